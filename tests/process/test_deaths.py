"""Workers that die are told at their place in the order, or replaced."""

import contextlib
import errno
import gc
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import get_worker_info

import shmloader
from shmloader import ClosedLoaderError, DataLoader, WorkerDiedError
from shmloader.device.thread import CallRequest
from shmloader.pools.status_page import Phase
from tests.late import to_host
from tests.process.support import (
    TOLD_S,
    Calls,
    Deaths,
    Gate,
    Streams,
    Switch,
    descriptor_count,
    few_descriptors,
    kill,
    only,
    outcomes,
    stop,
    told,
    wait_for_end,
    wait_until,
)

# Large enough to lie in a slot, and to be lent.
WIDTH = 3000


def row(index: int) -> torch.Tensor:
    return torch.arange(WIDTH, dtype=torch.float32) * (index + 1)


def rows(deaths: Deaths, length: int = 20) -> Calls:
    def sample(index: int) -> torch.Tensor:
        deaths.come(index)
        return row(index)

    return Calls(sample, length)


def content(batch: torch.Tensor) -> int:
    return hash(to_host(batch).numpy().tobytes())


def contents(batches: Any) -> list[int]:
    return [*map(content, batches)]


def expected(length: int = 20, batch_size: int = 1) -> list[int]:
    return contents(torch.stack([*map(row, range(length))]).split(batch_size))


def pids(batches: Any) -> list[int]:
    return [worker.pid for worker in batches._workers]


@contextlib.contextmanager
def soon(limit_s: float = TOLD_S) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s


def end_by(number: int) -> Callable[[], None]:
    def end() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    return end


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "SIGKILL": (end_by(signal.SIGKILL), "is killed by signal: Killed."),
    "SIGTERM": (end_by(signal.SIGTERM), "is killed by signal: Terminated."),
    "SIGSEGV": (end_by(signal.SIGSEGV), "is killed by signal: Segmentation fault."),
    "abort": (os.abort, "is killed by signal: Aborted."),
    "exit code 0": (lambda: os._exit(0), "exited unexpectedly with exit code 0."),
    "exit code 3": (lambda: os._exit(3), "exited unexpectedly with exit code 3."),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"timeout": 30}, {"persistent_workers": True}], ids=str)
