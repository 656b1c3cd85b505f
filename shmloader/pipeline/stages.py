"""The stages of a flow, the queues between them, and what flows through. Pure.

Items and exceptions flow, and each item with the checkpoint after it.

A stage counts as ``concurrency`` *workers*, one for each item that may be in work at once. At each
moment a worker is in work (its item is in the op, or about to be), behind (its results wait for
those of an earlier item), blocked (its results wait for space in the queue), or free. The meters
sum up these times over all workers.
"""

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmloader.pipeline.config import StageConfig

#: Stand where there is no item: no item yet, and no further item.
NOTHING, END = object(), object()


class Raised:
    """An exception that travels like an item, and that the consumer is to raise."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Checkpoint(NamedTuple):
    """The position after an item, where a resumed epoch begins.

    Attributes:
        saved: What the source's own ``state_dict()`` returned, or the exception that it raised;
            None if it has none.
        read: How many items the source has yielded since ``saved`` (or since its beginning) that
            are complete: all their results came before this position.
        results: Which results of incomplete items came before this position: pairs of a stage's
            number, and how many results of the first item that the stage gets in the resumed epoch
            came before. In ascending order of the stage's number.
    """

    saved: object
    read: int
    results: tuple[tuple[int, int], ...] = ()


# An item or a Raised, and the checkpoint after it, or None if there is no checkpoint.
_Entry = tuple[object, Checkpoint | None]


@dataclass(slots=True, eq=False)
class Meter:
    """Measures one stage. Times are sums over all workers, in ns.

    Attributes:
        in_count: Items taken in.
        out_count: Results passed on.
        failed_count: Calls that failed.
        op_ns: Time in the op.
        working_ns: Time in work.
        blocked_ns: Time blocked.
        behind_ns: Time behind.
        limiting_ns: Time in work or behind while the consumer waited.
    """

    in_count: int = 0
    out_count: int = 0
    failed_count: int = 0
    op_ns: int = 0
    working_ns: int = 0
    blocked_ns: int = 0
    behind_ns: int = 0
    limiting_ns: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """One item at one stage.

    Attributes:
        flow: The flow that takes the results.
        number: The number of the job's stage in the flow.
        stage: The stage's configuration.
        item: The item; None once the job is done.
        before: The checkpoint before the item; None for the source.
        after: The checkpoint after the item. For the source: after the newest result.
        skipped: How many of its first results are dropped, since they were delivered before the
            epoch was resumed.
        ready_ns: When the job could start, or resume.
        result_count: How many results the job has made.
        iterator: The iterator of a generator function's results; the executor sets it.
        outputs: Results that wait for space in the queue.
        is_done: Whether no further result comes.
    """

    flow: Any
    number: int
    stage: StageConfig
    item: object = None
    before: Checkpoint | None = None
    after: Checkpoint | None = None
    skipped: int = 0
    ready_ns: int = 0
    result_count: int = 0
    iterator: Any = None
    outputs: collections.deque[_Entry] = field(default_factory=collections.deque)
    is_done: bool = False

    @property
    def position(self) -> Checkpoint | None:
        """The checkpoint after the newest result."""
        if self.before is None or not self.stage.makes_many:
            return self.after
        results = (*self.before.results, (self.number, self.result_count))
        return self.before._replace(results=results)


class Stage:
    """The source, a stage whose jobs an executor runs, one that makes lists, or the sink.

    Attributes:
        inbox: The queue before the stage.
        is_fed: Whether further items may come to the inbox.
        working: The jobs that executors have, oldest first.
        free: How many further items the stage can take in.
        held: With ``in_order``, all jobs in the stage. Otherwise, the jobs whose results wait for
            space in the queue.
        meter: Measures the stage.

    Args:
        flow: The flow.
        number: The stage's number in the flow; the source is 0.
        config: The stage.
        limit: Most items in the inbox.
        start: The checkpoint where the epoch begins; None if items have none.
    """

    def __init__(
        self, flow: Any, number: int, config: StageConfig, limit: int, start: Checkpoint | None
    ) -> None:
        self._flow, self._number, self.config = flow, number, config
        self._limit = limit
        # If the inbox was full, further items come only when it has so many items or fewer: the
        # source is then woken more rarely.
        self._low, self._is_full = (limit // 2 if number == 1 else limit - 1), False
        self.inbox: collections.deque[_Entry] = collections.deque()
        self.is_fed = True
        self.working: dict[Job, None] = {}
        self.free = config.capacity
        self.held: collections.deque[Job] = collections.deque()
        self.meter = Meter()
        self._list: list[object] = []
        # The checkpoint after the item that was taken in last.
        self._newest, self._skipped = start, 0
        if start is not None:
            earlier = tuple(pair for pair in start.results if pair[0] < number)
            self._newest = start._replace(results=earlier)
            self._skipped = dict(start.results).get(number, 0)

    def accept(self, ready: list[Job]) -> None:
        """Take items as far as capacity goes. ``ready`` gets the jobs that start."""
        config, inbox = self.config, self.inbox
        while inbox and self.free:
            item, after = inbox.popleft()
            if type(item) is Raised:
                self._hold(item, None)
                continue
            self.meter.in_count += 1
            before, self._newest = self._newest, after
            if config.size:
                self._list.append(item)
                if len(self._list) == config.size:
                    self._hold(self._list, self._newest)
                continue
            self.free -= 1
            job = Job(self._flow, self._number, config, item, before, after, self._skipped)
            self._skipped = 0
            if config.in_order:
                self.held.append(job)
            self._run(job, ready)

    def _run(self, job: Job, ready: list[Job]) -> None:
        job.ready_ns = self._flow.now_ns
        self.working[job] = None
        ready.append(job)

    def _hold(self, output: object, after: Checkpoint | None) -> None:
        """Hold a result that no op has made, until it is passed on. A new list begins."""
        self._list = []
        self.free -= 1
        job = Job(self._flow, self._number, self.config, is_done=True)
        job.outputs.append((output, after))
        self.held.append(job)

    def has_space(self) -> bool:
        """Return whether a further item may come to the inbox."""
        count = len(self.inbox)
        self._is_full = count >= self._limit or (self._is_full and count > self._low)
        return not self._is_full

    def put(self, job: Job, output: object) -> None:
        """Receive a result of a job, which :meth:`pass_on` passes on."""
        job.result_count += 1
        if job.result_count > job.skipped or type(output) is Raised:
            if not job.outputs and not self.config.in_order:
                self.held.append(job)
            job.outputs.append((output, job.position))

    def finish(self, job: Job) -> None:
        """Receive a job that has no further result."""
        del self.working[job]
        job.is_done, job.item = True, None
        if not self.config.in_order and not job.outputs:
            self.free += 1

    def pass_on(self, following: "Stage", ready: list[Job]) -> bool:
        """Pass on results as far as the queue has space.

        Returns:
            Whether a result was passed on, or a job has left the stage.
        """
        held, has_moved = self.held, False
        while held:
            job = held[0]
            while job.outputs and following.has_space():
                following.inbox.append(job.outputs.popleft())
                self.meter.out_count += 1
                has_moved = True
            if job.outputs:
                break
            if job.is_done:
                self.free += 1
                has_moved = True
            elif job not in self.working:  # it was suspended until its result was passed on
                self._run(job, ready)
            if self.config.in_order and not job.is_done:
                break
            held.popleft()
        return has_moved

    def end(self, following: "Stage") -> bool:
        """End the queue after this stage if all is done. Returns whether anything has changed."""
        is_busy = self.inbox or self.held or self.free < self.config.capacity
        if not following.is_fed or self.is_fed or is_busy:
            return False
        if self._list and not self.config.drop_last:
            self._hold(self._list, self._newest)
            return True
        following.is_fed = False
        return True

    def measure(self, elapsed_ns: int, waited_ns: int) -> None:
        """Add a period in which the stage was in its present state.

        Args:
            elapsed_ns: Length of the period.
            waited_ns: For how much of the period the consumer waited.
        """
        meter, most = self.meter, self.config.concurrency  # items on their way do not count
        working = min(len(self.working), most)
        waiting = min(self.config.capacity - self.free, most) - working
        blocked = waiting if self.held and self.held[0].outputs else 0
        meter.working_ns += working * elapsed_ns
        meter.blocked_ns += blocked * elapsed_ns
        meter.behind_ns += (waiting - blocked) * elapsed_ns
        meter.limiting_ns += (working + waiting - blocked) * waited_ns
