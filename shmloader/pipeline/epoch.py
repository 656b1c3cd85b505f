"""One run through the source: a flow behind a lock, between its jobs' executors and its consumer.

Guarantees:
    * No op, nor any other function of the user's, is called while the lock is held.
    * :meth:`Epoch.leave` takes no lock, because the garbage collector may call it anywhere. If an
      epoch was left, results that still come to it are dropped.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from operator import attrgetter
from typing import Any

from shmloader.engine.failures import FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.pipeline.config import SOURCE_CAPACITY, PipelineConfig, StageConfig
from shmloader.pipeline.executors import StageExecutor
from shmloader.pipeline.failures import FailedItem, FailureCounter, explained, text_of
from shmloader.pipeline.flow import Flow
from shmloader.pipeline.source import SourceReader
from shmloader.pipeline.stages import END, NOTHING, Clock, Job, Meter, Raised, Stage, StageQueue
from shmloader.pipeline.transfer import opened
from shmloader.threads.wakeup import Wakeup

# A stage and what runs its jobs. The source's op is called once, with the SourceReader.
Runner = tuple[StageConfig, StageExecutor | None]


class Epoch:
    """One run through the source. Called from any thread.

    Attributes:
        is_over: Whether no further item comes: after the end, after an exception, or when left.
        over_because: Why the epoch is over, in words; "" at its regular end, or if it is not over.
        is_waiting: Whether :meth:`take` only waits, so that an exception from outside
            (``KeyboardInterrupt``, say) loses nothing.
        clock: The epoch's clock. The meters show how its time was spent.
        meters: The meters of the source, of each stage and of the sink. They outlive the flow.
        delivered: The checkpoint after the last item that :meth:`take` returned.
        taker: The thread that takes an item; 0 if none does. The caller of :meth:`take` sets it.

    Args:
        config: The pipeline's stages.
        runners: The source and all stages as they are run, and what runs them.
        failures: The pipeline's list of failures.
        reader: Iterates the source.
    """

    def __init__(
        self,
        config: PipelineConfig,
        runners: list[Runner],
        failures: FailureList[FailedItem],
        reader: SourceReader,
    ) -> None:
        # An RLock knows its owner, so `let_go` can release it after an interruption.
        self._lock = threading.RLock()
        self._wakeup = Wakeup()
        self._config = config
        self._runners = runners
        self._reader = reader
        now_ns = time.monotonic_ns()
        self.clock = Clock(now_ns, now_ns)
        flow = _make_flow(config, failures, self.clock, reader)
        self.meters: list[Meter] = [*(stage.meter for stage in flow.stages), flow.sink_meter]
        self.delivered = reader.start
        self._flow: Flow | None = flow
        self.is_over = self.is_waiting = False
        self.over_because = ""
        self.taker = 0

    def begin(self) -> None:
        """Start the source, unless the epoch was left meanwhile."""
        self._change(None, Flow.begin, self._reader)

    def _change(
        self, executor: StageExecutor | None, change: Callable[..., Any], *args: object
    ) -> tuple[Any, Job | None]:
        """Call ``change`` with the flow and ``args``, and hand out the jobs that may start then.

        Args:
            executor: The caller, if it can continue with a job itself.
            change: Called under the lock.
            args: The arguments after the flow.

        Returns:
            The result of ``change``, or None if the epoch is over; and of the new jobs that
            ``executor`` runs, one of the latest stage.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            flow = self._flow
            if flow is None:
                return None, None
            flow.set_time(now_ns)
            result = change(flow, *args)
            if flow.has_news:
                self._wakeup.set()
            ready = flow.ready
            if not ready:
                return result, None
            flow.ready = []  # other threads append to it as soon as the lock is free
        kept: Job | None = None
        if len(ready) > 1:
            ready.sort(key=attrgetter("number"), reverse=True)
        for job in ready:
            job.stage, runs = self._runners[job.number]
            job.epoch, job.executor = self, runs
            if kept is None and runs is executor:
                kept = job
            elif runs is not None:
                runs.put(job)
        return result, kept

    # Results, from the executors ------------------------------------------------------------

    def yielded(self, job: Job, output: object) -> bool:
        """Receive a result of a job that may have more. None is no result, except of the source.

        Returns:
            Whether the job may continue. If not, the caller must not touch it any more: the job is
            given to its executor again when it may continue.
        """
        if not job.number:
            job.after = self._reader.checkpoint()
        elif output is None:
            return self._flow is not None
        return bool(self._change(None, Flow.yielded, job, output)[0])

    def finished(self, job: Job, outputs: object = ()) -> Job | None:
        """Receive the last results of a job.

        Returns:
            A job that the same executor can continue with at once, or None.
        """
        if not job.number:
            job.after = self._reader.end()
        return self._change(job.executor, Flow.finished, job, outputs)[1]

    def failed(self, job: Job, error: BaseException) -> Job | None:
        """Handle an exception of a job's op. Returns the same as :meth:`finished`."""
        flow = self._flow
        counter = None if flow is None else flow.stages[job.number].counter
        if counter is None or not isinstance(error, Exception):
            return self.failed_for_good(job, error)
        listed = FailedItem.of(job.stage.name, job.item, error)
        _, following = self._change(job.executor, Flow.failed, job, error, listed)
        counter.log_first(listed)
        return following

    def failed_for_good(
        self, job: Job, error: BaseException, *, in_setup: bool = False
    ) -> Job | None:
        """Handle a failure that is raised to the consumer even if ``max_failures`` allows some."""
        items = (job.item,) if job.number and not in_setup else ()
        what = f"{'setup of ' if in_setup else ''}stage '{job.stage.name}'"
        raised = explained(error, what, *items)
        return self._change(job.executor, Flow.failed, job, raised, None)[1]

    # The consumer ---------------------------------------------------------------------------

    def take(self, timeout_s: float | None) -> object:
        """Return the next item, END after the last one, or a :class:`Raised`. One call at a time.

        A TimeoutError, after which nothing is lost, and a ClosedLoaderError, if the epoch was left
        or has failed before, also come as a :class:`Raised`.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            taken, _ = self._change(None, self._pop_item)
            if taken is None and self.over_because:
                _park_if_exiting()
                return Raised(ClosedLoaderError(f"the pipeline was ended: {self.over_because}"))
            item = END if taken is None else taken[0]
            if item is END:
                self.is_over, self._flow = True, None
            elif type(item) is Raised:
                _park_if_exiting()
                self.leave(f"{type(item.error).__name__}: {text_of(item.error)}")
            elif item is NOTHING:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return self._late(timeout_s)
                self.is_waiting = True
                self._wakeup.wait(None if left_s == math.inf else left_s)
                self.is_waiting = False
                continue
            return opened(item)

    def _pop_item(self, flow: Flow) -> tuple[object]:
        item, clock = flow.take(), flow.clock
        if not clock.startup_ns and item is not NOTHING:
            clock.startup_ns = clock.waited_ns
        clock.is_waiting = item is NOTHING
        self.delivered = flow.delivered
        return (item,)

    def _late(self, timeout_s: float | None) -> Raised:
        text, _ = self._change(None, self._stop_waiting)
        error = TimeoutError(
            f"the pipeline returned no item within {timeout_s:g} seconds. Nothing is lost: "
            f"call next() or get_item() again.{text or ''}"
        )
        return Raised(error)

    def _stop_waiting(self, flow: Flow) -> str:
        """Stop the clock of the consumer's wait. Returns in words what the flow waits for."""
        flow.clock.is_waiting = False
        return flow.describe(self._config.titles)

    def measure(self) -> None:
        """Bring the meters up to date, unless the epoch is over. From any thread."""
        self._change(None, Flow.measure)

    # Ends -----------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Release the lock after an interruption, if the calling thread holds it."""
        with contextlib.suppress(RuntimeError):
            while True:
                self._lock.release()

    def leave(self, why: str) -> None:
        """End the epoch, and drop all that is in flight. Takes no lock; may be called again."""
        if not self.is_over:
            self.over_because = why
        self.is_over = True
        self._flow = None
        self._wakeup.set()


