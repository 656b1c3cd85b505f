"""Loads several samples of a batch at once inside one worker (``fetch_concurrency=``).

The caller makes a context for each sample, in order, in which generators are seeded. Helper threads
then call ``dataset[index]`` in these contexts. If that returns coroutines, they are awaited
together, on an event loop that has a thread of its own and is kept for the dataset; the samples of
later batches are asked for there.

Guarantees:
    * At most k samples are loaded at once, and all are done when ``load`` returns. If the caller is
      interrupted, for instance by a KeyboardInterrupt, that is raised without waiting for samples
      on threads. Coroutines are cancelled first.
    * A helper thread that waits refers only to the queue, so it keeps no batch alive.
"""

import asyncio
import collections
import contextvars
import inspect
import itertools
import os
import queue
import time
from collections.abc import Callable, Iterable
from typing import Any

from shmloader.interruptions import Latch
from shmloader.threads import BackgroundThread

Get = Callable[[Any], Any]

# How long close() waits for helpers that are loading a sample, and how long an interrupted call
# waits for coroutines that it has cancelled.
_JOIN_S = 1.0


class SampleResult:
    """The result of loading one sample in a context: its value, or the error that was raised."""

    def __init__(self, index: Any, context: contextvars.Context) -> None:
        self.index, self.context = index, context
        self.value: Any = None
        self.error: BaseException | None = None

    def get(self) -> Any:
        """Return the sample, or raise the exception that loading it raised."""
        if self.error is not None:
            raise self.error
        return self.value


class _Batch:
    """The samples of one call of ``load``, which ``share_count`` threads or tasks share."""

    def __init__(self, get: Get, results: list[SampleResult], concurrency: int) -> None:
        self._get, self._waiting = get, collections.deque(results)
        self.share_count = min(concurrency, len(results))
        self._ended = itertools.count(1)
        self.over = Latch()

    def drop(self) -> None:
        """Begin no further sample."""
        while (result := self._next()) is not None:
            if inspect.iscoroutine(result.value):
                result.value.close()  # else Python warns that it was never awaited

    def _next(self) -> SampleResult | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _end(self) -> None:
        if next(self._ended) == self.share_count:
            self.over.set()

    def work(self) -> None:
        """Load one sample after the other, until none is left. Called on several threads."""
        pid = os.getpid()
        while (result := self._next()) is not None:
            try:
                result.value = result.context.run(self._get, result.index)
            except BaseException as error:  # noqa: BLE001 - it is the result
                result.error = error
        if os.getpid() != pid:  # a child that a sample has forked
            os._exit(1)
        self._end()

    async def await_samples(self) -> None:
        """Await one sample after the other, until none is left. Several tasks run it."""
        loop = asyncio.get_running_loop()
        while (result := self._next()) is not None:
            await loop.create_task(self._await(result), context=result.context)
        self._end()

    async def _await(self, result: SampleResult) -> None:
        sample, result.value = result.value, None
        try:
            if sample is None:
                sample = self._get(result.index)
            result.value = await sample if inspect.iscoroutine(sample) else sample
        except BaseException as error:  # noqa: BLE001 - it is the result
            result.error = error


class _Helper(BackgroundThread):
    """A thread that loads samples."""

    parks_for_forks = False

    def __init__(self, batches: "queue.SimpleQueue[_Batch | None]") -> None:
        super().__init__("shmloader_fetch")
        self._batches = batches

    def work(self) -> None:
        while True:
            with self.resting():
                batch = self._batches.get()
            if batch is None:
                return
            batch.work()
            del batch


class _LoopThread(BackgroundThread):
    """A thread that runs an event loop."""

    parks_for_forks = False

    def __init__(self) -> None:
        super().__init__("shmloader_async")
        self._loop = asyncio.new_event_loop()
        self._tasks: list[asyncio.Task[None]] = []

    def work(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def begin_tasks(self, batch: _Batch) -> None:
        """Await the samples of a batch in tasks."""

        def begin() -> None:
            shares = [batch.await_samples() for _ in range(batch.share_count)]
            self._tasks = [*map(self._loop.create_task, shares)]

        self._loop.call_soon_threadsafe(begin)

    def cancel_tasks(self) -> None:
        """Cancel the tasks."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def stop(self) -> None:
        """End the thread, at the next time that its loop runs."""
        self._loop.call_soon_threadsafe(self._loop.stop)


class ConcurrentFetcher:
    """Loads several samples at once, at most ``concurrency``. One thread at a time uses it."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency, self._pid = concurrency, os.getpid()
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._helpers: list[_Helper] = []
        # The event loop; None until the dataset has returned a coroutine.
        self._loop: _LoopThread | None = None

    def load(
        self, get: Get, indices: Iterable[Any], begins: Iterable[Callable[[], None]] = ()
    ) -> list[SampleResult]:
        """Load samples, and return their results in order.

        Args:
            get: Returns the sample of an index, or a coroutine for it. Called from several threads.
            indices: Indices of the samples.
            begins: Called for each sample, in order, in the sample's context.
        """
        results = []
        for index in indices:
            context = contextvars.copy_context()
            for begin in begins:
                context.run(begin)
            results.append(SampleResult(index, context))
        left = results
        if self._loop is None and results:
            self._run(_Batch(get, results, self._concurrency))
            left = [result for result in results if inspect.iscoroutine(result.value)]
            if left:
                self._loop = _LoopThread()
                self._loop.start()
        if left:
            self._run(_Batch(get, left, self._concurrency))
        return results

    def _run(self, batch: _Batch) -> None:
        """Load a batch on helper threads, or on the event loop if there is one."""
        loop = self._loop
        try:
            if loop is not None:
                loop.begin_tasks(batch)
            else:
                while len(self._helpers) < batch.share_count:
                    self._helpers.append(_Helper(self._batches))
                    self._helpers[-1].start()
                for _ in range(batch.share_count):
                    self._batches.put(batch)
            batch.over.wait()
        except BaseException:  # for instance a KeyboardInterrupt
            batch.drop()
            if loop is not None:
                loop.cancel_tasks()
                batch.over.wait(_JOIN_S)
            raise

    def close(self) -> None:
        """End the helpers and the loop. May be called again. A later ``load`` makes new ones."""
        helpers, self._helpers = self._helpers, []
        loop, self._loop = self._loop, None
        if os.getpid() != self._pid:
            return  # in a forked child, which has no such threads
        for _ in helpers:
            self._batches.put(None)
        if loop is not None:
            loop.stop()
        deadline = time.monotonic() + _JOIN_S
        for thread in (*helpers, *filter(None, [loop])):
            thread.join(deadline - time.monotonic())

    def __del__(self) -> None:
        self.close()
