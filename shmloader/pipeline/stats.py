"""The statistics of a pipeline, as a frozen snapshot: how they print, and what they show."""

import dataclasses
from operator import attrgetter
from typing import Any

from shmloader.grammar import counted, seconds, with_share
from shmloader.insight.stats import as_plain
from shmloader.insight.verdict import IDLE_SHARE
from shmloader.pipeline.flow import Flow

_NS = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineStageStats:
    """The statistics of the source or of one stage, in one epoch.

    Attributes:
        name: "the source", "stage 'decode'" or "aggregate(32)".
        kind: What runs the op: "source", "aggregate", "thread", "coroutine", "process" or "device".
        concurrency: Items at once, as given; 1 for the source and for aggregates.
        items_in: Items taken in; 0 for the source.
        items_out: Results passed on.
        failures: Calls that have failed.
        op_mean_s: Mean time in the op in seconds, of one call, or of one item of the source. In a
            worker process it is measured there. For a copy to a device, it is the time to start the
            copy, which continues after that. 0 for aggregates.
        busy_share: Share of the epoch's time in which an item was in work, including the time until
            a thread, the loop or a process began with it; 0 to 1. A stage counts as ``concurrency``
            workers, even if it shares fewer threads with others, and this is their mean.
    """

    name: str
    kind: str
    concurrency: int
    items_in: int = 0
    items_out: int = 0
    failures: int = 0
    op_mean_s: float = 0.0
    busy_share: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineStats:
    """Where the time of a pipeline's newest epoch went. ``print`` shows it as a table.

    Attributes:
        state: "not started", "running", "ended", or "ended: " and why.
        stages: The source and all stages, in order.
        items: Items delivered to the consumer.
        elapsed_s: Seconds from the epoch's beginning to its end, or until now.
        wait_s: Seconds that the consumer waited for items, in ``next()``.
    """

    __module__ = "shmloader"  # users import it from there

    state: str = "not started"
    stages: tuple[PipelineStageStats, ...] = ()
    items: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """``wait_s`` as a share of ``elapsed_s``; 0 to 1."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def limiting(self) -> str:
        """The name of the source or the stage that limits the speed: the busiest one.

        "the consumer" if a faster pipeline would gain nothing; "" before the first item.
        """
        return _judge(self)[0]

    @property
    def verdict(self) -> str:
        """What limits the speed, in one sentence. Mostly a second one says what to change."""
        return _judge(self)[1]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and properties by name, as values that ``json.dumps`` takes.

        ``stages`` is a list of dicts, with the fields of :class:`PipelineStageStats`.
        """
        found = {"wait_share": self.wait_share, "limiting": self.limiting}
        return {**as_plain(self), **found, "verdict": self.verdict}

    def __str__(self) -> str:
        """Return a table and the verdict."""
        rows = [[*_TITLES], *map(_row, self.stages)]
        width = max(len(row[0]) for row in rows)
        lines = [_COLUMNS.format(*row, width=width) for row in rows]
        return "\n".join([f"shmloader pipeline: {self._headline}", "", *lines, "", self.verdict])

    def __repr__(self) -> str:
        """Return one short line: the number of items, their rate, and the consumer's wait."""
        return f"<PipelineStats: {self._headline}>"

    @property
    def _headline(self) -> str:
        if self.state == "not started":
            return self.state
        rate = self.items / self.elapsed_s
        return (
            f"{self.state}, {counted(self.items, 'item')} in {seconds(self.elapsed_s)}, "
            f"{rate:,.3g} items/s, waited "
            f"{with_share(self.wait_s, self.wait_share)}"
        )


_TITLES = ("stage", "at once", "in", "out", "failed", "mean", "busy")
_COLUMNS = "  {:<{width}}  {:>7}  {:>9}  {:>9}  {:>6}  {:>7}  {:>4}"


def _row(stage: PipelineStageStats) -> list[str]:
    """Return the stage's row of the table."""
    name, _, *counts, mean_s, busy = dataclasses.astuple(stage)
    numbers = [f"{count:,}" for count in counts]
    return [name.removeprefix("stage "), *numbers, seconds(mean_s), f"{busy:.0%}"]


def _judge(stats: PipelineStats) -> tuple[str, str]:
    """Return what limits, and the verdict, by the first rule that holds."""
    if not stats.items:
        return "", "No item has been delivered yet."
    text = f"Your loop waited {with_share(stats.wait_s, stats.wait_share)} for items"
    if stats.wait_share < IDLE_SHARE:
        return "the consumer", f"{text}, so a faster pipeline would gain nothing."
    stages = [stage for stage in stats.stages if stage.kind != "aggregate"]
    busiest = max(stages, key=attrgetter("busy_share"))
    remedy = _REMEDIES.get(busiest.kind, "Raise its concurrency above {}.")
    remedy = remedy.format(busiest.concurrency)
    return busiest.name, f"{text}; {busiest.name} limits. {remedy}"


_REMEDIES = {
    "source": "Let it yield only keys, and read them in a stage with a higher concurrency.",
    "thread": "Raise its concurrency above {}, or give executor='process' if it computes.",
    "device": "Send smaller types, such as uint8, and convert them in your loop.",
}


def snapshot(flow: Flow, state: str) -> PipelineStats:
    """Return the statistics of a pipeline's newest epoch.

    Args:
        flow: The epoch.
        state: Its state in words, for ``PipelineStats.state``.
    """
    flow.measure()
    elapsed_ns, stages = max(1, flow.now_ns - flow.first_ns), []
    for stage, meter in flow.measured:
        items_in = 0 if stage.kind == "source" else meter.in_count
        measured = PipelineStageStats(
            stage.title,
            stage.kind,
            stage.concurrency,
            items_in,
            meter.out_count,
            meter.failed_count,
            meter.op_ns / _NS / max(1, items_in or meter.out_count),
            min(1.0, meter.busy_ns / (stage.concurrency * elapsed_ns)),
        )
        stages.append(measured)
    return PipelineStats(
        state=state,
        stages=tuple(stages),
        items=flow.item_count,
        elapsed_s=elapsed_ns / _NS,
        wait_s=flow.waited_ns / _NS,
    )
