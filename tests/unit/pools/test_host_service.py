"""Which of a host's workers their owner ends."""

from __future__ import annotations

from typing import Any

from shmloader.pools.adapting import Adapter
from shmloader.pools.host_service import _HostService, _Rank


class Worker:
    """A worker that notes when it is told to end."""

    is_lost = False
    was_told = False

    def hang_up(self) -> None:
        self.was_told = True


def service_of(adapter: Adapter | None, *attached: set[int]) -> tuple[Any, list[_Rank]]:
    """An owner of four workers, with ranks that are attached to these."""
    service: Any = object.__new__(_HostService)
    connection: Any = None
    ranks = [
        _Rank(connection, pid, -1, dict.fromkeys(numbers, 1))
        for pid, numbers in enumerate(attached)
    ]
    service._adapter, service._ranks = adapter, dict(enumerate(ranks))
    service._workers = {number: Worker() for number in range(4)}
    return service, ranks


def ended(service: Any) -> list[int]:
    workers = service._workers.items()
    assert all(worker.is_lost == worker.was_told for _, worker in workers)
    return [number for number, worker in workers if worker.is_lost]


def test_a_worker_ends_that_is_not_wanted_and_that_the_last_rank_has_left() -> None:
    service, (first, second) = service_of(Adapter(2, 4), {0, 1, 2, 3}, {0, 3})
    service._detach(first, {1, 2, 3})
    assert first.attached == {0: 1}
    assert ended(service) == [2], "1 is wanted, and the other rank uses 3"
    service._detach(second, {0, 3})
    assert ended(service) == [2, 3]


def test_of_a_fixed_number_no_worker_ends_before_the_last_rank_is_gone() -> None:
    service, (rank,) = service_of(None, {0, 1, 2, 3})
    service._detach(rank, {0, 1, 2, 3})
    assert rank.attached == {}
    assert ended(service) == []
