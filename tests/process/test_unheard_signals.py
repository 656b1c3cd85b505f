"""A signal that comes as a wait begins, after Python last looked for signals."""

from __future__ import annotations

import _thread
import functools
import signal

import pytest

from shmloader import DataLoader
from tests.process.support import Calls, Gate, only


class Unheard:
    """A poll object or a queue; a signal is there, unheard, when its next wait begins."""

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


class Told(BaseException):
    """What the signal's handler raises, as that of Ctrl-C does."""


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", WAITS)
def test_a_signal_is_heard_though_it_comes_as_the_wait_begins(kind, late) -> None:
    """It used to be heard when the next batch came, which may take for ever."""
    attach, options = WAITS[kind]
    gate = Gate()

    def sample(index: int) -> int:
        if index >= 2:
            gate.pass_through()
        return index

    def tell(signum, frame):
        raise Told

    before = signal.signal(signal.SIGUSR1, tell)
    loader = DataLoader(Calls(sample, 4), num_workers=1, collate_fn=only, **options)
    try:
        batches = iter(loader)
        assert [next(batches), next(batches)] == [0, 1]
        unheard = attach(batches)
        with pytest.raises(Told):
            next(batches)
        assert not unheard.is_due
        gate.open(2)
        assert list(batches) == [2, 3]
    finally:
        signal.signal(signal.SIGUSR1, before)
        loader.close()
