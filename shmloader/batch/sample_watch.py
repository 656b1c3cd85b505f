"""Watches how long samples take (``sample_timeout=``), where they are loaded.

Code that hangs cannot be interrupted from outside, so the worker whose sample takes too long is
replaced. A :class:`SampleWatch` publishes the number of the sample in work and its deadline. After
the deadline, the engine ends the worker, and a new worker loads the batch again. There, the watch
raises ``SampleTimeoutError`` in place of the samples that hung, which ``on_error`` handles like any
other error of a sample.

Samples of a batch are numbered from 0 in the order in which they are asked for. The samples of one
call of ``__getitems__`` have one number, and their limit is that of one sample times the number of
indices. In the batches that a resumed stream reads again, samples have the numbers -2, -3 and so
on. Records of streams of shards have numbers of their own, since a worker may pass over batches.
"""

import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sized
from contextvars import ContextVar
from typing import Any

from shmloader.errors import SampleTimeoutError

#: The published number while no sample is in work.
NO_SAMPLE = -1

_FIRST_REPLAYED = -2

# The number of a sample that is loaded at the same time as others, in the context of that sample.
_NUMBER: ContextVar[int | None] = ContextVar("shmloader_sample_number", default=None)


class SampleWatch:
    """Publishes which sample is in work, and raises in place of samples that hung before.

    One batch at a time is watched. Its samples may be loaded by several threads.

    Args:
        timeout_s: The longest time for one sample, in seconds.
        publish: Called with the number of the sample whose deadline is next, and that deadline in
            nanoseconds of ``time.monotonic_ns()``. Called with NO_SAMPLE and 0 when no sample is in
            work any more.
    """

    def __init__(self, timeout_s: float, publish: Callable[[int, int], None]) -> None:
        self._timeout_s = timeout_s
        self._publish = publish
        self._lock = threading.Lock()
        # Deadlines of the samples in work, by number.
        self._deadlines: dict[int, int] = {}
        self._hung: Mapping[int, str] = {}
        self._next, self._step, self._pid = 0, 1, os.getpid()

    def begin(self, hung: Mapping[int, str] | None = None, *, is_replay: bool = False) -> None:
        """Begin a batch, or the batches that a resumed stream reads again (``is_replay``).

        ``hung`` says of each sample that hung before what its worker was doing, by the sample's
        number.
        """
        self._hung, self._pid = hung or {}, os.getpid()
        self._next, self._step = (_FIRST_REPLAYED, -1) if is_replay else (0, 1)

    def begin_sample(self) -> None:
        """Number a sample that is loaded at the same time as others, in that sample's context."""
        _NUMBER.set(self._next_number())

    def load(self, get: Callable[[Any], Any], index: Any, count: int = 1, what: str = "") -> Any:
        """Call ``get(index)``, watch it, and return its result.

        If the result is a coroutine, awaiting it is watched, too.

        Args:
            get: Loads the sample.
            index: The sample's index, or the indices of one call of ``__getitems__``.
            count: How many samples the call loads.
            what: What is loaded, in words; "" for a sample by its index.

        Raises:
            SampleTimeoutError: If the sample hung before.
        """
        number = _NUMBER.get()
        if number is None:
            number = self._next_number()
        sample = self.call(get, index, number, lambda: what or f"sample {index!r}", count)
        return self._awaited(number, sample) if inspect.iscoroutine(sample) else sample

    def load_list(self, get: Callable[[Any], Any], indices: Any) -> Any:
        """Call ``get(indices)``, which loads several samples, watch it, and return its result."""
        count = len(indices) if isinstance(indices, Sized) else 1
        return self.load(get, indices, count, f"__getitems__ of {count} samples")

    def call(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        number: int,
        what: Callable[[], str],
        count: int = 1,
    ) -> Any:
        """Call ``function(argument)``, watch it, and return its result.

        Args:
            function: What loads the sample, or the record of a stream of shards.
            argument: Its argument.
            number: The sample's number; for a record one that is the same in all workers.
            what: Returns the name of the sample.
            count: How many samples the call loads.

        Raises:
            SampleTimeoutError: If the sample hung before.
        """
        text = self._hung.get(number)
        if text is not None:
            limit = f"sample_timeout={self._timeout_s:g} s"
            limit = limit if count == 1 else f"{count} × {limit}"
            raise SampleTimeoutError(f"{what()} took longer than {limit}. {text}")
        self._begin_work(number, count)
        try:
            return function(argument)
        finally:
            self._end_work(number)

    async def _awaited(self, number: int, sample: Coroutine[Any, Any, Any]) -> Any:
        self._begin_work(number, 1)
        try:
            return await sample
        finally:
            self._end_work(number)

    def _next_number(self) -> int:
        number = self._next
        self._next += self._step
        return number

    def _begin_work(self, number: int, count: int) -> None:
        limit_ns = int(self._timeout_s * count * 1e9)
        with self._lock:
            self._deadlines[number] = time.monotonic_ns() + limit_ns
            self._publish_first()

    def _end_work(self, number: int) -> None:
        with self._lock:
            self._deadlines.pop(number, None)
            self._publish_first()

    def _publish_first(self) -> None:
        deadlines = self._deadlines
        number = min(deadlines, key=deadlines.__getitem__, default=NO_SAMPLE)
        if os.getpid() == self._pid:  # not a child that the sample has forked
            self._publish(number, deadlines.get(number, 0))
