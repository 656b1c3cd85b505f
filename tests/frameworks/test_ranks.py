"""The frameworks on two processes: engines, batches, arguments that are kept, and resuming."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import output_of
from tests.frameworks.ranks import LENGTH
from tests.frameworks.support import assert_equal
from tests.template import ROOT

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]


def run(name: str, how: str, folder: Path, **config: Any) -> list[dict[str, Any]]:
    """Run `tests/frameworks/ranks.py` on two processes, and return what each of them found."""
    folder = folder / how
    folder.mkdir()
    output_of(
        *("-m", "torch.distributed.run", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
        *(ROOT / "tests/frameworks/ranks.py", name, how, folder, json.dumps(config)),
        limit_s=180,
        OMP_NUM_THREADS="1",
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


CONFIGS = {
    "usual": {},
    "dispatch_batches": {"dispatch_batches": True},
    "split_batches": {"split_batches": True},
    "uneven": {"even_batches": False},
}


@pytest.mark.parametrize("name", ["lightning", "fabric", "transformers", "accelerate"])
def test_on_two_processes_batches_are_those_of_torch(name, tmp_path):
    theirs, ours = run(name, "torch", tmp_path), run(name, "install", tmp_path)
    for one, other in zip(ours, theirs, strict=True):
        assert (one["engines"], other["engines"]) == ({"shmloader"}, {"torch"})
        assert_equal(one["seen"], other["seen"])
        if "gathered" in one:
            assert torch.equal(one["gathered"], other["gathered"])


@pytest.mark.parametrize("name", ["lightning", "fabric"])
def test_on_two_processes_lightning_keeps_our_class(name, tmp_path):
    ranks = run(name, "class", tmp_path)
    assert all(rank["engines"] == {"shmloader"} for rank in ranks)
    assert all(rank["class"] == "shmloader" for rank in ranks)
    first, second = (torch.cat(rank["seen"])[:, 0].tolist() for rank in ranks)
    assert len(first) == len(second) == 2 * (LENGTH // 2 + 1)
    assert {*first, *second} == {*map(float, range(LENGTH))}


@pytest.mark.parametrize("config", CONFIGS)
def test_on_two_processes_accelerates_adapter_keeps_class_and_arguments(config, tmp_path):
    ranks = run("accelerate", "adapter", tmp_path, **CONFIGS[config])
    for rank in ranks:
        assert rank["engines"] == {"shmloader"}
        assert rank["class"] == "shmloader"
        assert rank["options"] == (1, 7)
        if config != "uneven":
            assert sorted(rank["gathered"].tolist()) == [*map(float, range(LENGTH))]
        # Where batches are dispatched, the last one is filled up from the loader's first one.
        last = -1 if config == "dispatch_batches" else None
        assert_equal(rank["skipped"][:last], rank["whole"][1:last])
        if config != "dispatch_batches":
            assert_equal(rank["resumed"], rank["rest"])
    seen = [torch.cat(rank["seen"])[:, 0].tolist() for rank in ranks]
    assert {*seen[0], *seen[1]} == {*map(float, range(LENGTH))}
    if config in ("usual", "uneven"):  # each rank draws for itself
        numbers = [{*torch.cat(rank["seen"])[:, 1].tolist()} for rank in ranks]
        assert not numbers[0] & numbers[1]
