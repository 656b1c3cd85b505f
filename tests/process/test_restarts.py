"""Workers that die are replaced; a timeout says what workers are doing; none outlives main."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shmloader import DataLoader, LoaderTimeoutError, WorkerDiedError
from tests.process.support import (
    TOLD_S,
    Calls,
    Gate,
    Program,
    Streams,
    Switch,
    only,
    wait_for_end,
)

pytestmark = pytest.mark.timeout(60)


class Fuse:
    """Lets so many through, over all workers."""

    def __init__(self, count: int) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.write(self._write, b"x" * count)

    def is_lit(self) -> bool:
        try:
            return os.read(self._read, 1) == b"x"
        except BlockingIOError:
            return False

    def light(self) -> None:
        os.write(self._write, b"x")

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
def fuse() -> Iterator[Callable[[int], Fuse]]:
    made: list[Fuse] = []

    def make(count: int) -> Fuse:
        made.append(Fuse(count))
        return made[-1]

    yield make
    for one in made:
        one.close()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(at: int, fuse: Fuse, length: int = 20, end: Callable[[], Any] = kill_self) -> Calls:
    """Ends its worker at one index, for as long as the fuse is lit."""

    def sample(index: int) -> torch.Tensor:
        if index == at and fuse.is_lit():
            end()
        return torch.full((40_000,), index)

    return Calls(sample, length)


def firsts(batches: Any) -> list[int]:
    return [int(batch.flatten()[0]) for batch in batches]


# ---------------------------------------------------------------- what is delivered


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 5, 19])
def test_a_worker_that_dies_is_replaced_and_the_epoch_is_whole(workers, at, fuse, caplog) -> None:
    loader = DataLoader(dying(at, fuse(1)), batch_size=2, num_workers=workers, worker_restarts=1)
    began = time.monotonic()
    batches = [batch.tolist() for batch in (batch[:, 0] for batch in loader)]
    assert time.monotonic() - began < TOLD_S
    assert batches == [[n, n + 1] for n in range(0, 20, 2)]
    assert len(caplog.records) == 1
    assert firsts(loader) == list(range(0, 20, 2))


def test_the_log_says_who_died_what_is_done_again_and_that_streams_start_anew(fuse, caplog) -> None:
    loader = DataLoader(
        dying(2, fuse(1)), num_workers=2, prefetch_factor=2, collate_fn=only, worker_restarts=3
    )
    batches = iter(loader)
    victim = batches._workers[0].pid
    assert firsts(batches) == list(range(20))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("shmloader", logging.WARNING)
    text = record.getMessage()
    assert text.startswith(f"DataLoader worker (pid {victim}) is killed by signal: Killed. ")
    assert "A new process takes the place of worker 0 and loads again what it had in work" in text
    assert "batch 2" in text
    assert text.endswith("Its random streams start anew.")


def test_two_workers_that_die_at_the_same_time_are_both_replaced(fuse, caplog) -> None:
    lit = fuse(2)
    barrier = Gate()

    def sample(index: int) -> int:
        if index in {2, 3} and lit.is_lit():
            barrier.pass_through()
            os._exit(4)
        return index

    loader = DataLoader(Calls(sample, 20), num_workers=2, collate_fn=only, worker_restarts=2)
    batches = iter(loader)
    victims = [worker.pid for worker in batches._workers]
    assert [next(batches), next(batches)] == [0, 1]
    barrier.open(2)
    for victim in victims:
        wait_for_end(victim)
    assert list(batches) == list(range(2, 20))
    assert len(caplog.records) == 2
    barrier.close()


def test_out_of_order_every_batch_comes_once(fuse) -> None:
    loader = DataLoader(
        dying(7, fuse(1), 40),
        num_workers=2,
        collate_fn=only,
        in_order=False,
        worker_restarts=1,
    )
    assert sorted(firsts(loader)) == list(range(40))


def test_batches_that_lay_in_slots_when_their_worker_died_are_not_loaded_again(fuse) -> None:
    seen = fuse(0)
    lit = fuse(1)

    def sample(index: int) -> torch.Tensor:
        os.write(seen._write, bytes([index]))
        if index == 3 and lit.is_lit():
            kill_self()
        return torch.full((40_000,), index)

    loader = DataLoader(
        Calls(sample, 6), num_workers=1, prefetch_factor=6, collate_fn=only, worker_restarts=1
    )
    batches = iter(loader)
    wait_for_end(batches._workers[0].pid)
    assert firsts(batches) == list(range(6))
    assert list(os.read(seen._read, 100)) == [0, 1, 2, 3, 3, 4, 5]


def test_kept_batches_stay_as_they_are_while_workers_are_replaced(fuse) -> None:
    loader = DataLoader(
        dying(5, fuse(1)), num_workers=2, collate_fn=only, worker_restarts=1, prefetch_factor=1
    )
    kept = list(loader)
    assert [batch.unique().tolist() for batch in kept] == [[n] for n in range(20)]


def test_a_batch_sampler_and_its_long_index_lists_are_sent_again(fuse) -> None:
    lit = fuse(1)

    def sample(index: int) -> int:
        if index == 60_001 and lit.is_lit():
            kill_self()
        return index

    keys = [list(range(start, start + 30_000)) for start in range(0, 120_000, 30_000)]
    loader = DataLoader(
        Calls(sample, 120_000), batch_sampler=keys, num_workers=2, worker_restarts=1
    )
    assert [batch.tolist() for batch in loader] == keys


def test_random_streams_of_a_new_worker_are_those_of_a_worker_that_starts(fuse) -> None:
    lit = fuse(1)

    def sample(index: int) -> float:
        if index == 2 and lit.is_lit():
            kill_self()
        return random.random()

    def run() -> list[float]:
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(
            Calls(sample, 4), num_workers=1, collate_fn=only, worker_restarts=1,
            generator=generator,
        )  # fmt: skip
        return list(loader)

    with_death, without = run(), run()
    assert with_death[:2] == without[:2]
    assert with_death[2:] == without[:2]


# ---------------------------------------------------------------- iterable datasets


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_goes_on_past_what_was_given(workers, batch_size, fuse, caplog) -> None:
    lit = fuse(1)

    def stream() -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        for index in range(info.id, 40, info.num_workers):
            if index == 20 and lit.is_lit():
                kill_self()
            yield index

    def run(**options: Any) -> list[Any]:
        loader = DataLoader(Streams(stream), num_workers=workers, batch_size=batch_size, **options)
        return [batch.tolist() if batch_size else batch for batch in loader]

    with_death = run(worker_restarts=1)
    assert with_death == run()
    (record,) = caplog.records
    given = 20 // workers // (batch_size or 1)
    assert f"iterated anew, past {given} batches that were given already" in record.getMessage()


def test_a_stream_whose_worker_dies_after_its_end_gives_nothing_twice(fuse) -> None:
    gate = Gate()

    def stream() -> Iterator[int]:
        if torch.utils.data.get_worker_info().id == 0:
            yield 0
        else:
            for n in range(1, 10):
                gate.pass_through()
                yield n

    loader = DataLoader(
        Streams(stream), num_workers=2, collate_fn=only, prefetch_factor=2, worker_restarts=2
    )
    batches = iter(loader)
    assert next(batches) == 0
    gate.open()
    assert next(batches) == 1
    victim = batches._workers[0].pid
    os.kill(victim, signal.SIGKILL)
    wait_for_end(victim)
    gate.open(8)
    assert list(batches) == list(range(2, 10))
    gate.close()


def test_a_stream_is_skipped_past_a_sample_that_fails_each_time(fuse) -> None:
    lit = fuse(1)

    class Stream:
        def __init__(self) -> None:
            self.n = -1

        def __iter__(self) -> Stream:
            return self

        def __next__(self) -> int:
            self.n += 1
            if self.n == 2:
                raise ZeroDivisionError("each time")
            if self.n == 5 and lit.is_lit():
                kill_self()
            if self.n == 8:
                raise StopIteration
            return self.n

    batches = iter(DataLoader(Streams(Stream), num_workers=1, collate_fn=only, worker_restarts=1))
    seen: list[Any] = []
    while True:
        try:
            seen.append(next(batches))
        except ZeroDivisionError:
            seen.append("failed")
        except StopIteration:
            break
    assert seen == [0, 1, "failed", 3, 4, 5, 6, 7]


# ---------------------------------------------------------------- when it must not go on


def test_a_batch_that_kills_twice_is_told_with_its_indices(fuse, caplog) -> None:
    loader = DataLoader(dying(5, fuse(2)), batch_size=2, num_workers=2, worker_restarts=9)
    batches = iter(loader)
    assert [int(next(batches)[0, 0]), int(next(batches)[0, 0])] == [0, 2]
    with pytest.raises(WorkerDiedError) as told:
        next(batches)
    text = str(told.value)
    assert "Worker 0 was loading batch 2 (indices 4 to 5)." in text
    assert "This batch had killed a worker before, and is not loaded a third time." in text
    assert len(caplog.records) == 1
    assert firsts(loader) == list(range(0, 20, 2))


def test_only_the_batch_in_work_counts_as_killing(fuse) -> None:
    """Batch 1 is with a worker that dies twice, and killed it once."""
    lit = {0: fuse(1), 1: fuse(1)}

    def sample(index: int) -> int:
        if index in lit and lit[index].is_lit():
            kill_self()
        return index

    loader = DataLoader(
        Calls(sample, 4), num_workers=1, prefetch_factor=4, collate_fn=only, worker_restarts=2
    )
    assert list(loader) == [0, 1, 2, 3]


def test_when_as_many_were_replaced_as_may_be_the_next_death_is_told(fuse, caplog) -> None:
    lit = {index: fuse(1) for index in (2, 5, 15)}

    def sample(index: int) -> int:
        if index in lit and lit[index].is_lit():
            os._exit(6)
        return index

    loader = DataLoader(Calls(sample, 20), num_workers=2, collate_fn=only, worker_restarts=2)
    seen = []
    with pytest.raises(WorkerDiedError) as told:
        seen.extend(iter(loader))
    assert str(told.value).endswith(
        "Worker 1 was loading batch 15 (indices 15). As many workers as may be (worker_restarts=2) "
        "were replaced in this epoch."
    )
    assert len(caplog.records) == 2
    assert list(loader) == list(range(20))


def test_the_limit_is_an_epochs(fuse, caplog) -> None:
    lit = fuse(0)
    loader = DataLoader(
        dying(5, lit, 12), num_workers=2, collate_fn=only, worker_restarts=1,
        persistent_workers=True,
    )  # fmt: skip
    for epoch in range(1, 4):
        lit.light()
        assert firsts(loader) == list(range(12))
        assert len(caplog.records) == epoch
    loader.close()


# ---------------------------------------------------------------- when and where it dies


def test_a_worker_killed_while_idle_is_replaced(caplog) -> None:
    loader = DataLoader(Calls(lambda n: n, 40), num_workers=2, collate_fn=only, worker_restarts=1)
    batches = iter(loader)
    assert next(batches) == 0
    victim = batches._workers[1].pid
    os.kill(victim, signal.SIGKILL)
    wait_for_end(victim)
    assert list(batches) == list(range(1, 40))
    assert f"(pid {victim})" in caplog.text


@pytest.mark.parametrize("end", [kill_self, lambda: os._exit(11)])
def test_a_worker_that_dies_in_worker_init_fn_is_replaced(end, fuse) -> None:
    lit = fuse(2)

    def init(worker: int) -> None:
        if lit.is_lit():
            end()

    loader = DataLoader(
        Calls(lambda n: n, 20), num_workers=2, collate_fn=only, worker_restarts=2,
        worker_init_fn=init,
    )  # fmt: skip
    assert list(loader) == list(range(20))


def test_a_worker_that_cannot_start_uses_the_limit_up_and_is_told(caplog) -> None:
    loader = DataLoader(
        Calls(lambda n: n, 20), num_workers=1, collate_fn=only, worker_restarts=3,
        worker_init_fn=lambda worker: os._exit(12),
    )  # fmt: skip
    with pytest.raises(WorkerDiedError, match=r"exit code 12.*\(worker_restarts=3\)"):
        list(loader)
    assert len(caplog.records) == 3


def test_a_persistent_worker_killed_between_epochs_is_replaced() -> None:
    loader = DataLoader(
        Calls(lambda n: n, 6), num_workers=2, collate_fn=only, worker_restarts=1,
        persistent_workers=True,
    )  # fmt: skip
    for worker in (0, 1, 0):
        assert list(loader) == list(range(6))
        victim = loader._iterator._workers[worker].pid
        os.kill(victim, signal.SIGKILL)
        wait_for_end(victim)
    assert list(loader) == list(range(6))
    loader.close()


def test_a_worker_killed_while_it_leaves_an_epoch_is_replaced() -> None:
    """It is told of the new epoch while it is in a batch of the old one, and dies there."""
    gate, reached = Gate(), Gate()
    stuck = Switch(is_on=True)

    def sample(index: int) -> int:
        if index == 3 and stuck:
            stuck.turn(on=False)
            reached.open()
            gate.pass_through()
        return index

    loader = DataLoader(
        Calls(sample, 8), num_workers=2, collate_fn=only, worker_restarts=1,
        persistent_workers=True,
    )  # fmt: skip
    batches = iter(loader)
    assert next(batches) == 0
    reached.wait_until_open()
    victim = batches._workers[1].pid
    killer = threading.Timer(0.2, os.kill, (victim, signal.SIGKILL))
    killer.start()
    assert list(loader) == list(range(8))  # waits for worker 1
    killer.join()
    assert list(loader) == list(range(8))
    loader.close()
    gate.close()
    reached.close()


def test_a_new_worker_is_sent_the_slots_anew_and_no_descriptor_is_left(fuse) -> None:
    lit = {index: fuse(1) for index in range(1, 30, 7)}

    def sample(index: int) -> torch.Tensor:
        if index in lit and lit[index].is_lit():
            kill_self()
        return torch.full((100_000,), index)

    loader = DataLoader(
        Calls(sample, 30), num_workers=2, collate_fn=only, worker_restarts=6,
        persistent_workers=True,
    )  # fmt: skip
    assert firsts(loader) == list(range(30))
    held = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, not paths
    for _ in range(3):
        victim = loader._iterator._workers[0].pid
        os.kill(victim, signal.SIGKILL)
        wait_for_end(victim)
        assert firsts(loader) == list(range(30))
    assert len(os.listdir("/proc/self/fd")) <= held  # noqa: PTH208 - as above
    loader.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_start_afresh_are_replaced_too(method, tmp_path) -> None:
    done = Program(
        f"""
        import logging, os, signal, torch
        from shmloader import DataLoader

        class Data:
            def __len__(self):
                return 12
            def __getitem__(self, index):
                if index == 5:
                    try:
                        os.close(os.open("died", os.O_CREAT | os.O_EXCL))
                    except FileExistsError:
                        pass
                    else:
                        os.kill(os.getpid(), signal.SIGKILL)
                return index

        if __name__ == "__main__":
            logging.disable()
            loader = DataLoader(Data(), num_workers=2, multiprocessing_context={method!r},
                                worker_restarts=1)
            print([int(batch) for batch in loader])
        """,
        tmp_path / "program.py",
    ).finish(60)
    assert done.out.strip() == str(list(range(12)))
    done.assert_quiet()


# ---------------------------------------------------------------- what a timeout says


def sleep_in_a_function_of_its_own() -> None:
    time.sleep(60)


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(60)


def late(loader: DataLoader) -> str:
    """The text of the first timeout; batches before it are thrown away."""
    with pytest.raises(LoaderTimeoutError) as told:
        list(loader)
    loader.close()
    return str(told.value)


@pytest.mark.parametrize("stuck", [sleep_in_a_function_of_its_own, hold_the_interpreter])
def test_a_timeout_shows_the_stack_of_a_worker_that_is_stuck(stuck) -> None:
    def sample(index: int) -> int:
        if index == 3:
            stuck()
        return index

    loader = DataLoader(Calls(sample, 8), num_workers=2, collate_fn=only, timeout=0.5)
    text = late(loader)
    assert text.startswith("DataLoader timed out after 0.5 seconds. Batch 3 (indices 3) is with ")
    assert "No batch is lost: next() may be called again." in text
    assert "has been loading batch 3 (indices 3) for 0." in text
    assert "the innermost call first:" in text
    assert f"in {stuck.__name__}\n" in text
    assert "in sample\n" in text
    assert "child.py" not in text


def test_a_timeout_shows_what_a_worker_does_that_gets_ready() -> None:
    loader = DataLoader(
        Calls(lambda n: n, 8), num_workers=1, collate_fn=only, timeout=0.5,
        worker_init_fn=lambda worker: sleep_in_a_function_of_its_own(),
    )  # fmt: skip
    text = late(loader)
    assert "has been getting ready (dataset, worker_init_fn) for 0." in text
    assert "in sleep_in_a_function_of_its_own\n" in text


def test_a_timeout_says_that_a_worker_is_stopped_and_the_batch_comes_when_it_goes_on() -> None:
    loader = DataLoader(Calls(lambda n: n, 60), num_workers=2, collate_fn=only, timeout=0.4)
    batches = iter(loader)
    assert next(batches) == 0
    pid = batches._workers[1].pid
    os.kill(pid, signal.SIGSTOP)
    seen: list[int] = []
    with pytest.raises(LoaderTimeoutError, match=rf"pid {pid}\) .*is stopped \(SIGSTOP\)"):
        seen.extend(batches)
    os.kill(pid, signal.SIGCONT)
    assert [*seen, *batches] == list(range(1, 60))


def test_a_timeout_does_not_ask_a_worker_that_has_not_come_to_our_code(tmp_path) -> None:
    """A signal would end it: no handler is there yet."""
    done = Program(
        """
        import sys, time
        from shmloader import DataLoader, LoaderTimeoutError

        if __name__ != "__main__":
            time.sleep(2)  # a program that takes long to import

        class Data:
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index

        if __name__ == "__main__":
            loader = DataLoader(Data(), num_workers=1, multiprocessing_context="spawn", timeout=0.5)
            batches = iter(loader)
            seen, late = [], 0
            while len(seen) < 4:
                try:
                    seen.append(int(next(batches)))
                except LoaderTimeoutError as error:
                    late += 1
                    assert "has been starting for" in str(error), error
            print(seen, late > 1)
        """,
        tmp_path / "program.py",
    ).finish(60)
    assert done.out.strip() == "[0, 1, 2, 3] True"
    done.assert_quiet()


def test_a_timeout_of_a_new_worker_says_what_it_does(fuse) -> None:
    lit, gate = fuse(1), Gate()

    def sample(index: int) -> int:
        if index == 3:
            if lit.is_lit():
                kill_self()
            gate.pass_through()
        return index

    loader = DataLoader(
        Calls(sample, 8), num_workers=2, collate_fn=only, timeout=0.4, worker_restarts=1
    )
    batches = iter(loader)
    seen: list[int] = []
    with pytest.raises(LoaderTimeoutError) as told:
        seen.extend(batches)
    assert seen == [0, 1, 2]
    assert f"(pid {batches._workers[1].pid}) has been loading batch 3" in str(told.value)
    assert "in pass_through\n" in str(told.value)
    gate.open()
    assert list(batches) == [3, 4, 5, 6, 7]
    gate.close()


# ---------------------------------------------------------------- workers end with main

MAIN = """
import ctypes, os, signal, threading
from shmloader import DataLoader