def _park_if_exiting() -> None:
    """Block the calling thread for good if it is a daemon and the interpreter is exiting.

    The exit ends pipelines and executors. Without this, the thread would print an exception
    although the program ends as it should.
    """
    # concurrent.futures refuses items before the main thread counts as ended. Only this private
    # flag shows it. On a Python without the flag, an exception may be printed.
    has_begun = getattr(threading, "_SHUTTING_DOWN", False)
    is_exiting = has_begun or not threading.main_thread().is_alive()
    if is_exiting and threading.current_thread().daemon:
        threading.Event().wait()


def _make_flow(
    config: PipelineConfig, failures: FailureList[FailedItem], clock: Clock, reader: SourceReader
) -> Flow:
    def counter_of(max_failures: int | Fraction | None, scope: str) -> FailureCounter | None:
        if max_failures is None:
            return None
        return FailureCounter(max_failures, scope, failures, is_resumed=reader.is_resumed)

    shared = counter_of(config.max_failures, "the pipeline")
    sizes = [config.queue_size(number + 1) for number in range(len(config.stages))]
    queues = [StageQueue(size, size - 1) for size in (1, *sizes, config.buffer_size)]
    if sizes:
        queues[1].low = SOURCE_CAPACITY // 2
    stages = [Stage(0, queues[0], queues[1], clock)]
    last = max((i for i, one in enumerate(config.stages) if not one.size), default=0)
    for index, stage in enumerate(config.stages):
        own = counter_of(stage.max_failures, stage.title)
        judged = (own, shared if index == last else None)
        stages.append(
            Stage(
                index + 1, queues[index + 1], queues[index + 2], clock, stage.capacity,
                in_order=stage.in_order, concurrency=stage.concurrency, start=reader.start,
                counter=own or shared,
                judged=[counter for counter in judged if counter is not None],
                size=stage.size, drop_last=stage.drop_last,
            )
        )  # fmt: skip
    return Flow(stages, clock, reader.start)
