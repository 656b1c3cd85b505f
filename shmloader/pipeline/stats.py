"""The statistics of a pipeline, as a frozen snapshot: how they print, and what they show.

The verdict says what limits a pipeline and what to change, by rules over the statistics.
Only the time in which the consumer waited is judged. During that time, each worker of the stage
that limits had an item, and those of the stages before and after it did not. So the stage with the
largest share is named. Stages whose share is nearly as large are named with it, since a slightly
different run must not name another stage.
"""

import dataclasses

from shmloader.grammar import as_html, counted, seconds
from shmloader.insight.verdict import IDLE_SHARE
from shmloader.pipeline.flow import Flow

_NS = 1e9

#: Start-up is the limit if the wait for the first item is a larger share of all waiting than this.
STARTUP_SHARE = 0.5
#: A stage is named, too, if its share is smaller than the largest one by less than this.
MARGIN = 0.1
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
        op_mean_s: Mean time in the op in seconds, of one call, or of one item of the source. In a
            worker process it is measured there; on the user's executor it includes the time until
            the call begins. For a copy to a device, it is the time to start the copy, which
            continues after that. 0 for aggregates.
        busy_share: Share of the time in which a worker had an item in work, including the time
            until a thread, the loop or a process began with it; 0 to 1.
        input_wait_share: Share of the time in which a worker was free, and there was no item for
            it.
        output_wait_share: Share of the time in which results waited for space in the queue after
            the stage.
        order_wait_share: Share of the time in which results waited for those of an earlier item
            (``output_order="input"``).
        limit_share: Share of the consumer's waiting time in which a worker was busy or waited for
            an earlier item; 0 to 1. The verdict compares these shares of all stages.
    """

    name: str
    kind: str
    concurrency: int
    items_in: int = 0
    items_out: int = 0
    failures: int = 0
    op_mean_s: float = 0.0
    busy_share: float = 0.0
    input_wait_share: float = 1.0
    output_wait_share: float = 0.0
    order_wait_share: float = 0.0
    limit_share: float = 0.0


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
        rows = [_TITLES, *map(_row, self.stages)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"shmloader pipeline: {self._headline}", ""]
        for name, *cells in rows:
            others = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join(["", name.ljust(widths[0]), *others]).rstrip())
        return "\n".join([*lines, "", self.verdict])

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


_TITLES = (
    *("stage", "at once", "in", "out", "failed", "mean"),
    *("busy", "no input", "output full", "behind"),
)


def _row(stage: PipelineStageStats) -> tuple[str, ...]:
    """Return the stage's row of the table."""
    shares = (
        stage.busy_share, stage.input_wait_share, stage.output_wait_share, stage.order_wait_share
    )  # fmt: skip
    return (
        stage.name.removeprefix("stage "),
        *(f"{n:,}" for n in (stage.concurrency, stage.items_in, stage.items_out, stage.failures)),
        seconds(stage.op_mean_s),
        *(f"{share:.0%}" for share in shares),
    )


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
    if all(0 < stage.op_mean_s < TRIVIAL_S for stage in found):
        text = (
            f"the calls in {_listed(found)} are so short that passing items on costs more: "
            "aggregate earlier, or do more in each call."
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
        "Raise its concurrency from {} if the op waits or releases the GIL, and num_threads of "
        "build(), which all functions share; else use executor='process', or make the op cheaper."
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


def snapshot(flow: Flow, state: str) -> PipelineStats:
    """Return the statistics of a pipeline's newest epoch.

    Args:
        flow: The epoch.
        state: Its state in words, for ``PipelineStats.state``.
    """
    flow.measure()
    elapsed_ns = max(1, flow.now_ns - flow.first_ns)
    stages = []
    for stage, meter in zip(flow.configs, flow.meters, strict=True):
        times_ns = (meter.working_ns, meter.blocked_ns, meter.behind_ns)
        busy, blocked, behind = (ns / (stage.concurrency * elapsed_ns) for ns in times_ns)
        is_source = stage.kind == "source"
        made = PipelineStageStats(
            name=stage.title,
            kind=stage.kind,
            concurrency=stage.concurrency,
            items_in=0 if is_source else meter.in_count,
            items_out=meter.out_count,
            failures=meter.failed_count,
            op_mean_s=meter.op_ns / _NS / max(1, meter.out_count if is_source else meter.in_count),
            busy_share=busy,
            input_wait_share=max(0.0, 1.0 - busy - blocked - behind),
            output_wait_share=blocked,
            order_wait_share=behind,
            limit_share=meter.limiting_ns / (stage.concurrency * max(1, flow.waited_ns)),
        )
        stages.append(made)
    return PipelineStats(
        state=state,
        stages=tuple(stages),
        items=flow.item_count,
        elapsed_s=elapsed_ns / _NS,
        items_per_s=flow.item_count / (elapsed_ns / _NS),
        wait_s=flow.waited_ns / _NS,
        wait_share=flow.waited_ns / elapsed_ns,
        startup_s=(flow.startup_ns if flow.item_count else flow.waited_ns) / _NS,
    )
