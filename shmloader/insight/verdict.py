"""What limits the speed, and what to change: rules over the statistics. Pure.

The rules are tried in order, and the first that holds makes the verdict. First comes what may end
the run (memory), then whether there is anything to gain at all, then the causes of waiting, from
the special to the general.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from shmloader.insight.text import counted, seconds, size

#: A consumer that waits for a smaller share of its time than this would gain nothing.
IDLE_SHARE = 0.05
#: Workers, or a stage's thread, that are busy for a larger share than this are the limit.
BUSY_SHARE = 0.75
#: Start-up is the limit where it is a larger share of all waiting than this.
STARTUP_SHARE = 0.5
#: Workers that wait for a core for a larger share of their busy time than this are too many.
STALLED_SHARE = 0.3
#: A batch in a hundred is a straggler if it takes this many times as long as the median.
STRAGGLER_FACTOR = 3.0
#: A stage that delays batches for a larger share of the wait than this is its cause.
HELD_SHARE = 0.5
#: Collating is slow where it takes a larger share of the workers' time than this.
COLLATE_SHARE = 0.5
#: Copying batches out is the cause where it is a larger share of the wait than this.
COPY_SHARE = 0.3
#: Workers wait for something if they compute, or want a core, for a smaller share than this.
COMPUTING_SHARE = 0.5
#: Memory is near its limit where a smaller share than this of it is left.
FREE_SHARE = 0.1


class Finding(enum.Enum):
    """The rule that made the verdict."""

    NOTHING_YET = "nothing yet"
    MEMORY = "memory near the limit"
    NOTHING_TO_GAIN = "nothing to gain"
    START_UP = "start-up"
    IN_PROCESS = "no workers"
    PINNING = "pinning"
    DEVICE_COPY = "device copy"
    SLOTS_HELD = "slots held by the consumer"
    TOO_MANY_WORKERS = "too many workers"
    STRAGGLERS = "stragglers"
    CORES_TAKEN = "cores taken by others"
    BURSTS = "wanted in bursts"
    SLOW_COLLATE = "slow collate"
    TOO_FEW_WORKERS = "too few workers"
    DELIVERY = "drawing and delivering"
    OTHER_LOADER = "another loader"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The figures that the rules use; times in seconds, summed over batches or workers."""

    kind: str
    batches: int
    elapsed_s: float
    waited_s: float
    startup_s: float
    workers: int
    are_kept: bool
    cores: int
    busy_s: float
    busy_share: float
    cpu_s: float
    stalled_s: float
    stages: Mapping[str, float]
    load_p50_s: float
    load_p99_s: float
    lent: int
    copied: int
    largest_bytes: int
    share_bytes: int
    used_bytes: int
    free_bytes: int | None
    limit: str

    @property
    def wait_share(self) -> float:
        """Share of the time for which the consumer waited."""
        return min(1.0, self.waited_s / self.elapsed_s) if self.elapsed_s else 0.0

    def stage(self, name: str) -> float:
        """Return the seconds in a stage."""
        return self.stages.get(name, 0.0)


def judge(seen: Evidence) -> tuple[Finding, str]:
    """Return the rule that holds, and its sentence."""
    if not seen.batches:
        return Finding.NOTHING_YET, "No batch has been delivered yet."
    waited = f"The consumer waited {seen.wait_share:.0%} of the time for data"
    finding, text = _near_a_limit(seen) or _nothing_to_gain(seen) or _cause(seen)
    if finding in (Finding.MEMORY, Finding.NOTHING_TO_GAIN):
        return finding, text
    return finding, f"{waited}; {text}"


