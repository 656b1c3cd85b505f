"""Tracks where each item is, and which jobs may start. Pure: no thread, no clock, no user code.

Guarantees:
    * A queue holds at most its capacity, and so does a stage: items in work, and results that wait
      for space in the queue. So the number of items in flight is bounded, whatever the consumer
      does.
    * A stage passes on the results of each item once. An item may have no results.
    * With ``in_order``, the results of a stage leave in the order of its items.
    * After a :class:`Raised`, neither the stage that it comes from nor a stage before it starts a
      job. In the stages before it, a job that yields many results, such as the source's, does not
      continue after its next result. Results of jobs that are still in work may follow the
      ``Raised``. The consumer stops at the ``Raised``.
    * No thread has to look for work: the jobs that may start after a call are in ``ready``.
    * If the source gives a :class:`Checkpoint` with each of its items, each item travels with the
      checkpoint after it. This needs stages that keep the order.

Assumes that one thread at a time calls the methods, and first calls ``set_time``.
"""

from collections.abc import Sequence

from shmloader.grammar import counted, seconds
from shmloader.pipeline.config import PipelineConfig, RunsOn, one_of_threads
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
        stages: The source and all others, in order.
        ready: Jobs that may start or resume. The caller takes them away after each call.
        clock: The clock of all stages.
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
        self.sink_meter = Meter()
        self._end: Checkpoint | None = None
        self._measured_ns, self._measured_waited_ns = clock.now_ns, clock.waited_ns
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
        """Add the time since the last measurement to all meters."""
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
            item: The job's item, with which the executor calls the op.
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
        stage = self.stages[job.number]
        following = job.number + 1
        if following < len(self.stages) and self.stages[following].is_cut:
            return False  # nothing takes the result in, and the job stays suspended
        now_ns = self.clock.now_ns
        op_ns = now_ns - job.began_ns
        job.op_ns += op_ns
        job.began_ns = now_ns
        if not job.number:
            stage.meter.calls.note(op_ns)
            stage.meter.op_ns += op_ns
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
        """Note that a job is done, and take its last results, if any."""
        stage = self.stages[job.number]
        if stage.counter is not None:
            stage.counter.note_good()
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
        stage = self.stages[job.number]
        stage.meter.failed_count += 1
        if error is not None:
            stage.put(job, (Raised(error), None))
            for earlier in self.stages[: stage.number + 1]:
                earlier.cut()
        self._finish(stage, job)

    def _finish(self, stage: Stage, job: Job) -> None:
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

    def describe(self, config: PipelineConfig) -> str:
        """Return sentences that say which stages have items in work, how long, and which ones wait.

        Assumes that the clock was set to the present time.
        """
        sentences, waiting = [], []
        for stage in self.stages:
            name = config.name_of_stage(stage.number)
            sentence = self._describe_work(stage, config)
            if sentence:
                sentences.append(f" {name[0].upper()}{name[1:]} {sentence}.")
            elif not stage.after.is_ended:
                waiting.append(name)
        if waiting:
            text = f"{', '.join(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for items."
            sentences.append(f" {text[0].upper()}{text[1:]}")
        return "".join(sentences)

    def _describe_work(self, stage: Stage, config: PipelineConfig) -> str:
        if stage.after.is_ended:
            return "" if stage.number else "has come to its end"
        jobs = list(stage.working)
        if not jobs:
            return "" if stage.number else "waits until the next stage takes its items"
        oldest = seconds((self.clock.now_ns - min(job.ready_ns for job in jobs)) / 1e9)
        if not stage.number:
            return f"has not yielded its next item for {oldest}"
        text = f"has had {counted(len(jobs), 'item')} in work"
        text += f" for {oldest}" if len(jobs) == 1 else f", one for {oldest}"
        unbegun = sum(not job.began_ns for job in jobs)
        if unbegun and config.runs_on(stage.number) is RunsOn.THREADS:
            verb = "waits" if unbegun == 1 else "wait"
            threads = one_of_threads(config.num_threads)
            text += f", of which {unbegun} {verb} for {threads} (num_threads)"
        return text
