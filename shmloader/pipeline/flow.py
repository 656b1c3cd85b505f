"""Where each item is, and which job may start. Pure: no thread, no clock, nothing of the user's.

Guarantees:
    * A queue holds at most its room, and a stage at most its places: items in work, and results
      that wait for room. So what is in flight is bounded, whatever the consumer does.
    * Each item that is taken in leaves once: as its results, or not at all if it has none.
    * With ``in_order``, a stage's results come in the order of its items.
    * After a :class:`Raised` nothing more is passed on by the stage that it comes from, nor begun
      before it; and what gives many results there, the source for one, is not asked for more.
    * Nobody has to look for work: what may start after a call stands in ``ready``.

Assumes that one thread at a time calls the methods.
"""

import collections
from collections.abc import Sequence
from typing import Protocol


class Raised:
    """Travels in an item's place: what the consumer is to raise.

    Attributes:
        error: It.
    """

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Mark:
    """Says that there is no item."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: Nothing is there now.
NOTHING = Mark("NOTHING")
#: Nothing will come.
END = Mark("END")


class FailureCounter(Protocol):
    """Counts the calls of one stage."""

    def note_good(self) -> None:
        """A call has succeeded."""

    def end(self) -> BaseException | None:
        """The stage has ended: what is to be raised, if too many have failed."""


class Job:
    """One item at one stage.

    Attributes:
        number: Its stage's place in the flow.
        item: It; None once the job is done.
        stream: What gives its results one by one; the runner's.
        outputs: Results that wait for room on the queue; None: there are none.
        is_done: Whether no further result comes.
    """

    __slots__ = ("is_done", "item", "number", "outputs", "stream")

    def __init__(self, number: int, item: object) -> None:
        # Not the stage, which holds the job: a flow that was left must not wait for the collector
        # of cycles, nor what is in flight in it.
        self.number = number
        self.item = item
        self.stream: object = None
        self.outputs: collections.deque[object] | None = None
        self.is_done = False


class StageQueue:
    """Items between two stages.

    Attributes:
        items: They.
        room: How many there may be.
        low: How many may be left when a result that has waited for room is passed on. Less than
            ``room - 1``: whoever gives them is woken more rarely, for several at a time.
        is_ended: Whether no further one comes.
    """

    __slots__ = ("is_ended", "items", "low", "room")

    def __init__(self, room: int, low: int | None = None) -> None:
        self.items: collections.deque[object] = collections.deque()
        self.room = room
        self.low = room - 1 if low is None else low
        self.is_ended = False


class PipeStage:
    """A stage whose jobs somebody runs.

    Attributes:
        number: Its place in the flow; the source has 0.
        before: Where items come from.
        after: Where results go to.
        failure_counter: Counts its calls.
        is_cut: Whether it takes in nothing more, since it has failed, or a later one.

    Args:
        places: Items that may be in the stage.
        in_order: Whether results come in the order of the items.
        failure_counter: See above; None where a failure is raised.
    """

    def __init__(
        self,
        number: int,
        before: StageQueue,
        after: StageQueue,
        places: int,
        *,
        in_order: bool,
        failure_counter: FailureCounter | None,
    ) -> None:
        self.number = number
        self.before = before
        self.after = after
        self.failure_counter = failure_counter
        self._in_order = in_order
        self._places = places
        self._free = places
        # In order: all jobs. Else: those whose results wait for room.
        self._held: collections.deque[Job] = collections.deque()
        self.is_cut = False

    def cut(self) -> None:
        """Begin nothing more, and forget what waits to be begun, and what may still come."""
        self.is_cut = True
        self.before.items.clear()
        self.before.is_ended = True

    def take_in(self, ready: list[Job]) -> bool:
        """Begin jobs as far as items and places go; whether any was."""
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
        """A job has a result; whether it was passed on at once."""
        after = self.after
        has_room = len(after.items) < after.room and not job.outputs
        if has_room and (not self._held or (self._in_order and self._held[0] is job)):
            after.items.append(output)
            return True
        if job.outputs is None:
            job.outputs = collections.deque()
        if not self._in_order and not job.outputs:
            self._held.append(job)
        job.outputs.append(output)
        return False

    def finish(self, job: Job) -> None:
        """A job has no further result."""
        job.is_done = True
        job.item = None
        if not self._in_order and not job.outputs:
            self._free += 1

    def pass_on(self, ready: list[Job]) -> bool:
        """Pass on results as far as there is room; whether anything was, or a place became free."""
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
                    ready.append(job)  # it was at rest until its result was passed on
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
        """End the queue after it, if all is done; whether it was ended now."""
        after = self.after
        if after.is_ended or not self.before.is_ended or self.before.items:
            return False
        if self._free < self._places or self._held:
            return False
        error = None if self.failure_counter is None or self.is_cut else self.failure_counter.end()
        if error is not None:
            # The stage is empty, and takes nothing in any more.
            self._free -= 1
            job = Job(self.number, None)
            job.outputs, job.is_done = collections.deque([Raised(error)]), True
            self._held.append(job)
            self.is_cut = True
            return True
        after.is_ended = True
        return True


class GroupStage:
    """A stage that makes lists of items, at once.

    Attributes:
        number: See :class:`PipeStage`, likewise the others.

    Args:
        size: Items of a list.
        drop_last: Whether a last list that is shorter is left out.
    """

    failure_counter: FailureCounter | None = None

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
        """As a pipe's."""
        self.is_cut = self.before.is_ended = True
        self.before.items.clear()
        self._items.clear()
        self._full = NOTHING

    def take_in(self, ready: list[Job]) -> bool:  # noqa: ARG002 - as a pipe's
        """Collect items; whether any was taken."""
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

    def pass_on(self, ready: list[Job]) -> bool:  # noqa: ARG002 - as a pipe's
        """Pass on a list, if there is room; whether it was."""
        if self._full is NOTHING or len(self.after.items) >= self.after.room:
            return False
        self.after.items.append(self._full)
        self._full = NOTHING
        return True

    def end(self) -> bool:
        """End the queue after it, if all is done; whether anything has changed."""
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


