"""The statistics of a pipeline, as a frozen snapshot, and how they print."""

import dataclasses
from typing import TYPE_CHECKING

from shmloader.insight.text import counted, escape, html_table, seconds
from shmloader.pipeline.config import Aggregate, PipelineConfig, RunsOn
from shmloader.pipeline.meters import Meter
from shmloader.pipeline.verdict import PipelineFinding, judge

if TYPE_CHECKING:
    from shmloader.pipeline.epoch import Epoch

_NS = 1e9

_COLUMNS = (
    "stage", "at once", "in", "out", "failed", "left out", "mean", "median", "95 %", "busy",
    "no input", "output full", "behind", "queue",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineStageStats:
    """The statistics of the source or of one stage, in one epoch.

    A stage counts as ``concurrency`` workers, one for each item that may be in work at once, even
    if it shares fewer threads with other stages. At each moment a worker is busy, or it waits for
    one of three things: an item, space in the queue after the stage, or the results of an earlier
    item. The four shares (``busy_share``, ``input_wait_share``, ``output_wait_share`` and
    ``order_wait_share``) are means over all workers and over the time of the epoch, and add up to
    1.

    Attributes:
        name: "the source", "stage 'decode'" or "aggregate(32)".
        kind: What runs the op: "source", "aggregate", "thread", "coroutine", "process", "executor"
            or "device".
        concurrency: Items at once, as given; 1 for the source and for aggregates.
        items_in: Items taken in; 0 for the source.
        items_out: Results passed on.
        failures: Calls that have failed.
        left_out: Items without a result: the op returned None, or a generator yielded nothing but
            None. Failures are not included.
        op_mean_s: Mean time in the op in seconds, of calls that are over: for one call, or for one
            item of the source. In a worker process it is measured there; on the user's executor it
            includes the time until the call begins. For a copy to a device, it is the time to start
            the copy, which continues after that. 0 for aggregates.
        op_p50_s: Median of these times in seconds; accurate to 7 %.
        op_p95_s: 95th percentile of these times in seconds; accurate to 7 %.
        busy_share: Share of the time in which a worker had an item in work, including the time
            until a thread, the loop or a process began with it; 0 to 1.
        input_wait_share: Share of the time in which a worker was free, and there was no item for
            it.
        output_wait_share: Share of the time in which results waited for space in the queue after
            the stage.
        order_wait_share: Share of the time in which results waited for those of an earlier item
            (``output_order="input"``).
        thread_wait_share: Share of the time in work, of calls that are over, outside the op: the
            wait for a thread or the loop, or the way to a worker process and back; 0 to 1.
        limit_share: Share of the consumer's waiting time in which a worker was busy or waited for
            an earlier item; 0 to 1. The verdict compares these shares of all stages.
        queue_mean: Mean number of items in the queue before the stage; 0 for the source.
        queue_size: Most items that may be in that queue; 0 for the source.
    """

    name: str
    kind: str
    concurrency: int
    items_in: int = 0
    items_out: int = 0
    failures: int = 0
    left_out: int = 0
    op_mean_s: float = 0.0
    op_p50_s: float = 0.0
    op_p95_s: float = 0.0
    busy_share: float = 0.0
    input_wait_share: float = 1.0
    output_wait_share: float = 0.0
    order_wait_share: float = 0.0
    thread_wait_share: float = 0.0
    limit_share: float = 0.0
    queue_mean: float = 0.0
    queue_size: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineStats:
    """Where the time of a pipeline's newest epoch went. ``print`` shows it as a table.

    Attributes:
        state: "not started", "running", "ended", or "ended: " and why.
        stages: The source and all stages, in order.
        items: Items delivered to the consumer.
        elapsed_s: Seconds from the epoch's beginning to its end, or until now.
        items_per_s: Items per second of that time.
        wait_s: Seconds that the consumer waited for items, in ``next()`` or ``get_item()``.
        wait_share: ``wait_s`` as a share of ``elapsed_s``; 0 to 1.
        startup_s: The part of ``wait_s`` before the first item.
        buffer_mean: Mean number of items in the sink.
        buffer_size: Most items that may be in the sink.
        num_threads: Threads that the stages share.
    """

    __module__ = "shmloader"  # users import it from there

    state: str = "not started"
    stages: tuple[PipelineStageStats, ...] = ()
    items: int = 0
    elapsed_s: float = 0.0
    items_per_s: float = 0.0
    wait_s: float = 0.0
    wait_share: float = 0.0
    startup_s: float = 0.0
    buffer_mean: float = 0.0
    buffer_size: int = 0
    num_threads: int = 0

    @property
    def finding(self) -> PipelineFinding:
        """What the verdict says is the limit."""
        return judge(self).finding

    @property
    def limiting(self) -> tuple[str, ...]:
        """The names of the source and the stages that limit the speed, in the pipeline's order.

        More than one if they limit about equally; ("the consumer",) if a faster pipeline would gain
        nothing. Empty before the first item, and if the wait for the first item is the limit.
        """
        return judge(self).limiting

    @property
    def verdict(self) -> str:
        """What limits the speed and what to change, in one or two sentences."""
        return judge(self).text

    def __str__(self) -> str:
        """Return a table and the verdict."""
        rows = [_COLUMNS, *map(_row, self.stages)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"shmloader pipeline: {self._headline}", ""]
        for row in rows:
            first, *others = (
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join([f"  {first}", *others]).rstrip())
        return "\n".join([*lines, "", f"  {self._sink}", "", self.verdict])

    def __repr__(self) -> str:
        """Return one short line: the number of items, their rate, and the consumer's wait."""
        return f"<PipelineStats: {self._headline}>"

    def _repr_html_(self) -> str:
        """Return the table and the verdict as HTML, for a notebook."""
        return "\n".join(
            [
                f"<p><b>{escape(self._headline)}</b></p>",
                html_table(map(_row, self.stages), _COLUMNS),
                f"<p>{escape(self._sink)}</p>",
                f"<p>{escape(self.verdict)}</p>",
            ]
        )

    @property
    def _headline(self) -> str:
        if self.state == "not started":
            return self.state
        return (
            f"{self.state}, {counted(self.items, 'item')} in {seconds(self.elapsed_s)}, "
            f"{self.items_per_s:,.3g} items/s, waited {seconds(self.wait_s)} "
            f"({self.wait_share:.0%})"
        )

    @property
    def _sink(self) -> str:
        return f"sink: {self.buffer_mean:.1f} of {self.buffer_size} items ready on average"


def _row(stage: PipelineStageStats) -> tuple[str, ...]:
    is_source, has_calls = stage.kind == "source", stage.op_mean_s > 0
    times = (stage.op_mean_s, stage.op_p50_s, stage.op_p95_s)
    return (
        stage.name.removeprefix("stage "),
        str(stage.concurrency),
        "" if is_source else f"{stage.items_in:,}",
        f"{stage.items_out:,}",
        f"{stage.failures:,}",
        f"{stage.left_out:,}",
        *(seconds(time_s) if has_calls else "–" for time_s in times),
        f"{stage.busy_share:.0%}",
        "–" if is_source else f"{stage.input_wait_share:.0%}",
        f"{stage.output_wait_share:.0%}",
        f"{stage.order_wait_share:.0%}",
        "" if is_source else f"{stage.queue_mean:.1f} of {stage.queue_size}",
    )


def snapshot(config: PipelineConfig, epoch: "Epoch | None", state: str) -> PipelineStats:
    """Return the statistics of a pipeline's newest epoch.

    Args:
        config: The pipeline's configuration.
        epoch: The newest epoch; None before the first one.
        state: The epoch's state in words, for ``PipelineStats.state``.
    """
    if epoch is None:
        return PipelineStats(buffer_size=config.buffer_size, num_threads=config.num_threads)
    epoch.measure()
    clock, sink = epoch.clock, epoch.meters[-1]
    elapsed_ns = max(1, clock.now_ns - clock.first_ns)
    waited_ns = max(1, clock.waited_ns)
    items = sink.out_count
    return PipelineStats(
        state=state,
        stages=tuple(
            _stage_stats(config, number, meter, elapsed_ns, waited_ns)
            for number, meter in enumerate(epoch.meters[:-1])
        ),
        items=items,
        elapsed_s=elapsed_ns / _NS,
        items_per_s=items / (elapsed_ns / _NS),
        wait_s=clock.waited_ns / _NS,
        wait_share=clock.waited_ns / elapsed_ns,
        startup_s=(clock.startup_ns if items else clock.waited_ns) / _NS,
        buffer_mean=sink.queued_ns / elapsed_ns,
        buffer_size=config.buffer_size,
        num_threads=config.num_threads,
    )


def _stage_stats(
    config: PipelineConfig, number: int, meter: Meter, elapsed_ns: int, waited_ns: int
) -> PipelineStageStats:
    stage = config.stages[number - 1] if number else None
    kind, concurrency = "source", 1
    if isinstance(stage, Aggregate):
        kind = "aggregate"
    elif stage is not None:
        kind, concurrency = _KINDS[stage.runs_on], stage.concurrency
    workers_ns = meter.concurrency * elapsed_ns
    calls = meter.calls
    busy, blocked = meter.working_ns / workers_ns, meter.blocked_ns / workers_ns
    behind = meter.behind_ns / workers_ns
    return PipelineStageStats(
        name=config.name_of_stage(number),
        kind=kind,
        concurrency=concurrency,
        items_in=meter.in_count if number else 0,
        items_out=meter.out_count,
        failures=meter.failed_count,
        left_out=meter.left_out_count,
        op_mean_s=calls.total_ns / _NS / max(1, calls.count),
        op_p50_s=calls.percentile(50) / _NS,
        op_p95_s=calls.percentile(95) / _NS,
        busy_share=busy,
        input_wait_share=max(0.0, 1.0 - busy - blocked - behind),
        output_wait_share=blocked,
        order_wait_share=behind,
        thread_wait_share=max(0.0, 1 - calls.total_ns / meter.work_ns) if meter.work_ns else 0.0,
        limit_share=meter.waited_occupied_ns / (meter.concurrency * waited_ns),
        queue_mean=meter.queued_ns / elapsed_ns if number else 0.0,
        queue_size=config.queue_size(number),
    )


_KINDS = {
    RunsOn.THREADS: "thread",
    RunsOn.LOOP: "coroutine",
    RunsOn.PROCESSES: "process",
    RunsOn.EXECUTOR: "executor",
    RunsOn.DEVICE: "device",
}
