"""Says what limits the speed and what to change, by rules over the statistics. Pure.

The rules are tried in order, and the first that holds makes the verdict. First comes what may end
the run (memory), then whether there is anything to gain at all, then the causes of waiting, from
the special to the general.
"""

import enum
from typing import TYPE_CHECKING

from shmloader.insight.text import counted, seconds, size

if TYPE_CHECKING:
    from shmloader.insight.snapshot import LoaderStats

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


def judge(stats: "LoaderStats") -> tuple[Finding, str]:
    """Return the rule that holds, and its sentence."""
    if not stats.batches:
        return Finding.NOTHING_YET, "No batch has been delivered yet."
    waited = f"The consumer waited {stats.wait.share:.0%} of the time for data"
    finding, text = _near_a_limit(stats) or _nothing_to_gain(stats) or _cause(stats)
    if finding in (Finding.MEMORY, Finding.NOTHING_TO_GAIN):
        return finding, text
    return finding, f"{waited}; {text}"


def _near_a_limit(stats: "LoaderStats") -> tuple[Finding, str] | None:
    largest, share = stats.slots.largest_bytes, stats.slots.share_bytes
    if share and largest > (1 - FREE_SHARE) * share:
        return Finding.MEMORY, (
            f"Memory is near its limit: the largest batch took {size(largest)} of the "
            f"{size(share)} that shm_size leaves for each; raise shm_size, or lower batch_size or "
            "prefetch_factor, before a larger one raises SharedMemoryError."
        )
    free = stats.machine.free_bytes
    used = stats.slots.nbytes + sum(worker.pss_bytes or 0 for worker in stats.workers)
    if free is not None and free < FREE_SHARE * (free + used):
        return Finding.MEMORY, (
            f"Memory is near its limit: the loader takes {size(used)}, and {size(free)} is free "
            f"({stats.machine.limit}); lower num_workers, prefetch_factor or batch_size."
        )
    return None


def _nothing_to_gain(stats: "LoaderStats") -> tuple[Finding, str] | None:
    if stats.wait.share >= IDLE_SHARE:
        return None
    return Finding.NOTHING_TO_GAIN, (
        f"The loader is not the limit: the consumer waited {stats.wait.share:.1%} of the time for "
        "data, and has nothing to gain from a faster one."
    )


def _cause(stats: "LoaderStats") -> tuple[Finding, str]:
    startup_s, waited_s = stats.wait.startup_s, stats.wait.total_s
    if stats.num_workers and startup_s > STARTUP_SHARE * waited_s:
        remedy = "persistent_workers=True saves that in all epochs but the first, and"
        if stats.persistent_workers:
            remedy = "later epochs find their workers ready;"
        return Finding.START_UP, (
            f"{seconds(startup_s)} of {seconds(waited_s)} of waiting was for first batches: "
            f"{remedy} a dataset that is quicker to start saves more."
        )
    if stats.kind == "torch":
        return Finding.OTHER_LOADER, (
            "what the loader does meanwhile is not known: torch's own iterator loads, since the "
            "dataset is a data pipe, or this system has no memfd or pidfd."
        )
    if stats.kind == "other":
        return Finding.OTHER_LOADER, (
            "what the loader does meanwhile is not known, since it is not one of shmloader's."
        )
    if stats.kind == "in-process":
        busiest = _busiest(stats)
        remedy = f"give the loader workers (num_workers=; this process may use {_cores(stats)})"
        if busiest in ("build", "pin", "device"):  # workers would not do that
            remedy = "make that cheaper, or raise batch_size"
        return Finding.IN_PROCESS, (
            f"it loads the data itself, mostly in {_NAMES[busiest]}: {remedy}."
        )
    return _of_the_main_process(stats) or _of_the_workers(stats)


def _of_the_main_process(stats: "LoaderStats") -> tuple[Finding, str] | None:
    steady_s = max(1e-9, stats.elapsed_s - stats.wait.startup_s)
    pin_s, device_s = stats.stages.pin.total_s, stats.stages.device.total_s
    if pin_s > BUSY_SHARE * steady_s:
        return Finding.PINNING, (
            f"the thread that pins was busy {_share(pin_s, steady_s)}: copy batches straight to "
            "the device (device=), or use smaller types (uint8, converted there)."
        )
    if device_s > BUSY_SHARE * steady_s:
        return Finding.DEVICE_COPY, (
            f"the thread that copies to the device was busy {_share(device_s, steady_s)}: use "
            "smaller types (uint8, converted by device_transform=), or make device_transform= "
            "cheaper."
        )
    copied, lent = stats.slots.copied, stats.slots.lent
    # Building views takes microseconds: seconds there are copies.
    if copied > lent and stats.stages.build.total_s > COPY_SHARE * stats.wait.total_s:
        return Finding.SLOTS_HELD, (
            f"{copied} of {copied + lent} batches were copied out of their slots, since too many "
            "earlier ones were still held: drop each batch after use, or keep clones of the parts "
            "that you need."
        )
    return None


