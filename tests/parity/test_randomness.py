"""The same random streams in the workers, and the same answers to "where am I?"."""

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

from tests.parity.compare import assert_same, run_both, run_ours, run_torch
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
from tests.parity.ways import ALL, BOTH, WAYS, WORKERS, Case, compared, tried

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def dice(**kwargs: Any) -> dict[str, Any]:
    return {"dataset": Dice(), "batch_size": 3, **kwargs}


def shared_generator() -> dict[str, Any]:
    """The sampler's generator seeds the workers, first."""
    generator = torch.Generator().manual_seed(5)
    return dice(sampler=RandomSampler(Dice(), generator=generator), generator=generator)


def drawn_once(batches: list[Any], way: str) -> bool:
    draws = [value for batch in batches for value in batch["random"].tolist()]
    return len(draws) == 34 and ("persistent" not in way or len(set(draws)) == 34)


def makers_alternate(batches: list[Any], way: str) -> bool:
    makers = [batch["worker"].tolist() for batch in batches]
    count = WAYS[way]["num_workers"]
    return makers == [[n % count] * len(makers[n]) for n in range(6)] * 2


test_random_numbers_are_torchs = tried(
    9,
    {
        "samples": Case(lambda: dice(shuffle=True), ALL, check=drawn_once),
        "a collate function": Case(lambda: dice(collate_fn=dice_collate), ALL, 12),
        "samples without batching": Case(lambda: dice(batch_size=None), ALL, 34),
        "an iterable dataset": Case(lambda: {"dataset": DiceStream(), "batch_size": 2}, ALL),
        "a worker_init_fn that seeds": Case(
            lambda: dice(worker_init_fn=seed_numpy), WORKERS, 18, walk={"epochs": 3}
        ),
        "a worker_init_fn that draws": Case(
            lambda: dice(worker_init_fn=draw_some), WORKERS, 18, walk={"epochs": 3}
        ),
        "a generator shared with the sampler": Case(shared_generator, BOTH, 18, walk={"epochs": 3}),
        # Persistent workers have then drawn for all the batches that were under way.
        "epochs left in the middle": Case(
            lambda: dice(shuffle=True), WORKERS, 10, walk={"epochs": 4, "take": [1, 3, None, 0]}
        ),
        "the worker of each batch": Case(dice, WORKERS, check=makers_alternate),
    },
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ALL)
def test_the_generator_seeds_the_workers(way: str) -> None:
    def make(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return dice(shuffle=True, generator=generator, **WAYS[way])

    first = run_both(lambda: make(1))
    other_main_seed = run_both(lambda: make(1), seed=99)
    if way != "in-process":
        assert_same(first, other_main_seed)
    assert first[0]["index"].tolist() != run_both(lambda: make(2))[0]["index"].tolist()


@pytest.mark.parametrize("way", BOTH)
def test_the_same_seed_gives_the_same_epoch_again(way: str) -> None:
    def only_torchs(samples: list[dict[str, Any]]) -> list[Any]:
        """Python's and numpy's streams go on in-process, whatever torch's seed is."""
        return [(s["index"], s["worker"], s["seed"], s["torch"], s["permutation"]) for s in samples]

    batches = run_both(
        lambda: dice(shuffle=True, collate_fn=only_torchs, **WAYS[way]),
        before_epoch=lambda *_: torch.manual_seed(3),
    )
    assert_same(batches[:6], batches[6:])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_start_method_changes_no_stream(method: str) -> None:
    def make(method: str) -> dict[str, Any]:
        context = {"multiprocessing_context": method, "worker_init_fn": draw_some}
        return dice(shuffle=True, **WAYS["two persistent workers"], **context)

    def drive(loader: Any) -> list[Any]:
        return [*loader, *loader]

    assert_same(run_ours(lambda: make(method), drive), run_torch(lambda: make("fork"), drive))


def unbatched(make: Callable[[int], Any]) -> dict[str, Any]:
    return {"dataset": Made(make), "batch_size": None}


def asked(dataset: Any, **options: Any) -> dict[str, Any]:
    return {"dataset": dataset, "batch_size": 2, "collate_fn": as_is, **options}


def tells_its_dataset(batches: list[Any], way: str) -> bool:
    found = batches[0][0]
    if way == "in-process":
        return found["info"] is None
    return (found["info"], found["dataset type"], found["dataset is mine"]) == (
        "WorkerInfo",
        "Whoami",
        True,
    )


def is_marked(batches: list[Any], _way: str) -> bool:
    return all(sample["marked_by"] == 100 + sample["id"] for batch in batches for sample in batch)


def inspect_info(_index: int) -> tuple[bool, bool]:
    info = get_worker_info()
    torchs = type(info) is torch.utils.data._utils.worker.WorkerInfo
    try:
        info.id = 5  # type: ignore[misc, union-attr]
    except (AttributeError, RuntimeError):  # RuntimeError in torch 2.6
        return torchs, True
    return torchs, False


def inspect_process(_index: int) -> dict[str, Any]:
    process = multiprocessing.current_process()
    return {
        "threads of torch": torch.get_num_threads(),
        "daemon": process.daemon,
        "is a child of its own": os.getpid() != os.getppid(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "name in top": Path("/proc/self/comm").read_text().strip(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "numpy errors": np.geterr(),
    }


def is_a_worker(batches: list[Any], _way: str) -> bool:
    found = batches[0]
    return (found["threads of torch"], found["daemon"], found["name in top"]) == (
        1,
        True,
        "pt_data_worker",
    )


test_workers_are_told_and_set_up_as_torchs = tried(
    8,
    {
        "info in a map-style dataset": Case(lambda: asked(Whoami()), ALL, check=tells_its_dataset),
        "info in an iterable dataset": Case(lambda: asked(WhoamiStream()), ALL),
        "info in a collate function": Case(
            lambda: dice(collate_fn=lambda samples: [describe_worker(), len(samples)])
        ),
        "an init function for a map-style dataset": Case(
            lambda: asked(Whoami(), worker_init_fn=mark_dataset), WORKERS, check=is_marked
        ),
        "an init function for an iterable dataset": Case(
            lambda: asked(WhoamiStream(), worker_init_fn=mark_dataset), WORKERS, check=is_marked
        ),
        "info that cannot be changed": Case(
            lambda: unbatched(inspect_info),
            ["one worker"],
            check=lambda batches, _: batches == [[True, True]] * 8,
        ),
        "the process": Case(lambda: unbatched(inspect_process), WORKERS, check=is_a_worker),
    },
)


@compared(lambda: {"dataset": Whoami(), "collate_fn": len}, ALL, quick=4)
def test_the_main_process_never_has_a_worker_info(loader: Any) -> None:
    if loader.num_workers > 0:
        loader.worker_init_fn = mark_dataset
    assert get_worker_info() is None
    for _ in loader:
        assert get_worker_info() is None
    assert get_worker_info() is None
    assert loader.dataset.marked_by is None


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
                "dataset": Made(lambda n: torch.ones(2) * n),
                "batch_size": 2,
                "num_workers": 1,
            }
        )
    finally:
        torch.set_default_dtype(before)
    assert batches[0].dtype == torch.float64


@compared(
    lambda: unbatched(lambda _: os.getpid()),
    ["two workers", "two persistent workers"],
    check=lambda overlap: overlap in ([2, 2, 2, 2], [2, 2, 2, 0]),
)
def test_persistent_workers_keep_their_processes_and_others_do_not(loader: Any) -> list[int]:
    epochs = [{int(pid) for pid in loader} for _ in range(3)]
    assert os.getpid() not in set.union(*epochs)
    kept = set.intersection(*epochs)
    assert len(kept) == (2 if loader.persistent_workers else 0)
    return [*map(len, epochs), len(kept)]
