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

Assumes that one thread at a time calls the methods.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
        results: The iterator of a generator function's results; the executor sets it.
        outputs: Results that wait for a place in the queue; None if there were none so far.
        is_done: Whether no further result comes.
    """

    number: int
    item: object
    results: object = None
    outputs: collections.deque[object] | None = None
    is_done: bool = False


class StageQueue:
    """Items between two stages.

    Attributes:
        items: The items.
        capacity: How many there may be.
        low: A result that has waited is put here once no more than this number of items is left.
            A number below ``capacity - 1`` wakes the stage before more rarely, for several results
            at a time.
        is_ended: Whether no further item comes.
    """

    __slots__ = ("capacity", "is_ended", "items", "low")

    def __init__(self, capacity: int, low: int | None = None) -> None:
        self.items: collections.deque[object] = collections.deque()
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
        is_cut: Whether it takes nothing more in, since it or a later stage has failed.

    Args:
        capacity: Items that may be in the stage.
        in_order: Whether results leave in the order of the items.
    """

    def __init__(
        self,
        number: int,
        before: StageQueue,
        after: StageQueue,
        capacity: int,
        *,
        in_order: bool,
        failure_counter: FailureCounter | None = None,
    ) -> None:
        self.number = number
        self.before = before
        self.after = after
        self.failure_counter = failure_counter
        self._in_order = in_order
        self._capacity = self._free = capacity
        # In order: all jobs. Else: those whose results wait for the queue.
        self._held: collections.deque[Job] = collections.deque()
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
        while items and self._free:
            self._free -= 1
            job = Job(self.number, items.popleft())
            has_taken = True
            if type(job.item) is Raised:
                job.outputs, job.is_done = collections.deque([job.item]), True
                self._held.append(job)
                continue
            if self._in_order:
                self._held.append(job)
            ready.append(job)
        return has_taken

    def put(self, job: Job, output: object) -> bool:
        """Take a result of a job. Returns whether it was passed on at once."""
        after = self.after
        has_space = len(after.items) < after.capacity and not job.outputs
        if has_space and (not self._held or (self._in_order and self._held[0] is job)):
            after.items.append(output)
            return True
        if job.outputs is None:
            job.outputs = collections.deque()
        if not self._in_order and not job.outputs:
            self._held.append(job)
        job.outputs.append(output)
        return False

    def finish(self, job: Job) -> None:
        """Note that a job has no further result."""
        job.is_done = True
        job.item = None
        if not self._in_order and not job.outputs:
            self._free += 1

    def pass_on(self, ready: list[Job]) -> bool:
        """Pass on results as far as the queue has space.

        Returns:
            Whether a result was passed on, or a job has left the stage.
        """
        held, after = self._held, self.after
        has_moved = False
        while held:
            job = held[0]
            if job.outputs:
                if len(after.items) > after.low:
                    break
                after.items.append(job.outputs.popleft())
                has_moved = True
                if job.outputs:
                    continue
                if not job.is_done:
                    ready.append(job)  # it was suspended until its result was passed on
            if job.is_done:
                held.popleft()
                self._free += 1
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
        if self._free < self._capacity or self._held:
            return False
        error = None if self.failure_counter is None or self.is_cut else self.failure_counter.end()
        if error is not None:
            # A last job, which brings the exception: the stage is empty and takes nothing in.
            self._free -= 1
            outputs: collections.deque[object] = collections.deque([Raised(error)])
            self._held.append(Job(self.number, None, outputs=outputs, is_done=True))
            self.is_cut = True
            return True
        after.is_ended = True
        return True


