"""What a rank checks when it meets the owner of the workers of its host."""

from __future__ import annotations

import pytest

from shmloader.pools import host_pool
from shmloader.pools.host_messages import Welcome
from shmloader.pools.host_pool import HostPool, _check, open_host_pool
from shmloader.pools.host_service import ServiceStart
from shmloader.process_state import PROCESS

OURS = ServiceStart(4, None, 0, "Samples of 45 samples")
AUTO = ServiceStart(8, 2, 0, "Samples of 45 samples")


@pytest.mark.parametrize(
    ("worker_count", "wanted", "start"), [(4, None, OURS), (8, 2, AUTO), (8, 5, AUTO), (6, 2, AUTO)]
)
def test_ranks_that_want_the_same_share_a_pool(worker_count, wanted, start) -> None:
    _check(Welcome(1, worker_count, wanted, start.dataset), start)


@pytest.mark.parametrize(
    ("worker_count", "wanted", "dataset", "start", "text"),
    [
        (3, None, OURS.dataset, OURS, "got num_workers=4, and another rank has 3"),
        (4, 2, OURS.dataset, OURS, "got num_workers=4, and another rank has 'auto'"),
        (8, None, AUTO.dataset, AUTO, "got num_workers='auto', and another rank has 8"),
        (
            4,
            None,
            "Samples of 46 samples",
            OURS,
            "same dataset.* has Samples of 45 .* has Samples of 46",
        ),
    ],
)
def test_ranks_that_want_something_else_are_refused(
    worker_count, wanted, dataset, start, text
) -> None:
    with pytest.raises(ValueError, match=text):
        _check(Welcome(1, worker_count, wanted, dataset), start)


class Met(HostPool):
    """A pool that was met under a number, without an owner."""

    is_alive = True  # type: ignore[assignment]

    def __init__(self, _dataset, _init_fn, _start, number: int, *, is_alone: bool) -> None:
        self.number, self._is_alone = number, is_alone


def test_a_pool_in_place_of_one_that_was_lost_moves_no_later_pool(monkeypatch) -> None:
    """A rank that has not lost it counts it once, and has to meet the others at the next one."""
    monkeypatch.setattr(host_pool, "HostPool", Met)
    monkeypatch.setattr(PROCESS, "host_pools", {})
    monkeypatch.setattr(PROCESS, "pools_on_host", 0)
    first, second = [0], [0, 1]

    def opened(dataset: list[int], *, is_alone: bool = False) -> HostPool:
        pool = open_host_pool(dataset, None, 4, 0, is_alone=is_alone)
        pool.note_kept()
        return pool

    lost = opened(first)
    assert opened(first) is lost
    lost.is_alive = False  # type: ignore[misc]
    assert opened(first).number == lost.number == 0
    assert opened([9], is_alone=True).number == 1, "no other rank knows of it"
    assert opened(second).number == 1
    assert PROCESS.pools_on_host == 2
