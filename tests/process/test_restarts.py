"""Workers that are replaced when they die: the epoch is as if nothing had happened."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import itertools
import logging
import multiprocessing
import os
import re
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

import shmloader
from shmloader import ClosedLoaderError, DataLoader, LoaderTimeoutError, WorkerDiedError
from shmloader.device.thread import CallRequest
from shmloader.memory.flat import is_debugging
from shmloader.pools.status_page import STACK_SIGNAL, Phase
from tests.late import switched_on, to_host
from tests.process.support import (
    Calls,
    Gate,
    Program,
    Streams,
    Switch,
    descriptor_count,
    however_late,
    only,
    wait_for_end,
    wait_until,
)

pytestmark = pytest.mark.timeout(90)

AFRESH = ["spawn", "forkserver"]
METHODS = ["fork", *AFRESH]

# A second is meant; tests run on busy machines.
ENDED_S = 2.5

# Large enough to lie in a slot, and to be lent.
WIDTH = 3000


def row(index: int) -> torch.Tensor:
    """A sample whose content tells where it comes from."""
    return torch.arange(WIDTH, dtype=torch.float32) * (index + 1)


def hashed(batch: Any) -> str:
    """A batch's content, in brief."""
    digest = hashlib.sha256()
    for part in batch if isinstance(batch, list | tuple) else [batch]:
        data = part.cpu().numpy() if isinstance(part, torch.Tensor) else np.asarray(part)
        digest.update(f"{data.dtype}{data.shape}".encode())
        digest.update(data.tobytes())
    return digest.hexdigest()[:16]


def hashes(batches: Any) -> list[str]:
    return [hashed(batch) for batch in batches]


def rows(length: int, batch_size: int = 1) -> list[str]:
    """What an epoch over `row` gives."""
    every = [row(index) for index in range(length)]
    parts = [every[at : at + batch_size] for at in range(0, length, batch_size)]
    return [hashed(torch.stack(part)) for part in parts]


class Deaths:
    """So many deaths are left; forked workers, and those started afresh, take them."""

    def __init__(self, count: int = 1) -> None:
        self.switches = [Switch(is_on=True) for _ in range(count)]

    def take(self) -> None:
        """End this process, if a death is left. One process at a time may call this."""
        for switch in self.switches:
            if switch:
                switch.turn(on=False)
                os._exit(3)

    @property
    def left(self) -> int:
        return sum(map(bool, self.switches))


def dying(at: int, deaths: Deaths, length: int = 20) -> Calls:
    """Rows, one of which kills who loads it."""

    def sample(index: int) -> torch.Tensor:
        if index == at:
            deaths.take()
        return row(index)

    return Calls(sample, length)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of workers that were replaced."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "shmloader" and record.levelno == logging.WARNING
    ]


def pids(batches: Any) -> list[int]:
    return [worker.pid for worker in batches._workers]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)


# ---------------------------------------------------------------- map-style datasets


def test_a_batch_that_kills_its_worker_is_loaded_again_in_order(caplog) -> None:
    deaths = Deaths()
    loader = DataLoader(dying(9, deaths), batch_size=2, num_workers=2, worker_restarts=1)
    batches = iter(loader)
    before = pids(batches)
    first = [hashed(next(batches)) for _ in range(3)]
    assert first + hashes(batches) == rows(20, 2)
    assert deaths.left == 0
    (text,) = told(caplog)
    assert text.startswith(f"DataLoader worker (pid {before[0]}) exited unexpectedly with exit")
    assert "exit code 3." in text
    assert "replaces worker 0 and loads its unfinished batches again: 4" in text
    assert "random number generators start over" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_worker_that_a_signal_ends_is_replaced_and_the_log_names_it(number, caplog) -> None:
    switch = Switch(is_on=True)

    def sample(index: int) -> torch.Tensor:
        if index == 3 and switch:
            switch.turn(on=False)
            os.kill(os.getpid(), number)
            signal.pause()
        return row(index)

    assert hashes(DataLoader(Calls(sample, 8), num_workers=2, worker_restarts=1)) == rows(8)
    (text,) = told(caplog)
    assert f"is killed by signal: {signal.strsignal(number)}." in text
    assert "loads its unfinished batches again: 3" in text


