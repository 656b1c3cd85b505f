"""A flow with its lock, those who run its jobs, and its consumer.

Guarantees:
    * No op is called while the lock is held, nor any other function of the user's.
    * :meth:`Epoch.leave` takes no lock: the garbage collector may call it anywhere. What is brought
      to an epoch that was left is dropped.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

from shmloader.engine.failures import FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.loader.calls import refuse
from shmloader.pipeline.device_future import opened
from shmloader.pipeline.failures import (
    FailedItem,
    Limit,
    StageFailureCounter,
    explained,
    text_of,
)
from shmloader.pipeline.flow import (
    END,
    NOTHING,
    Flow,
    GroupStage,
    Job,
    PipeStage,
    Raised,
    Stage,
    StageQueue,
)
from shmloader.pipeline.ops import OpKind
from shmloader.pipeline.plan import QUEUE_ROOM, SOURCE_ROOM, Group, Plan
from shmloader.threads.wakeup import Wakeup


class StageExecutor(Protocol):
    """Runs jobs."""

    def put(self, task: "Task") -> None:
        """Have a job run, or go on. From any thread; does not wait."""


class Call:
    """How one stage's jobs are run.

    Attributes:
        name: The stage's.
        op: What is called with an item.
        kind: Of the op.
        executor: Who calls it.
        is_source: Whether it is the source, which has no item, and may give None.
    """

    __slots__ = ("executor", "is_source", "kind", "name", "op")

    def __init__(
        self,
        name: str,
        op: Callable[[object], object],
        kind: OpKind,
        executor: StageExecutor,
        *,
        is_source: bool = False,
    ) -> None:
        self.name = name
        self.op = op
        self.kind = kind
        self.executor = executor
        self.is_source = is_source


class Task:
    """A job, as an executor gets it.

    Attributes:
        epoch: Whom to bring the results to.
        job: The job.
        call: How it is run.
    """

    __slots__ = ("call", "epoch", "job")

    def __init__(self, epoch: "Epoch", job: Job, call: Call) -> None:
        self.epoch = epoch
        self.job = job
        self.call = call


class Epoch:
    """One run through the source, from any thread.

    Attributes:
        is_over: Whether nothing more comes: the end was told, or an exception, or it was left.
        over_because: In words, if it is over for another reason than its end.
        in_transit: Whether :meth:`take` has taken an item, or may have: an exception from outside
            would lose it. Still so after it has returned.

    Args:
        plan: The stages.
        calls: How each is run, the source first; None for one that nobody runs.
        listed: Where failures are listed.
    """

    def __init__(
        self, plan: Plan, calls: list[Call | None], listed: FailureList[FailedItem]
    ) -> None:
        # It knows who holds it: an interruption may come before it is let go of.
        self._lock = threading.RLock()
        self._wakeup = Wakeup()
        self._calls = calls
        self._flow: Flow | None = _make_flow(plan, listed)
        self.is_over = False
        self.over_because = ""
        self.in_transit = False
        # The `id` of what `take` raised on purpose, and the thread that is in there.
        self._told = 0
        self._taker = 0

    def begin(self) -> None:
        """Have the source start."""
        with self._lock:
            flow = self._flow
            assert flow is not None
            flow.begin()
            ready = self._take_ready(flow)
        self._hand_out(ready)

    # Results in; on executors ----------------------------------------------------------------

    def gave(self, task: Task, output: object) -> bool:
        """A job that gives many results has one; None is none.

        Returns:
            Whether the job may go on. If not, it is given to its executor again when it may; nobody
            may touch it after this.
        """
        if output is None and not task.call.is_source:
            return self._flow is not None
        with self._lock:
            flow = self._flow
            if flow is None:
                return False
            goes_on = flow.gave(task.job, output)
            ready = self._take_ready(flow)
        self._hand_out(ready)
        return goes_on

    def finished(self, task: Task, *outputs: object) -> Task | None:
        """A job is done, with its last results; None is none.

        Returns:
            A job that the same executor may go on with at once.
        """
        return self._settle(lambda flow: flow.finished(task.job, *outputs), task.call.executor)

    def failed(self, task: Task, error: BaseException) -> Task | None:
        """A job's op has raised; returns as :meth:`finished`."""
        item = task.job.item
        if task.call.is_source:
            return self.broke(task, error)
        flow = self._flow
        if flow is None:
            return None
        failure_counter = flow.stages[task.job.number].failure_counter
        assert isinstance(failure_counter, StageFailureCounter)
        if not failure_counter.leaves_out or not isinstance(error, Exception):
            return self.broke(task, error)
        listed, good = failure_counter.describe(error, item), error
        kept = self._settle(
            lambda flow: flow.failed(task.job, failure_counter.note_bad(listed, good)),
            task.call.executor,
        )
        failure_counter.log_first(listed, error)
        return kept

    def broke(self, task: Task, error: BaseException) -> Task | None:
        """As :meth:`failed`, whatever may fail: nothing can go on after it."""
        raised = explained(error, task.call.name, task.job.item)
        return self._settle(lambda flow: flow.failed(task.job, raised), task.call.executor)

    def _settle(self, change: Callable[[Flow], None], executor: StageExecutor) -> Task | None:
        with self._lock:
            flow = self._flow
            if flow is None:
                return None
            change(flow)
            ready = self._take_ready(flow)
        return self._hand_out(ready, executor) if ready else None

    def _take_ready(self, flow: Flow) -> list[Job]:
        if flow.has_news:
            self._wakeup.set()
        # Never the flow's own list: others put jobs there as soon as the lock is free.
        ready = flow.ready
        if not ready:
            return []
        flow.ready = []
        return ready

    def _hand_out(self, ready: list[Job], executor: StageExecutor | None = None) -> Task | None:
        """Give jobs to their executors, except for one of the last stage of ``executor``.

        Returns:
            That one, with which the executor continues.
        """
        kept: Task | None = None
        ready.sort(key=_number, reverse=True)
        for job in ready:
            call = self._calls[job.number]
            assert call is not None
            task = Task(self, job, call)
            if kept is None and call.executor is executor:
                kept = task
            else:
                call.executor.put(task)
        return kept

    # The consumer ------------------------------------------------------------------------

    def take(self, timeout_s: float | None) -> object:
        """What comes next. On the consumer's thread, one at a time.

        Returns:
            The item; END after the last one.

        Raises:
            TimeoutError: If there is none in time; nothing is lost.
            ClosedLoaderError: If the epoch was left, or has failed before.
            BaseException: What was raised in an item's place.
        """
        caller = threading.get_ident()
        if self._taker:
            refuse(self._taker, caller)
        try:
            self._taker = caller
            self.in_transit = False
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
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"the pipeline gave nothing within {timeout_s:g} seconds. Nothing is lost: ask "
                    "again."
                )
            self._wakeup.wait(left)

    def _take_now(self) -> object:
        with self._lock:
            flow = self._flow
            if flow is None:
                if self.over_because:
                    self.in_transit = False
                    raise ClosedLoaderError(f"the pipeline was ended: {self.over_because}")
                return END
            item = flow.take()
            ready = self._take_ready(flow)
        self._hand_out(ready)
        return item

    def _opened(self, item: object) -> object:
        if item is END:
            self.is_over, self._flow = True, None
            return END
        if type(item) is not Raised:
            return opened(item)
        error = item.error
        self.leave(f"{type(error).__name__}: {text_of(error)}")
        self._told = id(error)
        try:
            raise error
        finally:
            del error, item  # the traceback holds this frame

    def loses(self, error: BaseException) -> bool:
        """Whether to go on after an exception, of :meth:`take` or after it, would lose an item."""
        return self.in_transit and self._told != id(error)

    @property
    def is_taken_here(self) -> bool:
        """Whether this thread is in :meth:`take`: what it does for others may be interrupted."""
        return self._taker == threading.get_ident()

    # Ends --------------------------------------------------------------------------------

    def let_go(self) -> None:
        """After an interruption on this thread: let go of the lock, if it is held here."""
        with contextlib.suppress(RuntimeError):
            while True:
                self._lock.release()

    def leave(self, why: str) -> None:
        """Drop all that is in flight, and take nothing more. Takes no lock; may be repeated."""
        if not self.is_over:
            self.over_because = why
        self.is_over = True
        self._flow = None
        self._wakeup.set()