def _of_the_workers(stats: "LoaderStats") -> tuple[Finding, str]:
    working = [worker for worker in stats.workers if worker.batches]
    busy_s = sum(worker.busy_s for worker in working)
    busy_share = sum(worker.busy_share for worker in working) / max(1, len(working))
    stalled_s = sum(worker.stalled_s or 0.0 for worker in stats.workers)
    busy = f"workers were busy {busy_share:.0%}"
    # Workers that have little to do may wait for a core now and then.
    is_stalled = stalled_s > STALLED_SHARE * max(busy_s, stats.elapsed_s * stats.num_workers / 2)
    stalled = f"{busy}, but for {_share(stalled_s, busy_s)} of that no core was free"
    if is_stalled and stats.num_workers > stats.machine.cores:
        return Finding.TOO_MANY_WORKERS, (
            f"{stalled} for them: {stats.num_workers} workers compete for {_cores(stats)}; lower "
            "num_workers."
        )
    is_idle = busy_share < BUSY_SHARE
    is_uneven = stats.load_p99_s > STRAGGLER_FACTOR * stats.load_p50_s > 0
    stages, held_s = stats.stages, HELD_SHARE * stats.wait.total_s
    # Where workers had to wait for a slow one, the batches behind it were done and waited.
    if is_idle and is_uneven and stages.reorder.total_s > held_s:
        return Finding.STRAGGLERS, (
            f"one batch in a hundred takes {stats.load_p99_s / stats.load_p50_s:.0f} times as long "
            f"as the median and holds up those behind it, so that {busy}: let later batches come "
            "first (in_order=False), or raise prefetch_factor."
        )
    if is_idle and stages.transport.total_s + stages.build.total_s > held_s:
        return Finding.DELIVERY, (
            f"{busy} with batches of {seconds(stats.load_p50_s)}, and the other time went into "
            "drawing and delivering them: raise batch_size, so that there are fewer, or make the "
            "sampler (or a device_transform= on the CPU) cheaper."
        )
    if is_idle and stages.ready.total_s > held_s:
        return Finding.BURSTS, (
            f"{busy}, since batches are wanted in bursts and too few are loaded ahead: raise "
            "prefetch_factor."
        )
    if is_stalled:
        return Finding.CORES_TAKEN, (
            f"{stalled}: other programs use them ({_cores(stats)}); end these, or use other cores."
        )
    return _of_their_work(stats, busy, busy_s, stalled_s)


def _of_their_work(
    stats: "LoaderStats", busy: str, busy_s: float, stalled_s: float
) -> tuple[Finding, str]:
    collate_s = stats.stages.collate.total_s
    if collate_s > COLLATE_SHARE * busy_s:
        return Finding.SLOW_COLLATE, (
            f"{busy}, {_share(collate_s, busy_s)} of it in collate_fn: move work from there to the "
            "dataset, or let it write into shmloader.empty()."
        )
    where = f"{busy}, mostly in {_NAMES[_busiest(stats)]}"
    turns = ""
    if stats.kind == "threads":
        turns = " Threads run Python code one at a time: for that, leave out thread_pool=True."
    if stats.num_workers < stats.machine.cores:
        return Finding.TOO_FEW_WORKERS, (
            f"{where}: add workers ({stats.num_workers} of {_cores(stats)} are used).{turns}"
        )
    if sum(worker.cpu_s for worker in stats.workers) + stalled_s < COMPUTING_SHARE * busy_s:
        return Finding.TOO_FEW_WORKERS, (
            f"{where}, where they wait more than they compute: add workers, even more than the "
            f"{_cores(stats)}."
        )
    return Finding.TOO_FEW_WORKERS, (
        f"{where}, on all of {_cores(stats)}: make that cheaper, or use more cores.{turns}"
    )


_NAMES = {
    "fetch": "`__getitem__`",
    "collate": "`collate_fn`",
    "encode": "encoding",
    # Of a loader without workers:
    "build": "delivering batches (and `device_transform`)",
    "pin": "pinning",
    "device": "copying to the device and `device_transform`",
}


def _busiest(stats: "LoaderStats") -> str:
    """Return the stage that takes most of the loading time."""
    seconds_in = {name: stage.total_s for name, stage in stats.stages._asdict().items()}
    of_workers = ("fetch", "collate", "encode")
    return max(_NAMES if stats.kind == "in-process" else of_workers, key=seconds_in.__getitem__)


def _share(part: float, whole: float) -> str:
    return f"{min(1.0, part / whole):.0%}" if whole else "0%"


def _cores(stats: "LoaderStats") -> str:
    return counted(stats.machine.cores, "core")
