"""Workers that hang: replaced with ``sample_timeout``, told with ``timeout``; nothing is lost."""

import ctypes
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmloader import DataLoader, LoaderTimeoutError, SampleTimeoutError
from shmloader.pools.status_page import Phase
from tests.process.support import (
    Calls,
    Gate,
    Numbers,
    Streams,
    Switch,
    however_late,
    only,
    outcomes,
    stop,
    wait_until,
)

LENGTH, BATCH = 24, 4
LIMIT_S = 0.3


class Hangs(Numbers):
    """Rows, some of which take for ever."""

    def __init__(self, *bad: int) -> None:
        super().__init__(LENGTH, *bad)

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            self._hang()
        return index

    def _hang(self) -> None:
        assert threading.Event().wait(60)


WAYS: dict[str, dict[str, Any]] = {
    "processes": {},
    "dynamic": {"seed": 3},
    "any order": {"in_order": False},
    "several at once": {"fetch_concurrency": 2},
}


def load(dataset: Any, **options: Any) -> DataLoader:
    defaults = {"num_workers": 2, "batch_size": BATCH, "sample_timeout": LIMIT_S}
    return DataLoader(dataset, **(defaults | options))


def read(loader: DataLoader) -> list[Any]:
    found = outcomes(loader)
    return [one if isinstance(one, SampleTimeoutError) else one.tolist() for one in found]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_a_sample_that_hangs_is_treated_as_one_that_fails(way, on_error):
    dataset = Hangs(5, 9, 10)
    options = dict(WAYS[way])
    if on_error != "raise":
        options["on_error"] = "skip" if on_error == "skip" else instead
    with load(dataset, **options) as loader:
        batches = read(loader)
        if way == "any order":
            batches.sort(key=lambda batch: batch[0] if isinstance(batch, list) else 100)
        errors = [batch for batch in batches if isinstance(batch, Exception)]
        if on_error == "raise":
            assert sorted(text_of(error)[:9] for error in errors) == ["sample 5 ", "sample 9 "]
            places = [at for at, batch in enumerate(batches) if isinstance(batch, Exception)]
            assert places == ([4, 5] if way == "any order" else [1, 2])
            good = [batch for batch in batches if batch not in errors]
            assert good == [[*range(at, at + 4)] for at in (0, 12, 16, 20)]
            assert loader.failures.total == 0
            return
        assert not errors
        assert {one.index for one in loader.failures} == {5, 9, 10}
        assert {type(one.error) for one in loader.failures} == {SampleTimeoutError}
        second, third = ([4, 105, 6, 7], [8, 109, 110, 11]) if on_error == "replace" else (
            [4, 6, 7], [8, 11],
        )  # fmt: skip
        rest = [[*range(at, at + 4)] for at in (12, 16, 20)]
        assert batches == [[0, 1, 2, 3], second, third, *rest]


def instead(index: int, error: Exception) -> int:
    assert isinstance(error, SampleTimeoutError)
    return 100 + index


def text_of(error: Exception) -> str:
    """The message, without the worker's traceback before it."""
    return str(error).rpartition("SampleTimeoutError: ")[2]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_in_a_fresh_interpreter_is_replaced_too(method):
    dataset = Hangs(5)
    with load(dataset, multiprocessing_context=method, on_error="skip") as loader:
        assert read(loader)[1] == [4, 6, 7]
        assert [one.index for one in loader.failures] == [5]


def test_the_error_names_the_index_the_limit_the_worker_and_the_code():
    with load(Hangs(5)) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(SampleTimeoutError) as caught:
            next(iterator)
    text = text_of(caught.value)
    first, *frames = text.strip().splitlines()
    assert re.fullmatch(
        r"sample 5 took longer than sample_timeout=0.3 s\. Worker 1 \(pid \d+\) was killed in it, "
        r"the innermost call first:",
        first,
    )
    assert any(f'{__file__}", line' in frame and "in _hang" in frame for frame in frames)
    assert not any("shmloader/" in frame for frame in frames)


def test_a_batch_may_take_longer_than_each_of_its_samples_may():
    """The last sample is the longest, so that the worker can be seen in it for a while."""

    def sample(index: int) -> int:
        time.sleep(1.0 if index == 3 else 0.4)
        return index

    with load(Calls(sample, 4), batch_size=4, sample_timeout=1.5) as loader:
        assert read(loader) == [[0, 1, 2, 3]]
        assert loader.stats().restarts == 0


