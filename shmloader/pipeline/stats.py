"""The statistics of a pipeline, as a frozen snapshot: how they print, and what they show.

The verdict says what limits a pipeline and what to change, by rules over the statistics.
Only the time in which the consumer waited is judged. During that time, each worker of the stage
that limits had an item, and those of the stages before and after it did not. So the stage with the
largest share is named. Stages whose share is nearly as large are named with it, since a slightly
different run must not name another stage.
"""

import dataclasses
from collections.abc import Sequence

from shmloader.grammar import as_html, counted, seconds
from shmloader.insight.verdict import IDLE_SHARE
from shmloader.pipeline.config import PipelineConfig
from shmloader.pipeline.stages import Clock, Meter

_NS = 1e9

#: Start-up is the limit if the wait for the first item is a larger share of all waiting than this.
STARTUP_SHARE = 0.5
#: A stage is named, too, if its share is smaller than the largest one by less than this.
MARGIN = 0.1
#: Calls need more threads if they wait for a thread for a larger share of their time than this.
THREAD_WAIT_SHARE = 0.5
#: Calls that take less time than this, in seconds, cost less than passing their items on.
TRIVIAL_S = 50e-6


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
    def limiting(self) -> tuple[str, ...]:
        """The names of the source and the stages that limit the speed, in the pipeline's order.

        More than one if they limit about equally; ("the consumer",) if a faster pipeline would gain
        nothing. Empty before the first item, and if the wait for the first item is the limit.
        """
        return _judge(self)[0]

    @property
    def verdict(self) -> str:
        """What limits the speed and what to change, in one or two sentences."""
        return _judge(self)[1]

    def __str__(self) -> str:
        """Return a table and the verdict."""
        rows = [_row(stage) for stage in self.stages]
        titles = list(_row(PipelineStageStats("", "", 0)))
        widths = [max(len(title), *(len(row[title]) for row in rows), 0) for title in titles]
        lines = [f"shmloader pipeline: {self._headline}", ""]
        for cells in (titles, *(row.values() for row in rows)):
            first, *others = zip(cells, widths, strict=True)
            texts = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
            lines.append("  ".join(["", *texts]).rstrip())
        sink = f"sink: {self.buffer_mean:.1f} of {self.buffer_size} items ready on average"
        return "\n".join([*lines, "", f"  {sink}", "", self.verdict])

    def __repr__(self) -> str:
        """Return one short line: the number of items, their rate, and the consumer's wait."""
        return f"<PipelineStats: {self._headline}>"

    def _repr_html_(self) -> str:
        """Return the table and the verdict for a notebook."""
        return as_html(str(self))

    @property
    def _headline(self) -> str:
        if self.state == "not started":
            return self.state
        return (
            f"{self.state}, {counted(self.items, 'item')} in {seconds(self.elapsed_s)}, "
            f"{self.items_per_s:,.3g} items/s, waited {seconds(self.wait_s)} "
            f"({self.wait_share:.0%})"
        )


def _row(stage: PipelineStageStats) -> dict[str, str]:
    """Return the stage's row of the table: the text of each column by its title."""
    is_source, has_calls = stage.kind == "source", stage.op_mean_s > 0
    times = {"mean": stage.op_mean_s, "median": stage.op_p50_s, "95 %": stage.op_p95_s}
    return {
        "stage": stage.name.removeprefix("stage "),
        "at once": str(stage.concurrency),
        "in": "" if is_source else f"{stage.items_in:,}",
        "out": f"{stage.items_out:,}",
        "failed": f"{stage.failures:,}",
        "left out": f"{stage.left_out:,}",
        **{name: seconds(time_s) if has_calls else "–" for name, time_s in times.items()},
        "busy": f"{stage.busy_share:.0%}",
        "no input": "–" if is_source else f"{stage.input_wait_share:.0%}",
        "output full": f"{stage.output_wait_share:.0%}",
        "behind": f"{stage.order_wait_share:.0%}",
        "queue": "" if is_source else f"{stage.queue_mean:.1f} of {stage.queue_size}",
    }


