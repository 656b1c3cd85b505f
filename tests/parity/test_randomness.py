"""The same random streams in the workers, and the same answers to "where am I?"."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, get_worker_info

from tests.parity.compare import (
    assert_same,
    run_both,
    run_ours,
    run_torch,
)
from tests.parity.data import (
    Dice,
    DiceStream,
    Made,
    Whoami,
    WhoamiStream,
    as_is,
    describe_worker,
    dice_collate,
    draw_some,
    mark_dataset,
    seed_numpy,
)

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

WAYS: dict[str, dict[str, Any]] = {
    "in-process": {"num_workers": 0},
    "one worker": {"num_workers": 1},
    "two workers": {"num_workers": 2},
    "three workers, one batch ahead": {"num_workers": 3, "prefetch_factor": 1},
    "two workers, five batches ahead": {"num_workers": 2, "prefetch_factor": 5},
    "two persistent workers": {"num_workers": 2, "persistent_workers": True},
}
WORKERS = [way for way in WAYS if way != "in-process"]
PERSISTENT = WAYS["two persistent workers"]


def dice(**kwargs: Any) -> dict[str, Any]:
    return {"dataset": Dice(), "batch_size": 3, **kwargs}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_samples_draw_from_the_same_streams(way: str) -> None:
    batches = run_both(lambda: dice(shuffle=True, **WAYS[way]))
    draws = [value for batch in batches for value in batch["random"].tolist()]
    assert len(draws) == 34
    if "persistent" in way:
        assert len(set(draws)) == 34, "persistent workers were seeded twice"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_collate_fn_draws_from_the_same_streams(way: str) -> None:
    assert run_both(lambda: dice(collate_fn=dice_collate, **WAYS[way]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_unbatched_samples_draw_from_the_same_streams(way: str) -> None:
    assert run_both(lambda: dice(batch_size=None, **WAYS[way]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_iterable_datasets_draw_from_the_same_streams(way: str) -> None:
    assert run_both(lambda: {"dataset": DiceStream(), "batch_size": 2, **WAYS[way]})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("init", [seed_numpy, draw_some])
@pytest.mark.parametrize("way", WORKERS)
def test_a_worker_init_fn_may_seed_or_draw(way: str, init: Callable[[int], None]) -> None:
    assert run_both(lambda: dice(worker_init_fn=init, **WAYS[way]), epochs=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_the_generator_seeds_the_workers(way: str) -> None:
    def make(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return dice(shuffle=True, generator=generator, **WAYS[way])

    first = run_both(lambda: make(1))
    other_main_seed = run_both(lambda: make(1), seed=99)
    if way != "in-process":
        assert_same(first, other_main_seed)
    assert first[0]["index"].tolist() != run_both(lambda: make(2))[0]["index"].tolist()


def test_a_generator_shared_with_the_sampler_seeds_the_workers_first() -> None:
    def make() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5)
        sampler = RandomSampler(Dice(), generator=generator)
        return dice(sampler=sampler, generator=generator, **WAYS["two workers"])

    assert run_both(make, epochs=3)


@pytest.mark.parametrize("way", ["in-process", "two workers"])
def test_the_same_seed_gives_the_same_epoch_again(way: str) -> None:
    def reseed(loader: Any, epoch: int) -> None:
        torch.manual_seed(3)

    batches = run_both(
        lambda: dice(shuffle=True, collate_fn=only_torchs, **WAYS[way]), before_epoch=reseed
    )
    assert_same(batches[:6], batches[6:])


def only_torchs(samples: list[dict[str, Any]]) -> list[Any]:
    """Python's and numpy's streams go on in-process, whatever torch's seed is."""
    return [(s["index"], s["worker"], s["seed"], s["torch"], s["permutation"]) for s in samples]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WORKERS)