@pytest.mark.parametrize("in_order", [True, False])
def test_all_tickets_of_a_dead_worker_are_loaded_again(in_order, caplog) -> None:
    deaths = Deaths()
    loader = DataLoader(
        dying(2, deaths, 40), num_workers=2, prefetch_factor=6, worker_restarts=1,
        in_order=in_order,
    )  # fmt: skip
    seen, expected = hashes(loader), rows(40)
    if not in_order:
        assert len(seen) == 40
        seen.sort()
        expected.sort()
    assert seen == expected
    (text,) = told(caplog)
    # In any order the others were no one's yet.
    assert f"unfinished batches again: 2{', 4, 6, 8, 10' if in_order else '. '}" in text


def test_a_worker_that_dies_idle_is_replaced_and_nothing_is_loaded_again(caplog) -> None:
    loader = DataLoader(Calls(row, 12), num_workers=2, prefetch_factor=1, worker_restarts=1)
    batches = iter(loader)
    seen = [hashed(next(batches))]
    wait_until(lambda: len(answered(batches)) == 2)
    victim = pids(batches)[1]
    kill(victim)
    assert seen + hashes(batches) == rows(12)
    (text,) = told(caplog)
    assert f"pid {victim}) is killed by signal: Killed. A new process replaces" in text


def answered(batches: Any) -> list[Any]:
    """Tickets in flight whose answer is here; what has come is taken note of."""
    engine = batches._engine
    for worker_id in range(len(batches._workers)):
        engine._pool.poll(worker_id, engine)
    return [ticket for ticket in engine._scheduler.tickets if ticket.answer is not None]


def test_dying_before_a_batch_is_in_work_does_not_count_against_it(caplog) -> None:
    """Three deaths at the start, and one over the batch itself, which is loaded once more."""
    starts, deaths = Deaths(3), Deaths()

    def start(worker: int) -> None:
        starts.take()

    loader = DataLoader(dying(0, deaths, 4), num_workers=1, worker_restarts=4, worker_init_fn=start)
    assert hashes(loader) == rows(4)
    assert (starts.left, deaths.left) == (0, 0)
    assert len(told(caplog)) == 4


def test_a_batch_that_waits_behind_the_one_in_work_does_not_count_as_killing(caplog) -> None:
    """Batch 1 is in flight at the first death; it kills once by itself, and comes after all."""
    first, second = Deaths(), Deaths()

    def sample(index: int) -> torch.Tensor:
        if index == 0:
            first.take()
        if index == 1:
            second.take()
        return row(index)

    loader = DataLoader(Calls(sample, 4), num_workers=1, worker_restarts=2)
    assert hashes(loader) == rows(4)
    assert len(told(caplog)) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_that_kills_twice_raises_with_its_indices(in_order, caplog) -> None:
    loader = DataLoader(
        dying(5, Deaths(9)), batch_size=2, num_workers=2, worker_restarts=5, in_order=in_order
    )
    batches = iter(loader)
    before = pids(batches)
    seen: list[str] = []
    with pytest.raises(WorkerDiedError) as raised:
        seen.extend(map(hashed, batches))
    text, (log,) = str(raised.value), told(caplog)
    worker = 0  # by round robin
    if in_order:
        assert seen == rows(20, 2)[:2]
    else:
        worker = next(number for number, pid in enumerate(before) if f"(pid {pid})" in log)
    # In any order, the batch waited for any worker after the first death.
    again = f"{worker}" if in_order else "[01]"
    assert re.search(rf"Worker {again} was loading batch 2 \(indices 4 to 5\)\.", text)
    assert "has killed a worker before, and is not loaded a third time" in text
    assert "worker_restarts" not in text
    assert f"(pid {before[worker]})" in log
    assert f"(pid {before[worker]})" not in text  # the second one's