def hold_the_interpreter() -> None:
    """Call C, which never gives it back: no thread of the worker can run."""
    mutex = ctypes.create_string_buffer(64)  # PTHREAD_MUTEX_INITIALIZER is all zeros
    for _ in range(2):  # the second call waits for ever, and no signal ends that
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("hang", [hold_the_interpreter, stop_itself])
def test_a_worker_that_no_thread_of_its_own_can_end_is_replaced_too(hang):
    sample = lambda index: index if index != 1 else hang()  # noqa: E731
    with load(Calls(sample, 8), on_error="skip") as loader:
        assert read(loader) == [[0, 2, 3], [4, 5, 6, 7]]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_whole_batch_may_hang_sample_by_sample(way):
    dataset = Hangs(4, 5, 6, 7, 23)
    with load(dataset, on_error="skip", **WAYS[way]) as loader:
        batches = read(loader)
        assert sorted(itertools.chain(*batches)) == sorted(set(range(LENGTH)) - dataset.bad)
        assert loader.failures.total == 5


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_epoch_that_is_left_in_a_sample_that_hangs_does_not_hold_up_the_next(
    persistent,
):
    dataset = Hangs(9)
    options = {"persistent_workers": persistent, "on_error": "skip"}
    with load(dataset, **options) as loader:
        for _ in range(3 if persistent else 1):  # where the workers end, they are waited for
            next(iter(loader))
        assert sorted(itertools.chain(*read(loader))) == sorted(set(range(LENGTH)) - {9})


@pytest.mark.parametrize("is_list", [False, True])
def test_one_call_for_a_batch_is_named_whole_and_with_skip_taken_apart(is_list):
    class Lists(Hangs):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [self[index] for index in indices]

    dataset = Lists(5)
    with load(dataset, on_error="skip" if is_list else "raise", sample_timeout=0.1) as loader:
        batches = read(loader)
        if is_list:
            assert batches[1] == [4, 6, 7]
            assert [one.index for one in loader.failures] == [5]
        else:
            assert text_of(batches[1]).startswith(
                "__getitems__ of 4 samples took longer than 4 × sample_timeout=0.1 s. Worker 1 "
            )


def test_a_sample_that_hangs_once_costs_only_itself():
    """The other samples of its batch, and all other batches of its worker, are loaded again."""
    has_hung = Switch(is_on=False)

    def sample(index: int) -> int:
        if index == 5 and not has_hung:
            has_hung.turn(on=True)
            threading.Event().wait(60)
        return index

    with load(Calls(sample, LENGTH), on_error="skip") as loader:
        assert read(loader)[1] == [4, 6, 7]
        assert loader.stats().restarts == 1
        assert read(loader)[1] == [4, 5, 6, 7]


@pytest.mark.parametrize("every", [1, 0])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_stream_ends_with_the_sample_that_hangs_and_the_others_go_on(every, seed):
    def numbers() -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        for index in range(info.id, LENGTH, 2):
            if index == 9:
                threading.Event().wait(60)
            yield index

    options = {"snapshot_every_n_steps": every, "seed": seed, "batch_size": 2}
    with load(Streams(numbers), **options) as loader:
        batches = read(loader)
    assert [batch if isinstance(batch, list) else "hung" for batch in batches] == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], "hung", [12, 14], [16, 18], [20, 22],
    ]  # fmt: skip
    (error,) = (batch for batch in batches if not isinstance(batch, list))
    assert text_of(error).startswith("the next sample of the dataset's iterator took longer than")


def test_after_a_sample_that_hung_a_state_resumes_at_the_next_batch():
    def run(state: Any = None) -> tuple[list[Any], Any]:
        with load(Hangs(5), on_error="skip", seed=7, shuffle=True) as loader:
            if state is not None:
                loader.load_state_dict(state)
                return read(loader), None
            found, states = [], []
            for batch in loader:
                found.append(batch.tolist())
                states.append(loader.state_dict())
            return found, states

    whole, states = run()
    hung = next(at for at, batch in enumerate(whole) if len(batch) < BATCH)
    assert run(states[hung])[0] == whole[hung + 1 :]


