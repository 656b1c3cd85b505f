"""Loads several samples of a batch at once inside one worker (``fetch_concurrency=``).

Runs wherever samples are loaded: in a worker process, in a worker thread, or in the main process.

::

    the worker's own thread                    k - 1 helper threads, or an event loop
    ───────────────────────                    ─────────────────────────────────────
    load(get, indices, begins)
      makes a context for each sample, in
      order, in which begin() seeds
      loads one sample after the other, ─────▶ which helpers also do: get(index),
                                               in the sample's context
      waits for the last sample
      returns the results, in the order
      of the indices

The dataset's first sample decides: if ``dataset[index]`` returns a coroutine, samples are awaited
together, on one event loop that is kept for the dataset. Otherwise, threads share them.

Guarantees:
    * At most k samples are loaded at once, and all that were begun are done when ``load`` returns.
      If the worker's own thread gets an exception that is not an ``Exception``, such as a
      KeyboardInterrupt, it is raised at once, without waiting for other samples.
    * After a sample has failed, no further sample is begun, unless the caller wants all.
    * A helper thread that waits refers only to the queue, so it keeps no batch alive.
"""

import asyncio
import collections
import contextvars
import inspect
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from shmloader.forked_child import end_if_forked
from shmloader.threads.background import BackgroundThread
from shmloader.threads.wakeup import Latch, Wakeup

Get = Callable[[Any], Any]

# How long close() waits for helpers that are loading a sample, and how long an interrupted call
# waits for samples that it has cancelled on another thread's event loop.
_JOIN_S = 1.0


class SampleResult:
    """The result of loading one sample.

    Attributes:
        index: The sample's index.
        context: The context in which it was loaded.
        value: The sample.
        error: The exception that loading it raised; None if it did not raise.
        is_begun: Whether loading it was begun.
    """

    __slots__ = ("context", "error", "index", "is_begun", "value")

    def __init__(self, index: Any, context: contextvars.Context) -> None:
        self.index = index
        self.context = context
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_begun = False

    def take(self) -> Any:
        """Return the sample, or raise the exception that loading it raised."""
        if self.error is not None:
            raise self.error
        return self.value


