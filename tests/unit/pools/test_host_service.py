"""What the owner of a host's workers does when ranks leave them, and when they die."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmloader.pools.adapting import Adapter
from shmloader.pools.host_messages import Lost, unpack
from shmloader.pools.host_service import _HostService, _Rank
from shmloader.pools.status_page import AtWork, Phase


class Worker:
    """A worker that notes when it is told to end."""

    is_lost = False
    was_told = False
    pidfd = 9
    process = SimpleNamespace(pid=77, exitcode=3)

    def hang_up(self) -> None:
        self.was_told = True

    def reap(self, deadline: float) -> bool:
        return True

    def close_pidfd(self) -> None: ...


class Connection:
    """A connection to a rank that keeps what the rank is told."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.told: list[object] = []

    def fileno(self) -> int:
        return self._fd

    def send(self, data: bytes, flags: int) -> None:
        self.told.append(unpack(data))

    def close(self) -> None: ...


def service_of(adapter: Adapter | None, *attached: set[int]) -> tuple[Any, list[_Rank]]:
    """An owner of four workers, with ranks that are attached to these."""
    service: Any = object.__new__(_HostService)
    connections: list[Any] = [Connection(fd) for fd in range(len(attached))]
    ranks = [
        _Rank(connection, 100 + row, dict.fromkeys(numbers, 5))
        for row, (connection, numbers) in enumerate(zip(connections, attached, strict=True))
    ]
    service._adapter, service._ranks = adapter, dict(enumerate(ranks))
    service._workers = {number: Worker() for number in range(4)}
    service._poll = SimpleNamespace(unregister=lambda fd: None)
    return service, ranks


def ended(service: Any) -> list[int]:
    workers = service._workers.items()
    assert all(worker.is_lost == worker.was_told for _, worker in workers)
    return [number for number, worker in workers if worker.is_lost]


def test_a_worker_ends_that_is_not_wanted_and_that_the_last_rank_has_left() -> None:
    service, (first, second) = service_of(Adapter(2, 4), {0, 1, 2, 3}, {0, 3})
    service._detach(first, {1, 2, 3})
    assert first.attached == {0: 5}
    assert ended(service) == [2], "1 is wanted, and the other rank uses 3"
    service._detach(second, {0, 3})
    assert ended(service) == [2, 3]


def test_of_a_fixed_number_no_worker_ends_before_the_last_rank_is_gone() -> None:
    service, (rank,) = service_of(None, {0, 1, 2, 3})
    service._detach(rank, {0, 1, 2, 3})
    assert rank.attached == {}
    assert ended(service) == []


def test_a_rank_is_told_once_of_a_death_and_is_attached_no_more() -> None:
    service, ranks = service_of(None, {0, 1}, {1}, {0})
    service._by_pidfd = {Worker.pidfd: 1}
    service._oom_kills = SimpleNamespace(since=lambda exit_code: 0)
    service._status_page = SimpleNamespace(read=lambda worker_id: AtWork(Phase.LOADING, 0, 2, 1.0))
    service._reap(1)
    told: list[Any] = [rank.connection for rank in ranks]
    lost = Lost(1, 5, 77, 3, 0, was_loading=True)
    assert [one.told for one in told] == [[lost], [lost], []]
    assert [set(rank.attached) for rank in ranks] == [{0}, set(), {0}]
    assert set(service._workers) == {0, 2, 3}