def _near_a_limit(seen: Evidence) -> tuple[Finding, str] | None:
    if seen.share_bytes and seen.largest_bytes > (1 - FREE_SHARE) * seen.share_bytes:
        return Finding.MEMORY, (
            f"Memory is near its limit: the largest batch took {size(seen.largest_bytes)} of the "
            f"{size(seen.share_bytes)} that shm_size leaves for each; raise shm_size, or lower "
            "batch_size or prefetch_factor, before a larger one raises SharedMemoryError."
        )
    if seen.free_bytes is None:
        return None
    if seen.free_bytes < FREE_SHARE * (seen.free_bytes + seen.used_bytes):
        return Finding.MEMORY, (
            f"Memory is near its limit: the loader takes {size(seen.used_bytes)}, and "
            f"{size(seen.free_bytes)} is free ({seen.limit}); lower num_workers, prefetch_factor "
            "or batch_size."
        )
    return None


def _nothing_to_gain(seen: Evidence) -> tuple[Finding, str] | None:
    if seen.wait_share >= IDLE_SHARE:
        return None
    return Finding.NOTHING_TO_GAIN, (
        f"The loader is not the limit: the consumer waited {seen.wait_share:.1%} of the time for "
        "data, and has nothing to gain from a faster one."
    )


def _cause(seen: Evidence) -> tuple[Finding, str]:
    if seen.workers and seen.startup_s > STARTUP_SHARE * seen.waited_s:
        remedy = "persistent_workers=True saves that in all epochs but the first, and"
        if seen.are_kept:
            remedy = "later epochs find their workers ready;"
        return Finding.START_UP, (
            f"{seconds(seen.startup_s)} of {seconds(seen.waited_s)} of waiting was for first "
            f"batches: {remedy} a dataset that is quicker to start saves more."
        )
    if seen.kind == "torch":
        return Finding.OTHER_LOADER, (
            "what the loader does meanwhile is not known: torch's own iterator loads, since the "
            "dataset is a data pipe, or this system has no memfd or pidfd."
        )
    if seen.kind == "other":
        return Finding.OTHER_LOADER, (
            "what the loader does meanwhile is not known, since it is not one of shmloader's."
        )
    if seen.kind == "in-process":
        busiest = _busiest(seen)
        remedy = (
            f"give the loader workers (num_workers=; this process may use {_cores(seen.cores)})"
        )
        if busiest in ("build", "pin", "device"):  # workers would not do that
            remedy = "make that cheaper, or raise batch_size"
        return Finding.IN_PROCESS, (
            f"it loads the data itself, mostly in {_NAMES[busiest]}: {remedy}."
        )
    return _of_the_main_process(seen) or _of_the_workers(seen)


def _of_the_main_process(seen: Evidence) -> tuple[Finding, str] | None:
    steady_s = max(1e-9, seen.elapsed_s - seen.startup_s)
    if seen.stage("pin") > BUSY_SHARE * steady_s:
        return Finding.PINNING, (
            f"the thread that pins was busy {_share(seen.stage('pin'), steady_s)}: copy batches "
            "straight to the device (device=), or use smaller types (uint8, converted there)."
        )
    if seen.stage("device") > BUSY_SHARE * steady_s:
        return Finding.DEVICE_COPY, (
            "the thread that copies to the device was busy "
            f"{_share(seen.stage('device'), steady_s)}: use smaller types (uint8, converted by "
            "transform=), or make transform= cheaper."
        )
    # Building views takes microseconds: seconds there are copies.
    if seen.copied > seen.lent and seen.stage("build") > COPY_SHARE * seen.waited_s:
        return Finding.SLOTS_HELD, (
            f"{seen.copied} of {seen.copied + seen.lent} batches were copied out of their slots, "
            "since too many earlier ones were still held: drop each batch after use, or keep "
            "clones of the parts that you need."
        )
    return None


