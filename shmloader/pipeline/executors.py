"""Executors: they run the jobs of stages, on daemon threads or on an event loop.

Each executor has ``start()``, ``put(job)``, ``end()`` and ``join(timeout_s)``. All but the first
may be called from any thread, and only the last waits.

Guarantees:
    * ``end`` does not wait for an op. A thread that is in an op ends when the op returns, and keeps
      neither the caller nor the interpreter alive.
    * The end of a loop cancels all coroutines, and the asyncio tasks that ops have begun. A
      coroutine that resists being cancelled is abandoned.
    * An idle thread holds only the queue, so it keeps no pipeline alive.
    * At the interpreter's exit, threads are asked to pause. The exit waits for them at most
      ``_EXIT_S`` seconds.
"""

import asyncio
import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from shmloader.device.device import Destination, DeviceStage, OnDevice
from shmloader.pipeline.config import results_of
from shmloader.pipeline.stages import Job
from shmloader.threads import BackgroundThread

# How long the interpreter's exit waits for an executor's threads, in seconds.
_EXIT_S = 0.3

# How long coroutines may take to end after they were cancelled, in seconds.
_CANCEL_S = 0.3

# How many batches may be on their way to a device, or be there and not yet taken.
_TRANSFERS_AHEAD = 2


# Threads ---------------------------------------------------------------------------------


class _Thread(BackgroundThread):
    """A thread that runs jobs off a queue until there is a None."""

    parks_for_forks = False
    exit_s = _EXIT_S

    def __init__(self, name: str, jobs: "queue.SimpleQueue[Job | None]") -> None:
        super().__init__(name)
        self._jobs = jobs

    def work(self) -> None:
        while True:
            with self.resting():
                job = self._jobs.get()
            if job is None:
                return
            while job is not None:
                self.pause()
                job = self._run_job(job)

    def _run_job(self, job: Job) -> Any:
        """Run a function or a generator function. Returns the job that follows, if any."""
        stage, flow = job.stage, job.flow
        if flow.is_over:
            return None
        outputs: Sequence[Any] = ()
        began_ns = time.monotonic_ns()
        try:
            if stage.makes_many:
                if job.iterator is None:
                    job.iterator = iter(stage.op(job.item))
                for result in job.iterator:
                    op_ns = time.monotonic_ns() - began_ns
                    if not flow.yielded(job, result, op_ns):
                        return None
                    began_ns = time.monotonic_ns()
                job.iterator = None
            else:
                outputs = results_of(stage, stage.op(job.item))
        except BaseException as error:  # noqa: BLE001 - raised to the consumer
            return flow.failed(job, error)
        return flow.finished(job, outputs, time.monotonic_ns() - began_ns)


class ThreadExecutor:
    """Daemon threads that take jobs off one queue."""

    def __init__(self, name: str, count: int) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [_Thread(f"{name}_{number}", self._jobs) for number in range(count)]
        self.put = self._jobs.put

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Tell the threads to end after their present jobs."""
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, so that an op that is about to return can finish.

        Returns:
            Whether all threads have ended.
        """
        deadline = time.monotonic() + timeout_s
        return all(thread.join(deadline - time.monotonic()) for thread in self._threads)


class DeviceExecutor(ThreadExecutor):
    """One thread that copies batches to a device."""

    _is_prepared = False

    def __init__(self, destination: Destination) -> None:
        self.stage = DeviceStage(destination, _TRANSFERS_AHEAD)
        super().__init__(DeviceStage.name, 1)

    def copy(self, batch: object) -> OnDevice:
        """Start a batch's copy. Called on the thread."""
        try:
            if not self._is_prepared:
                self.stage.start()
                self._is_prepared = True
            return self.stage.run(batch)
        finally:
            del batch  # a traceback pins this frame, which must not pin the slot

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, and if it has ended, for the copies under way."""
        has_ended = super().join(timeout_s)
        if has_ended:
            self.stage.close()
        return has_ended


# Coroutines ------------------------------------------------------------------------------


class LoopExecutor(BackgroundThread):
    """Runs coroutines and async generators on an event loop with a thread of its own.

    One asyncio task runs an async generator to its end, and sleeps while the flow has no space for
    results: the generator's timeouts and task groups belong to that task.
    """

    parks_for_forks = False
    exit_s = _EXIT_S

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._loop = asyncio.new_event_loop()
        self._is_ended = asyncio.Event()
        # The loop itself holds asyncio tasks weakly.
        self._running: set[asyncio.Task[None]] = set()

    def put(self, job: Job) -> None:
        """Run a job on the loop, or resume its suspended generator."""
        self._call(self._start_or_resume, job)

    def end(self) -> None:
        """Cancel all coroutines and end the loop."""
        self._call(self._is_ended.set)

    def wake(self) -> None:
        """Make the thread pause. Called from the thread that asks for the pause."""
        self._call(self.pause)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop call a function, unless the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:  # a signal handler may raise one, too
            if str(error) != "Event loop is closed":
                raise

    def work(self) -> None:
        """Run the loop until :meth:`end`."""
        main = self._loop.create_task(self._live())
        try:
            while not main.done():
                # If an asyncio task of an op raises SystemExit or KeyboardInterrupt, this raises
                # it, too. The coroutine that awaits the task gets it, so the loop continues.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_until_complete(main)
        finally:
            self._loop.close()

    async def _live(self) -> None:
        await self._is_ended.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # with those that ops have begun
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CANCEL_S)
        await self._loop.shutdown_asyncgens()

    def _start_or_resume(self, job: Job) -> None:
        if job.iterator is not None:
            if not job.iterator.done():
                job.iterator.set_result(None)
        elif not self._is_ended.is_set():
            task = self._loop.create_task(self._run_job(job))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run_job(self, job: Job) -> None:
        stage, flow = job.stage, job.flow
        if flow.is_over:
            return
        outputs: Sequence[Any] = ()
        began_ns = time.monotonic_ns()
        try:
            if stage.makes_many:
                async with contextlib.aclosing(stage.op(job.item)) as results:
                    async for result in results:
                        op_ns = time.monotonic_ns() - began_ns
                        if not flow.yielded(job, result, op_ns):
                            # The job cannot have come back: no step of the loop lies in between.
                            job.iterator = self._loop.create_future()
                            await job.iterator
                            job.iterator = None
                        began_ns = time.monotonic_ns()
            else:
                outputs = results_of(stage, await stage.op(job.item))
        except BaseException as error:
            if self._is_ended.is_set() and isinstance(error, asyncio.CancelledError):
                raise
            following = flow.failed(job, error)
        else:
            following = flow.finished(job, outputs, time.monotonic_ns() - began_ns)
        if following is not None:
            self._start_or_resume(following)