class _Batch:
    """The samples of one call of ``load``, which threads share."""

    def __init__(self, get: Get, results: list[SampleResult], *, wants_all: bool) -> None:
        self._get: Get | None = get
        self._waiting = collections.deque(results)
        self._wants_all = wants_all
        self._owner = threading.get_ident()
        self._left = len(results)
        self._lock = threading.Lock()
        self.over = Wakeup()

    def work(self) -> None:
        """Load one sample after the other, until none is left."""
        while True:
            try:
                result = self._waiting.popleft()
            except IndexError:
                return
            self._load(result)
            self._note_one()

    def _load(self, result: SampleResult) -> None:
        get = self._get
        if get is None:  # dropped
            return
        result.is_begun, pid = True, os.getpid()
        try:
            result.value = result.context.run(get, result.index)
        except BaseException as error:
            end_if_forked(pid)
            result.error = error
            if not self._wants_all:
                self.drop()
            if not isinstance(error, Exception) and threading.get_ident() == self._owner:
                raise
        end_if_forked(pid)

    def _note_one(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self.over.set()

    def drop(self) -> None:
        """Begin no further sample."""
        self._get = None


class _Helper(BackgroundThread):
    """A thread that loads samples."""

    parks_for_forks = False

    def __init__(self, batches: "queue.SimpleQueue[_Batch | None]") -> None:
        super().__init__("shmloader_fetch")
        self._batches = batches

    def work(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        with self.resting():
            batch = self._batches.get()
        if batch is None:
            return False
        batch.work()
        return True


def _cancel_all(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    """Cancel all tasks of a loop, and return them. Called on the loop's thread."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    return tasks


class ConcurrentFetcher:
    """Loads several samples at once. One thread at a time uses it.

    Args:
        concurrency: The largest number of samples that are loaded at once.
    """

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._helpers: list[_Helper] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        # Whether the dataset returns coroutines; None before its first sample.
        self._is_async: bool | None = None

    def load(
        self,
        get: Get,
        indices: Iterable[Any],
        begins: Iterable[Callable[[], None]] = (),
        *,
        wants_all: bool,
    ) -> list[SampleResult]:
        """Load samples.

        Args:
            get: Returns the sample of an index, or a coroutine for it. Called from several threads.
            indices: Indices of the samples.
            begins: Called for each sample, in order, in the sample's context.
            wants_all: Whether the other samples are loaded if one fails.

        Returns:
            The samples' results, in order. Without ``wants_all``, samples that were not begun when
            the first one failed have neither value nor error.
        """
        results = []
        for index in indices:
            context = contextvars.copy_context()
            for begin in begins:
                context.run(begin)
            results.append(SampleResult(index, context))
        left = results
        if self._is_async is None and results:
            self._load_first(get, results[0], wants_all=wants_all)
            if results[0].error is not None and not wants_all:
                return results
            left = results[1:]
        if not self._is_async and left:
            self._share(get, left, wants_all=wants_all)
            left = []
        to_await = [*left, *(result for result in results if inspect.iscoroutine(result.value))]
        if to_await:
            self._await_all(get, to_await, wants_all=wants_all)
        return results

    def _load_first(self, get: Get, result: SampleResult, *, wants_all: bool) -> None:
        """Load the dataset's first sample, which shows whether samples are coroutines."""
        alone = _Batch(get, [result], wants_all=wants_all)
        alone.work()
        if result.error is None:
            self._is_async = inspect.iscoroutine(result.value)

    # Threads -----------------------------------------------------------------------------

    def _share(self, get: Get, results: list[SampleResult], *, wants_all: bool) -> None:
        batch = _Batch(get, results, wants_all=wants_all)
        wanted = min(self._concurrency, len(results)) - 1
        while len(self._helpers) < wanted:
            helper = _Helper(self._batches)
            helper.start()
            self._helpers.append(helper)
        for _ in range(wanted):
            self._batches.put(batch)
        try:
            batch.work()
            batch.over.wait()
        except BaseException:
            batch.drop()  # for instance after a KeyboardInterrupt
            raise

    # Event loop --------------------------------------------------------------------------

    def _await_all(self, get: Get, results: list[SampleResult], *, wants_all: bool) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._run(self._loop, self._work_all(get, results, wants_all=wants_all))

    def _run(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
        if asyncio._get_running_loop() is None:
            self._run_here(loop, work)
            return
        # This thread runs an event loop already, for instance in a notebook.
        raised: list[BaseException] = []
        over = Latch()  # not join(): once interrupted, it may return too early

        def run() -> None:
            try:
                self._run_here(loop, work)
            except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
                raised.append(error)
            finally:
                over.set()

        try:
            threading.Thread(target=run, daemon=True).start()
            over.wait()
        except BaseException:  # such as a KeyboardInterrupt
            cancelling = loop.call_soon_threadsafe(_cancel_all, loop)
            over.wait(_JOIN_S)
            cancelling.cancel()  # if the work was over: it must not cancel the next work
            raise
        if raised:
            raise raised.pop()

    @staticmethod
    def _run_here(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
        try:
            loop.run_until_complete(work)
        finally:
            left = _cancel_all(loop)  # only after a KeyboardInterrupt or the like
            if left:
                loop.run_until_complete(asyncio.wait(left))

    async def _work_all(self, get: Get, results: list[SampleResult], *, wants_all: bool) -> None:
        waiting = collections.deque(results)
        runners = [
            asyncio.ensure_future(self._work(get, waiting, wants_all=wants_all))
            for _ in range(min(self._concurrency, len(results)))
        ]
        try:
            await asyncio.gather(*runners)
        finally:
            for result in results:
                if inspect.iscoroutine(result.value):  # not awaited, since another sample failed
                    result.value.close()

    async def _work(
        self, get: Get, waiting: collections.deque[SampleResult], *, wants_all: bool
    ) -> None:
        while waiting:
            result = waiting.popleft()
            try:
                if result.is_begun:
                    sample, result.value = result.value, None
                else:
                    result.is_begun = True
                    sample = result.context.run(get, result.index)
                if inspect.iscoroutine(sample):
                    loop = asyncio.get_running_loop()
                    sample = await loop.create_task(sample, context=result.context)
                result.value = sample
            except BaseException as error:  # noqa: BLE001 - handed on
                result.error = error
                runner = asyncio.current_task()
                is_interrupted = runner is not None and runner.cancelling() > 0
                if not wants_all or is_interrupted:
                    waiting.clear()

    # End ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the helpers and the loop. May be called again. A later ``load`` makes new ones."""
        helpers, self._helpers = self._helpers, []
        loop, self._loop = self._loop, None
        for _ in helpers:
            self._batches.put(None)
        deadline = time.monotonic() + _JOIN_S
        for helper in helpers:
            helper.join(deadline - time.monotonic())
        if loop is not None and not loop.is_running():
            self._run(loop, loop.shutdown_asyncgens())
            loop.close()

    def __del__(self) -> None:
        self.close()
