"""What a signal handler raises in the midst of ``next()`` loses nothing, or closes and says so.

That is so for loaders and for pipelines. And a signal is heard at once.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from shmloader import ClosedLoaderError, DataLoader, PipelineBuilder
from tests.late import switched_on, to_host
from tests.process.bytecodes import KINDS, Outcome, Preempted, interrupt
from tests.process.support import Calls, Gate, in_thread, only, stack_of, wait_until

BATCHES = 5
#: Of a pipeline.
ITEMS = 8
SOON_S = 20.0


def numbers() -> Calls:
    return Calls(torch.tensor, 2 * BATCHES)


class Counted(IterableDataset):
    def __iter__(self) -> Counter:
        info = torch.utils.data.get_worker_info()
        return Counter(0 if info is None else 100 * info.id)


class Counter:
    def __init__(self, first: int) -> None:
        self.first = self.next = first

    def __next__(self) -> torch.Tensor:
        if self.next - self.first == 2 * BATCHES:
            raise StopIteration
        self.next += 1
        return torch.tensor(self.next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@contextlib.contextmanager
def pinned() -> Iterator[Callable[[Any], Any]]:
    with switched_on():
        yield _as_it_is


def _as_it_is(batch: Any) -> Any:
    return batch


@contextlib.contextmanager
def on_the_device() -> Iterator[Callable[[Any], Any]]:
    with switched_on():
        yield to_host


@contextlib.contextmanager
def on_the_host() -> Iterator[Callable[[Any], Any]]:
    yield _as_it_is


@dataclass
class Mode:
    """A way to load.

    Attributes:
        options: Of the loader.
        dataset: What makes its dataset.
        around: What it needs meanwhile.
        has_order: Whether the order of batches is always the same.
        stride: Of how many instructions one is tried, where not all are.
    """

    options: dict[str, Any]
    dataset: Callable[[], Any] = numbers
    around: Callable[[], Any] = on_the_host
    has_order: bool = True
    stride: int = 17

    def make(self) -> DataLoader[Any]:
        return DataLoader(self.dataset(), 2, **self.options)

    def make_resumed(self) -> DataLoader[Any]:
        """A loader that can go on from a state of the other, with few means."""
        if self.dataset is Counted:
            return self.make()
        names = ("seed", "shuffle")
        options = {name: self.options[name] for name in names if name in self.options}
        return DataLoader(self.dataset(), 2, **options)

    def in_order(self, batches: list[list[int]]) -> list[list[int]]:
        return batches if self.has_order else sorted(batches)


WORKERS: dict[str, Any] = {"num_workers": 1}
THREADS: dict[str, Any] = {"num_workers": 2, "thread_pool": True}
SEED: dict[str, Any] = {"seed": 3, "shuffle": True}

# The strides are such that a mode takes a second or two.
MODES = {
    "in-process": Mode({}, stride=3),
    "in-process, seed": Mode(SEED, stride=5),
    "in-process, bad samples": Mode({"on_error": "skip"}, stride=3),
    "in-process, pin": Mode({"pin_memory": True}, around=pinned, stride=3),
    "in-process, stream": Mode({}, Counted, stride=3),
    "threads": Mode({**THREADS, "num_workers": 1}),
    "threads, any order": Mode({**THREADS, "in_order": False}, has_order=False),
    "threads, seed": Mode(THREADS | SEED),
    "workers": Mode(WORKERS, stride=149),
    "workers, bad samples": Mode({**WORKERS, "on_error": "skip"}, stride=157),
    "workers, any order": Mode({"num_workers": 2, "in_order": False}, has_order=False, stride=263),
    "workers, seed": Mode({"num_workers": 2, **SEED}, stride=257),
    "workers, stream": Mode({"num_workers": 2}, Counted, stride=397),
    "workers, pin": Mode({**WORKERS, "pin_memory": True}, around=pinned, stride=151),
    "workers, device": Mode({**WORKERS, "device": "late"}, around=on_the_device, stride=163),
}

#: Which call is interrupted: one that gives a batch or an item, or the one at the epoch's end.
CALLS = ("next", "end")


def rest_of(
    batches: Any, read: Callable[[Any], Any], outcome: Outcome, kind: type[BaseException]
) -> list[Any] | None:
    """Return what an iterator gives after an interruption; None if it is closed, and says why."""
    assert outcome.has_arrived(kind), f"{outcome.where}: {outcome}"
    try:
        return [read(batch) for batch in batches]
    except ClosedLoaderError as error:
        why = str(error)
        assert kind.__name__ in why or "did not finish" in why, f"{outcome.where}: {why}"
        return None


def try_all(try_at: Callable[[str, int, Any], str | None], stride: int) -> None:
    """Interrupt each call by each kind of exception, at one of so many instructions.

    Args:
        try_at: Raises at the nth instruction of a call. It returns what became of the iterator, or
            None if the call has fewer instructions.
        stride: Of how many instructions one is tried, where not all are.
    """
    if os.environ.get("SHMLOADER_TEST_ALL") == "1":
        stride = 1
    became: collections.Counter[str] = collections.Counter()
    # Where not all are tried, each call and kind has others.
    for begin, (call, kind) in enumerate(itertools.product(CALLS, KINDS)):
        for nth in itertools.count(1 + begin * stride // 4, stride):
            what = try_at(call, nth, kind)
            if what is None:
                break
            became[what] += 1
    assert became["goes on"] > 1
    assert became["is closed"] > 1


def try_loader(
    mode: Mode,
    to_host: Callable[[Any], Any],
    everything: list[list[int]],
    call: str,
    nth: int,
    kind: type[BaseException],
) -> str | None:
    def read(batch: Any) -> list[int]:
        return to_host(batch).tolist()

    loader = mode.make()
    try:
        batches = iter(loader)
        given = [read(next(batches)) for _ in range(2 if call == "next" else len(everything))]
        outcome = interrupt(batches.__next__, nth, kind)
        if outcome.where is None:
            return None
        state = loader.state_dict()
        rest = rest_of(batches, read, outcome, kind)
        if rest is not None:
            found = mode.in_order(given + rest)
            assert found == everything, f"{outcome.where}: gave {found}"
    finally:
        loader.close()
    resumed = mode.make_resumed()
    resumed.load_state_dict(state)
    again = [batch.tolist() for batch in resumed]
    resumed.close()
    if state["epoch"] == 1:  # the next one, in an order of its own
        given, everything = [], [sorted(itertools.chain.from_iterable(everything))]
        again = [sorted(itertools.chain.from_iterable(again))]
    found = mode.in_order(given + again)
    assert found == everything, f"{outcome.where}: the state gave {found}"
    return "is closed" if rest is None else "goes on"


@pytest.mark.sampled(2)
@pytest.mark.timeout(600)  # as many loaders as instructions are tried
@pytest.mark.parametrize("name", MODES)
def test_what_a_handler_raises_at_any_instruction_of_next_loses_nothing_or_closes(name) -> None:
    mode = MODES[name]
    with mode.around() as to_host:
        with mode.make() as loader:
            everything = mode.in_order([to_host(batch).tolist() for batch in loader])
        try_all(functools.partial(try_loader, mode, to_host, everything), mode.stride)


def double(item: int) -> int:
    return 2 * item


async def double_soon(item: int) -> int:
    return 2 * item


def tensor(item: int) -> torch.Tensor:
    return torch.tensor(2 * item)


#: For each kind of pipeline: what it needs, its stages, and of how many instructions one is tried.
PIPELINES: dict[str, tuple[Any, Callable[[PipelineBuilder], Any], int]] = {
    "threads": (on_the_host, lambda builder: builder.pipe(double, concurrency=2), 29),
    "loop": (on_the_host, lambda builder: builder.pipe(double_soon, concurrency=2), 31),
    "processes": (on_the_host, lambda builder: builder.pipe(double, executor="process"), 151),
    "device": (on_the_device, lambda builder: builder.pipe(tensor).transfer("late"), 41),
}


def try_pipeline(
    build: Callable[[], Any], to_host: Callable[[Any], Any], call: str, nth: int, kind: Any
) -> str | None:
    """The interruption does not hang the pipeline or its next epoch, either."""

    def read(item: Any) -> int:
        return int(to_host(item))

    pipeline = build()
    everything = [2 * number for number in range(ITEMS)]
    with contextlib.ExitStack() as stack:
        if call == "next":
            stack.enter_context(pipeline.auto_stop())
        else:  # what the iterator starts, it stops, at the end
            stack.callback(pipeline.stop)
        items = iter(pipeline)
        given = [read(next(items)) for _ in range(2 if call == "next" else ITEMS)]
        outcome = interrupt(items.__next__, nth, kind)
        if outcome.where is None:
            return None
        rest = rest_of(items, read, outcome, kind)
        if rest is not None:
            assert sorted(given + rest) == everything, f"{outcome.where}: gave {given + rest}"
        again = [read(item) for item in pipeline]
        assert sorted(again) == everything, f"{outcome.where}: then gave {again}"
    return "is closed" if rest is None else "goes on"


@pytest.mark.slow
@pytest.mark.timeout(600)  # as many pipelines as instructions are tried
@pytest.mark.parametrize("name", PIPELINES)
def test_what_a_handler_raises_at_any_instruction_of_a_pipeline_s_next_loses_nothing_or_closes(
    name,
) -> None:
    around, add_stages, stride = PIPELINES[name]

    def build() -> Any:
        builder = add_stages(PipelineBuilder().add_source(range(ITEMS)))
        return builder.add_sink(1).build(num_threads=2, timeout=SOON_S)

    with around() as to_host:
        try_all(functools.partial(try_pipeline, build, to_host), stride)


@contextlib.contextmanager
def handler_that_raises(kind: type[BaseException] = Preempted) -> Iterator[None]:
    """What SIGUSR1 does."""

    def handler(signum: int, frame: object) -> None:
        raise kind("from a handler")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Signalled(Calls):
    """The signal comes once, at one index."""

    index = 5

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.index:
            self.index = -1
            signal.raise_signal(signal.SIGUSR1)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"fetch_concurrency": 2}])
def test_in_the_midst_of_a_sample_in_this_process_it_arrives_and_the_batch_is_not_given(
    kind, options
) -> None:
    loader = DataLoader(Signalled(torch.tensor, 2 * BATCHES), 2, **options)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with handler_that_raises(kind), pytest.raises(kind):
        next(batches)
    with pytest.raises(ClosedLoaderError, match=kind.__name__):
        next(batches)
    state = loader.state_dict()
    assert state["position"] == 2
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9]]
    assert loader.failures.total == 0


class SignalledSampler:
    """A generator, in which the signal comes once."""

    def __init__(self) -> None:
        self.is_due = True

    def __iter__(self) -> Iterator[int]:
        for number in range(2 * BATCHES):
            if number == 2 * 3 and self.is_due:
                self.is_due = False
                signal.raise_signal(signal.SIGUSR1)
            yield number

    def __len__(self) -> int:
        return 2 * BATCHES


@pytest.mark.parametrize(
    "options", [{}, {**THREADS, "prefetch_factor": 1}, {**WORKERS, "prefetch_factor": 1}], ids=str
)
def test_a_sampler_that_a_handler_ends_is_told_as_such(options) -> None:
    sampler = SignalledSampler()
    loader = DataLoader(numbers(), 2, sampler=sampler, **options)
    given = []
    with loader, handler_that_raises():
        batches = iter(loader)
        with pytest.raises(Preempted):  # noqa: PT012 - with threads it comes some batches before
            while True:
                given.append(next(batches).tolist())
        with pytest.raises(ClosedLoaderError, match="from outside, interrupted"):
            next(batches)
        state = loader.state_dict()
    resumed = DataLoader(numbers(), 2, sampler=sampler)
    resumed.load_state_dict(state)
    assert given + [batch.tolist() for batch in resumed] == [
        [first, first + 1] for first in range(0, 2 * BATCHES, 2)
    ]


@pytest.mark.parametrize("options", [{}, THREADS, WORKERS], ids=str)
def test_a_second_thread_in_next_is_told_and_the_first_goes_on(options) -> None:
    gate = Gate()

    def load(index: int) -> int:
        gate.pass_through()
        return index

    found = []
    with DataLoader(Calls(load, 4), None, **options) as loader:
        batches = iter(loader)
        with in_thread(lambda: found.append(next(batches))) as first:
            wait_until(lambda: "_next_data" in stack_of(first.ident))
            with pytest.raises(RuntimeError, match="another thread is in next"):
                next(batches)
            gate.open(4)
        found.extend(batches)
    assert found == [0, 1, 2, 3]


class Unheard:
    """A poll object or a queue; a signal is there, unheard, when its next wait begins.

    Python last looked for signals before that wait.
    """

    def __init__(self, inner, *names: str) -> None:
        self._inner = inner
        self._names = names
        self.is_due = True

    def __getattr__(self, name: str):
        function = getattr(self._inner, name)
        if name not in self._names or not self.is_due:
            return function
        return functools.partial(self._wait, function)

    def _wait(self, function, *args, **kwargs):
        if args == (0,):  # a look, which does not wait
            return function(*args)
        self.is_due = False
        calls = (
            functools.partial(_thread.interrupt_main, signal.SIGUSR1),
            functools.partial(function, *args, **kwargs),
        )
        # No instruction of Python's comes between the two.
        _, result = map(functools.partial.__call__, calls)
        return result


def processes(batches) -> Unheard:
    workers = batches._pool
    workers._poll = unheard = Unheard(workers._poll, "poll")
    return unheard


def threads(batches) -> Unheard:
    return silence(batches._engine._pool.wakeup)


def results(batches) -> Unheard:
    return silence(batches._source.owner.thread.has_item)


def silence(wakeup) -> Unheard:
    wakeup.wait(0)  # it may have been set for a batch taken before
    wakeup._tokens = unheard = Unheard(wakeup._tokens, "get")
    return unheard


WAITS = {
    "processes": (processes, {}),
    "threads": (threads, {"thread_pool": True}),
    "stage": (results, {"device": "late"}),
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_signal_is_heard_though_it_comes_as_the_wait_begins(kind, late) -> None:
    """It used to be heard when the next batch came, which may take for ever."""
    attach, options = WAITS[kind]
    gate = Gate()

    def sample(index: int) -> int:
        if index >= 2:
            gate.pass_through()
        return index

    loader = DataLoader(Calls(sample, 4), num_workers=1, collate_fn=only, **options)
    with loader, handler_that_raises(KeyboardInterrupt):
        batches = iter(loader)
        assert [next(batches), next(batches)] == [0, 1]
        unheard = attach(batches)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert not unheard.is_due
        gate.open(2)
        assert list(batches) == [2, 3]
