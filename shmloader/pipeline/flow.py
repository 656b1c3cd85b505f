"""Tracks where each item is, and which jobs may start. Pure: no thread, no clock, no user code.

Guarantees:
    * A queue holds at most its capacity, and a stage at most its own: items in work, and results
      that wait for a place in the queue. So what is in flight is bounded, whatever the consumer
      does.
    * Each item that is taken in leaves once: as its results, or not at all if it has none.
    * With ``in_order``, the results of a stage leave in the order of its items.
    * After a :class:`Raised`, the stage that it comes from passes nothing more on, and no stage
      before it starts a job. A job that yields many results there, such as the source's, is not
      resumed.
    * No thread has to look for work: the jobs that may start after a call are in ``ready``.
    * Each item travels with a :class:`Checkpoint`, if the source gives one with each of its items:
      where an epoch begins that continues after this item. That needs stages that keep the order.

Assumes that one thread at a time calls the methods, and first calls ``set_time``.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shmloader.pipeline.meters import SAMPLE_NS, Clock, Meter


@dataclass(slots=True, eq=False)
class Raised:
    """Travels in an item's place: an exception that the consumer is to raise."""

    error: BaseException


class Mark:
    """Says that there is no item."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: There is no item yet.
NOTHING = Mark("NOTHING")
#: There will be no further item.
END = Mark("END")


class Checkpoint(NamedTuple):
    """Where an epoch begins that continues after an item.

    Attributes:
        saved: What the source's own ``state_dict()`` returned; None if it has none.
        read: Items of the source after that, or after its beginning, that are complete: all their
            results came before.
        results: Which results of the next items came before: pairs of a stage's number, in
            ascending order, and how many results of the first item that it gets.
    """

    saved: object
    read: int
    results: tuple[tuple[int, int], ...] = ()

    def upto(self, number: int) -> "Checkpoint":
        """Return where the first item that stage ``number`` gets begins."""
        results = tuple(one for one in self.results if one[0] < number)
        return Checkpoint(self.saved, self.read, results)

    def within(self, number: int, result_count: int) -> "Checkpoint":
        """Return the checkpoint after some results that stage ``number`` makes of the next item."""
        return Checkpoint(self.saved, self.read, (*self.results, (number, result_count)))


# An item or a :class:`Raised`, and the checkpoint after it: None if there is none.
Entry = tuple[object, Checkpoint | None]


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
        number: Number of its stage in the flow. Not the stage, which holds the job: a reference
            cycle would keep a flow that was left, and all that is in flight in it, alive until the
            garbage collector runs.
        item: The item; None once the job is done.
        after: The checkpoint after the item.
        before: The checkpoint before it.
        dropped: How many of its first results are dropped, since they came before the epoch was
            resumed.
        ready_ns: When it could start, or resume.
        began_ns: When its op was called, or resumed; the executor sets it. 0 before, and where the
            executor reports ``op_ns`` itself.
        op_ns: Time in the op so far.
        work_ns: The same, with the time until the op was called.
        result_count: How many results it has made.
        results: The iterator of a generator function's results; the executor sets it.
        outputs: Results that wait for a place in the queue; None if there were none so far.
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
        capacity: How many there may be.
        low: A result that has waited is put here once no more than this number of items is left.
            A number below ``capacity - 1`` wakes the stage before more rarely, for several results
            at a time.
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
        number: Its number in the flow; the source is 0.
        before: The queue that items come from.
        after: The queue that results go to.
        failure_counter: Counts the calls; None where the first failure is raised.
        meter: Measures the stage.
        working: The jobs that executors have, oldest first.
        free: How many further items may be in the stage.
        held: In order: all jobs. Else: those whose results wait for the queue.
        is_cut: Whether it takes nothing more in, since it or a later stage has failed.

    Args:
        clock: The time.
        capacity: Items that may be in the stage.
        in_order: Whether results leave in the order of the items.
        places: Items that may be in work at once; others are on their way. None for ``capacity``.
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
        places: int | None = None,
        start: Checkpoint | None = None,
    ) -> None:
        self.number = number
        self.before = before
        self.after = after
        self.failure_counter = failure_counter
        self.meter = Meter(capacity if places is None else places)
        self.working: dict[Job, None] = {}
        self._clock = clock
        self._start = None if start is None else start.upto(number)
        self._dropped = 0 if start is None else dict(start.results).get(number, 0)
        self._in_order = in_order
        self._capacity = self.free = capacity
        self.held: collections.deque[Job] = collections.deque()
        self.is_cut = False

    def cut(self) -> None:
        """Start no further job, and drop the items that wait for one or may still come."""
        self.is_cut = True
        self.before.items.clear()
        self.before.is_ended = True

    def take_in(self, ready: list[Job]) -> bool:
        """Start jobs as far as items and capacity go. Returns whether any was started."""
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
        """Note that an executor has a job no longer: it is suspended or done."""
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
            # A last job, which brings the exception: the stage is empty and takes nothing in.
            self.free -= 1
            outputs: collections.deque[Entry] = collections.deque([(Raised(error), None)])
            self.held.append(Job(self.number, None, outputs=outputs, is_done=True))
            self.is_cut = True
            return True
        after.is_ended = True
        return True

    def measure(self, elapsed_ns: int, waited_ns: int) -> None:
        """Have the meter add a time in which the stage was as it is now."""
        meter, working = self.meter, len(self.working)
        places = min(self._capacity, meter.places)  # items that are on their way do not count
        working = min(working, places)
        held = min(self._capacity - self.free, places) - working
        is_blocked = held and self.held and self.held[0].outputs
        blocked = held if is_blocked else 0
        meter.add(working, blocked, held - blocked, elapsed_ns, waited_ns)
        meter.queued_ns += len(self.before.items) * elapsed_ns


class AggregateStage:
    """A stage that makes lists of items. It has the interface of a :class:`PipeStage`, but no jobs.

    Args:
        size: Items of a list.
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
        # The checkpoint after the newest item.
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


