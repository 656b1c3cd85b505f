"""The stages of a flow, and the queues between them. Pure."""

import collections
from dataclasses import dataclass
from typing import Protocol

from shmloader.pipeline.entries import Checkpoint, Entry, Raised
from shmloader.pipeline.meters import Clock, Meter


class FailureCounter(Protocol):
    """Counts the calls of one stage."""

    def note_good(self) -> None:
        """Count a call that has succeeded."""

    def end(self) -> BaseException | None:
        """Return the exception to raise at the stage's end, if too many calls have failed."""


@dataclass(slots=True, eq=False)
class Job:
    """One item at one stage.

    Attributes:
        number: The number of the job's stage in the flow. It does not refer to the stage itself,
            which holds the job: a reference cycle would keep a flow that was left, and all that is
            in flight in it, alive until the garbage collector runs.
        item: The item; None once the job is done.
        after: The checkpoint after the item.
        before: The checkpoint before the item.
        dropped: How many of its first results are dropped, since they were delivered before the
            epoch was resumed.
        ready_ns: When the job could start, or resume.
        began_ns: When its op was called, or resumed; the executor sets it. 0 before that, and if
            the executor sets ``op_ns`` itself.
        op_ns: Time in the op so far.
        work_ns: Time in work so far: in the op, and before and after it.
        result_count: How many results the job has made.
        results: The iterator of a generator function's results; the executor sets it.
        outputs: Results that wait for space in the queue; None if there were none so far.
        is_done: Whether no further result comes.
    """

    number: int
    item: object
    after: Checkpoint | None = None
    before: Checkpoint | None = None
    dropped: int = 0
    ready_ns: int = 0
    began_ns: int = 0
    op_ns: int = 0
    work_ns: int = 0
    result_count: int = 0
    results: object = None
    outputs: collections.deque[Entry] | None = None
    is_done: bool = False


class StageQueue:
    """Items between two stages.

    Attributes:
        items: The items, each with its checkpoint.
        capacity: How many items may wait.
        low: If the queue was full, results that wait for space are put here only when at most this
            many items are left. With a number below ``capacity - 1``, the stage before the queue is
            woken more rarely, for several results at a time.
        is_ended: Whether no further item comes.
    """

    __slots__ = ("capacity", "is_ended", "items", "low")

    def __init__(self, capacity: int, low: int | None = None) -> None:
        self.items: collections.deque[Entry] = collections.deque()
        self.capacity = capacity
        self.low = capacity - 1 if low is None else low
        self.is_ended = False


class PipeStage:
    """A stage whose jobs an executor runs.

    Attributes:
        number: The stage's number in the flow; the source is 0.
        before: The queue that items come from.
        after: The queue that results go to.
        failure_counter: Counts the calls; None if the first failure is raised.
        meter: Measures the stage.
        working: The jobs that executors have, oldest first.
        free: How many further items the stage can take in.
        held: With ``in_order``, all jobs in the stage. Otherwise, the jobs whose results wait for
            space in the queue.
        is_cut: Whether the stage takes nothing more in, since it or a later stage has failed.

    Args:
        clock: The flow's clock.
        capacity: Items that may be in the stage.
        in_order: Whether results leave in the order of the items.
        concurrency: Items that may be in work at once; further items in the stage are on their way
            to a worker. None for ``capacity``.
        start: Where the epoch begins; None if items have no checkpoints.
    """

    def __init__(
        self,
        number: int,
        before: StageQueue,
        after: StageQueue,
        clock: Clock,
        capacity: int,
        *,
        in_order: bool,
        failure_counter: FailureCounter | None = None,
        concurrency: int | None = None,
        start: Checkpoint | None = None,
    ) -> None:
        self.number = number
        self.before = before
        self.after = after
        self.failure_counter = failure_counter
        self.meter = Meter(capacity if concurrency is None else concurrency)
        self.working: dict[Job, None] = {}
        self._clock = clock
        self._start = None if start is None else start.upto(number)
        self._dropped = 0 if start is None else dict(start.results).get(number, 0)
        self._in_order = in_order
        self._capacity = self.free = capacity
        self.held: collections.deque[Job] = collections.deque()
        self.is_cut = False

    def cut(self) -> None:
        """Start no further job, and drop the items that wait before the stage or still come."""
        self.is_cut = True
        self.before.items.clear()
        self.before.is_ended = True

    def take_in(self, ready: list[Job]) -> bool:
        """Start jobs as far as items and capacity go. Returns whether any item was taken in."""
        items = self.before.items
        has_taken = False
        if self.is_cut:
            items.clear()
        while items and self.free:
            self.free -= 1
            item, after = items.popleft()
            job = Job(self.number, item, after, self._start, self._dropped)
            has_taken = True
            if type(item) is Raised:
                job.outputs, job.is_done = collections.deque([(item, None)]), True
                self.held.append(job)
                continue
            self._start, self._dropped = after, 0
            self.meter.in_count += 1
            if self._in_order:
                self.held.append(job)
            job.ready_ns = self._clock.now_ns
            self.working[job] = None
            ready.append(job)
        return has_taken

    def _resume(self, job: Job, ready: list[Job]) -> None:
        job.ready_ns, job.began_ns = self._clock.now_ns, 0
        self.working[job] = None
        ready.append(job)

    def end_work(self, job: Job) -> None:
        """Note that an executor no longer has a job: the job is suspended or done."""
        if job not in self.working:
            return
        del self.working[job]
        now_ns = self._clock.now_ns
        job.work_ns += now_ns - job.ready_ns
        if job.began_ns:
            job.op_ns += now_ns - job.began_ns

    def put(self, job: Job, output: Entry) -> bool:
        """Take a result of a job. Returns whether it was passed on at once."""
        after = self.after
        has_space = len(after.items) < after.capacity and not job.outputs
        if has_space and (not self.held or (self._in_order and self.held[0] is job)):
            after.items.append(output)
            self.meter.out_count += 1
            return True
        if job.outputs is None:
            job.outputs = collections.deque()
        if not self._in_order and not job.outputs:
            self.held.append(job)
        job.outputs.append(output)
        return False

    def finish(self, job: Job) -> None:
        """Note that a job has no further result."""
        self.end_work(job)
        if job.op_ns and self.number:
            self.meter.calls.note(job.op_ns)
            self.meter.work_ns += job.work_ns
        job.is_done = True
        job.item = None
        if not self._in_order and not job.outputs:
            self.free += 1

    def pass_on(self, ready: list[Job]) -> bool:
        """Pass on results as far as the queue has space.

        Returns:
            Whether a result was passed on, or a job has left the stage.
        """
        held, after = self.held, self.after
        has_moved = False
        while held:
            job = held[0]
            if job.outputs:
                if len(after.items) > after.low:
                    break
                after.items.append(job.outputs.popleft())
                self.meter.out_count += 1
                has_moved = True
                if job.outputs:
                    continue
                if not job.is_done:  # it was suspended until its result was passed on
                    self._resume(job, ready)
            if job.is_done:
                held.popleft()
                self.free += 1
                has_moved = True
            elif self._in_order:
                break
            else:
                held.popleft()
        return has_moved

    def end(self) -> bool:
        """End the queue after this stage if all is done. Returns whether anything has changed."""
        after = self.after
        if after.is_ended or not self.before.is_ended or self.before.items:
            return False
        if self.free < self._capacity or self.held:
            return False
        error = None if self.failure_counter is None or self.is_cut else self.failure_counter.end()
        if error is not None:
            # A last job brings the exception. The stage is empty, and takes nothing more in.
            self.free -= 1
            outputs: collections.deque[Entry] = collections.deque([(Raised(error), None)])
            self.held.append(Job(self.number, None, outputs=outputs, is_done=True))
            self.is_cut = True
            return True
        after.is_ended = True
        return True

    def measure(self, elapsed_ns: int, waited_ns: int) -> None:
        """Have the meter add a period in which the stage was in its present state.

        Args:
            elapsed_ns: Length of the period.
            waited_ns: For how much of the period the consumer waited.
        """
        meter, working = self.meter, len(self.working)
        most = min(self._capacity, meter.concurrency)  # items that are on their way do not count
        working = min(working, most)
        held = min(self._capacity - self.free, most) - working
        is_blocked = held and self.held and self.held[0].outputs
        blocked = held if is_blocked else 0
        meter.add(working, blocked, held - blocked, elapsed_ns, waited_ns)
        meter.queued_ns += len(self.before.items) * elapsed_ns


