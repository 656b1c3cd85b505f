"""Says what limits a pipeline and what to change, by rules over the statistics. Pure.

Only the time in which the consumer waited is judged. During that time, each worker of the stage
that limits had an item, and those of the stages before and after it did not. So the stage with the
largest share is named. Stages whose share is nearly as large are named with it, since a slightly
different run must not name another stage.
"""

import enum
from typing import TYPE_CHECKING, NamedTuple

from shmloader.insight.text import seconds
from shmloader.insight.verdict import IDLE_SHARE

if TYPE_CHECKING:
    from shmloader.pipeline.stats import PipelineStageStats, PipelineStats

#: Start-up is the limit if the wait for the first item is a larger share of all waiting than this.
STARTUP_SHARE = 0.5
#: A stage is named, too, if its share is smaller than the largest one by less than this.
MARGIN = 0.1
#: Calls need more threads if they wait for a thread for a larger share of their time than this.
THREAD_WAIT_SHARE = 0.5
#: Calls that take less time than this, in seconds, cost less than passing their items on.
TRIVIAL_S = 50e-6


class PipelineFinding(enum.Enum):
    """What the verdict says is the limit."""

    NOTHING_YET = "nothing yet"
    CONSUMER = "the consumer"
    START_UP = "start-up"
    SOURCE = "the source"
    STAGE = "a stage"
    SEVERAL = "several stages about equally"
    THREADS = "too few threads"
    OVERHEAD = "passing items on"


class Judgement(NamedTuple):
    """What limits a pipeline.

    Attributes:
        finding: What the limit is.
        limiting: Names of the source, of stages or of the consumer, in order; empty if none limits.
        text: One or two sentences that say what limits, and what to change.
    """

    finding: PipelineFinding
    limiting: tuple[str, ...]
    text: str


def judge(stats: "PipelineStats") -> Judgement:
    """Return what limits the pipeline, with names and a text, by the first rule that holds."""
    if not stats.items:
        return Judgement(PipelineFinding.NOTHING_YET, (), "No item has been delivered yet.")
    share = stats.wait_share
    if share < IDLE_SHARE:
        return Judgement(
            PipelineFinding.CONSUMER,
            ("the consumer",),
            f"The consumer limits: it waited {share:.1%} of the time for items, and has nothing to "
            "gain from a faster pipeline.",
        )
    finding, limiting, text = _start_up(stats) or _cause(stats)
    return Judgement(
        finding, limiting, f"The consumer waited {share:.0%} of the time for items; {text}"
    )


def _start_up(stats: "PipelineStats") -> Judgement | None:
    if stats.items > 1 and stats.startup_s <= STARTUP_SHARE * stats.wait_s:
        return None
    return Judgement(
        PipelineFinding.START_UP,
        (),
        f"{seconds(stats.startup_s)} of {seconds(stats.wait_s)} was the wait for the first item: "
        "call start() earlier, or measure a longer epoch.",
    )


def _cause(stats: "PipelineStats") -> Judgement:
    stages = [stage for stage in stats.stages if stage.kind != "aggregate"]
    most = max(stage.limit_share for stage in stages)
    found = [stage for stage in stages if stage.limit_share > most - MARGIN]
    names = tuple(stage.name for stage in found)
    if all(_is_trivial(stage) for stage in found):
        return Judgement(
            PipelineFinding.OVERHEAD,
            names,
            f"the calls in {_listed(names)} are so short that passing items on costs more: "
            "aggregate earlier, or do more in each call.",
        )
    if any(_needs_threads(stage) for stage in found):
        names = tuple(stage.name for stage in found if _needs_threads(stage))
        return Judgement(
            PipelineFinding.THREADS,
            names,
            f"items in {_listed(names)} wait for {one_of_threads(stats.num_threads)} that all "
            "functions share: raise num_threads of build(), or use executor='process'.",
        )
    if len(found) > 1:
        return Judgement(
            PipelineFinding.SEVERAL,
            names,
            f"{_listed(names)} limit about equally: an item was in work there for "
            f"{_range(found)} of that time. Making only one of them faster gains little.",
        )
    [stage] = found
    finding = PipelineFinding.SOURCE if stage.kind == "source" else PipelineFinding.STAGE
    return Judgement(
        finding,
        names,
        f"{stage.name} limits: it was busy {_percent(stage.limit_share)} of that time. "
        f"{_REMEDIES[stage.kind].format(stage.concurrency)}",
    )


def _is_trivial(stage: "PipelineStageStats") -> bool:
    return 0 < stage.op_mean_s < TRIVIAL_S


def _needs_threads(stage: "PipelineStageStats") -> bool:
    return stage.kind == "thread" and stage.thread_wait_share > THREAD_WAIT_SHARE


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


def one_of_threads(count: int) -> str:
    """Return "one of the 4 threads", or "the only thread"."""
    return "the only thread" if count == 1 else f"one of the {count} threads"


def _listed(names: tuple[str, ...]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _range(stages: "list[PipelineStageStats]") -> str:
    shares = sorted(stage.limit_share for stage in stages)
    return f"{_percent(shares[0])} to {_percent(shares[-1])}"


def _percent(share: float) -> str:
    return f"{min(1.0, share):.0%}"