def test_while_others_go_on_a_slow_sample_is_left_alone():
    """Nobody waits for it: the limit counts while a batch is waited for."""
    gate = Gate()

    def sample(index: int) -> int:
        if index == 0:
            gate.pass_through()
        return index

    options = {"batch_size": 1, "in_order": False, "prefetch_factor": 8, "on_error": "skip"}
    with load(Calls(sample, 8), sample_timeout=60, **options) as loader:
        iterator = iter(loader)
        # The worker that waits may have one more task.
        found = [next(iterator).item() for _ in range(6)]
        gate.open()
        assert sorted([*found, *(batch.item() for batch in iterator)]) == list(range(8))
        assert loader.failures.total == 0


def late(batches: Any) -> list[str]:
    with pytest.raises(LoaderTimeoutError, match=r"^DataLoader timed out after 0\.3 s") as raised:
        next(batches)
    assert isinstance(raised.value, RuntimeError)
    return str(raised.value).splitlines()


LATE = {
    "starting": r"starting for \d+\.\d s\.$",
    "preparing": r"preparing \(dataset, worker_init_fn\) for .*, the innermost call first:$",
    "sleeping": r"loading batch 1 \(index 1\) for .*, the innermost call first:$",
    "stopped": r"loading batch 1 \(index 1\) for .*; the process is stopped \(SIGSTOP\)\.$",
}


@pytest.mark.parametrize("what", LATE)
def test_a_timeout_says_what_a_late_worker_is_doing_and_loses_nothing(what) -> None:
    gate, numbers = Gate(), itertools.count()

    class Slow(multiprocessing.context.ForkProcess):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.number = next(numbers)

        def run(self) -> None:
            if what == "starting" and self.number == 1:
                gate.pass_through()
            super().run()

    def wait_for_the_gate(worker: int) -> None:
        if what == "preparing" and worker == 1:
            gate.pass_through()

    def sample(index: int) -> int:
        if what in ("sleeping", "stopped") and index == 1:
            gate.pass_through()
        return index

    context = multiprocessing.context.ForkContext()
    context.Process = Slow  # type: ignore[assignment]
    loader = DataLoader(
        Calls(sample, 8), num_workers=2, timeout=0.3, collate_fn=only, prefetch_factor=1,
        worker_init_fn=wait_for_the_gate, multiprocessing_context=context,
    )  # fmt: skip
    batches = iter(loader)
    assert next(batches) == 0
    first, second = (worker.pid for worker in batches._workers)
    if what == "stopped":
        wait_until(lambda: batches._pool.was_at(1).phase is Phase.LOADING)
        stop(second)
    for _ in range(2):
        head, other, line, *stack = late(batches)
        assert ", waiting for batch 1 (index 1). No batch is lost. " in head
        assert "sample_timeout= replaces one whose sample hangs." in head
        assert other.startswith(f"Worker 0 (pid {first}) has been idle for ")
        assert re.match(rf"Worker 1 \(pid {second}\) has been {LATE[what]}", line)
        names = [re.search(r"in (\S+)$", call)[1] for call in stack]  # type: ignore[index]
        caller = {"preparing": "wait_for_the_gate", "sleeping": "sample"}.get(what)
        assert names[:2] == (["pass_through", caller] if caller else [])
    gate.open()
    os.kill(second, signal.SIGCONT)
    assert list(however_late(batches, 35)) == list(range(1, 8))


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
        Calls(sample, 2 * count), num_workers=2, prefetch_factor=count, collate_fn=only, timeout=0.3
    )
    batches = iter(loader)
    assert "waiting for batch 0 " in late(batches)[0]
    assert made.value < count, "it was late only when nothing more could come"
    gate.open()
    assert next(however_late(batches)) == 0


def test_a_further_epoch_with_a_stopped_worker_times_out_as_well() -> None:
    loader = DataLoader(
        Calls(int, 40), num_workers=2, collate_fn=only, timeout=0.5, persistent_workers=True
    )
    batches = iter(loader)
    assert next(batches) == 0
    os.kill(batches._workers[1].pid, signal.SIGSTOP)
    with pytest.raises(LoaderTimeoutError):
        iter(loader)
    assert list(loader) == list(range(40))  # with new workers