class Data:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        os.write(1, b"%d\\n" % os.getpid())
        if index == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        ctypes.PyDLL(None).sleep(60)

def go():
    list(DataLoader(Data(), num_workers=2, multiprocessing_context={method!r}))

if __name__ == "__main__":
    if {in_thread}:
        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
    else:
        go()
"""


@pytest.mark.parametrize("in_thread", [False, True], ids=["main thread", "other thread"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_stopped_or_stuck_end_within_a_second_of_mains_kill(
    method, in_thread, tmp_path
) -> None:
    running = Program(MAIN.format(method=method, in_thread=in_thread), tmp_path / "program.py")
    workers = [int(running.read_line()) for _ in range(2)]
    os.kill(running.pid, signal.SIGKILL)
    began = time.monotonic()
    for worker in workers:
        wait_for_end(worker)
    assert time.monotonic() - began < 1.0
    running.finish().assert_quiet(-signal.SIGKILL)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_imports_the_program_ends_within_a_second_of_mains_kill(
    method, tmp_path
) -> None:
    """It has not come to any line of ours."""
    running = Program(
        f"""
        import os, sys, time
        if __name__ != "__main__":
            print(os.getpid(), flush=True)
            time.sleep(60)

        from shmloader import DataLoader

        if __name__ == "__main__":
            next(iter(DataLoader([0, 1], num_workers=1, multiprocessing_context={method!r})))
        """,
        tmp_path / "program.py",
    )
    worker = int(running.read_line())
    os.kill(running.pid, signal.SIGKILL)
    began = time.monotonic()
    wait_for_end(worker)
    assert time.monotonic() - began < 1.0
    running.finish().assert_quiet(-signal.SIGKILL)