Stage = PipeStage | GroupStage


class Flow:
    """One run through the source.

    The source is a stage as well: one job, which gives many results.

    Attributes:
        stages: The source and all others, in order.
        ready: Jobs that may start, or go on; to be taken away after each call.

    Args:
        stages: They.
        sink: The queue after the last.
    """

    def __init__(self, stages: Sequence[Stage], sink: StageQueue) -> None:
        self.stages = list(stages)
        self.ready: list[Job] = []
        self._pipes = {stage.number: stage for stage in stages if isinstance(stage, PipeStage)}
        self._sink = sink

    def begin(self) -> None:
        """Have the source's job start."""
        source = self.stages[0]
        source.before.items.append(NOTHING)
        source.before.is_ended = True
        self._settle(0)

    def gave(self, job: Job, output: object) -> bool:
        """A job has a result, and may have more.

        Returns:
            Whether it may go on; else it comes to ``ready`` when it may.
        """
        stage = self._pipes[job.number]
        if job.number + 1 < len(self.stages) and self.stages[job.number + 1].is_cut:
            return False  # nobody takes it, and the job rests for good
        is_passed = stage.put(job, output)
        if is_passed:
            self._settle(stage.number + 1)
        return is_passed

    def finished(self, job: Job, *outputs: object) -> None:
        """A job is done, with its last results, or none."""
        stage = self._pipes[job.number]
        if stage.failure_counter is not None:
            stage.failure_counter.note_good()
        for output in outputs:
            stage.put(job, output)
        self._finish(stage, job)

    def failed(self, job: Job, error: BaseException | None) -> None:
        """A job has failed.

        Args:
            job: It.
            error: What the consumer is to raise; None: the item is left out.
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
            self._settle(stage.number + 1)
        self._settle(stage.number)

    def take(self) -> object:
        """What comes next for the consumer; NOTHING if it is not there yet, END after the last."""
        items = self._sink.items
        if items:
            item = items.popleft()
            self._settle(len(self.stages) - 1)
            return item
        return END if self._sink.is_ended else NOTHING

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` would give anything but NOTHING."""
        return bool(self._sink.items) or self._sink.is_ended

    def _settle(self, number: int) -> None:
        """Move whatever can be moved, now that something has changed at this stage."""
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
