"""Ranks whose datasets differ are told what differs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

from shmloader import share_on_host
from tests.process.host_loaders import Samples, loader
from tests.process.ranks import meet

pytestmark = pytest.mark.usefixtures("quick_spawn")


class Holder(Samples):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.parts = parts


def differences(make: Any, folder: Path) -> Any:
    """Begin an epoch of a dataset; return the error, or None."""
    with loader(make()) as one:
        try:
            next(iter(one))
        except ValueError as error:
            return str(error)
        finally:
            meet(folder)  # a rank that comes when the others have left has a pool of its own
        return None


class TorchHolder(Holder, torch.utils.data.Dataset[int]):
    pass


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", [Holder, TorchHolder])
@pytest.mark.parametrize(
    "of_rank",
    [
        lambda rank: rank,
        lambda rank: [{"images": np.arange(9_000) + rank}],
        lambda rank: torch.arange(9_000) + rank,
        lambda rank: [np.min, max][rank],
    ],
    ids=["number", "array", "tensor", "function"],
)
def test_ranks_whose_datasets_have_other_contents_are_told_what_differs(
    run, of_rank, kind, tmp_path
) -> None:
    def make() -> Holder:
        found = kind(same=lambda x: x)
        found.seed = of_rank(int(os.environ["RANK"]))
        return found

    ranks = [run.start(lambda: differences(make, tmp_path), rank) for rank in range(2)]
    (told,) = filter(None, [one.result() for one in ranks])
    assert "in dataset.seed." in told
    assert all(f"(process {one.process.pid})" in told for one in ranks)
    assert "dataset.parts" not in told
    assert "worker_scope='rank'" in told


def test_a_dataset_that_one_rank_has_built_is_the_same_in_all(run, tmp_path) -> None:
    def make() -> Holder:
        return share_on_host(lambda: Holder(name="parts", texts=[str(n) for n in range(1000)]))

    assert run.results(lambda: differences(make, tmp_path), 2) == [None, None]


FINGERPRINTS = """
import torch
from shmloader.batch.fingerprint import fingerprints_of
class Data:
    def __init__(self):
        self.words = {"some", "words", "of", "a", "set", ("and", frozenset("others"))}
        self.scale = lambda value: value * self.factor
        self.factor = 3
        self.tensor = torch.arange(1000).share_memory_()
print(fingerprints_of(Data()))
"""


@pytest.mark.slow
def test_hash_randomisation_makes_no_difference() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", FINGERPRINTS],
            env=dict(os.environ, PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    ]
    assert found[0] == found[1]
    assert "dataset.words" in found[0]