class AggregateStage:
    """A stage that makes lists of items. It has the interface of a :class:`PipeStage`, but no jobs.

    Args:
        size: Number of items in a list.
        drop_last: Whether a shorter last list is left out.
    """

    failure_counter = None

    def __init__(
        self,
        number: int,
        before: StageQueue,
        after: StageQueue,
        size: int,
        *,
        drop_last: bool,
    ) -> None:
        self.number = number
        self.before = before
        self.after = after
        self.meter = Meter(1)
        self.working: dict[Job, None] = {}
        self._size = size
        self._drop_last = drop_last
        self._items: list[object] = []
        self.free = True
        # A full list, while it waits for the queue.
        self.held: collections.deque[Entry] = collections.deque()
        # The checkpoint after the newest item that was taken in.
        self._newest: Checkpoint | None = None
        self.is_cut = False

    def cut(self) -> None:
        """See :meth:`PipeStage.cut`."""
        self.is_cut = self.before.is_ended = True
        self.before.items.clear()
        self._items.clear()
        self.held.clear()
        self.free = True

    def take_in(self, ready: list[Job]) -> bool:  # noqa: ARG002 - the signature of PipeStage
        """Collect items. Returns whether any was taken."""
        items = self.before.items
        has_taken = False
        if self.is_cut:
            items.clear()
        while items and self.free:
            item, after = items.popleft()
            has_taken = True
            if type(item) is Raised:
                self._items.clear()
                self.held.append((item, None))
                self.free = False
                break
            self._items.append(item)
            self._newest = after
            self.meter.in_count += 1
            if len(self._items) == self._size:
                self._fill()
        return has_taken

    def _fill(self) -> None:
        self.held.append((self._items, self._newest))
        self._items = []
        self.free = False

    def pass_on(self, ready: list[Job]) -> bool:  # noqa: ARG002 - the signature of PipeStage
        """Pass on a list if the queue has space. Returns whether it was passed on."""
        if not self.held or len(self.after.items) >= self.after.capacity:
            return False
        self.after.items.append(self.held.popleft())
        self.free = True
        self.meter.out_count += 1
        return True

    def end(self) -> bool:
        """End the queue after this stage if all is done. Returns whether anything has changed."""
        if self.after.is_ended or not self.before.is_ended or self.before.items:
            return False
        if self.held:
            return False
        if self._items and not self._drop_last:
            self._fill()
            return True
        self._items.clear()
        self.after.is_ended = True
        return True

    def measure(self, elapsed_ns: int, waited_ns: int) -> None:
        """See :meth:`PipeStage.measure`."""
        self.meter.add(0, len(self.held), 0, elapsed_ns, waited_ns)
        self.meter.queued_ns += len(self.before.items) * elapsed_ns
