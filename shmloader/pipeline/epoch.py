"""One run through the source: a flow behind a lock, between its jobs' executors and its consumer.

Guarantees:
    * No op, nor any other function of the user's, is called while the lock is held.
    * :meth:`Epoch.leave` takes no lock, because the garbage collector may call it anywhere. If an
      epoch was left, results that still come to it are dropped.

The module is long because it contains everything that takes the lock: what executors report, what
the consumer takes, and every way in which an epoch ends.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from shmloader.engine.failures import FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.loader.calls import refuse
from shmloader.pipeline.config import (
    QUEUE_CAPACITY,
    SOURCE_CAPACITY,
    Aggregate,
    OpKind,
    PipelineConfig,
)
from shmloader.pipeline.device_future import opened
from shmloader.pipeline.entries import END, NOTHING, Raised
from shmloader.pipeline.failures import (
    FailedItem,
    Limit,
    StageFailureCounter,
    explained,
    text_of,
)
from shmloader.pipeline.flow import Flow, Stage
from shmloader.pipeline.lateness import describe_flow
from shmloader.pipeline.lifecycle import Lifecycle
from shmloader.pipeline.meters import Clock, Meter
from shmloader.pipeline.source import SourceReader
from shmloader.pipeline.stages import AggregateStage, Job, PipeStage, StageQueue
from shmloader.pools.executor_kinds import CHECK_S
from shmloader.threads.wakeup import Wakeup


class StageExecutor(Protocol):
    """Runs the jobs of one or more stages."""

    def put(self, task: "Task") -> None:
        """Have a job run, or resume. Called from any thread; does not wait."""


@dataclass(frozen=True, slots=True, eq=False)
class StageOp:
    """How the jobs of a stage are run.

    Attributes:
        name: The stage's name.
        op: The function that is called with each item.
        kind: The op's kind.
        executor: What calls the op.
        is_source: Whether this is the source. Its only item is the :class:`SourceReader`, and it
            may yield None.
        lifecycle: The stage's ``setup`` and ``teardown``; None if it has none. With it, the op's
            second argument is what ``setup`` returned.
        waits_for_threads: Whether jobs wait for one of the threads that stages share.
    """

    name: str
    op: Callable[..., object]
    kind: OpKind
    executor: StageExecutor
    is_source: bool = False
    lifecycle: Lifecycle | None = None
    waits_for_threads: bool = False


@dataclass(slots=True, eq=False)
class Task:
    """A job as an executor gets it.

    Attributes:
        epoch: The epoch that takes the results.
        job: The job.
        stage: How the job is run.
    """

    epoch: "Epoch"
    job: Job
    stage: StageOp


class Epoch:
    """One run through the source. Called from any thread.

    Attributes:
        is_over: Whether no further item comes: after the end, after an exception, or when left.
        over_because: Why the epoch is over, in words; "" at its regular end, or if it is not over.
        in_transit: Whether :meth:`take` has, or may have, taken an item that an exception from
            outside (``KeyboardInterrupt``, say) would lose. Stays True when :meth:`take` returns.
        clock: The epoch's clock. The meters show how its time was spent.
        meters: The meters of the source, of each stage and of the sink. They outlive the flow.
        delivered: The checkpoint after the last item that :meth:`take` returned.

    Args:
        config: The pipeline's stages.
        stage_ops: How each stage is run, the source first; None for a stage without jobs.
        failures: The pipeline's list of failures.
        reader: Iterates the source.
    """

    def __init__(
        self,
        config: PipelineConfig,
        stage_ops: list[StageOp | None],
        failures: FailureList[FailedItem],
        reader: SourceReader,
    ) -> None:
        # An RLock knows its owner, so `let_go` can release it after an interruption.
        self._lock = threading.RLock()
        self._wakeup = Wakeup()
        self._config = config
        self._stage_ops = stage_ops
        # For executors that may be gone without reporting it.
        self._checks: list[Callable[[], None]] = [
            check
            for op in stage_ops
            if op is not None and (check := getattr(op.executor, "check", None)) is not None
        ]
        self._check_at_s = time.monotonic() + CHECK_S
        self._reader = reader
        self.clock = Clock(time.monotonic_ns())
        flow = _make_flow(config, failures, self.clock, reader)
        self.meters: list[Meter] = [*(stage.meter for stage in flow.stages), flow.sink_meter]
        self.delivered = self._delivered_before = reader.start
        self._flow: Flow | None = flow
        self.is_over = False
        self.over_because = ""
        self.in_transit = False
        # The `id` of the exception that `take` raised on purpose, and the thread that is inside it.
        self._raised_id = 0
        self._taker = 0

    def begin(self) -> None:
        """Start the source, unless the epoch was left meanwhile."""
        with self._lock:
            flow = self._flow
            if flow is None:
                return
            flow.begin(self._reader)
            ready = self._take_ready(flow)
        self._hand_out(ready)

    # Results, from the executors ------------------------------------------------------------

    def yielded(self, task: Task, output: object) -> bool:
        """Take a result of a job that may have more. None is no result, except from the source.

        Returns:
            Whether the job may continue. If not, the caller must not touch it any more: the job is
            given to its executor again when it may continue.
        """
        job, after = task.job, None
        if task.stage.is_source:
            after = self._reader.note_item()
        elif output is None:
            return self._flow is not None
        now_ns = time.monotonic_ns()
        with self._lock:
            flow = self._flow
            if flow is None:
                return False
            flow.set_time(now_ns)
            may_continue = flow.yielded(job, output, after)
            ready = self._take_ready(flow)
        if ready:
            self._hand_out(ready)
        return may_continue

    def finished(self, task: Task, *outputs: object) -> Task | None:
        """Take the last results of a job.

        Returns:
            A task that the same executor can continue with at once, or None.
        """
        if task.stage.is_source:
            return self._update(task, Flow.source_finished, self._reader.note_end())
        return self._update(task, Flow.finished, *outputs)

    def failed(self, task: Task, error: BaseException) -> Task | None:
        """Note that a job's op has raised. Returns the same as :meth:`finished`."""
        item = task.job.item
        if task.stage.is_source:
            return self.failed_for_good(task, error)
        flow = self._flow
        if flow is None:
            return None
        failure_counter = flow.stages[task.job.number].failure_counter
        if failure_counter is None or not isinstance(error, Exception):
            return self.failed_for_good(task, error)
        assert isinstance(failure_counter, StageFailureCounter)
        listed = failure_counter.describe(error, item)
        following = self._update(task, _leave_out, failure_counter, listed, error)
        failure_counter.log_first(listed, error)
        return following

    def failed_for_good(self, task: Task, error: BaseException) -> Task | None:
        """Note a failure that is raised to the consumer even if ``max_failures`` allows some."""
        item = NOTHING if task.stage.is_source else task.job.item
        raised = explained(error, f"stage '{task.stage.name}'", item)
        return self._update(task, Flow.failed, raised)

    def failed_to_set_up(self, task: Task, error: BaseException) -> Task | None:
        """Note that ``setup`` of a job's stage has raised."""
        raised = explained(error, f"setup of stage '{task.stage.name}'")
        return self._update(task, Flow.failed, raised)

    def _update(self, task: Task, change: Callable[..., None], *args: object) -> Task | None:
        """Call ``change`` with the flow, the task's job and ``args``, under the lock."""
        now_ns = time.monotonic_ns()
        with self._lock:
            flow = self._flow
            if flow is None:
                return None
            flow.set_time(now_ns)
            change(flow, task.job, *args)
            ready = self._take_ready(flow)
        return self._hand_out(ready, task.stage.executor) if ready else None

    def _take_ready(self, flow: Flow) -> list[Job]:
        if flow.has_news:
            self._wakeup.set()
        # Never the flow's own list: other threads append to it as soon as the lock is free.
        ready = flow.ready
        if not ready:
            return []
        flow.ready = []
        return ready

    def _hand_out(self, ready: list[Job], executor: StageExecutor | None = None) -> Task | None:
        """Give jobs to their executors, except for one that ``executor`` continues with itself.

        Returns:
            That one: of the jobs that ``executor`` runs, one of the latest stage. None if there is
            none.
        """
        kept: Task | None = None
        if len(ready) > 1:
            ready.sort(key=attrgetter("number"), reverse=True)
        for job in ready:
            stage = self._stage_ops[job.number]
            assert stage is not None
            task = Task(self, job, stage)
            if kept is None and stage.executor is executor:
                kept = task
            else:
                stage.executor.put(task)
        return kept

    # The consumer ---------------------------------------------------------------------------

    def take(self, timeout_s: float | None) -> object:
        """Return the next item, or END after the last one. One call at a time.

        Raises:
            TimeoutError: If no item comes in time. Nothing is lost.
            ClosedLoaderError: If the epoch was left or has failed before, or if a call on this
                thread has not finished.
            RuntimeError: If another thread is in this method.
            BaseException: The exception of a :class:`Raised` that came instead of an item.
        """
        caller = threading.get_ident()
        if self._taker:
            refuse(self._taker, caller)
        try:
            self._taker = caller
            self.in_transit = False
            self._delivered_before = self.delivered
            return self._take(timeout_s)
        finally:
            self._taker = 0

    def _take(self, timeout_s: float | None) -> object:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.in_transit = True
            item = self._take_now()
            if item is not NOTHING:
                return self._opened(item)
            self.in_transit = False
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError(
                    f"the pipeline returned no item within {timeout_s:g} seconds. Nothing is lost: "
                    f"call next() or get_item() again.{self._stop_waiting()}"
                )
            self._wait(left_s)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for an item or the end, at most ``timeout_s`` seconds. May return early."""
        if not self._checks:
            self._wakeup.wait(timeout_s)
            return
        self._wakeup.wait(CHECK_S if timeout_s is None else min(timeout_s, CHECK_S))
        if time.monotonic() >= self._check_at_s:
            self._check_at_s = time.monotonic() + CHECK_S
            for check in self._checks:
                check()

    def _take_now(self) -> object:
        with self._lock:
            flow = self._flow
            if flow is None:
                if self.over_because:
                    self.in_transit = False
                    _park_if_exiting()
                    raise ClosedLoaderError(f"the pipeline was ended: {self.over_because}")
                return END
            flow.set_time(time.monotonic_ns())
            item, clock = flow.take(), flow.clock
            if not clock.startup_ns and item is not NOTHING:
                clock.startup_ns = clock.waited_ns
            clock.is_waiting = item is NOTHING
            self.delivered = flow.delivered
            ready = self._take_ready(flow)
        if ready:
            self._hand_out(ready)
        return item

    def _stop_waiting(self) -> str:
        """Note that the consumer no longer waits. Returns in words what the flow waits for."""
        with self._lock:
            flow = self._flow
            if flow is None:
                return ""
            flow.set_time(time.monotonic_ns())
            flow.clock.is_waiting = False
            return describe_flow(flow, self._config, self._stage_ops)

    def _opened(self, item: object) -> object:
        if item is END:
            self.is_over, self._flow = True, None
            return END
        if type(item) is not Raised:
            return opened(item)
        _park_if_exiting()
        error = item.error
        self.leave(f"{type(error).__name__}: {text_of(error)}")
        self._raised_id = id(error)
        try:
            raise error
        finally:
            del error, item  # the traceback pins this frame

    def loses(self, error: BaseException) -> bool:
        """Whether an item would be lost if the epoch continued after ``take`` raised ``error``."""
        return self.in_transit and self._raised_id != id(error)

    def undo_delivery(self) -> None:
        """Set :attr:`delivered` back: the item that the last :meth:`take` has taken is lost."""
        self.delivered = self._delivered_before

    @property
    def is_taken_here(self) -> bool:
        """Whether the calling thread is in :meth:`take`, which a signal handler may interrupt."""
        return self._taker == threading.get_ident()

    # Statistics -----------------------------------------------------------------------------

    def measure(self) -> None:
        """Bring the meters up to date, unless the epoch is over."""
        with self._lock:
            if self._flow is not None:
                self._flow.set_time(time.monotonic_ns())
                self._flow.measure()

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


def _leave_out(
    flow: Flow, job: Job, counter: StageFailureCounter, failed: FailedItem, error: Exception
) -> None:
    """Count and list a failed call. Leaves its item out, or fails if too many calls failed."""
    flow.failed(job, counter.note_bad(failed, error))


def _make_flow(
    config: PipelineConfig,
    failures: FailureList[FailedItem],
    clock: Clock,
    reader: SourceReader,
) -> Flow:
    start, is_resumed = reader.start, reader.is_resumed
    sink = StageQueue(config.buffer_size)
    count = len(config.stages)
    queues = [
        StageQueue(1),  # before the source
        *(StageQueue(SOURCE_CAPACITY, SOURCE_CAPACITY // 2) for _ in config.stages[:1]),
        *(StageQueue(QUEUE_CAPACITY) for _ in config.stages[1:]),
        sink,
    ]
    stages: list[Stage] = [PipeStage(0, queues[0], queues[1], clock, 1, in_order=True)]
    shared = None
    if config.max_failures is not None:
        shared = Limit(config.max_failures, "the pipeline", is_resumed=is_resumed)
    last_pipe = max(
        (index for index in range(count) if not isinstance(config.stages[index], Aggregate)),
        default=-1,
    )
    for index, stage in enumerate(config.stages):
        number, before, after = index + 1, queues[index + 1], queues[index + 2]
        if isinstance(stage, Aggregate):
            stages.append(
                AggregateStage(number, before, after, stage.size, drop_last=stage.drop_last)
            )
            continue
        own = None
        if stage.max_failures is not None:
            own = Limit(stage.max_failures, f"stage '{stage.name}'", is_resumed=is_resumed)
        failure_counter = None
        if own is not None or shared is not None:
            failure_counter = StageFailureCounter(
                stage.name, own, shared, failures, judges_shared=index == last_pipe
            )
        stages.append(
            PipeStage(
                number,
                before,
                after,
                clock,
                stage.capacity,
                in_order=stage.in_order,
                failure_counter=failure_counter,
                concurrency=stage.concurrency,
                start=start,
            )
        )
    return Flow(stages, clock, start)