@pytest.mark.parametrize("way", ENDS)
def test_a_death_is_told_after_the_batches_before_it(way, options, slots) -> None:
    end, words = ENDS[way]
    loader = DataLoader(rows(Deaths({5: 1}, end)), batch_size=2, num_workers=2, **options)
    batches = iter(loader)
    pid = pids(batches)[0]
    assert contents(itertools.islice(batches, 2)) == expected(20, 2)[:2]
    with soon(), pytest.raises(WorkerDiedError) as raised:
        next(batches)
    assert isinstance(raised.value, RuntimeError)
    text = str(raised.value)
    assert text.startswith(f"DataLoader worker (pid {pid}) {words}")
    assert "Worker 0 was loading batch 2 (indices 4 to 5)." in text
    assert slots.maps() == {}  # though the iterator lives
    for _ in range(2):
        with pytest.raises(ClosedLoaderError):
            next(batches)
    assert contents(loader) == expected(20, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_out_of_order_the_other_batches_come_or_the_death_is_told(workers) -> None:
    loader = DataLoader(rows(Deaths({4: 1}), 8), num_workers=workers, in_order=False)
    batches, seen = iter(loader), []
    with soon(), pytest.raises(WorkerDiedError, match=r"exit code 3.*batch [45] "):
        seen.extend(int(batch[0, 1]) - 1 for batch in batches)
    assert 4 not in seen
    assert len(set(seen)) == len(seen)
    with pytest.raises(ClosedLoaderError):
        next(batches)
    assert sorted(contents(loader)) == sorted(expected(8))


def test_batches_that_were_ready_when_the_worker_died_are_delivered_first() -> None:
    batches = iter(DataLoader(rows(Deaths({3: 1})), num_workers=1, prefetch_factor=8))
    wait_for_end(pids(batches)[0])
    assert contents(itertools.islice(batches, 3)) == expected()[:3]
    with pytest.raises(WorkerDiedError, match="batch 3"):
        next(batches)


def test_a_worker_that_dies_and_leaves_a_child_of_its_own_behind_is_told() -> None:
    gate, dying = Gate(), Gate()

    def sample(index: int) -> int:
        if index == 2:
            if os.fork() == 0:
                with contextlib.suppress(BaseException):
                    gate.pass_through()  # lives on, with every descriptor of the worker
                os._exit(0)
            dying.open()
            os._exit(7)
        return index

    batches = iter(DataLoader(Calls(sample, 8), num_workers=2, collate_fn=only))
    try:
        assert [next(batches), next(batches)] == [0, 1]
        dying.wait_until_open()
        with soon(), pytest.raises(WorkerDiedError, match="exit code 7"):
            next(batches)
    finally:
        gate.open()


@pytest.mark.parametrize("when", ["in an epoch", "between epochs"])
def test_a_killed_worker_is_told_in_place_of_its_next_batch(when) -> None:
    loader = DataLoader(Calls(int, 40), num_workers=2, collate_fn=only, persistent_workers=True)
    batches = iter(loader)
    assert next(batches) == 0
    if when == "between epochs":
        assert list(batches) == list(range(1, 40))
    victim = pids(batches)[1]
    kill(victim)
    seen: list[int] = []
    with soon(), pytest.raises(WorkerDiedError, match=rf"pid {victim}\) is killed by signal: K"):
        seen.extend(batches if when == "in an epoch" else loader)
    assert seen == list(range(1, 1 + len(seen)))
    assert list(loader) == list(range(40))


def test_a_death_that_was_seen_before_the_epoch_was_left_does_not_hang_the_next_one() -> None:
    deaths, gate, hold = Deaths({1: 1}), Gate(), Switch(is_on=True)

    def sample(index: int) -> int:
        if index == 0 and hold:
            gate.pass_through()
        deaths.come(index)
        return index

    loader = DataLoader(Calls(sample, 6), num_workers=1, collate_fn=only, persistent_workers=True)
    batches = iter(loader)
    pool = batches._pool
    wait = pool.wait

    def wait_after_the_end(*arguments: Any) -> Any:
        gate.open()
        wait_for_end(pool.pid(0))
        return wait(*arguments)

    pool.wait = wait_after_the_end
    assert next(batches) == 0  # the death is seen together with this answer
    pool.wait = wait
    hold.turn(on=False)
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        iter(loader)
    assert list(loader) == list(range(6))


def test_a_worker_that_dies_in_worker_init_fn_is_told_with_its_first_batch() -> None:
    end = lambda worker: os._exit(11) if worker == 1 else None  # noqa: E731
    batches = iter(DataLoader(Calls(int, 6), num_workers=2, collate_fn=only, worker_init_fn=end))
    assert next(batches) == 0
    with pytest.raises(WorkerDiedError, match=r"exit code 11\..*Worker 1 was loading batch 1"):
        next(batches)


def test_a_worker_killed_after_its_stream_ended_changes_nothing() -> None:
    gate = Gate()

    def stream() -> Any:
        for n in range(10 if get_worker_info().id == 1 else 0):
            gate.pass_through()
            yield n

    loader = DataLoader(Streams(stream), num_workers=2, collate_fn=only, prefetch_factor=1)
    batches = iter(loader)
    gate.open()
    assert next(batches) == 0
    kill(pids(batches)[0])
    gate.open(9)
    assert list(batches) == list(range(1, 10))


@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_a_death_is_told_by_its_own_loader_beside_torch_s(whose) -> None:
    # No tensors: torch may be interrupted while it takes the descriptor of one, and leak.
    torchs = iter(TorchLoader(Calls(int, 20), num_workers=1, collate_fn=only))
    ours = iter(DataLoader(Calls(int, 20), num_workers=2, collate_fn=only))
    assert (next(torchs), next(ours)) == (0, 0)
    died, other = (ours, torchs) if whose == "ours" else (torchs, ours)
    kill(pids(died)[0]) if whose == "ours" else os.kill(pids(died)[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"is killed by signal|exited unexpectedly"):
        list(died)
    assert list(other) == list(range(1, 20))
    torchs._shutdown_workers()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reaper", ["ignored", "handled"])
def test_a_process_that_reaps_all_children_itself_is_told_of_the_death_and_can_close(reaper):
    def reap(number: int, frame: Any) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN if reaper == "ignored" else reap)
    try:
        loader = DataLoader(rows(Deaths({2: 1}), 6), num_workers=2)
        batches = iter(loader)
        pid = pids(batches)[0]
        next(batches)
        next(batches)
        with soon(), pytest.raises(WorkerDiedError, match=rf"pid {pid}\).*batch 2"):
            next(batches)
        assert contents(loader) == expected(6)
        batches = iter(loader)
        with soon():
            loader.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_death_that_was_told_leaves_nothing_to_the_garbage_collector(no_collector) -> None:
    before = descriptor_count()
    loader = DataLoader(rows(Deaths({0: 1})), num_workers=1)
    with pytest.raises(WorkerDiedError):
        next(iter(loader))
    del loader
    assert descriptor_count() == before


@pytest.mark.parametrize("how", ["stopped", "ignores SIGTERM"])
def test_close_ends_a_worker_in_bounded_time(how) -> None:
    gate = Gate()

    def sample(index: int) -> int:
        if how == "ignores SIGTERM":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gate.open()
        time.sleep(60)
        return index

    loader = DataLoader(Calls(sample, 4), num_workers=1)
    batches = iter(loader)
    (pid,) = pids(batches)
    gate.wait_until_open()
    if how == "stopped":
        stop(pid)
    with soon(2 * TOLD_S):
        loader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


AGAIN = r"Worker 0 is replaced\. Batches loaded again: "

# Where workers die, the loader's options, and what the log says of each death.
MAP_STYLE: dict[str, tuple[dict[Any, int], dict[str, Any], list[str]]] = {
    "in order": ({9: 1}, {"batch_size": 2}, [AGAIN + "4"]),
    "all tickets of the worker": ({2: 1}, {"prefetch_factor": 6}, [AGAIN + "2, 4, 6, 8, 10"]),
    # The others were no one's yet.
    "in any order": ({2: 1}, {"prefetch_factor": 6, "in_order": False}, [r"loaded again: 2\."]),
    # Dying before a batch is in work does not count against the batch.
    "at the start": ({"start": 3, 0: 1}, {"num_workers": 1}, [AGAIN + "0"] * 4),
    # Nor does waiting behind the one in work.
    "one after the other": ({0: 1, 1: 1}, {"num_workers": 1}, [AGAIN + "0, 1", AGAIN + "1"]),
    "in the middle of a slot": ({("half", 8): 1}, {"batch_size": 2}, [AGAIN]),
    "capped": ({("half", 8): 1}, {"batch_size": 2, "shm_size": 1 << 20}, [""]),
    "again and again": ({5 * n + 4: 1 for n in range(4)}, {}, [""] * 4),
}


@pytest.mark.parametrize("case", MAP_STYLE)
def test_a_map_style_dataset_s_batches_are_loaded_again(case, caplog) -> None:
    places, options, texts = MAP_STYLE[case]
    deaths = Deaths(places)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        batch = shmloader.empty((len(samples), WIDTH), torch.float32)
        batch[0] = samples[0]
        deaths.come(("half", int(samples[0][1]) - 1))
        return torch.stack(samples, out=batch)

    options = {
        "num_workers": 2, "worker_restarts": len(texts), "collate_fn": collate,
        "worker_init_fn": lambda _: deaths.come("start"), **options,
    }  # fmt: skip
    loader = DataLoader(rows(deaths), **options)
    kept = list(loader)  # some lent, some copied out
    assert deaths.left == 0
    assert loader.stats().restarts == len(texts)
    seen = contents(kept)
    if "in_order" in options:
        seen, ordered = sorted(seen), sorted(expected())
    else:
        ordered = expected(20, options.get("batch_size", 1))
    assert seen == ordered
    for text, pattern in zip(told(caplog), texts, strict=True):
        assert text.startswith("DataLoader worker (pid ")
        assert "exited unexpectedly with exit code 3." in text
        assert re.search(pattern, text)


def test_a_worker_that_dies_idle_is_replaced_and_nothing_is_loaded_again(caplog) -> None:
    loader = DataLoader(Calls(row, 12), num_workers=2, prefetch_factor=1, worker_restarts=1)
    batches = iter(loader)
    seen = contents(itertools.islice(batches, 2))  # worker 1 has answered, and has no other ticket
    assert next(batches)[0, 1] == 3
    victim = pids(batches)[1]
    wait_until(lambda: batches._pool.was_at(1).phase is Phase.IDLE)
    kill(victim)
    assert seen + expected(12)[2:3] + contents(batches) == expected(12)
    (text,) = told(caplog)
    assert f"pid {victim}) is killed by signal: Killed. Worker 1 is replaced." in text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_that_kills_each_worker_uses_up_the_restarts(in_order, caplog) -> None:
    dataset = rows(Deaths({5: 9}))
    loader = DataLoader(dataset, batch_size=2, num_workers=2, worker_restarts=2, in_order=in_order)
    seen: list[int] = []
    with pytest.raises(WorkerDiedError) as raised:
        seen.extend(content(batch) for batch in loader)
    if in_order:
        assert seen == expected(20, 2)[:2]
    text, logs = str(raised.value), told(caplog)
    assert re.search(r"Worker [01] was loading batch 2 \(indices 4 to 5\)\.", text)
    assert text.endswith("No restart is left in this epoch (worker_restarts=2).")
    (pid,) = re.findall(r"\(pid \d+\)", text)
    assert [pid in log for log in logs] == [False, False]  # the third one's


def test_long_index_lists_are_sent_again() -> None:
    """They lie in the batch's slot, which the dead worker has written over."""
    deaths = Deaths({40_000: 1})

    def collate(samples: list[int]) -> torch.Tensor:
        batch = torch.utils.data.default_collate([torch.tensor(samples)])[0]
        deaths.come(samples[0])
        return batch

    loader = DataLoader(
        Calls(int, 80_000), batch_size=20_000, num_workers=2, worker_restarts=1, collate_fn=collate
    )
    assert torch.equal(torch.cat([batch.clone() for batch in loader]), torch.arange(80_000))
    assert deaths.left == 0


def test_bad_samples_are_skipped_and_counted_once_though_their_worker_died() -> None:
    deaths = Deaths({5: 1})  # after the bad one of its batch

    def sample(index: int) -> torch.Tensor:
        if index in (4, 9):
            raise ValueError(f"bad {index}")
        deaths.come(index)
        return row(index)

    loader = DataLoader(
        Calls(sample, 12), batch_size=3, num_workers=2, worker_restarts=1, on_error="skip"
    )
    assert [len(batch) for batch in loader] == [3, 2, 3, 2]
    assert deaths.left == 0
    assert [record.index for record in loader.failures] == [4, 9]
    assert loader.failures.total == 2


def test_a_replacement_that_cannot_be_started_is_an_error_that_names_the_limit() -> None:
    # Not so early that a worker might die before descriptors are few.
    loader = DataLoader(rows(Deaths({17: 1})), batch_size=2, num_workers=2, worker_restarts=1)
    batches = iter(loader)
    assert contents(itertools.islice(batches, 3)) == expected(20, 2)[:3]
    with few_descriptors(), pytest.raises(OSError, match=r"ulimit -n") as raised:
        contents(batches)
    assert raised.value.errno == errno.EMFILE
    with pytest.raises(ClosedLoaderError, match="ulimit -n"):
        next(batches)
    assert contents(loader) == expected(20, 2)


@pytest.mark.parametrize("left", range(6))
def test_workers_that_cannot_be_started_leave_nothing_that_garbage_would_warn_of(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", warned.append)
    loader = DataLoader(range(4), batch_size=2, num_workers=2, seed=1)
    with few_descriptors(left), contextlib.suppress(OSError):
        iter(loader)
    gc.collect()
    assert warned == []


def test_a_replacement_has_the_number_the_seed_and_the_streams_of_a_new_worker() -> None:
    deaths = Deaths({2: 1})

    def sample(index: int) -> tuple[int, int, int, int, float, float]:
        info = get_worker_info()
        deaths.come(index)
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_is_replaced_whatever_started_it(method, caplog) -> None:
    """A map-style one at its start, and again over a batch; what it was given is given again."""
    deaths = Deaths({"start": 1, 3: 1})

    def sample(index: int) -> tuple[int, torch.Tensor]:
        info = get_worker_info()
        deaths.come(index)
        return info.seed, row(index)

    loader = DataLoader(
        Calls(sample, 8), num_workers=1, worker_restarts=2,
        worker_init_fn=lambda _: deaths.come("start"), multiprocessing_context=method,
        collate_fn=only,
    )  # fmt: skip
    batches = iter(loader)
    first = next(batches)
    before = descriptor_count()
    seen = [first, *itertools.islice(batches, 4)]
    gc.collect()
    assert descriptor_count() <= before
    seen += batches
    assert contents(data for _, data in seen) == expected(8)
    assert len({seed for seed, _ in seen}) == 1
    assert deaths.left == 0
    assert "loaded again: 0, 1." in told(caplog)[0]
    assert "loaded again: 3, 4." in told(caplog)[1]


def stream_of(lengths: list[int], deaths: Deaths) -> Streams:
    """A stream of each worker's own length. The places of deaths are worker 0's."""

    def stream() -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for at in range(lengths[info.id]):
            if info.id == 0:
                deaths.come(at)
            yield row(info.id * 1000 + at)

    return Streams(stream)


ITERABLE: dict[str, dict[str, Any]] = {
    "batches": {"batch_size": 3},
    "batches, the last one left out": {"batch_size": 3, "drop_last": True},
    "no batches": {"batch_size": None},
    "in any order": {"batch_size": 3, "in_order": False},
    "a long window": {"batch_size": 2, "prefetch_factor": 5},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("lengths", [[20, 20], [20, 2], [2, 20], [1, 0]], ids=str)
@pytest.mark.parametrize("what", ITERABLE)
def test_an_iterable_dataset_goes_on_where_its_worker_died(what, lengths, times, caplog) -> None:
    options = {"num_workers": 2, **ITERABLE[what]}
    ats = sorted({min(at, lengths[0] - 1) for at in (13, 3, 7, 17)[:times]})
    deaths = Deaths(dict.fromkeys(ats, 1))
    unbroken = contents(DataLoader(stream_of(lengths, Deaths()), **options))
    seen = contents(DataLoader(stream_of(lengths, deaths), worker_restarts=times, **options))
    if "order" in what:
        seen, unbroken = sorted(seen), sorted(unbroken)
    assert seen == unbroken
    assert deaths.left == 0
    assert len(told(caplog)) == len(ats)


@pytest.mark.parametrize("failure", [ValueError("mine"), SystemExit("mine")], ids=repr)
def test_a_stream_that_failed_fails_once_though_it_is_iterated_anew(failure) -> None:
    """The iterator raises and goes on, which a generator cannot."""
    deaths = Deaths({5: 1})

    def sample(number: int) -> int:
        deaths.come(number)
        if number == 2:
            raise failure
        return number

    stream = Streams(lambda: map(sample, range(8)))
    loader = DataLoader(stream, num_workers=1, batch_size=None, worker_restarts=1)
    seen = outcomes(loader)
    assert "mine" in str(seen[2])
    assert [*seen[:2], *seen[3:]] == [0, 1, 3, 4, 5, 6, 7]
    assert deaths.left == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("when", ["between epochs", "while an epoch is left"])
@pytest.mark.parametrize("which", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("kind", ["map-style", "iterable"])
def test_workers_that_die_before_a_further_epoch_are_replaced(kind, which, when, caplog) -> None:
    """The new ones know nothing of the epoch before, and leave nothing of the next one out."""
    dataset = rows(Deaths(), 8) if kind == "map-style" else stream_of([6, 4], Deaths())
    loader = DataLoader(
        dataset, num_workers=2, batch_size=2, worker_restarts=2, persistent_workers=True
    )
    whole = contents(loader)
    for _ in range(2):
        caplog.clear()
        if when == "while an epoch is left":
            assert contents(itertools.islice(iter(loader), 2)) == whole[:2]
        for worker in which:
            kill(pids(loader._iterator)[worker])
        assert contents(loader) == whole
        texts = told(caplog)
        assert len(texts) == len(which)
        assert all(text.endswith("Batches loaded again: none.") for text in texts)
    assert contents(loader) == whole


def test_a_stage_waits_for_the_user_to_start_a_worker_or_its_epoch_is_left(kind, caplog) -> None:
    gate, hold = Gate(), Switch(is_on=True)

    def sample(index: int) -> torch.Tensor:
        if index == 1 and hold:
            gate.pass_through()
        return row(index)

    options = {"num_workers": 2, "worker_restarts": 1, "persistent_workers": True, **kind.options}
    loader = DataLoader(Calls(sample, 12), **options)
    for is_left in (True, True, False):
        hold.turn(on=True)
        batches = iter(loader)
        kill(pids(batches)[1])  # the stage's thread waits for its batch, the user for none
        items = batches._source.owner.thread.items
        wait_until(lambda i=items: any(isinstance(item, CallRequest) for item in list(i)))
        hold.turn(on=False)
        assert contents(iter(loader) if is_left else batches) == expected(12)
    assert len(told(caplog)) == 3
    del batches
    loader.close()
