"""The stages of a flow, the queues between them, and what flows through. Pure.

Items and exceptions flow, and each item with the checkpoint after it.
"""

import collections
import contextlib
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import PurePath
from typing import Any, NamedTuple

from shmloader.batch.failures import RemoteError, describe_index
from shmloader.engine.failures import FailureLimit
from shmloader.errors import TooManyFailures
from shmloader.pipeline.config import StageConfig

#: Stand where there is no item: no item yet, and no further item.
NOTHING, END = object(), object()


# A str of up to this length is listed whole. This is long enough for a URL.
_LISTED_CHARACTERS = 2_000


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
    """Measures one stage: items, calls that failed, and times in ns.

    ``op_ns`` is the time in the op. ``busy_ns`` is that in which jobs were in work, or about to be.
    """

    in_count: int = 0
    out_count: int = 0
    failed_count: int = 0
    op_ns: int = 0
    busy_ns: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """One item at one stage, and its results that wait for space in the queue.

    Attributes:
        item: The item; None once the job is done.
        before: The checkpoint before the item; None for the source.
        after: The checkpoint after the item. For the source: after the newest result.
        skipped: How many of its first results are dropped, since they were delivered before the
            epoch was resumed.
        ready_ns: When the job could start, or resume, or was measured last.
        iterator: The iterator of a generator function's results; the executor sets it.
    """

    flow: Any
    number: int
    stage: StageConfig
    executor: Any
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


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item that a stage has left out because its op failed: see ``Pipeline.failures``."""

    stage: str
    item: object
    error: Exception
    traceback: str = field(repr=False)

    @classmethod
    def of(cls, stage: str, item: object, error: Exception) -> "FailedItem":
        """Return the entry for a failure, which keeps no frame of the op alive.

        This calls the item's ``repr``, so it must not be called under a lock.
        """
        remote, text = RemoteError.of(error, f"in stage '{stage}'"), describe_index(item)
        is_small = not isinstance(item, str) or len(item) <= _LISTED_CHARACTERS
        is_listed = is_small and isinstance(item, str | numbers.Number | PurePath | None)
        summarized = remote.summarized(f"The item was {text}.")
        return cls(stage, item if is_listed else text, summarized, remote.text)


class FailureCounter(FailureLimit):
    """Counts the calls of one epoch, of all stages. Used under the flow's lock.

    With None, the first failure is raised. Calls before a resumed epoch are not counted.
    """

    def __init__(self, max_failures: int | Fraction | None) -> None:
        super().__init__(max_failures, may_all_fail=False)
        self._last: FailedItem | None = None

    def add_failed(self, failed: FailedItem) -> TooManyFailures | None:
        """Count a call that has failed. Returns the exception to raise if too many have."""
        self._last = failed
        return self._error_if(self.add_samples(1, 1))

    def end(self) -> TooManyFailures | None:
        """Return the exception to raise at the epoch's end, if too many or all calls failed."""
        return self._error_if(self.is_too_much)

    def _error_if(self, is_passed: bool) -> TooManyFailures | None:
        last = self._last
        if last is None or not is_passed:
            return None
        raised = TooManyFailures(
            f"{self.failed_count} of {self.sample_count} calls failed, with "
            f"max_failures={self.max_failures}. The last was in stage '{last.stage}' for item "
            f"{describe_index(last.item)}: see the cause. The pipeline's `failures` lists the "
            "newest."
        )
        raised.__cause__ = last.error
        return raised


def explained(error: BaseException, what: str, of_item: str) -> BaseException:
    """Return the exception to raise to the consumer when the user's code has raised one.

    It is the same exception if possible, with a note that says what has failed.
    """
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        # Raised unchanged, it would end the consumer's loop or task, or the program.
        cause, name = error, type(error).__name__
        error = RuntimeError(f"{what} raised {name}, which would end more than the epoch: {cause}")
        error.__cause__ = cause
    note = f"{what[0].upper()}{what[1:]} failed{of_item}."
    with contextlib.suppress(Exception):  # an exception may refuse attributes
        if note not in getattr(error, "__notes__", ()):  # several coroutines may share it
            error.add_note(note)
    return error


class Stage:
    """The source, a stage whose jobs an executor runs, one that makes lists, or the sink.

    Attributes:
        inbox: The queue before the stage.
        is_fed: Whether further items may come to the inbox.
        working: The jobs that executors have.
        free: How many further items the stage can take in.
        held: With ``in_order``, all jobs in the stage. Otherwise, the jobs whose results wait for
            space in the queue.

    Args:
        make_job: Returns a job of the stage for an item.
        number: The stage's number in the flow; the source is 0.
        config: The stage.
        limit: Most items in the inbox.
        start: The checkpoint where the epoch begins; None if items have none.
    """

    def __init__(
        self,
        make_job: Callable[..., Job],
        number: int,
        config: StageConfig,
        limit: int,
        start: Checkpoint | None,
    ) -> None:
        self._make_job, self.config, self._limit = make_job, config, limit
        # If the inbox was full, further items come only when it has so many items or fewer: the
        # source is then woken more rarely.
        self._low, self._is_full = (limit // 2 if number == 1 else limit - 1), False
        self.inbox: collections.deque[_Entry] = collections.deque()
        self.is_fed = True
        self.working: set[Job] = set()
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
            job = self._make_job(item, before, after, self._skipped)
            self._skipped = 0
            if config.in_order:
                self.held.append(job)
            self._run(job, ready)

    def _run(self, job: Job, ready: list[Job]) -> None:
        job.ready_ns = job.flow.now_ns
        self.working.add(job)
        ready.append(job)

    def _hold(self, output: object, after: Checkpoint | None) -> None:
        """Hold a result that no op has made, until it is passed on. A new list begins."""
        self._list = []
        self.free -= 1
        job = self._make_job(is_done=True)
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
        self.stop(job)
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

    def stop(self, job: Job) -> None:
        """Receive a job that has ended, or cannot continue."""
        self.meter.busy_ns += job.flow.now_ns - job.ready_ns
        self.working.remove(job)

    def measure(self) -> None:
        """Add the time until now in which the present jobs were in work."""
        for job in self.working:
            self.meter.busy_ns += job.flow.now_ns - job.ready_ns
            job.ready_ns = job.flow.now_ns