def _judge(stats: PipelineStats) -> tuple[tuple[str, ...], str]:
    """Return what limits, and the verdict, by the first rule that holds."""
    if not stats.items:
        return (), "No item has been delivered yet."
    if stats.wait_share < IDLE_SHARE:
        return ("the consumer",), (
            f"The consumer limits: it waited {stats.wait_share:.1%} of the time for items, and "
            "has nothing to gain from a faster pipeline."
        )
    waited = f"The consumer waited {stats.wait_share:.0%} of the time for items; "
    if stats.items == 1 or stats.startup_s > STARTUP_SHARE * stats.wait_s:
        return (), (
            f"{waited}{seconds(stats.startup_s)} of {seconds(stats.wait_s)} was the wait for the "
            "first item: call start() earlier, or measure a longer epoch."
        )
    stages = [stage for stage in stats.stages if stage.kind != "aggregate"]
    least = max(stage.limit_share for stage in stages) - MARGIN
    found = [stage for stage in stages if stage.limit_share > least]
    lacking = [
        stage
        for stage in found
        if stage.kind == "thread" and stage.thread_wait_share > THREAD_WAIT_SHARE
    ]
    if all(0 < stage.op_mean_s < TRIVIAL_S for stage in found):
        text = (
            f"the calls in {_listed(found)} are so short that passing items on costs more: "
            "aggregate earlier, or do more in each call."
        )
    elif lacking:
        found = lacking
        text = (
            f"items in {_listed(found)} wait for one of the {stats.num_threads} threads that all "
            "functions share: raise num_threads of build(), or use executor='process'."
        )
    elif len(found) > 1:
        shares = sorted(min(1.0, stage.limit_share) for stage in found)
        text = (
            f"{_listed(found)} limit about equally: an item was in work there for "
            f"{shares[0]:.0%} to {shares[-1]:.0%} of that time. Making only one of them faster "
            "gains little."
        )
    else:
        stage = found[0]
        text = (
            f"{stage.name} limits: it was busy {min(1.0, stage.limit_share):.0%} of that time. "
            f"{_REMEDIES[stage.kind].format(stage.concurrency)}"
        )
    return tuple(stage.name for stage in found), waited + text


def _listed(stages: list[PipelineStageStats]) -> str:
    *others, last = (stage.name for stage in stages)
    return f"{', '.join(others)} and {last}" if others else last


_REMEDIES = {
    "source": (
        "Make the source faster, or have it yield only names or keys, and read in a stage with "
        "concurrency."
    ),
    "thread": (
        "Raise its concurrency from {} if the op waits or releases the GIL, else use "
        "executor='process', or make the op cheaper."
    ),
    "coroutine": (
        "Raise its concurrency from {} if the op waits; move work that computes to a function, "
        "which does not hold up the event loop."
    ),
    "process": "Raise its concurrency from {} as far as there are cores, or make the op cheaper.",
    "executor": (
        "Raise its concurrency from {} and the executor's number of workers, or make the op "
        "cheaper."
    ),
    "device": "Use smaller types (uint8, converted on the device).",
}


def snapshot(
    config: PipelineConfig, clock: Clock, meters: Sequence[Meter], state: str
) -> PipelineStats:
    """Return the statistics of a pipeline's newest epoch.

    Args:
        config: The pipeline's configuration.
        clock: The epoch's clock.
        meters: The meters of the source, of each stage and of the sink.
        state: The epoch's state in words, for ``PipelineStats.state``.
    """
    *stages, sink = meters
    elapsed_ns = max(1, clock.now_ns - clock.first_ns)
    return PipelineStats(
        state=state,
        stages=tuple(
            _stage_stats(config, number, meter, elapsed_ns, max(1, clock.waited_ns))
            for number, meter in enumerate(stages)
        ),
        items=sink.out_count,
        elapsed_s=elapsed_ns / _NS,
        items_per_s=sink.out_count / (elapsed_ns / _NS),
        wait_s=clock.waited_ns / _NS,
        wait_share=clock.waited_ns / elapsed_ns,
        startup_s=(clock.startup_ns if sink.out_count else clock.waited_ns) / _NS,
        buffer_mean=sink.queued_ns / elapsed_ns,
        buffer_size=config.buffer_size,
        num_threads=config.num_threads,
    )


def _stage_stats(
    config: PipelineConfig, number: int, meter: Meter, elapsed_ns: int, waited_ns: int
) -> PipelineStageStats:
    calls, workers_ns = meter.calls, meter.concurrency * elapsed_ns
    busy, blocked, behind = (
        spent_ns / workers_ns for spent_ns in (meter.working_ns, meter.blocked_ns, meter.behind_ns)
    )
    return PipelineStageStats(
        name=config.titles[number],
        kind=config.stages[number - 1].runs_on.value if number else "source",
        concurrency=meter.concurrency,
        items_in=meter.in_count if number else 0,
        items_out=meter.out_count,
        failures=meter.failed_count,
        left_out=meter.left_out_count,
        op_mean_s=meter.op_ns / _NS / max(1, calls.total()),
        op_p50_s=calls.percentile(50) / _NS,
        op_p95_s=calls.percentile(95) / _NS,
        busy_share=busy,
        input_wait_share=max(0.0, 1.0 - busy - blocked - behind),
        output_wait_share=blocked,
        order_wait_share=behind,
        thread_wait_share=max(0.0, 1 - meter.op_ns / meter.work_ns) if meter.work_ns else 0.0,
        limit_share=meter.waited_occupied_ns / (meter.concurrency * waited_ns),
        queue_mean=meter.queued_ns / elapsed_ns if number else 0.0,
        queue_size=config.queue_size(number),
    )