def _number(job: Job) -> int:
    return job.number


def _make_flow(plan: Plan, listed: FailureList[FailedItem]) -> Flow:
    before = StageQueue(1)
    after = (
        StageQueue(SOURCE_ROOM, SOURCE_ROOM // 2) if plan.stages else StageQueue(plan.buffer_size)
    )
    stages: list[Stage] = [PipeStage(0, before, after, 1, in_order=True, failure_counter=None)]
    shared = None if plan.max_failures is None else Limit(plan.max_failures, "the pipeline")
    last_pipe = max(
        (place for place, one in enumerate(plan.stages) if not isinstance(one, Group)), default=-1
    )
    for place, one in enumerate(plan.stages):
        is_last = place == len(plan.stages) - 1
        before, after = after, StageQueue(plan.buffer_size if is_last else QUEUE_ROOM)
        if isinstance(one, Group):
            stages.append(GroupStage(place + 1, before, after, one.size, drop_last=one.drop_last))
            continue
        own = None
        if one.max_failures is not None:
            own = Limit(one.max_failures, f"stage '{one.name}'")
        failure_counter = StageFailureCounter(
            one.name, own, shared, listed, judges_shared=place == last_pipe
        )
        stages.append(
            PipeStage(
                place + 1,
                before,
                after,
                one.places,
                in_order=one.in_order,
                failure_counter=failure_counter,
            )
        )
    return Flow(stages, after)