def test_past_the_limit_a_death_raises_and_says_so(caplog) -> None:
    deaths = [Deaths(), Deaths(), Deaths()]
    is_replaced = Switch(is_on=False)

    def sample(index: int) -> torch.Tensor:
        if index == 8:  # the last of the three to be noticed, though another worker loads it
            wait_until(lambda: is_replaced)
        if index in (2, 5, 8):
            deaths[(index - 2) // 3].take()
        if index == 5:
            is_replaced.turn(on=True)
        return row(index)

    loader = DataLoader(Calls(sample, 12), num_workers=2, worker_restarts=2)
    seen: list[str] = []
    with pytest.raises(WorkerDiedError) as raised:
        seen.extend(map(hashed, loader))
    assert seen == rows(12)[:8]
    text = str(raised.value)
    assert "exited unexpectedly with exit code 3." in text
    assert "Worker 0 was loading batch 8 (index 8)." in text
    assert text.endswith("No restart is left in this epoch (worker_restarts=2).")
    assert len(told(caplog)) == 2
    assert hashes(loader) == rows(12)


def test_long_index_lists_are_sent_again(caplog) -> None:
    """They lie in the batch's slot, which the dead worker has written over."""
    deaths = Deaths()

    def collate(samples: list[int]) -> torch.Tensor:
        batch = torch.utils.data.default_collate([torch.tensor(samples)])[0]
        if samples[0] == 40_000:
            deaths.take()
        return batch

    loader = DataLoader(
        Calls(lambda index: index, 80_000), batch_size=20_000, num_workers=2, worker_restarts=1,
        collate_fn=collate,
    )  # fmt: skip
    seen = [batch.clone() for batch in loader]
    assert torch.equal(torch.cat(seen), torch.arange(80_000))
    assert len(told(caplog)) == 1


def test_a_batch_in_the_users_hands_stays_when_its_worker_is_replaced() -> None:
    deaths = Deaths(6)

    def sample(index: int) -> torch.Tensor:
        if index % 5 == 4 and deaths.left * 5 == 30 - index + 4:
            deaths.take()
        return row(index)

    loader = DataLoader(Calls(sample, 30), num_workers=2, worker_restarts=6)
    kept = list(loader)  # some lent, some copied out
    assert deaths.left == 0
    assert hashes(kept) == rows(30)
    window: list[torch.Tensor] = []
    deaths.switches = Deaths(6).switches
    for index, batch in enumerate(DataLoader(Calls(sample, 30), num_workers=2, worker_restarts=6)):
        window = [*window[-3:], batch]  # all lent
        assert hashes(window) == rows(30)[max(0, index - 3) : index + 1]
    assert deaths.left == 0


def test_bad_samples_are_skipped_and_counted_once_though_their_worker_died() -> None:
    deaths = Deaths()

    def sample(index: int) -> torch.Tensor:
        if index in (4, 9):
            raise ValueError(f"bad {index}")
        if index == 5:
            deaths.take()  # after the bad one of its batch
        return row(index)

    loader = DataLoader(
        Calls(sample, 12), batch_size=3, num_workers=2, worker_restarts=1, on_error="skip"
    )
    assert [len(batch) for batch in loader] == [3, 2, 3, 2]
    assert deaths.left == 0
    assert [record.index for record in loader.failures] == [4, 9]
    assert loader.failures.total == 2


@pytest.mark.parametrize("how", ["checked", "capped"])
def test_a_slot_that_is_half_written_is_written_again(how, monkeypatch) -> None:
    deaths = Deaths()

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        out = shmloader.empty((2, WIDTH), torch.float32)
        out[0] = samples[0]
        if samples[0][1] == 7:
            deaths.take()
        out[1] = samples[1]
        return out

    options: dict[str, Any] = {}
    is_debugging.cache_clear()
    if how == "checked":
        monkeypatch.setenv("SHMLOADER_DEBUG", "1")
    else:
        options["shm_size"] = 8 * 128 * 1024
    try:
        assert is_debugging() == (how == "checked")
        loader = DataLoader(
            Calls(row, 20), batch_size=2, num_workers=2, worker_restarts=1, collate_fn=collate,
            **options,
        )  # fmt: skip
        assert hashes(loader) == rows(20, 2)
    finally:
        is_debugging.cache_clear()
    assert deaths.left == 0


@contextlib.contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """So many can be opened, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_replacement_that_cannot_be_started_is_an_error_that_names_the_limit() -> None:
    # Not so early that a worker might die before descriptors are few.
    loader = DataLoader(dying(17, Deaths()), batch_size=2, num_workers=2, worker_restarts=1)
    batches = iter(loader)
    assert [hashed(next(batches)) for _ in range(3)] == rows(20, 2)[:3]
    with few_descriptors(0), pytest.raises(OSError, match=r"ulimit -n") as raised:
        hashes(batches)
    assert raised.value.errno == errno.EMFILE
    with pytest.raises(ClosedLoaderError, match="ulimit -n"):
        next(batches)
    assert hashes(loader) == rows(20, 2)


def test_a_replacement_has_the_number_the_seed_and_the_streams_of_a_new_worker() -> None:
    deaths = Deaths()

    def sample(index: int) -> tuple[int, int, int, int, float, float]:
        info = get_worker_info()
        assert info is not None
        if index == 2:
            deaths.take()
        drawn, noise = torch.rand(()).item(), float(np.random.random())
        return os.getpid(), info.id, info.num_workers, info.seed, drawn, noise

    loader = DataLoader(
        Calls(sample, 6), num_workers=2, prefetch_factor=1, worker_restarts=1, collate_fn=only
    )
    seen = list(loader)
    old, new = seen[0], seen[2]
    assert old[0] != new[0]
    assert old[1:] == new[1:]  # numbers, seed, and the first draws of each
    assert seen[4][0] == new[0]
    assert seen[4][4:] != new[4:]
    assert [each[1] for each in seen] == [0, 1, 0, 1, 0, 1]
    assert seen[1][0] == seen[3][0] == seen[5][0]


@pytest.mark.slow
@pytest.mark.parametrize("method", AFRESH)
def test_a_worker_started_afresh_is_replaced(method, caplog) -> None:
    """A map-style one at its start, and again over a batch; what it was given is given again."""
    starts, deaths = Deaths(), Deaths()

    def start(worker: int) -> None:
        starts.take()

    def sample(index: int) -> tuple[int, torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        if index == 3:
            deaths.take()
        return info.seed, row(index)

    loader = DataLoader(
        Calls(sample, 8), num_workers=1, worker_restarts=2, worker_init_fn=start,
        multiprocessing_context=method, collate_fn=only,
    )  # fmt: skip
    batches = iter(loader)
    first = next(batches)
    before = descriptor_count()
    seen = [first, *itertools.islice(batches, 4)]
    gc.collect()
    assert descriptor_count() <= before
    seen += batches
    assert [hashed(data.unsqueeze(0)) for _, data in seen] == rows(8)
    assert len({seed for seed, _ in seen}) == 1
    assert (starts.left, deaths.left) == (0, 0)
    assert "batches again: 0, 1" in told(caplog)[0]
    assert "batches again: 3, 4" in told(caplog)[1]


# ---------------------------------------------------------------- iterable datasets


def numbers(worker_id: int, length: int) -> range:
    return range(worker_id * 1000, worker_id * 1000 + length)


class Dying(Streams):
    """A stream of a worker's own length, in which worker 0 dies once before one sample."""

    def __init__(self, lengths: list[int], at: int, deaths: Deaths) -> None:
        self.lengths = lengths
        self.at = at
        self.deaths = deaths

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        for place, number in enumerate(numbers(info.id, self.lengths[info.id])):
            if info.id == 0 and place == self.at:
                self.deaths.take()
            yield row(number)


ITERABLE: dict[str, dict[str, Any]] = {
    "batches": {"batch_size": 3},
    "batches, the last one left out": {"batch_size": 3, "drop_last": True},
    "no batches": {"batch_size": None},
    "in any order": {"batch_size": 3, "in_order": False},
    "a long window": {"batch_size": 2, "prefetch_factor": 5},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lengths", [[20, 20], [20, 2], [2, 20], [1, 0]], ids=str)
@pytest.mark.parametrize("what", ITERABLE)
def test_an_iterable_dataset_goes_on_where_its_worker_died(what, lengths, caplog) -> None:
    at = min(13, lengths[0] - 1)
    dataset = Dying(lengths, at, Deaths(0))
    unbroken = hashes(DataLoader(dataset, num_workers=2, **ITERABLE[what]))
    dataset.deaths = Deaths()
    seen = hashes(DataLoader(dataset, num_workers=2, worker_restarts=1, **ITERABLE[what]))
    if "order" in what:
        seen.sort()
        unbroken.sort()
    assert seen == unbroken
    assert dataset.deaths.left == 0
    (text,) = told(caplog)
    given = at // (ITERABLE[what]["batch_size"] or 1)
    batches = f"{given} batch{'' if given == 1 else 'es'}"
    skipping = f", skipping {batches} already delivered" if given else ""
    assert f"resumes from its beginning{skipping}." in text


def test_an_iterable_worker_may_die_again_and_again() -> None:
    deaths = Deaths(4)

    def stream() -> Iterator[torch.Tensor]:
        for number in range(20):
            if number == (4 - deaths.left) * 4 + 3:
                deaths.take()
            yield row(number)

    loader = DataLoader(Streams(stream), num_workers=1, batch_size=2, worker_restarts=4)
    assert hashes(loader) == rows(20, 2)
    assert deaths.left == 0


FAILURES = [ValueError("mine"), SystemExit("mine")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_stream_that_failed_fails_once_though_it_is_iterated_anew(failure) -> None:
    """The iterator raises and goes on, which a generator cannot."""
    deaths = Deaths()

    class Numbers:
        def __init__(self) -> None:
            self.next = 0

        def __iter__(self) -> Numbers:
            return self

        def __next__(self) -> int:
            number, self.next = self.next, self.next + 1
            if number == 2:
                raise failure
            if number == 5:
                deaths.take()
            if number == 8:
                raise StopIteration
            return number

    batches = iter(DataLoader(Streams(Numbers), num_workers=1, batch_size=None, worker_restarts=1))
    seen: list[Any] = []
    for _ in range(8):
        try:
            seen.append(next(batches))
        except (ValueError, RuntimeError) as error:
            seen.append("mine" in str(error))
    assert seen == [0, 1, True, 3, 4, 5, 6, 7]
    assert next(batches, None) is None
    assert deaths.left == 0


def test_a_generator_that_failed_has_ended_and_its_replacement_knows() -> None:
    gate = Gate()

    def stream() -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            yield 0
            raise ValueError("mine")
        for number in range(10, 16):
            gate.pass_through()
            yield number

    batches = iter(
        DataLoader(
            Streams(stream), num_workers=2, batch_size=None, worker_restarts=1, prefetch_factor=3
        )
    )
    assert next(batches) == 0
    gate.open()
    assert next(batches) == 10
    kill(pids(batches)[0])
    gate.open(5)
    with pytest.raises(ValueError, match="mine"):
        next(batches)
    assert list(batches) == [11, 12, 13, 14, 15]
    gate.close()


# ---------------------------------------------------------------- further epochs


def test_each_epoch_may_have_as_many_deaths(caplog) -> None:
    switch = Switch(is_on=False)

    def sample(index: int) -> torch.Tensor:
        if index == 3 and switch:
            switch.turn(on=False)
            os._exit(3)
        return row(index)

    loader = DataLoader(Calls(sample, 8), num_workers=2, worker_restarts=1, persistent_workers=True)
    for epoch in range(3):
        switch.turn(on=True)
        assert hashes(loader) == rows(8)
        assert len(told(caplog)) == epoch + 1
    loader.close()


STREAMS: dict[str, Callable[[], Any]] = {
    "map-style": lambda: Calls(row, 8),
    "iterable": lambda: Dying([6, 4], 99, Deaths(0)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("kind", STREAMS)
def test_workers_that_died_between_epochs_are_replaced(kind, which, caplog) -> None:
    """The new ones know nothing of the epoch before, and leave nothing of the next one out."""
    loader = DataLoader(
        STREAMS[kind](), num_workers=2, batch_size=2, worker_restarts=2, persistent_workers=True
    )
    first = hashes(loader)
    for epoch in range(2):
        caplog.clear()
        for worker in which:
            kill(pids(loader._iterator)[worker])
        assert hashes(loader) == first, f"epoch {epoch + 1}"
        texts = told(caplog)
        assert len(texts) == len(which)
        assert not any("skipping" in text or "again" in text for text in texts)
    assert hashes(loader) == first
    loader.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_worker_that_dies_while_the_epoch_is_left_is_replaced(kind) -> None:
    loader = DataLoader(
        STREAMS[kind](), num_workers=2, batch_size=2, worker_restarts=1, persistent_workers=True
    )
    whole = hashes(loader)
    for worker in (0, 1):
        batches = iter(loader)
        assert [hashed(next(batches)) for _ in range(2)] == whole[:2]
        kill(pids(batches)[worker])
        assert hashes(loader) == whole
    loader.close()


# ---------------------------------------------------------------- with a thread of our own


@contextlib.contextmanager
def staged(stage: str) -> Iterator[dict[str, Any]]:
    """Options for a loader whose batches pass a thread."""
    with switched_on() as late:
        yield {"device": "late"} if stage == "device" else {"pin_memory": True}
        assert late.count("faults") == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dataset", ["map-style", "iterable"])
@pytest.mark.parametrize("stage", ["device", "pin"])
def test_a_worker_is_replaced_behind_a_stage(stage, dataset, caplog) -> None:
    deaths = Deaths()
    data: Any = dying(4, deaths, 12) if dataset == "map-style" else Dying([9, 4], 4, deaths)
    plain = Calls(row, 12) if dataset == "map-style" else Dying([9, 4], 99, deaths)
    expected = hashes(DataLoader(plain, num_workers=2))
    with staged(stage) as options:
        loader = DataLoader(
            data, num_workers=2, worker_restarts=1, persistent_workers=True, **options
        )
        assert to_hashes(loader, options) == expected
        assert deaths.left == 0
        assert len(told(caplog)) == 1
        assert to_hashes(loader, options) == expected
        loader.close()


def to_hashes(batches: Any, options: dict[str, Any]) -> list[str]:
    """The batches' content, back on the host."""
    return hashes(map(to_host, batches))


def stage_waits_for_the_user(batches: Any) -> None:
    """Kill worker 1, whose batch the stage's thread waits for; the user is not in next()."""
    kill(pids(batches)[1])
    items = batches._source.owner.thread.items
    wait_until(lambda: any(isinstance(item, CallRequest) for item in list(items)))


def held(gate: Gate, hold: Switch) -> Calls:
    """Rows, the second of which waits at a gate."""

    def sample(index: int) -> torch.Tensor:
        if index == 1 and hold:
            gate.pass_through()
        return row(index)

    return Calls(sample, 12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", ["device", "pin"])
def test_an_epoch_is_left_while_its_stage_waits_for_the_user_to_start_a_worker(
    stage, caplog
) -> None:
    gate, hold = Gate(), Switch(is_on=True)
    with staged(stage) as options:
        loader = DataLoader(
            held(gate, hold), num_workers=2, worker_restarts=1, persistent_workers=True, **options
        )
        for _ in range(2):
            hold.turn(on=True)
            batches = iter(loader)
            stage_waits_for_the_user(batches)
            hold.turn(on=False)
            assert to_hashes(iter(loader), options) == rows(12)
        assert len(told(caplog)) == 2
        del batches
        loader.close()
    gate.close()


@pytest.mark.parametrize("stage", ["device", "pin"])
def test_a_stage_that_waited_for_the_user_to_start_a_worker_goes_on(stage, caplog) -> None:
    gate, hold = Gate(), Switch(is_on=True)
    with staged(stage) as options:
        loader = DataLoader(held(gate, hold), num_workers=2, worker_restarts=1, **options)
        batches = iter(loader)
        stage_waits_for_the_user(batches)
        hold.turn(on=False)
        assert to_hashes(batches, options) == rows(12)
        assert len(told(caplog)) == 1
        del batches
        loader.close()
    gate.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("stage", ["none", "pin"])
def test_a_loader_is_closed_from_another_thread_while_a_worker_is_started(stage, moment) -> None:
    gate, hold = Gate(), Switch(is_on=True)
    with contextlib.nullcontext({}) if stage == "none" else staged(stage) as options:
        loader = DataLoader(held(gate, hold), num_workers=2, worker_restarts=1, **options)
        batches = iter(loader)
        workers = batches._pool._workers
        start = workers._start_worker
        others: list[Any] = []

        def close() -> None:
            closer = threading.Thread(target=loader.close)
            closer.start()
            closer.join(20)

        def start_worker(worker_id: int) -> Any:
            if moment == "before":
                close()
            worker = start(worker_id)
            others.append(worker.process.pid)
            if moment == "after":
                close()
            return worker

        workers._start_worker = start_worker
        next(batches)
        kill(pids(batches)[1])
        with pytest.raises(ClosedLoaderError):
            next(batches)
        assert not any(psutil.pid_exists(pid) for pid in others)
        del workers._start_worker
        del batches, workers
    gate.close()


# ---------------------------------------------------------------- what is left behind


@pytest.mark.slow
def test_twenty_replacements_leave_nothing_behind() -> None:
    count = 20
    deaths = Deaths(count)

    def sample(index: int) -> torch.Tensor:
        # Each death is of one sample, whichever worker comes first.
        if index % 3 == 2 and index // 3 < count and deaths.switches[index // 3]:
            deaths.switches[index // 3].turn(on=False)
            os._exit(3)
        return row(index)

    loader = DataLoader(Calls(sample, 3 * count + 6), num_workers=2, worker_restarts=count)
    batches = iter(loader)
    seen, counts = [hashed(next(batches))], []
    for batch in batches:
        seen.append(hashed(batch))
        del batch
        if len(seen) in (30, 3 * count + 3):
            gc.collect()
            processes = len(psutil.Process().children(recursive=True))
            counts.append((descriptor_count(), processes, threading.active_count()))
    assert seen == rows(3 * count + 6)
    assert deaths.left == 0
    early, late = counts
    assert late <= early
    loader.close()


# ---------------------------------------------------------------- the argument


def test_the_argument_needs_workers_and_a_number() -> None:
    with pytest.raises(ValueError, match=r"worker_restarts needs num_workers > 0"):
        DataLoader(Calls(row, 4), worker_restarts=1)
    for value in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match=f"but got worker_restarts={value!r}"):
            DataLoader(Calls(row, 4), num_workers=1, worker_restarts=value)
    with pytest.raises(ValueError, match=r"0 or more, but got worker_restarts=-1"):
        DataLoader(Calls(row, 4), num_workers=1, worker_restarts=-1)
    loader = DataLoader(Calls(row, 4), worker_restarts=0)
    assert loader.worker_restarts == 0
    assert hashes(loader) == rows(4)


# ---------------------------------------------------------------- what a timeout says


def late(batches: Any) -> list[str]:
    """The lines of the timeout that comes next."""
    with pytest.raises(LoaderTimeoutError) as raised:
        next(batches)
    return str(raised.value).splitlines()


def of_workers(lines: list[str]) -> list[str]:
    """The line of each worker, without its stack."""
    return [line for line in lines if line.startswith("Worker ")]


def test_a_timeout_says_where_a_sleeping_worker_sleeps_and_the_epoch_goes_on() -> None:
    gate, hold = Gate(), Switch(is_on=True)

    def wait_for_the_gate() -> None:
        gate.pass_through()

    def sample(index: int) -> int:
        if index == 1 and hold:
            wait_for_the_gate()
        return index

    loader = DataLoader(
        Calls(sample, 8), num_workers=2, timeout=0.3, collate_fn=only, prefetch_factor=1
    )
    batches = iter(loader)
    assert next(batches) == 0
    first, second = pids(batches)
    for _ in range(2):
        lines = late(batches)
        assert lines[0] == (
            "DataLoader timed out after 0.3 seconds, waiting for batch 1 (index 1). No batch is "
            "lost. A for loop ends here; call next() on the same iterator to go on waiting, or "
            "raise timeout=. Without executor=, sample_timeout= replaces a worker whose sample "
            "hangs."
        )
        other, awaited = of_workers(lines)
        assert awaited.startswith(f"Worker 1 (pid {second}) has been loading batch 1 (index 1)")
        assert awaited.endswith(" s, the innermost call first:")
        assert other.startswith(f"Worker 0 (pid {first}) has been idle for ")
        stack = lines[lines.index(awaited) + 1 :]
        names = [re.search(r"in (\S+)$", line)[1] for line in stack]  # type: ignore[index]
        assert names[:3] == ["pass_through", "wait_for_the_gate", "sample"]
    gate.open()
    assert list(however_late(batches)) == list(range(1, 8))
    gate.close()


@pytest.mark.slow
def test_a_timeout_tells_of_a_worker_in_a_call_that_keeps_the_interpreter() -> None:
    begun = Gate()

    def count_for_ever() -> None:
        begun.open()
        sum(range(10**12))

    def sample(index: int) -> int:
        if index == 0:
            count_for_ever()
        return index

    loader = DataLoader(Calls(sample, 4), num_workers=2, timeout=0.3, collate_fn=only)
    batches = iter(loader)
    begun.wait_until_open()
    for _ in range(2):
        lines = late(batches)
        assert [line[:8] for line in of_workers(lines)] == ["Worker 0", "Worker 1"]
        assert lines[2].endswith("in count_for_ever")
        assert lines[3].endswith("in sample")
    loader.close()
    begun.close()


def test_a_timeout_tells_of_stopped_workers_and_the_epoch_goes_on() -> None:
    loader = DataLoader(Calls(lambda n: n, 8), num_workers=2, timeout=0.3, collate_fn=only)
    batches = iter(loader)
    assert next(batches) == 0
    gate_pids = pids(batches)
    for pid in gate_pids:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    seen: list[int] = []
    while True:
        try:
            seen.append(next(batches))
        except LoaderTimeoutError as error:
            lines = str(error).splitlines()
            break
    assert len(lines) == 3
    assert all(line.endswith("; the process is stopped (SIGSTOP).") for line in lines[1:])
    assert {f"(pid {pid})" in lines[1] + lines[2] for pid in gate_pids} == {True}
    for pid in gate_pids:
        os.kill(pid, signal.SIGCONT)
    assert [*seen, *however_late(batches)] == list(range(1, 8))


def test_a_timeout_tells_of_a_worker_that_is_still_starting() -> None:
    """Where it cannot be asked yet."""
    gate = Gate()

    class Slow(multiprocessing.context.ForkProcess):
        def run(self) -> None:
            gate.pass_through()
            super().run()

    context = multiprocessing.context.ForkContext()
    context.Process = Slow  # type: ignore[assignment]
    loader = DataLoader(
        Calls(lambda n: n, 4), num_workers=1, timeout=0.05, collate_fn=only,
        multiprocessing_context=context,
    )  # fmt: skip
    batches = iter(loader)
    (pid,) = pids(batches)
    lines = late(batches)
    assert len(lines) == 2
    assert re.fullmatch(rf"Worker 0 \(pid {pid}\) has been starting for \d+\.\d s\.", lines[1])
    gate.open()
    assert list(however_late(batches, 35)) == [0, 1, 2, 3]
    gate.close()


def test_a_timeout_tells_of_a_worker_in_worker_init_fn() -> None:
    gate = Gate()

    def get_ready(worker: int) -> None:
        gate.pass_through()

    batches = iter(
        DataLoader(
            Calls(lambda n: n, 4), num_workers=1, timeout=0.3, collate_fn=only,
            worker_init_fn=get_ready,
        )
    )  # fmt: skip
    lines = late(batches)
    assert "has been preparing (dataset, worker_init_fn) for " in lines[1]
    assert lines[3].endswith("in get_ready")
    gate.open()
    assert list(however_late(batches)) == [0, 1, 2, 3]
    gate.close()


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
def test_a_timeout_has_a_line_for_each_worker_though_none_of_them_answers(in_order) -> None:
    """Asked one after the other, a third of a second each, they would take too long."""
    gate = Gate()

    def deafen(worker: int) -> None:
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)

    def sample(index: int) -> int:
        gate.pass_through()
        return index

    loader = DataLoader(
        Calls(sample, 6), num_workers=6, timeout=0.3, collate_fn=only, worker_init_fn=deafen,
        prefetch_factor=1, in_order=in_order,
    )  # fmt: skip
    batches = iter(loader)
    wait_until(
        lambda: all(batches._pool.was_at(worker).phase is Phase.LOADING for worker in range(6))
    )
    began = time.monotonic()
    lines = late(batches)
    assert time.monotonic() - began < 4
    assert sorted(line[:8] for line in lines[1:]) == [f"Worker {number}" for number in range(6)]
    loaded = sorted(line.partition(" has been loading batch ")[2][:11] for line in lines[1:])
    assert loaded == [f"{number} (index {number})"[:11] for number in range(6)]
    gate.open(6)
    assert sorted(however_late(batches)) == list(range(6))
    gate.close()


# ---------------------------------------------------------------- the main process is killed

KILLED = """
import logging, os, signal, threading, time, warnings
from torch.utils.data import get_worker_info
from shmloader import DataLoader

class Data:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index < 4:
            return index
        worker = get_worker_info().id
        open(f"stuck {worker}", "w").close()
        if worker == 1:
            sum(range(10**12))
        time.sleep(60)

def begin(method, keep, **options):
    loader = DataLoader(Data(), multiprocessing_context=method, **options)
    batches = iter(loader)
    keep.append(batches)

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch's, of more workers than cores
    logging.disable()
    keep = []
    # Its thread has ended when the main process is killed.
    thread = threading.Thread(
        target=begin, args=(METHOD, keep),
        kwargs={"num_workers": 3, "worker_restarts": 1, "prefetch_factor": 3},
    )
    thread.start()
    thread.join()
    batches = keep[0]
    for _ in range(4):
        next(batches)
    if REPLACE:
        lost = batches._workers[0].pid
        os.kill(lost, signal.SIGKILL)
        while batches._workers[0].pid == lost:
            batches._engine._receive_any(None)
            batches._engine._adjust_workers()
    os.kill(batches._workers[2].pid, signal.SIGSTOP)
    print(*[worker.pid for worker in batches._workers], flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_no_worker_outlives_a_main_process_that_is_killed(method, tmp_path) -> None:
    """One sleeps, one keeps the interpreter, one is stopped; a thread that has ended began them."""
    source = KILLED.replace("METHOD", repr(method)).replace("REPLACE", str(method == "fork"))
    running = Program(source, tmp_path / "program.py")
    workers = [int(pid) for pid in running.read_line().split()]
    for worker in (0, 1):
        wait_until((tmp_path / f"stuck {worker}").exists, 30)
    wait_until(lambda: psutil.Process(workers[2]).status() == psutil.STATUS_STOPPED)
    handles = [os.pidfd_open(pid) for pid in workers]
    began = time.monotonic()
    os.kill(running.pid, signal.SIGKILL)
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(max(0, began + ENDED_S - time.monotonic()) * 1000)
        os.close(handle)
    running.finish().assert_quiet(-signal.SIGKILL)