def test_an_epoch_left_in_the_middle_leaves_the_streams_where_torch_does(way: str) -> None:
    """Persistent workers have then drawn for all the batches that were under way."""
    assert run_both(lambda: dice(shuffle=True, **WAYS[way]), epochs=4, take=[1, 3, None, 0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WORKERS)
def test_the_worker_that_makes_a_batch_is_the_same(way: str) -> None:
    batches = run_both(lambda: dice(**WAYS[way]))
    count = WAYS[way]["num_workers"]
    makers = [batch["worker"].tolist() for batch in batches]
    assert [maker[0] for maker in makers] == [n % count for n in range(6)] * 2
    assert all(len(set(maker)) == 1 for maker in makers)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_start_method_changes_no_stream(method: str) -> None:
    def make(method: str) -> dict[str, Any]:
        return dice(
            num_workers=2,
            shuffle=True,
            persistent_workers=True,
            multiprocessing_context=method,
            worker_init_fn=draw_some,
        )

    ours = run_ours(lambda: make(method), lambda loader: list(loader) + list(loader))
    theirs = run_torch(lambda: make("fork"), lambda loader: list(loader) + list(loader))
    assert_same(ours, theirs)


# ---------------------------------------------------------------- get_worker_info


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_worker_info_in_a_map_style_dataset(way: str) -> None:
    kwargs = {"batch_size": 2, "collate_fn": as_is, **WAYS[way]}
    batches = run_both(lambda: {"dataset": Whoami(), **kwargs})
    if way == "in-process":
        assert batches[0][0]["info"] is None
    else:
        assert batches[0][0]["info"] == "WorkerInfo"
        assert batches[0][0]["dataset is mine"]
        assert batches[0][0]["dataset type"] == "Whoami"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_worker_info_in_an_iterable_dataset(way: str) -> None:
    kwargs = {"batch_size": 2, "collate_fn": as_is, **WAYS[way]}
    assert run_both(lambda: {"dataset": WhoamiStream(), **kwargs})


def collate_with_info(samples: list[Any]) -> list[Any]:
    return [describe_worker(), len(samples)]


@pytest.mark.parametrize("way", ["in-process", "two workers"])
def test_worker_info_in_a_collate_fn(way: str) -> None:
    assert run_both(lambda: dice(collate_fn=collate_with_info, **WAYS[way]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dataset", [Whoami, WhoamiStream])
@pytest.mark.parametrize("way", WORKERS)
def test_a_worker_init_fn_reaches_its_workers_dataset(way: str, dataset: Any) -> None:
    batches = run_both(
        lambda: {
            "dataset": dataset(),
            "batch_size": 1,
            "collate_fn": as_is,
            "worker_init_fn": mark_dataset,
            **WAYS[way],
        }
    )
    assert all(sample["marked_by"] == 100 + sample["id"] for (sample,) in batches)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
def test_the_main_process_never_has_a_worker_info(way: str) -> None:
    def drive(loader: Any) -> None:
        dataset = loader.dataset
        assert get_worker_info() is None
        for _ in loader:
            assert get_worker_info() is None
        assert get_worker_info() is None
        assert dataset.marked_by is None

    kwargs = {} if way == "in-process" else {"worker_init_fn": mark_dataset}
    run_ours(lambda: {"dataset": Whoami(), "collate_fn": as_is, **kwargs, **WAYS[way]}, drive)


def test_worker_info_cannot_be_changed_and_is_torchs_class() -> None:
    def probe(_index: int) -> tuple[bool, bool]:
        info = get_worker_info()
        torchs = type(info) is torch.utils.data._utils.worker.WorkerInfo
        try:
            info.id = 5  # type: ignore[misc, union-attr]
        except (AttributeError, RuntimeError):  # RuntimeError in torch 2.6
            return torchs, True
        return torchs, False

    batches = run_both(
        lambda: {"dataset": Made(probe), "batch_size": None, "num_workers": 1}, epochs=1
    )
    assert batches == [[True, True]] * 4


# ---------------------------------------------------------------- the worker process


def inspect_process(_index: int) -> dict[str, Any]:
    process = multiprocessing.current_process()
    return {
        "threads of torch": torch.get_num_threads(),
        "daemon": process.daemon,
        "is a child of its own": os.getpid() != os.getppid(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "numpy errors": np.geterr(),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WORKERS)
def test_the_worker_process_is_set_up_as_torchs(way: str) -> None:
    batches = run_both(
        lambda: {"dataset": Made(inspect_process), "batch_size": None, **WAYS[way]}, epochs=1
    )
    assert batches[0]["threads of torch"] == 1
    assert batches[0]["daemon"]


def kernel_name(_index: int) -> str:
    return Path("/proc/self/comm").read_text().strip()


def test_the_worker_has_torchs_name_in_top() -> None:
    batches = run_both(
        lambda: {"dataset": Made(kernel_name), "batch_size": None, "num_workers": 1}, epochs=1
    )
    assert batches == ["pt_data_worker"] * 4


def test_the_number_of_threads_in_the_main_process_stays() -> None:
    before = torch.get_num_threads()
    run_ours(lambda: dice(num_workers=1), list)
    assert torch.get_num_threads() == before


def test_a_mode_set_by_the_main_process_reaches_forked_workers_only_through_the_fork() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        batches = run_both(
            lambda: {
                "dataset": Made(lambda index: torch.ones(2) * index),
                "batch_size": 2,
                "num_workers": 1,
            }
        )
    finally:
        torch.set_default_dtype(before)
    assert batches[0].dtype == torch.float64


def test_persistent_workers_keep_their_processes_and_others_do_not() -> None:
    def drive(loader: Any) -> list[set[int]]:
        return [{int(pid) for pid in loader} for _ in range(3)]

    def make(persistent: bool) -> dict[str, Any]:
        return {
            "dataset": Made(lambda index: os.getpid(), 8),
            "batch_size": None,
            "num_workers": 2,
            "persistent_workers": persistent,
        }

    for run in (run_torch, run_ours):
        first, second, third = run(lambda: make(True), drive)
        assert first == second == third
        assert len(first) == 2
        first, second, third = run(lambda: make(False), drive)
        assert len(first) == len(second) == len(third) == 2
        assert not first & second
        assert os.getpid() not in first | second | third
