"""The stages of a flow, the queues between them, and what flows through. Pure.

Items and exceptions flow, and each item with the checkpoint after it.

A stage counts as ``concurrency`` *workers*, one for each item that may be in work at once. At each
moment a worker is in work (its item is in the op, or about to be), behind (its results wait for
those of an earlier item), blocked (its results wait for space in the queue), or free. The meters
sum up these times over all workers. The state is measured only before a change that comes at least
``SAMPLE_NS`` after the last measurement, and counts for all the time since then: summing up at each
change would cost more than passing the items on.

The module is long because nearly half of it documents attributes.
"""

import collections
import enum
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from shmloader.insight.sums import Histogram
from shmloader.pipeline.failures import FailureCounter

#: Changes that come sooner after one another than this are summed up together, in ns.
SAMPLE_NS = 200_000


class Mark(enum.Enum):
    """Stands where there is no item."""

    NOTHING = "there is no item yet"
    END = "there will be no further item"


NOTHING, END = Mark.NOTHING, Mark.END


@dataclass(slots=True, eq=False)
class Raised:
    """An exception that travels like an item, and that the consumer is to raise."""

    error: BaseException


class Checkpoint(NamedTuple):
    """The position after an item, where a resumed epoch begins.

    Attributes:
        saved: What the source's own ``state_dict()`` returned; None if it has none.
        read: How many items the source has yielded since ``saved`` (or since its beginning) that
            are complete: all their results came before this position.
        results: Which results of incomplete items came before this position: pairs of a stage's
            number, and how many results of the first item that the stage gets in the resumed epoch
            came before. In ascending order of the stage's number.
    """

    saved: object
    read: int
    results: tuple[tuple[int, int], ...] = ()

    def upto(self, number: int) -> "Checkpoint":
        """Return the position before the first item that stage ``number`` gets."""
        results = tuple(pair for pair in self.results if pair[0] < number)
        return Checkpoint(self.saved, self.read, results)

    def within(self, number: int, result_count: int) -> "Checkpoint":
        """Return the position after some results that a stage makes of the next item."""
        return Checkpoint(self.saved, self.read, (*self.results, (number, result_count)))


# An item or a Raised, and the checkpoint after it, or None if there is no checkpoint.
_Entry = tuple[object, Checkpoint | None]


@dataclass(slots=True, eq=False)
class Clock:
    """The time of an epoch, in ns: all of it, and the part in which the consumer waited.

    Attributes:
        first_ns: When the epoch began.
        now_ns: The present time.
        waited_ns: How long the consumer has waited so far.
        startup_ns: How long the consumer has waited for the first item; 0 before it has come.
        is_waiting: Whether the consumer waits now.
    """

    first_ns: int = 0
    now_ns: int = 0
    waited_ns: int = 0
    startup_ns: int = 0
    is_waiting: bool = False