def _of_the_workers(seen: Evidence) -> tuple[Finding, str]:
    busy = f"workers were busy {seen.busy_share:.0%}"
    # Workers that have little to do may wait for a core now and then.
    is_stalled = seen.stalled_s > STALLED_SHARE * max(
        seen.busy_s, seen.elapsed_s * seen.workers / 2
    )
    stalled = f"{busy}, but for {_share(seen.stalled_s, seen.busy_s)} of that no core was free"
    if is_stalled and seen.workers > seen.cores:
        return Finding.TOO_MANY_WORKERS, (
            f"{stalled} for them: {seen.workers} workers compete for {_cores(seen.cores)}; lower "
            "num_workers."
        )
    is_idle = seen.busy_share < BUSY_SHARE
    is_uneven = seen.load_p99_s > STRAGGLER_FACTOR * seen.load_p50_s > 0
    # Where workers had to wait for a slow one, the batches behind it were done and waited.
    if is_idle and is_uneven and seen.stage("reorder") > HELD_SHARE * seen.waited_s:
        return Finding.STRAGGLERS, (
            f"one batch in a hundred takes {seen.load_p99_s / seen.load_p50_s:.0f} times as long "
            f"as the median and holds up those behind it, so that {busy}: let later batches come "
            "first (in_order=False), or raise prefetch_factor."
        )
    between_s = seen.stage("transport") + seen.stage("build")
    if is_idle and between_s > HELD_SHARE * seen.waited_s:
        return Finding.DELIVERY, (
            f"{busy} with batches of {seconds(seen.load_p50_s)}, and the other time went into "
            "drawing and delivering them: raise batch_size, so that there are fewer, or make the "
            "sampler (or a transform= on the CPU) cheaper."
        )
    if is_idle and seen.stage("ready") > HELD_SHARE * seen.waited_s:
        return Finding.BURSTS, (
            f"{busy}, since batches are wanted in bursts and too few are loaded ahead: raise "
            "prefetch_factor."
        )
    if is_stalled:
        return Finding.CORES_TAKEN, (
            f"{stalled}: other programs use them ({_cores(seen.cores)}); end these, or use other "
            "cores."
        )
    return _of_their_work(seen, busy)


def _of_their_work(seen: Evidence, busy: str) -> tuple[Finding, str]:
    if seen.stage("collate") > COLLATE_SHARE * seen.busy_s:
        return Finding.SLOW_COLLATE, (
            f"{busy}, {_share(seen.stage('collate'), seen.busy_s)} of it in collate_fn: move work "
            "from there to the dataset, or let it write into shmloader.empty()."
        )
    where = f"{busy}, mostly in {_NAMES[_busiest(seen)]}"
    turns = ""
    if seen.kind == "threads":
        turns = " Threads run Python code one at a time: for that, leave out thread_pool=True."
    if seen.workers < seen.cores:
        return Finding.TOO_FEW_WORKERS, (
            f"{where}: add workers ({seen.workers} of {_cores(seen.cores)} are used).{turns}"
        )
    if seen.cpu_s + seen.stalled_s < COMPUTING_SHARE * seen.busy_s:
        return Finding.TOO_FEW_WORKERS, (
            f"{where}, where they wait more than they compute: add workers, even more than the "
            f"{_cores(seen.cores)}."
        )
    return Finding.TOO_FEW_WORKERS, (
        f"{where}, on all of {_cores(seen.cores)}: make that cheaper, or use more cores.{turns}"
    )


_NAMES = {
    "fetch": "`__getitem__`",
    "collate": "`collate_fn`",
    "encode": "encoding",
    # Of a loader without workers:
    "build": "delivering batches (and `transform`)",
    "pin": "pinning",
    "device": "copying to the device and `transform`",
}


def _busiest(seen: Evidence) -> str:
    """Return the stage that takes most of the loading time."""
    of_workers = ("fetch", "collate", "encode")
    return max(_NAMES if seen.kind == "in-process" else of_workers, key=seen.stage)


def _share(part: float, whole: float) -> str:
    return f"{min(1.0, part / whole):.0%}" if whole else "0%"


def _cores(count: int) -> str:
    return counted(count, "core")
