"""Tracks where each item is, and which jobs may start. Pure: no thread, no clock, no user code.

Guarantees:
    * A queue holds at most its capacity, and so does a stage: items in work, and results that wait
      for space in the queue. So the number of items in flight is bounded, whatever the consumer
      does.
    * A stage passes on the results of each item once. With ``in_order``, they leave in the order of
      the items.
    * After a :class:`Raised`, neither the stage that it comes from nor a stage before it starts a
      job. Results of jobs that are still in work may follow it. The consumer stops at it.
    * No thread has to look for work: the jobs that may start after a call are in ``ready``.

Assumes that one thread at a time calls the methods, and first calls ``set_time``.
"""

from collections.abc import Sequence

from shmloader.grammar import counted, seconds
from shmloader.pipeline.failures import FailedItem
from shmloader.pipeline.stages import (
    END,
    NOTHING,
    SAMPLE_NS,
    Checkpoint,
    Clock,
    Job,
    Meter,
    Raised,
    Stage,
)


class Flow:
    """The stages and items of one run through the source.

    The source is a stage, too: it has one job, which yields many results.

    Attributes:
        stages: The source and all others, in order. The last one's queue is the sink.
        ready: Jobs that may start or resume. The caller takes them away after each call.
        clock: The clock of all stages.
        delivered: The checkpoint after the item that :meth:`take` returned last; after END, where
            the next epoch begins. None if there is none.
        sink_meter: Measures the sink: how many items wait in it.

    Args:
        stages: The source and all others, in order.
        clock: The clock of all stages.
        start: Where the epoch begins; None if items have no checkpoints.
    """

    def __init__(
        self, stages: Sequence[Stage], clock: Clock, start: Checkpoint | None = None
    ) -> None:
        self.stages = stages
        self.ready: list[Job] = []
        self.clock = clock
        self.delivered = start
        self.sink_meter = Meter()
        self._end: Checkpoint | None = None
        self._measured = (clock.now_ns, clock.waited_ns)
        self._sink = stages[-1].after

    def set_time(self, now_ns: int) -> None:
        """Set the clock. Called before each change."""
        clock = self.clock
        if now_ns > clock.now_ns:  # another thread may have been faster
            if clock.is_waiting:
                clock.waited_ns += now_ns - clock.now_ns
            clock.now_ns = now_ns
            if now_ns - self._measured[0] >= SAMPLE_NS:
                self.measure()

    def measure(self) -> None:
        """Add the time since the last measurement to all meters."""
        clock, (measured_ns, measured_waited_ns) = self.clock, self._measured
        self._measured = (clock.now_ns, clock.waited_ns)
        elapsed_ns = clock.now_ns - measured_ns
        waited_ns = clock.waited_ns - measured_waited_ns
        for stage in self.stages:
            stage.measure(elapsed_ns, waited_ns)
        self.sink_meter.queued_ns += len(self._sink.items) * elapsed_ns

    def begin(self, item: object = NOTHING) -> None:
        """Start the source's job, for which the executor calls the op with ``item``."""
        queue = self.stages[0].before
        queue.items.append((item, None))
        queue.is_ended = True
        self._advance(0)

    def yielded(self, job: Job, output: object) -> bool:
        """Receive a result of a job that may have more.

        Returns:
            Whether the job may continue. If not, it comes to ``ready`` when it may.
        """
        number = job.number
        stage, following = self.stages[number], number + 1
        if following < len(self.stages) and self.stages[following].is_cut:
            return False  # nothing takes the result in, and the job stays suspended
        now_ns = self.clock.now_ns
        op_ns = now_ns - job.began_ns
        job.op_ns += op_ns
        job.began_ns = now_ns
        if not number:
            stage.meter.calls.note(op_ns)
            stage.meter.op_ns += op_ns
        job.result_count += 1
        if job.result_count <= job.dropped:
            return True
        is_passed = stage.put(job, (output, job.after_result(job.result_count)))
        if is_passed:
            self._advance(following)
        else:
            stage.end_work(job)
        return is_passed

    def finished(self, job: Job, outputs: Sequence[object] = ()) -> None:
        """Receive the last results of a job."""
        stage = self.stages[job.number]
        if stage.counter is not None:
            stage.counter.add_good()
        if not job.number:
            self._end = job.after
        total = job.result_count + len(outputs)
        for count, output in enumerate(outputs, start=job.result_count + 1):
            if count > job.dropped:
                after = job.after if count == total else job.after_result(count)
                stage.put(job, (output, after))
        job.result_count = total
        if job.number and not total:
            stage.meter.left_out_count += 1
        self._finish(stage, job)

    def failed(self, job: Job, error: BaseException, listed: FailedItem | None) -> None:
        """Leave a job's item out, or have the consumer raise an exception.

        Args:
            job: The job, whose op has failed.
            error: The exception.
            listed: The entry for the list of failures; None raises ``error`` whatever the stage's
                limit.
        """
        stage = self.stages[job.number]
        stage.meter.failed_count += 1
        raised: BaseException | None = error
        if listed is not None and stage.counter is not None:
            raised = stage.counter.add_bad(listed, error)
        if raised is not None:
            stage.put(job, (Raised(raised), None))
            for earlier in self.stages[: job.number + 1]:
                earlier.cut()
        self._finish(stage, job)

    def _finish(self, stage: Stage, job: Job) -> None:
        stage.finish(job)
        self._advance(stage.number, stage.number + 1)

    def take(self) -> object:
        """Return the consumer's next item, NOTHING if it is not there yet, or END."""
        if self._sink.items:
            item, after = self._sink.items.popleft()
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
        """Move all items that can be moved after a change at some stages, the last stage first."""
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
                if before.items and (stage.free or stage.is_cut) and stage.accept(ready):
                    has_taken = True
                elif before.is_ended and stage.end():
                    has_passed = True
                else:
                    break
            if has_taken and number and stages[number - 1].held:
                todo.append(number - 1)
            if has_passed:
                todo.append(number + 1)

    def describe(self, names: Sequence[str]) -> str:
        """Return sentences that say which stages have items in work and how long, and which wait.

        Args:
            names: The names of all stages.
        """
        text, idle = "", []
        for name, stage in zip(names, self.stages, strict=True):
            began_ns = [job.ready_ns for job in stage.working]
            if began_ns:
                oldest = seconds((self.clock.now_ns - min(began_ns)) / 1e9)
                text += f" {name[0].upper()}{name[1:]} has had {counted(len(began_ns), 'item')} in "
                text += f"work{', one' if len(began_ns) > 1 else ''} for {oldest}."
            elif not stage.after.is_ended:
                idle.append(name)
        return f"{text} Idle: {', '.join(idle)}." if idle else text