@dataclass(slots=True, eq=False)
class Meter:
    """Measures one stage, or the sink. Times are sums over all workers.

    Attributes:
        concurrency: Number of workers.
        in_count: Items taken in.
        out_count: Results passed on.
        failed_count: Calls that failed.
        left_out_count: Calls without a result.
        calls: Times in the op, one for each call; for the source, one for each item.
        op_ns: Sum of these times.
        work_ns: Time in work of these calls: in the op, and before and after it; 0 for the source.
        working_ns: Time in work.
        blocked_ns: Time blocked.
        behind_ns: Time behind.
        queued_ns: Number of items in the queue before the stage, over time.
        waited_occupied_ns: Time in work or behind while the consumer waited.
    """

    concurrency: int = 1
    in_count: int = 0
    out_count: int = 0
    failed_count: int = 0
    left_out_count: int = 0
    calls: Histogram = field(default_factory=Histogram)
    op_ns: int = 0
    work_ns: int = 0
    working_ns: int = 0
    blocked_ns: int = 0
    behind_ns: int = 0
    queued_ns: int = 0
    waited_occupied_ns: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """One item at one stage.

    A job does not refer to its stage, which holds it: a reference cycle would keep all that is in
    flight alive until the garbage collector runs.

    Attributes:
        number: The number of the job's stage in the flow.
        item: The item; None once the job is done.
        after: The checkpoint after the item. For the source, the epoch sets it: to the one after
            the newest result, and at the end to where the next epoch begins.
        before: The checkpoint before the item; None for the source.
        dropped: How many of its first results are dropped, since they were delivered before the
            epoch was resumed.
        ready_ns: When the job could start, or resume.
        began_ns: When its op was called, or resumed; the executor sets it. 0 before that, and if
            the executor sets ``op_ns`` itself.
        op_ns: Time in the op so far.
        work_ns: Time in work so far: in the op, and before and after it.
        result_count: How many results the job has made.
        results: The iterator of a generator function's results; the executor sets it.
        outputs: Results that wait for space in the queue.
        is_done: Whether no further result comes.
        epoch: The epoch that takes the results; it sets this when it hands the job out.
        stage: The stage's configuration, and ``executor``: what runs the job; set with ``epoch``.
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
    results: Any = None
    outputs: collections.deque[_Entry] = field(default_factory=collections.deque)
    is_done: bool = False
    epoch: Any = None
    stage: Any = None
    executor: Any = None

    def after_result(self, count: int) -> Checkpoint | None:
        """Return the checkpoint after the job's first ``count`` results, if more may follow."""
        return self.after if self.before is None else self.before.within(self.number, count)


@dataclass(slots=True, eq=False)
class StageQueue:
    """Items between two stages.

    Attributes:
        capacity: How many items may wait.
        low: If the queue was full, results that wait for space are put here only when at most this
            many items are left: with a low number, the stage before the queue is woken more rarely.
        items: The items, each with its checkpoint.
        is_ended: Whether no further item comes.
    """

    capacity: int
    low: int
    items: collections.deque[_Entry] = field(default_factory=collections.deque)
    is_ended: bool = False