Stage = PipeStage | AggregateStage


class Flow:
    """One run through the source.

    The source is a stage, too: it has one job, which yields many results.

    Attributes:
        stages: The source and all others, in order.
        ready: Jobs that may start or resume. The caller takes them away after each call.
        clock: The time.
        delivered: The checkpoint after the item that :meth:`take` returned last; after END, where
            the next epoch begins. None if there is none.
        sink_meter: Measures the sink: how many items wait in it.

    Args:
        stages: The source and all others, in order. The last one's queue is the sink.
        clock: The clock of all stages.
        start: Where the epoch begins; None if items have no checkpoints.
    """

    def __init__(
        self, stages: Sequence[Stage], clock: Clock, start: Checkpoint | None = None
    ) -> None:
        self.stages = list(stages)
        self.ready: list[Job] = []
        self.clock = clock
        self.delivered = start
        self.sink_meter = Meter(1)
        self._end: Checkpoint | None = None
        self._measured_ns, self._measured_waited_ns = clock.now_ns, clock.waited_ns
        self._pipes = {stage.number: stage for stage in stages if isinstance(stage, PipeStage)}
        self._sink = stages[-1].after

    def set_time(self, now_ns: int) -> None:
        """Set the clock. Called before each change."""
        clock = self.clock
        if now_ns > clock.now_ns:  # another thread may have been faster
            if clock.is_waiting:
                clock.waited_ns += now_ns - clock.now_ns
            clock.now_ns = now_ns
            if now_ns - self._measured_ns >= SAMPLE_NS:
                self.measure()

    def measure(self) -> None:
        """Have all meters add the time since they did so last."""
        clock = self.clock
        elapsed_ns = clock.now_ns - self._measured_ns
        waited_ns = clock.waited_ns - self._measured_waited_ns
        self._measured_ns, self._measured_waited_ns = clock.now_ns, clock.waited_ns
        for stage in self.stages:
            stage.measure(elapsed_ns, waited_ns)
        self.sink_meter.queued_ns += len(self._sink.items) * elapsed_ns

    def begin(self, item: object = NOTHING) -> None:
        """Start the source's job.

        Args:
            item: The job's item, which the executor gets.
        """
        source = self.stages[0]
        source.before.items.append((item, None))
        source.before.is_ended = True
        self._advance(0)

    def yielded(self, job: Job, output: object, after: Checkpoint | None = None) -> bool:
        """Take a result of a job that may have more.

        Args:
            job: The job.
            output: The result.
            after: The checkpoint after the result, if it comes from the source.

        Returns:
            Whether the job may continue. If not, it comes to ``ready`` when it may.
        """
        stage = self._pipes[job.number]
        following = job.number + 1
        if following < len(self.stages) and self.stages[following].is_cut:
            return False  # nothing takes the result in, and the job stays suspended
        now_ns = self.clock.now_ns
        op_ns = now_ns - job.began_ns
        job.op_ns += op_ns
        job.began_ns = now_ns
        if not job.number:
            stage.meter.calls.note(op_ns)
        job.result_count += 1
        if job.result_count <= job.dropped:
            return True
        if job.before is not None:
            after = job.before.within(job.number, job.result_count)
        is_passed = stage.put(job, (output, after))
        if is_passed:
            self._advance(following)
        else:
            stage.end_work(job)
        return is_passed

    def source_finished(self, job: Job, end: Checkpoint | None) -> None:
        """Note that the source's job is done.

        Args:
            job: The job.
            end: Where the next epoch begins.
        """
        self._end = end
        self.finished(job)

    def finished(self, job: Job, *outputs: object) -> None:
        """Take the last results of a job, or none: it is done."""
        stage = self._pipes[job.number]
        if stage.failure_counter is not None:
            stage.failure_counter.note_good()
        count, total = job.result_count, job.result_count + len(outputs)
        for output in outputs:
            count += 1
            if count > job.dropped:
                after = job.after
                if count < total and job.before is not None:
                    after = job.before.within(job.number, count)
                stage.put(job, (output, after))
        job.result_count = total
        if job.number and not total:
            stage.meter.left_out_count += 1
        self._finish(stage, job)

    def failed(self, job: Job, error: BaseException | None) -> None:
        """Note that a job has failed.

        Args:
            job: The job.
            error: The exception that the consumer is to raise; None leaves the item out.
        """
        stage = self._pipes[job.number]
        stage.meter.failed_count += 1
        if error is not None:
            stage.put(job, (Raised(error), None))
            for earlier in self.stages[: stage.number + 1]:
                earlier.cut()
        self._finish(stage, job)

    def _finish(self, stage: PipeStage, job: Job) -> None:
        stage.finish(job)
        self._advance(stage.number, stage.number + 1)

    def take(self) -> object:
        """Return the consumer's next item, NOTHING if it is not there yet, or END."""
        items = self._sink.items
        if items:
            item, after = items.popleft()
            if type(item) is not Raised:
                self.delivered = after
                self.sink_meter.out_count += 1
            self._advance(len(self.stages) - 1)
            return item
        if self._sink.is_ended:
            self.delivered = self._end
            self.measure()
            return END
        return NOTHING

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` would return anything but NOTHING."""
        return bool(self._sink.items) or self._sink.is_ended

    def _advance(self, *numbers: int) -> None:
        """Move all items that can be moved, after a change at some stages, the last one first."""
        stages, ready = self.stages, self.ready
        todo = list(numbers)
        while todo:
            number = todo.pop()
            if number == len(stages):
                continue
            stage = stages[number]
            before = stage.before
            has_passed = has_taken = False
            while True:
                if stage.held and stage.pass_on(ready):
                    has_passed = True
                if before.items and (stage.free or stage.is_cut) and stage.take_in(ready):
                    has_taken = True
                elif before.is_ended and stage.end():
                    has_passed = True
                else:
                    break
            if has_taken and number and stages[number - 1].held:
                todo.append(number - 1)
            if has_passed:
                todo.append(number + 1)
