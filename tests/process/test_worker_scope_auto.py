"""``worker_scope="host"`` with ``num_workers="auto"``: one decision for all ranks of a host."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import shmloader.loader.dataloader as dataloader_module
from shmloader.pools import host_pool
from shmloader.pools.nursery_process import Demand
from tests.process.host_loaders import Samples, contents, expected, has_ended, loader, owner_of
from tests.process.ranks import LONG_S, meet
from tests.process.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: More than are taken while a busy machine starts and ends workers.
COUNT = 12_000
SECOND_NS = 1_000_000_000


@pytest.fixture(autouse=True)
def _cores(monkeypatch) -> None:
    """Four, whatever the machine has: two workers at first, eight at most."""
    monkeypatch.setattr(dataloader_module, "usable_cores", lambda _: 4)
    # The tests say how long the ranks wait, rather than the clock of a busy machine.
    monkeypatch.setattr(host_pool, "REPORT_NS", 1 << 62)


def auto(**options: Any) -> Any:
    return loader(Samples(COUNT), num_workers="auto", **options)


class Trainer:
    """Takes batches of a loader, one after the other, and says how long it has waited."""

    def __init__(self, **options: Any) -> None:
        self.loader = auto(**options)
        self.batches: list[Any] = []

    def begin(self) -> None:
        self.iterator = iter(self.loader)
        self.take()

    def take(self) -> None:
        self.batches.append(next(self.iterator))

    def until(self, is_so: Callable[[], bool], demand: Demand | None = None) -> None:
        """Take batches until something is so, which the owner hears of as it is told."""

        def look() -> bool:
            if demand is not None:
                self.iterator._parts.host_pool.nursery.tell(demand)
            self.take()
            time.sleep(0.03)
            return is_so()

        wait_until(look, LONG_S)

    def has(self, count: int) -> Callable[[], bool]:
        return lambda: self.loader.num_workers == count

    def worker_processes(self) -> list[int]:
        return [child.pid for child in psutil.Process(owner_of(self.loader)).children()]

    def end(self) -> Any:
        """All batches of the epoch."""
        with self.loader:
            self.batches += self.iterator
        return contents(self.batches)


#: What a rank reports: that it waits for every batch; and that it never waits, and that the batches
#: come faster than before.
WAITS = Demand(50, SECOND_NS, SECOND_NS)
IS_SUPPLIED = Demand(1_000, 0, 0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_workers_come_and_go_for_all_ranks_by_what_one_reports(run, tmp_path, ranks):
    told = tmp_path / "told"

    def wait_for_followers(number: int) -> None:
        """Wait until they have seen so many numbers: a slow one would miss some."""
        wait_until(lambda: len([*tmp_path.glob(f"{number} *")]) == ranks - 1, LONG_S)

    def decides() -> Any:
        one = Trainer()
        one.begin()
        counts = [one.loader.num_workers]
        wait_for_followers(1)
        for count, demand in ((3, WAITS), (2, IS_SUPPLIED), (1, IS_SUPPLIED)):
            one.until(one.has(count), demand)
            one.until(lambda count=count: len(one.worker_processes()) == count)
            counts.append(len(one.worker_processes()))
            wait_for_followers(len(counts))
        told.touch()
        return one.end(), counts

    def follows() -> Any:
        one = Trainer()
        one.begin()
        seen = [one.loader.num_workers]

        def is_told() -> bool:
            if one.loader.num_workers != seen[-1]:
                seen.append(one.loader.num_workers)
            (tmp_path / f"{len(seen)} {os.environ['RANK']}").touch()
            return told.exists()

        one.until(is_told)
        return one.end(), seen

    started = [run.start(decides if rank == 0 else follows, rank, ranks) for rank in range(ranks)]
    for rank, one in enumerate(started):
        batches, counts = one.result()
        assert batches == expected(rank, ranks, dataset=Samples(COUNT))[0]
        assert counts == [2, 3, 2, 1]


def test_a_rank_that_comes_late_begins_with_as_many_workers_as_there_are(run, tmp_path):
    told, joined = tmp_path / "told", tmp_path / "joined"

    def decides() -> Any:
        one = Trainer()
        one.begin()
        one.until(one.has(3), WAITS)
        told.touch()
        one.until(joined.exists)
        return one.end(), len(one.batches)

    def is_late() -> Any:
        wait_until(told.exists, LONG_S)
        one = Trainer()
        one.begin()
        count = one.loader.num_workers
        joined.touch()
        return one.end(), count

    started = [run.start(decides, 0), run.start(is_late, 1)]
    found = [one.result() for one in started]
    for rank, (batches, _) in enumerate(found):
        assert batches == expected(rank, dataset=Samples(COUNT))[0]
    assert found[1][1] == 3


def kill_the_newest(one: Trainer) -> None:
    os.kill(max(one.worker_processes()), signal.SIGKILL)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_worker_that_dies_while_the_number_changes_costs_no_batch(run, tmp_path, ranks):
    told = tmp_path / "told"

    def decides() -> Any:
        one = Trainer(worker_restarts=9)
        one.begin()
        for count, demand in ((3, WAITS), (2, IS_SUPPLIED), (1, IS_SUPPLIED)):
            one.until(one.has(count), demand)
            kill_the_newest(one)
        one.until(lambda: len(one.worker_processes()) == 1)
        told.touch()
        return one.end()

    def follows() -> Any:
        one = Trainer(worker_restarts=9)
        one.begin()
        one.until(told.exists)
        return one.end()

    started = [run.start(decides if rank == 0 else follows, rank, ranks) for rank in range(ranks)]
    for rank, one in enumerate(started):
        assert one.result() == expected(rank, ranks, dataset=Samples(COUNT))[0]


def test_a_worker_that_is_not_wanted_ends_when_a_rank_that_asked_for_it_leaves_it(run):
    """A rank may ask before it hears that the number has changed."""

    def epoch() -> Any:
        one = Trainer()
        one.begin()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            pid, _ = one.iterator._parts.host_pool.nursery.attach(5, theirs.fileno())
        wait_until(lambda: has_ended(pid), LONG_S)
        return one.end()

    assert run.results(epoch, 1) == [expected(0, 1, dataset=Samples(COUNT))[0]]


def test_the_next_epoch_begins_with_as_many_and_may_change_it(run):
    def epochs(is_persistent: bool) -> Any:
        one = Trainer(persistent_workers=is_persistent)
        one.begin()
        pool = one.loader._parts.host_pool
        one.until(one.has(3), WAITS)
        one.batches += one.iterator
        first, one.batches = one.batches, []
        one.begin()
        count = one.loader.num_workers
        one.until(one.has(2), IS_SUPPLIED)
        assert one.loader._parts.host_pool is pool
        return [contents(first), one.end()], count

    for is_persistent in (False, True):
        found = run.start(lambda value=is_persistent: epochs(value), 0, 1)
        batches, count = found.result()
        found.end()
        assert batches == expected(0, 1, epochs=2, dataset=Samples(COUNT))
        assert count == 3


def test_a_rank_with_a_fixed_number_is_refused(run, tmp_path):
    def epoch() -> Any:
        is_auto = os.environ["RANK"] == "0"
        with auto() if is_auto else loader(Samples(COUNT), num_workers=2) as one:
            try:
                return contents(one)
            finally:
                meet(tmp_path)

    found = run.results(epoch, 2)
    (error,) = [each for each in found if isinstance(each, ValueError)]
    assert "num_workers (" in str(error)
    assert "auto" in str(error)


def test_ranks_that_wait_are_given_more_workers(run, monkeypatch, tmp_path: Path):
    """With real times: samples take long, and nothing else does."""
    monkeypatch.setattr(host_pool, "REPORT_NS", 100_000_000)

    def slow() -> None:
        time.sleep(0.01)

    def rises() -> Any:
        dataset = Samples(100_000, dict.fromkeys(range(100_000), slow))
        with loader(dataset, num_workers="auto") as one:
            iterator = iter(one)

            def has_more() -> bool:
                next(iterator)
                return one.num_workers > 2

            wait_until(has_more, LONG_S)
            return one.stats().num_workers == one.num_workers

    assert run.results(rises, 2) == [True, True]