@dataclass(eq=False)
class Stage:
    """The source, a stage whose jobs an executor runs, or one that makes lists and has no jobs.

    Attributes:
        working: The jobs that executors have, oldest first.
        free: How many further items the stage can take in.
        held: With ``in_order``, all jobs in the stage. Otherwise, the jobs whose results wait for
            space in the queue.
        is_cut: Whether the stage takes nothing more in, since it or a later stage has failed.
        meter: Measures the stage.

    Args:
        number: The stage's number in the flow; the source is 0.
        before: The queue that items come from.
        after: The queue that results go to.
        clock: The flow's clock.
        capacity: Items that may be in the stage.
        in_order: Whether results leave in the order of the items.
        concurrency: Items that may be in work at once; further items in the stage are on their way
            to a worker. 0 for ``capacity``.
        start: Where the epoch begins; None if items have no checkpoints.
        counter: Counts the calls; None if the first failure is raised.
        judged: The counters that may raise an exception at the stage's end.
        size: Length of the lists that the stage makes; 0 if it has jobs.
        drop_last: Whether a shorter last list is left out.
    """

    number: int
    before: StageQueue
    after: StageQueue
    clock: Clock
    capacity: int = 1
    _: KW_ONLY
    in_order: bool = True
    concurrency: int = 0
    start: Checkpoint | None = None
    counter: FailureCounter | None = None
    judged: Sequence[FailureCounter] = ()
    size: int = 0
    drop_last: bool = False
    working: dict[Job, None] = field(init=False, default_factory=dict)
    held: collections.deque[Job] = field(init=False, default_factory=collections.deque)
    is_cut: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.meter = Meter(self.concurrency or self.capacity)
        self.free = self.capacity
        self._list: list[object] = []
        # The checkpoint after the item that was taken in last.
        self._newest = self.start and self.start.upto(self.number)
        self._dropped = dict(self.start.results).get(self.number, 0) if self.start else 0

    def cut(self) -> None:
        """Start no further job, and drop the items that wait before the stage or still come."""
        self.is_cut = self.before.is_ended = True
        self.before.items.clear()

    def accept(self, ready: list[Job]) -> bool:
        """Take items as far as capacity goes. Returns whether any was taken.

        Args:
            ready: Gets the jobs that start.
        """
        items = self.before.items
        if self.is_cut:
            items.clear()
        has_taken = bool(items and self.free)
        while items and self.free:
            item, after = items.popleft()
            if type(item) is Raised:
                self._list = []
                self._hold(item, None)
                continue
            self.meter.in_count += 1
            before, self._newest = self._newest, after
            if not self.size:
                self.free -= 1
                job = Job(self.number, item, after, before, self._dropped)
                self._dropped = 0
                if self.in_order:
                    self.held.append(job)
                self._start(job, ready)
                continue
            self._list.append(item)
            if len(self._list) == self.size:
                self._hold_list()
        return has_taken

    def _start(self, job: Job, ready: list[Job]) -> None:
        """Have an executor start or resume a job."""
        job.ready_ns, job.began_ns = self.clock.now_ns, 0
        self.working[job] = None
        ready.append(job)

    def _hold(self, output: object, after: Checkpoint | None) -> None:
        """Hold a result that no op has made, until it is passed on."""
        self.free -= 1
        job = Job(self.number, None, is_done=True)
        job.outputs.append((output, after))
        self.held.append(job)

    def _hold_list(self) -> None:
        made, self._list = self._list, []
        self._hold(made, self._newest)

    def end_work(self, job: Job) -> None:
        """Take a job back from its executor, since it is suspended or done."""
        if job not in self.working:
            return
        del self.working[job]
        now_ns = self.clock.now_ns
        job.work_ns += now_ns - job.ready_ns
        if job.began_ns:
            job.op_ns += now_ns - job.began_ns

    def put(self, job: Job, output: _Entry) -> bool:
        """Receive a result of a job. Returns whether it was passed on at once."""
        after = self.after
        has_space = len(after.items) < after.capacity and not job.outputs
        if has_space and (not self.held or (self.in_order and self.held[0] is job)):
            after.items.append(output)
            self.meter.out_count += 1
            return True
        if not self.in_order and not job.outputs:
            self.held.append(job)
        job.outputs.append(output)
        return False

    def finish(self, job: Job) -> None:
        """Count a call that has no further result."""
        self.end_work(job)
        if job.op_ns and self.number:
            self.meter.calls.note(job.op_ns)
            self.meter.op_ns += job.op_ns
            self.meter.work_ns += job.work_ns
        job.is_done, job.item = True, None
        if not self.in_order and not job.outputs:
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
                    self._start(job, ready)
            if job.is_done:
                held.popleft()
                self.free += 1
                has_moved = True
            elif self.in_order:
                break
            else:
                held.popleft()
        return has_moved

    def end(self) -> bool:
        """End the queue after this stage if all is done. Returns whether anything has changed."""
        before = self.before
        is_busy = before.items or self.held or self.free < self.capacity
        if self.after.is_ended or not before.is_ended or is_busy:
            return False
        if self._list and not self.drop_last:
            self._hold_list()
            return True
        for counter in () if self.is_cut else self.judged:
            error = counter.end()
            if error is not None:  # the stage is empty, and takes nothing more in
                self._hold(Raised(error), None)
                self.is_cut = True
                return True
        self.after.is_ended = True
        return True

    def measure(self, elapsed_ns: int, waited_ns: int) -> None:
        """Add a period in which the stage was in its present state.

        Args:
            elapsed_ns: Length of the period.
            waited_ns: For how much of the period the consumer waited.
        """
        meter = self.meter
        most = min(self.capacity, meter.concurrency)  # items that are on their way do not count
        working = min(len(self.working), most)
        waiting = min(self.capacity - self.free, most) - working
        is_blocked = waiting and self.held and self.held[0].outputs
        blocked = waiting if is_blocked else 0
        meter.working_ns += working * elapsed_ns
        meter.blocked_ns += blocked * elapsed_ns
        meter.behind_ns += (waiting - blocked) * elapsed_ns
        meter.waited_occupied_ns += (working + waiting - blocked) * waited_ns
        meter.queued_ns += len(self.before.items) * elapsed_ns
