"""One run through the source: a lock around its stages, and the hand-out of jobs that may start.

Guarantees:
    * A queue holds at most its capacity, and so does a stage: items in work, and results that wait
      for space in the queue. So the number of items in flight is bounded, whatever the consumer
      does.
    * A stage passes on the results of each item once. With ``in_order``, they leave in the order of
      the items.
    * No thread has to look for work: the thread that changes the flow hands out the jobs that may
      start then.
    * No op, nor any other function of the user's, is called while the lock is held.
    * :meth:`Flow.leave` takes no lock, because the garbage collector may call it anywhere. If a
      flow was left, results that still come to it are dropped.
"""

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from shmloader.batch.failures import describe_index
from shmloader.engine.failures import FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.interruptions import Wakeup
from shmloader.pipeline.config import (
    QUEUE_CAPACITY,
    SOURCE_CAPACITY,
    PipelineConfig,
    StageConfig,
)
from shmloader.pipeline.source import SourceReader
from shmloader.pipeline.stages import (
    END,
    NOTHING,
    FailedItem,
    FailureCounter,
    Job,
    Raised,
    Stage,
    explained,
)

_log = logging.getLogger("shmloader")

_SINK = StageConfig("sink", "sink")


class Flow:
    """One run through the source. Its methods are called from any thread.

    Attributes:
        is_over: Whether no further item comes: after the end, after an exception, or when left.
        over_because: Why it is over, in words; "" at its regular end, or if it is not over.
        delivered: The checkpoint after the item that :meth:`take` returned last; at the end, where
            the next epoch begins. None if there is none.
        measured: The source and all stages, with what measures them. It outlives the epoch.

    Args:
        config: The pipeline.
        runners: The source and all stages as they are run, and what runs them: an object with
            ``put(job)``. The source's op is called once, with the reader.
        failures: The pipeline's list of failures.
        reader: Iterates the source.
        clock: Returns the time in ns.
    """

    def __init__(
        self,
        config: PipelineConfig,
        runners: Sequence[tuple[StageConfig, Any]],
        failures: FailureList[FailedItem],
        reader: SourceReader,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._lock, self._wakeup, self._clock = threading.Lock(), Wakeup(), clock
        self._reader, self._failures = reader, failures
        # Keeps coroutines that resist being cancelled: asyncio complains when they are garbage.
        self._runners = runners
        # How many items may wait before each stage and the sink.
        limits = [1, SOURCE_CAPACITY, *[QUEUE_CAPACITY] * len(config.stages)]
        limits[len(runners)] = config.buffer_size
        self._counter = FailureCounter(config.max_failures)
        self._stages: Sequence[Stage] = ()
        for (stage, executor), limit in zip([*runners, (_SINK, None)], limits, strict=False):
            number = len(self._stages)
            make_job = functools.partial(Job, self, number, stage, executor)
            start = reader.start if number else None
            self._stages = (*self._stages, Stage(make_job, number, stage, limit, start))
        self.measured = [(stage.config, stage.meter) for stage in self._stages[:-1]]
        self.first_ns = self.now_ns = clock()
        self.waited_ns = self.item_count = 0
        self.delivered, self._end = reader.start, reader.start
        self.is_over = self._is_waited_for = False
        self.over_because = ""

    # Changes, from the executors ------------------------------------------------------------

    def begin(self) -> None:
        """Start the source, unless the epoch was left meanwhile."""
        with self._lock:
            stages = self._stages
            if not stages:
                return
            stages[0].inbox.append((self._reader, None))
            stages[0].is_fed = False
            ready = self._advance(stages, 0)
        self._hand_out(ready)

    def yielded(self, job: Job, output: object, op_ns: int) -> bool:
        """Receive a result of a job that may have more. None is no result, except of the source.

        Returns:
            Whether the job may continue. If not, the caller must not touch it any more: the job is
            given to its executor again when it may continue.
        """
        if not job.number:
            job.after = self._reader.checkpoint()
        outputs = () if output is None and job.number else (output,)
        return self._receive(job, outputs, op_ns, is_done=False)[1]

    def finished(self, job: Job, outputs: Sequence[object], op_ns: int) -> Job | None:
        """Receive a job's last results. Returns a job for the same executor, or None."""
        if not job.number:
            self._end = self._reader.end()
        return self._receive(job, outputs, op_ns, is_done=True, is_good=True)[0]

    def failed(self, job: Job, error: BaseException, *, is_lost: bool = False) -> Job | None:
        """Leave a job's item out, or have the consumer raise an exception.

        The loss of a call by a worker is raised even if ``max_failures`` allows failures. Returns
        the same as :meth:`finished`.
        """
        stages, name, item = self._stages, job.stage.name, job.item
        if not stages:
            return None
        counter = self._counter
        raised: BaseException | None
        is_counted = (
            job.number and counter.max_failures is not None and isinstance(error, Exception)
        )
        if is_lost or not is_counted:
            of_item = f" for item {describe_index(item)}" if job.number else ""
            raised = explained(error, f"stage '{name}'", of_item)
        else:
            assert isinstance(error, Exception)
            failed = FailedItem.of(name, item, error)
            with self._lock:
                raised, is_first = counter.add_failed(failed), counter.failed_count == 1
                self._failures.total += 1
                self._failures.add(failed)
            if is_first:
                _log.warning(
                    "stage '%s' failed for item %s, which is left out (max_failures): %s; further "
                    "failures are counted in the pipeline's `failures` and not logged",
                    name, describe_index(failed.item), describe_index(failed.error),
                )  # fmt: skip
        outputs = () if raised is None else (Raised(raised),)
        stages[job.number].meter.failed_count += 1
        return self._receive(job, outputs, 0, is_done=True)[0]

    def _receive(
        self,
        job: Job,
        outputs: Sequence[object],
        op_ns: int,
        *,
        is_done: bool,
        is_good: bool = False,
    ) -> tuple[Job | None, bool]:
        """Return a job that the same executor can continue with, and whether this one may."""
        number = job.number
        with self._lock:
            stages = self._stages
            if not stages:
                return None, False
            self._set_time()
            stage = stages[number]
            stage.meter.op_ns += op_ns
            if is_good and number:
                self._counter.add_samples(1, 0)
            for output in outputs:
                stage.put(job, output)
            if is_done:
                stage.finish(job)
            ready = self._advance(stages, number, number + 1)
            may_continue = not (is_done or job.outputs)
            if job.outputs and not is_done:  # suspended
                stage.stop(job)
        return self._hand_out(ready, job.executor if is_done else None), may_continue

    def _advance(self, stages: Sequence[Stage], *numbers: int) -> list[Job]:
        """Move all items that can be moved after a change at some stages, the last stage first.

        Returns the jobs that may start or resume.
        """
        todo, sink = list(numbers), stages[-1]
        ready: list[Job] = []
        while todo:
            number = todo.pop()
            stage = stages[number]
            if stage is sink:
                continue
            following, has_passed, has_accepted = stages[number + 1], False, False
            while True:
                if stage.held and stage.pass_on(following, ready):
                    has_passed = True
                if stage.inbox and stage.free:
                    stage.accept(ready)
                    has_accepted = True
                elif not stage.is_fed and stage.end(following):
                    has_passed = True
                else:
                    break
            if has_accepted and number and stages[number - 1].held:
                todo.append(number - 1)
            if has_passed:
                todo.append(number + 1)
        if sink.inbox or not sink.is_fed:
            self._wakeup.set()
        return ready

    def _hand_out(self, ready: list[Job], executor: Any = None) -> Job | None:
        """Give jobs to their executors, but return one of the latest stage of ``executor``."""
        kept: Job | None = None
        if len(ready) > 1:
            ready.sort(key=attrgetter("number"), reverse=True)
        for job in ready:
            if kept is None and job.executor is executor:
                kept = job
            else:
                job.executor.put(job)
        return kept

    # Time -----------------------------------------------------------------------------------

    def _set_time(self) -> None:
        """Set the present time. Called before each change."""
        now_ns = self._clock()
        if self._is_waited_for:
            self.waited_ns += now_ns - self.now_ns
        self.now_ns = now_ns

    def measure(self) -> None:
        """Bring the meters up to date, unless the epoch is over."""
        with self._lock:
            if self._stages:
                self._set_time()
            for stage in self._stages:
                stage.measure()

    # The consumer ---------------------------------------------------------------------------

    def take(self, timeout_s: float | None) -> object:
        """Return the next item, END after the last one, or a :class:`Raised`. One call at a time.

        A TimeoutError, after which nothing is lost, and a ClosedLoaderError, if the epoch was left
        or has failed before, also come as a :class:`Raised`.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (item := self._pop()) is NOTHING:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                with self._lock:
                    self._set_time()
                    self._is_waited_for = False
                text = f"the pipeline returned no item within {timeout_s:g} seconds. Nothing is "
                text += (
                    "lost: call next() again. The pipeline's stats() show which stages are busy."
                )
                return Raised(TimeoutError(text))
            self._wakeup.wait(None if left_s == math.inf else left_s)
        if type(item) is Raised:
            # The interpreter's exit stops pipelines: a daemon must not print that as an exception.
            if not threading.main_thread().is_alive() and threading.current_thread().daemon:
                threading.Event().wait()
            self.leave(f"{type(item.error).__name__}: {item.error}")
        return item

    def _pop(self) -> object:
        with self._lock:
            stages = self._stages
            if not stages:
                if not self.over_because:
                    return END
                return Raised(ClosedLoaderError(f"the pipeline was ended: {self.over_because}"))
            self._set_time()
            sink = stages[-1]
            self._is_waited_for = not sink.inbox and sink.is_fed
            if self._is_waited_for:
                return NOTHING
            if not sink.inbox:
                return self._finish()
            item, after = sink.inbox.popleft()
            if type(item) is not Raised:
                self.delivered = after
                self.item_count += 1
            ready = self._advance(stages, len(stages) - 2)
        self._hand_out(ready)
        return item

    def _finish(self) -> object:
        """End the epoch. Returns END, or what to raise since too many calls have failed."""
        error = self._counter.end()
        if error is not None:
            return Raised(error)
        self.is_over, self.delivered, self._stages = True, self._end, ()
        return END

    def leave(self, why: str) -> None:
        """End the epoch, and drop all that is in flight. Takes no lock; may be called again."""
        if not self.is_over:
            self.over_because = why
        self.is_over = True
        self._stages = ()
        self._wakeup.set()
