"""Workers that end by themselves: told at their place in the order, and soon."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from shmloader import ClosedLoaderError, DataLoader, LoaderTimeoutError, WorkerDiedError
from tests.process.support import (
    TOLD_S,
    Calls,
    Gate,
    Streams,
    Switch,
    descriptor_count,
    however_late,
    only,
    run_program,
    wait_for_end,
)

pytestmark = pytest.mark.timeout(60)


def kill_self(number: int) -> Callable[[], None]:
    def end() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    return end


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "SIGKILL": (kill_self(signal.SIGKILL), "is killed by signal: Killed."),
    "SIGSEGV": (kill_self(signal.SIGSEGV), "is killed by signal: Segmentation fault."),
    "SIGBUS": (kill_self(signal.SIGBUS), "is killed by signal: Bus error."),
    "SIGTERM": (kill_self(signal.SIGTERM), "is killed by signal: Terminated."),
    "SIGABRT": (os.abort, "is killed by signal: Aborted."),
    "exit code 0": (lambda: os._exit(0), "exited unexpectedly with exit code 0."),
    "exit code 3": (lambda: os._exit(3), "exited unexpectedly with exit code 3."),
}


def healing(end: Callable[[], Any], at: int, armed: Switch, length: int = 20) -> Calls:
    """Ends its worker at one index, for as long as it is armed."""

    def sample(index: int) -> torch.Tensor:
        if index == at and armed:
            end()
        return torch.full((3,), index)

    return Calls(sample, length)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"timeout": 30}, {"persistent_workers": True}], ids=str)
@pytest.mark.parametrize("way", ENDS)
def test_a_worker_that_ends_is_told_after_the_batches_before_it(way, options) -> None:
    end, words = ENDS[way]
    armed = Switch(is_on=True)
    loader = DataLoader(healing(end, 5, armed), batch_size=2, num_workers=2, **options)
    batches = iter(loader)
    pid = batches._workers[0].pid
    assert next(batches)[:, 0].tolist() == [0, 1]
    assert next(batches)[:, 0].tolist() == [2, 3]
    began = time.monotonic()
    with pytest.raises(WorkerDiedError) as told:
        next(batches)
    assert time.monotonic() - began < TOLD_S
    assert isinstance(told.value, RuntimeError)
    text = str(told.value)
    assert text.startswith(f"DataLoader worker (pid {pid}) {words}")
    assert "Worker 0 was loading batch 2 (indices 4 to 5)." in text
    for _ in range(2):
        with pytest.raises(ClosedLoaderError):
            next(batches)
    armed.turn(on=False)
    assert [batch[:, 0].tolist() for batch in loader] == [[n, n + 1] for n in range(0, 20, 2)]
    loader.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_out_of_order_the_other_batches_come_or_the_death_is_told(workers) -> None:
    armed = Switch(is_on=True)
    loader = DataLoader(
        healing(lambda: os._exit(3), 4, armed, 8),
        num_workers=workers,
        in_order=False,
        collate_fn=only,
    )
    batches = iter(loader)
    seen: list[int] = []
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"exit code 3.*batch [45] "):
        seen.extend(int(batch[0]) for batch in batches)
    assert time.monotonic() - began < TOLD_S
    assert 4 not in seen
    assert len(set(seen)) == len(seen)
    with pytest.raises(ClosedLoaderError):
        next(batches)
    armed.turn(on=False)
    assert sorted(int(batch[0]) for batch in loader) == list(range(8))


def test_batches_that_were_ready_when_the_worker_died_are_delivered_first() -> None:
    armed = Switch(is_on=True)
    loader = DataLoader(
        healing(lambda: os._exit(1), 3, armed), num_workers=1, prefetch_factor=8, collate_fn=only
    )
    batches = iter(loader)
    wait_for_end(batches._workers[0].pid)
    assert [int(next(batches)[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(WorkerDiedError, match="batch 3"):
        next(batches)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration])
def test_control_flow_out_of_a_worker_is_a_runtime_error(kind) -> None:
    def sample(index: int) -> int:
        if index == 1:
            raise kind("stop it")
        return index

    batches = iter(DataLoader(Calls(sample, 4), num_workers=2, collate_fn=only))
    assert next(batches) == 0
    with pytest.raises(RuntimeError, match=kind.__name__):
        next(batches)
    assert list(batches) == [2, 3]


def test_a_worker_that_dies_and_leaves_a_child_of_its_own_behind_is_told() -> None:
    gate, told = Gate(), Gate()

    def sample(index: int) -> int:
        if index == 2:
            if os.fork() == 0:
                with contextlib.suppress(BaseException):
                    gate.pass_through()  # lives on, with every descriptor of the worker
                os._exit(0)
            told.open()
            os._exit(7)
        return index

    batches = iter(DataLoader(Calls(sample, 8), num_workers=2, collate_fn=only))
    try:
        assert [next(batches), next(batches)] == [0, 1]
        told.wait_until_open()
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match="exit code 7"):
            next(batches)
        assert time.monotonic() - began < TOLD_S
    finally:
        gate.open()
        gate.close()
        told.close()


def test_a_worker_killed_while_idle_is_told_at_its_next_batch() -> None:
    loader = DataLoader(
        Calls(lambda n: n, 40), num_workers=2, collate_fn=only, persistent_workers=True
    )
    batches = iter(loader)
    assert next(batches) == 0
    victim = batches._workers[1].pid
    os.kill(victim, signal.SIGKILL)
    wait_for_end(victim)
    seen = []
    with pytest.raises(WorkerDiedError, match=rf"pid {victim}\) is killed by signal: Killed"):
        seen.extend(batches)
    assert seen == list(range(1, 1 + len(seen)))
    assert list(loader) == list(range(40))
    loader.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_persistent_worker_killed_between_epochs_is_told_and_then_replaced(workers) -> None:
    loader = DataLoader(
        Calls(lambda n: n, 6), num_workers=workers, collate_fn=only, persistent_workers=True
    )
    assert list(loader) == list(range(6))
    victim = loader._iterator._workers[0].pid
    os.kill(victim, signal.SIGKILL)
    wait_for_end(victim)
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"pid {victim}\) is killed by signal: Killed"):
        list(loader)
    assert time.monotonic() - began < TOLD_S
    assert list(loader) == list(range(6))
    loader.close()


@pytest.mark.timeout(15)
def test_a_death_that_was_seen_before_the_epoch_was_left_does_not_hang_the_next_one() -> None:
    armed = Switch(is_on=True)
    gate = Gate()

    def sample(index: int) -> int:
        if index == 0 and armed:
            gate.pass_through()
        if index == 1 and armed:
            os._exit(5)
        return index

    loader = DataLoader(
        Calls(sample, 6), num_workers=1, collate_fn=only, persistent_workers=True, prefetch_factor=2
    )
    batches = iter(loader)
    pool = batches._pool._workers
    wait = pool.wait

    def wait_after_the_end(timeout_s: float | None) -> Any:
        gate.open()
        wait_for_end(pool.pid(0))
        return wait(timeout_s)

    pool.wait = wait_after_the_end
    assert next(batches) == 0  # the death is seen together with this answer
    pool.wait = wait
    armed.turn(on=False)
    with pytest.raises(WorkerDiedError, match="exit code 5"):
        iter(loader)
    assert list(loader) == list(range(6))
    loader.close()
    gate.close()


def test_a_worker_that_dies_in_worker_init_fn_is_told_with_the_first_batch() -> None:
    loader = DataLoader(
        Calls(lambda n: n, 6), num_workers=2, collate_fn=only,
        worker_init_fn=lambda worker: os._exit(11) if worker == 1 else None,
    )  # fmt: skip
    batches = iter(loader)
    assert next(batches) == 0
    with pytest.raises(WorkerDiedError, match=r"exit code 11\..*Worker 1 was loading batch 1"):
        next(batches)


def test_a_worker_killed_after_its_stream_ended_changes_nothing() -> None:
    gate = Gate()

    def stream() -> Any:
        if torch.utils.data.get_worker_info().id == 1:
            for n in range(10):
                gate.pass_through()
                yield n

    loader = DataLoader(Streams(stream), num_workers=2, collate_fn=only, prefetch_factor=1)
    batches = iter(loader)
    gate.open()
    assert next(batches) == 0
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    wait_for_end(batches._workers[0].pid)
    gate.open(9)
    assert list(batches) == list(range(1, 10))
    gate.close()


@pytest.mark.slow
def test_what_unpickling_under_spawn_does_to_a_worker_is_told(tmp_path) -> None:
    done = run_program(
        """
        import os
        from shmloader import DataLoader, WorkerDiedError

        class Data:
            def __init__(self, end):
                self.end = end
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index
            def __setstate__(self, state):
                if state["end"]:
                    os._exit(13)
                raise ZeroDivisionError("not today")

        if __name__ == "__main__":
            for end in (True, False):
                loader = DataLoader(Data(end), num_workers=1, multiprocessing_context="spawn")
                try:
                    next(iter(loader))
                except (WorkerDiedError, ZeroDivisionError) as error:
                    print(type(error).__name__, str(error).replace(chr(10), " "))
                loader.close()
        """,
        tmp_path / "program.py",
    )
    died, raised = done.out.splitlines()
    assert died.startswith("WorkerDiedError ")
    assert "exited unexpectedly with exit code 13." in died
    assert "batch 0 (index 0)" in died
    assert raised.startswith("ZeroDivisionError ")
    assert "not today" in raised
    done.assert_quiet()


# ---------------------------------------------------------------- stopped workers


def test_a_stopped_worker_times_out_and_nothing_is_lost_when_it_goes_on() -> None:
    gate = Gate()

    def sample(index: int) -> int:
        gate.pass_through()
        return index

    loader = DataLoader(Calls(sample, 6), num_workers=2, collate_fn=only, timeout=0.3)
    batches = iter(loader)
    pid = batches._workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    gate.open(6)
    for _ in range(2):
        with pytest.raises(LoaderTimeoutError) as told:
            next(batches)
        assert str(told.value).startswith("DataLoader timed out after 0.3 seconds")
        assert f"pid {pid}" in str(told.value)
        assert isinstance(told.value, RuntimeError)
    os.kill(pid, signal.SIGCONT)
    assert list(however_late(batches)) == list(range(6))
    gate.close()


def test_a_batch_is_late_though_the_other_worker_goes_on_answering() -> None:
    """The time runs from the call of next(), not from the newest answer."""
    gate, made = Gate(), multiprocessing.RawValue("i", 0)
    count = 400

    def sample(index: int) -> int:
        if index == 0:
            gate.pass_through()
        elif index % 2:
            time.sleep(0.05)
            made.value += 1
        return index

    loader = DataLoader(
        Calls(sample, 2 * count), num_workers=2, prefetch_factor=count, collate_fn=only, timeout=0.5
    )
    batches = iter(loader)
    with pytest.raises(LoaderTimeoutError, match="waiting for batch 0 "):
        next(batches)
    assert made.value < count, "it was late only when nothing more could come"
    gate.open()
    assert next(however_late(batches)) == 0
    loader.close()
    gate.close()


def test_close_ends_a_stopped_worker_in_bounded_time() -> None:
    loader = DataLoader(Calls(lambda n: n, 40), num_workers=2, collate_fn=only)
    batches = iter(loader)
    pids = [worker.pid for worker in batches._workers]
    os.kill(pids[0], signal.SIGSTOP)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 2 * TOLD_S
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.timeout(10)
def test_a_further_epoch_with_a_stopped_worker_times_out_as_well() -> None:
    loader = DataLoader(
        Calls(lambda n: n, 40), num_workers=2, collate_fn=only, timeout=0.5,
        persistent_workers=True,
    )  # fmt: skip
    batches = iter(loader)
    assert next(batches) == 0
    os.kill(batches._workers[1].pid, signal.SIGSTOP)
    with pytest.raises(LoaderTimeoutError):
        iter(loader)
    assert list(loader) == list(range(40))  # with new workers
    loader.close()


def test_close_ends_a_worker_that_ignores_sigterm() -> None:
    gate = Gate()

    def stubborn(worker: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def sample(index: int) -> int:
        gate.open()
        while True:
            time.sleep(10)

    loader = DataLoader(Calls(sample, 4), num_workers=1, worker_init_fn=stubborn)
    batches = iter(loader)
    gate.wait_until_open()
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 2 * TOLD_S
    del batches
    gate.close()


# ---------------------------------------------------------------- beside others


def test_deaths_are_told_beside_torchs_own_loader() -> None:
    torchs = iter(TorchLoader(Calls(lambda n: n, 100), num_workers=1))
    next(torchs)
    armed = Switch(is_on=True)
    ours = DataLoader(healing(lambda: os._exit(3), 2, armed, 6), num_workers=2)
    batches = iter(ours)
    next(batches)
    next(batches)
    with pytest.raises(WorkerDiedError, match=r"exit code 3.*batch 2"):
        next(batches)
    assert next(torchs).tolist() == [1]
    armed.turn(on=False)
    assert len(list(ours)) == 6
    assert len(list(torchs)) == 98
    del torchs
    gc.collect()


def test_a_death_of_torchs_worker_is_not_taken_for_ours() -> None:
    # No tensors: torch may be interrupted while it takes the descriptor of one, and leak.
    loader = TorchLoader(Calls(lambda n: n, 100), num_workers=1, collate_fn=only)
    torchs = iter(loader)
    next(torchs)
    ours = iter(DataLoader(Calls(lambda n: n, 6), num_workers=2, collate_fn=only))
    assert next(ours) == 0
    os.kill(torchs._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"is killed by signal|exited unexpectedly"):
        list(torchs)
    assert list(ours) == [1, 2, 3, 4, 5]
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
        armed = Switch(is_on=True)
        loader = DataLoader(healing(lambda: os._exit(3), 2, armed, 6), num_workers=2)
        batches = iter(loader)
        pid = batches._workers[0].pid
        next(batches)
        next(batches)
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match=rf"pid {pid}\).*batch 2"):
            next(batches)
        assert time.monotonic() - began < TOLD_S
        armed.turn(on=False)
        assert len(list(loader)) == 6
        batches = iter(loader)
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < TOLD_S
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_death_that_was_told_leaves_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    before = descriptor_count()
    gc.disable()
    try:
        loader = DataLoader(Calls(lambda n: os._exit(3), 4), num_workers=1)
        with pytest.raises(WorkerDiedError):
            next(iter(loader))
        del loader
        assert descriptor_count() == before
    finally:
        gc.enable()