class AggregateStage:
    """A stage that makes lists of items. It has the interface of a :class:`PipeStage`, but no jobs.

    Args:
        size: Items of a list.
        drop_last: Whether a shorter last list is left out.
    """

    failure_counter = None

    def __init__(
        self, number: int, before: StageQueue, after: StageQueue, size: int, *, drop_last: bool
    ) -> None:
        self.number = number
        self.before = before
        self.after = after
        self._size = size
        self._drop_last = drop_last
        self._items: list[object] = []
        self._full: object = NOTHING
        self.is_cut = False

    def cut(self) -> None:
        """See :meth:`PipeStage.cut`."""
        self.is_cut = self.before.is_ended = True
        self.before.items.clear()
        self._items.clear()
        self._full = NOTHING

    def take_in(self, ready: list[Job]) -> bool:  # noqa: ARG002 - the signature of PipeStage
        """Collect items. Returns whether any was taken."""
        items = self.before.items
        has_taken = False
        if self.is_cut:
            items.clear()
        while items and self._full is NOTHING:
            item = items.popleft()
            has_taken = True
            if type(item) is Raised:
                self._items.clear()
                self._full = item
                break
            self._items.append(item)
            if len(self._items) == self._size:
                self._full, self._items = self._items, []
        return has_taken

    def pass_on(self, ready: list[Job]) -> bool:  # noqa: ARG002 - the signature of PipeStage
        """Pass on a list if the queue has space. Returns whether it was passed on."""
        if self._full is NOTHING or len(self.after.items) >= self.after.capacity:
            return False
        self.after.items.append(self._full)
        self._full = NOTHING
        return True

    def end(self) -> bool:
        """End the queue after this stage if all is done. Returns whether anything has changed."""
        if self.after.is_ended or not self.before.is_ended or self.before.items:
            return False
        if self._full is not NOTHING:
            return False
        if self._items and not self._drop_last:
            self._full, self._items = self._items, []
            return True
        self._items.clear()
        self.after.is_ended = True
        return True


Stage = PipeStage | AggregateStage


class Flow:
    """One run through the source.

    The source is a stage, too: it has one job, which yields many results.

    Attributes:
        stages: The source and all others, in order.
        ready: Jobs that may start or resume. The caller takes them away after each call.

    Args:
        stages: The source and all others, in order. The last one's queue is the sink.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        self.ready: list[Job] = []
        self._pipes = {stage.number: stage for stage in stages if isinstance(stage, PipeStage)}
        self._sink = stages[-1].after

    def begin(self) -> None:
        """Start the source's job."""
        source = self.stages[0]
        source.before.items.append(NOTHING)
        source.before.is_ended = True
        self._advance(0)

    def yielded(self, job: Job, output: object) -> bool:
        """Take a result of a job that may have more.

        Returns:
            Whether the job may continue. If not, it comes to ``ready`` when it may.
        """
        stage = self._pipes[job.number]
        if job.number + 1 < len(self.stages) and self.stages[job.number + 1].is_cut:
            return False  # nothing takes the result in, and the job stays suspended
        is_passed = stage.put(job, output)
        if is_passed:
            self._advance(stage.number + 1)
        return is_passed

    def finished(self, job: Job, *outputs: object) -> None:
        """Take the last results of a job, or none: it is done."""
        stage = self._pipes[job.number]
        if stage.failure_counter is not None:
            stage.failure_counter.note_good()
        for output in outputs:
            stage.put(job, output)
        self._finish(stage, job)

    def failed(self, job: Job, error: BaseException | None) -> None:
        """Note that a job has failed.

        Args:
            job: The job.
            error: The exception that the consumer is to raise; None leaves the item out.
        """
        stage = self._pipes[job.number]
        if error is not None:
            stage.put(job, Raised(error))
            for earlier in self.stages[: stage.number + 1]:
                earlier.cut()
        self._finish(stage, job)

    def _finish(self, stage: PipeStage, job: Job) -> None:
        stage.finish(job)
        if stage.number + 1 < len(self.stages):
            self._advance(stage.number + 1)
        self._advance(stage.number)

    def take(self) -> object:
        """Return the consumer's next item, NOTHING if it is not there yet, or END."""
        items = self._sink.items
        if items:
            item = items.popleft()
            self._advance(len(self.stages) - 1)
            return item
        return END if self._sink.is_ended else NOTHING

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` would return anything but NOTHING."""
        return bool(self._sink.items) or self._sink.is_ended

    def _advance(self, number: int) -> None:
        """Move all items that can be moved, after a change at stage ``number``."""
        stages, ready = self.stages, self.ready
        todo = [number]
        while todo:
            number = todo.pop()
            if not 0 <= number < len(stages):
                continue
            stage = stages[number]
            has_passed = has_taken = False
            while True:
                passes = stage.pass_on(ready)
                takes = stage.take_in(ready)
                has_passed |= passes
                has_taken |= takes
                if not passes and not takes and not stage.end():
                    break
                has_passed |= not passes and not takes  # it has ended
            if has_taken:
                todo.append(number - 1)
            if has_passed:
                todo.append(number + 1)
