"""A child that the user's code forks in a worker ends when it comes back to our code."""

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmloader import DataLoader, ShardedDataLoader
from tests.process.support import Calls, Streams

pytestmark = [
    # Threads of a worker that fork are what is tested.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.usefixtures("quick_spawn"),
]


def fail() -> None:
    raise ValueError("of the child")


def come_back() -> None: ...


#: How a child leaves the sample, and the exit status that its parent sees.
LEAVES: dict[str, tuple[Callable[[], object], int]] = {
    "sys.exit()": (sys.exit, 1),
    "an exception": (fail, 1),
    "os._exit(3)": (lambda: os._exit(3), 3),
    "a return": (come_back, 1),
}


class Forks:
    """Forks a child that leaves somehow, and returns its exit status."""

    def __init__(self, leave: Callable[[], object]) -> None:
        self.leave = leave

    def __call__(self, *_: object) -> int:
        child = os.fork()
        if child == 0:
            self.leave()
            return 99
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def collate(self, samples: list[Any]) -> torch.Tensor:
        return torch.tensor([self() for _ in samples])


WORKER: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
# Where children are forked → what is special about such a loader.
WAYS: dict[str, Callable[[Forks], dict[str, Any]]] = {
    "a worker": lambda forks: WORKER,
    "a worker that skips": lambda forks: {"on_error": "skip", **WORKER},
    "a worker with a timeout": lambda forks: {"sample_timeout": 30, **WORKER},
    "a worker with threads": lambda forks: {"fetch_concurrency": 2, **WORKER},
    "a stream": lambda forks: {"dataset": Streams(lambda: map(forks, range(4))), **WORKER},
    "collate": lambda forks: {"dataset": range(4), "collate_fn": forks.collate, **WORKER},
    "a thread": lambda forks: {"num_workers": 1, "thread_pool": True},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("way", WAYS)
def test_a_forked_child_that_comes_back_ends_and_all_batches_come(way, leave) -> None:
    function, status = LEAVES[leave]
    forks = Forks(function)
    with DataLoader(**{"dataset": Calls(forks, 4), "batch_size": 2, **WAYS[way](forks)}) as loader:
        assert [batch.tolist() for batch in loader] == [[status] * 2] * 2


@pytest.mark.parametrize("leave", LEAVES)
def test_a_child_that_worker_init_fn_forks_takes_no_task(leave) -> None:
    function, _ = LEAVES[leave]
    with DataLoader(range(4), 2, worker_init_fn=Forks(function), **WORKER) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def fork_and_return(index: int) -> int:
    return Forks(come_back)(index)


def test_a_child_does_not_answer_for_a_process_of_an_executor() -> None:
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        options: dict[str, Any] = {"num_workers": 1, "executor": pool, "seed": 0}
        with DataLoader(Calls(fork_and_return, 4), 2, **options) as loader:
            assert [batch.tolist() for batch in loader] == [[1, 1], [1, 1]]


def test_a_child_does_not_answer_for_a_worker_that_ranks_share() -> None:
    options: dict[str, Any] = {"num_workers": 1, "worker_scope": "host", "shuffle": False}
    with ShardedDataLoader(Calls(fork_and_return, 4), 2, **options) as loader:
        assert [batch.tolist() for batch in loader] == [[1, 1], [1, 1]]
