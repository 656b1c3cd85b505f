"""Makes the statistics of what was recorded, and says what limits the speed and what to change.

The verdict is made by a table of rules over the statistics.

First comes what may end the run (memory), then whether there is anything to gain. The other rules
go by where the next batch was while the consumer waited (``wait.places``). These places form
groups, and the group with the largest share of the wait is the cause.

"Add workers" and "lower num_workers" never follow each other in similar epochs: between the
thresholds of these two there is a gap.
"""

from dataclasses import replace

from shmloader.grammar import counted, seconds, size
from shmloader.insight.stats import (
    Finding,
    LoaderStats,
    Machine,
    SlotStats,
    Times,
    WaitStats,
    WorkerStats,
)
from shmloader.insight.sums import Sums

_NS = 1e9

#: A consumer that waits for a smaller share of its time than this would gain nothing.
IDLE_SHARE = 0.05
#: More batches loaded ahead would help if the workers' time without work is a larger share than
#: this of the time in which the consumer waits for them.
AHEAD_SHARE = 0.5
#: Workers compete for cores if they lack one for a larger share of their busy time than this.
STALLED_SHARE = 0.3
#: Workers wait for something else, such as a disk, if they have or want a core for less than the
#: first share of their busy time. They compute if they do so for more than the second share.
WAITING_SHARE, COMPUTING_SHARE = 0.4, 0.6
#: Collating is slow where it takes a larger share of the workers' time than this.
COLLATE_SHARE = 0.5
#: Slots are held where a larger share of the batches than this was copied out of them.
COPIED_SHARE = 0.5
#: Memory is near its limit where less than this share of it is free.
FREE_SHARE = 0.1

# Groups of places. The places of a group have the same cause.
_GROUPS = {
    "start": ("start", "end"),
    "draw": ("draw",),
    "work": ("slot", "queue", "fetch", "collate", "encode"),
    "delivery": ("transport", "build"),
    "copy": ("pin", "device"),
    "other": ("other",),
}
_NAMES = {
    "fetch": "`__getitem__`",
    "collate": "`collate_fn`",
    "build": "delivering batches (and `device_transform`)",
    "pin": "pinning",
    "device": "copying to the device and `device_transform`",
}


def judged(stats: LoaderStats) -> LoaderStats:
    """Return the statistics with their finding and verdict, by the first rule that holds."""
    wait, slots, machine, places = stats.wait, stats.slots, stats.machine, stats.wait.places
    groups = {name: sum(getattr(places, one) for one in of) for name, of in _GROUPS.items()}
    cause = max(groups, key=groups.__getitem__)
    working = [worker for worker in stats.workers if worker.batches]
    busy_s = sum(worker.busy_s for worker in working)
    idle_s = sum(worker.idle_s for worker in working)
    # A worker's CPU time includes its start, and it can lack a core between two batches, too. No
    # more than its busy time counts.
    ran_s = sum(min(worker.cpu_s, worker.busy_s) for worker in working)
    stalled_s = sum(
        min(worker.stalled_s, max(0.0, worker.busy_s - worker.cpu_s)) for worker in working
    )
    wanted_s, is_crowded = ran_s + stalled_s, stats.num_workers > machine.cores
    is_stalled = wanted_s > COMPUTING_SHARE * busy_s and stalled_s > STALLED_SHARE * busy_s
    is_computing = stats.num_workers >= machine.cores and wanted_s >= WAITING_SHARE * busy_s
    is_local, is_executor = stats.kind == "in-process", stats.kind == "executor"

    used_bytes = slots.nbytes + sum(worker.pss_bytes or 0 for worker in stats.workers)
    free_bytes = machine.free_bytes
    is_short = free_bytes is not None and free_bytes < FREE_SHARE * (free_bytes + used_bytes)
    is_full = slots.largest_bytes > (1 - FREE_SHARE) * slots.share_bytes > 0
    memory = f"{size(free_bytes or 0)} is free ({machine.limit})"
    if is_full:
        memory = f"the largest batch took {size(slots.largest_bytes)} of the "
        memory += f"{size(slots.share_bytes)} that shm_size leaves for each"

    work = {"fetch": stats.stages.fetch, "collate": stats.stages.collate}
    if is_local:
        work = {name: getattr(places, name) for name in _NAMES}
    slowest = max(work, key=work.__getitem__)
    where, cores = _NAMES[slowest], counted(machine.cores, "core")
    busy = f"workers were busy {sum(one.busy_share for one in working) / (len(working) or 1):.0%}, "
    busy += f"mostly in {where}"
    remedy = "make that cheaper"
    if is_local and slowest in ("fetch", "collate"):  # workers would take over nothing else
        remedy = f"give the loader workers (num_workers=; {cores} may be used)"
    add = f"add workers ({stats.num_workers} for {cores})"
    if stats.num_workers >= machine.cores:
        add = f"add workers, even more than the {cores}, since they wait more than they compute"
    if is_executor:
        add = "give the executor more processes and raise num_workers=, or use smaller types"
    elif stats.kind == "threads":
        add += "; Python code runs in one thread at a time: for that, leave out thread_pool=True"
    start = "the start and the end of workers, which persistent_workers=True pays only once"
    if stats.persistent_workers or not stats.num_workers:
        start = "iter() and the first batch: make the start of the sampler or the dataset cheaper"
    waited = f"The consumer waited {wait.share:.0%} of the time for data; "
    part = f"{waited}for {min(1.0, groups[cause] / (wait.total_s or 1.0)):.0%} of that, "
    is_held = slots.copied > COPIED_SHARE * (slots.copied + slots.lent)
    is_ahead = idle_s <= AHEAD_SHARE * groups["work"] * max(1, len(working) - 1)
    # The first rule that holds.
    rules = [
        (Finding.NOTHING_YET, not stats.batches),
        (Finding.MEMORY, is_full or is_short),
        (Finding.NOTHING_TO_GAIN, wait.share < IDLE_SHARE),
        (Finding.START_UP, cause == "start"),
        (Finding.SAMPLER, cause == "draw"),
        (Finding.UNKNOWN, cause == "other"),
        (Finding.IN_PROCESS, is_local),
        (Finding.COPYING, cause == "copy"),
        (Finding.SLOTS_HELD, cause == "delivery" and is_held),
        (Finding.DELIVERY, cause == "delivery"),
        (Finding.TOO_FEW_WORKERS, is_executor),
        (Finding.CORES_BUSY, is_stalled),
        (Finding.TOO_FEW_AHEAD, not is_ahead),
        (Finding.SLOW_COLLATE, stats.stages.collate > COLLATE_SHARE * busy_s),
        (Finding.CORES_BUSY, is_computing),
        (Finding.TOO_FEW_WORKERS, True),
    ]
    texts = {
        Finding.NOTHING_YET: stats.verdict,
        Finding.MEMORY: (
            f"Memory is near its limit: the loader takes {size(used_bytes)}, and {memory}. Lower "
            "num_workers, prefetch_factor or batch_size, or raise shm_size, before a larger batch "
            "raises SharedMemoryError."
        ),
        Finding.NOTHING_TO_GAIN: (
            f"The loader is not the limit: the consumer waited {wait.share:.1%} of the time for "
            "data, and has nothing to gain from a faster one."
        ),
        Finding.START_UP: (
            f"{waited}{seconds(groups[cause])} of {seconds(wait.total_s)} of waiting was for "
            f"{start}."
        ),
        Finding.SAMPLER: (
            f"{part}the batch sampler was drawing indices, which it does on the consumer's thread: "
            "make the sampler cheaper, for example by drawing many indices at once."
        ),
        Finding.UNKNOWN: (
            f"{part}an error was raised in place of a batch (skip bad samples by on_error=), or "
            "the loader is not one of shmloader's, or torch's own iterator loads."
        ),
        Finding.IN_PROCESS: f"{waited}it loads the data itself, mostly in {where}: {remedy}.",
        Finding.COPYING: (
            f"{part}the next batch was being pinned or copied to the device: copy batches straight "
            "to it (device=), use smaller types (uint8, converted there), or make "
            "device_transform= cheaper."
        ),
        Finding.SLOTS_HELD: (
            f"{waited}{slots.copied} of {slots.copied + slots.lent} batches were copied out of "
            "their slots, since too many earlier ones were still held: drop each batch after use, "
            "or keep clones of the parts that you need."
        ),
        Finding.DELIVERY: (
            f"{part}the next batch was loaded and being delivered: use a larger batch_size, return "
            "tensors instead of Python objects, or make device_transform= cheaper."
        ),
        Finding.CORES_BUSY: (
            f"{waited}{busy}, and none of {cores} is free: "
            f"{'lower num_workers, ' if is_stalled and is_crowded else ''}end other programs on "
            "this machine, make that, or what is done with each batch, cheaper, or use more cores."
        ),
        Finding.TOO_FEW_AHEAD: (
            f"{waited}workers had nothing to do meanwhile, since batches are wanted in bursts, or "
            "a slow one holds up those behind it. Raise prefetch_factor, or let later batches come "
            "first (in_order=False)."
        ),
        Finding.SLOW_COLLATE: (
            f"{waited}{busy}: move work from there to the dataset, or let it write into "
            "shmloader.empty()."
        ),
        Finding.TOO_FEW_WORKERS: f"{waited}{busy}: {add}.",
    }
    finding = next(finding for finding, holds in rules if holds)
    return replace(stats, finding=finding, verdict=texts[finding])


def snapshot(sums: Sums | None, epochs: int, machine: Machine) -> LoaderStats:
    """Return the statistics of what was recorded.

    Args:
        sums: The sums; None before the first epoch.
        epochs: Number of epochs in them.
        machine: What the machine offers this process.
    """
    if sums is None or not sums.newest:
        return LoaderStats(machine=machine)
    added, most, newest, times = sums.added, sums.most, sums.newest, Times._fields
    elapsed_s, total_s = max(1, added["elapsed"]) / _NS, added["waited"] / _NS
    places = {name: added["wait", name] / _NS for name in times}
    places["build"] = max(0.0, total_s - sum(places.values()))
    longest_ns = most.get("next", 0)
    numbers = sorted({name[0] for name in (*added, *newest) if isinstance(name[0], int)})
    stats = LoaderStats(
        **{name: value for name, value in newest.items() if name in _OF_NEWEST},
        epochs=epochs,
        batches=added["batches"],
        samples=added["samples"],
        nbytes=added["nbytes"],
        elapsed_s=elapsed_s,
        samples_per_s=added["samples"] / elapsed_s,
        wait=WaitStats(
            total_s,
            min(1.0, total_s / elapsed_s),
            min(longest_ns, sums.waits.percentile(50)) / _NS,
            min(longest_ns, sums.waits.percentile(99)) / _NS,
            longest_ns / _NS,
            added["startup"] / _NS,
            Times(**places),
        ),
        stages=Times(*(added["stage", name] / _NS for name in times)),
        workers=tuple(_worker_stats(sums, number) for number in numbers),
        slots=SlotStats(
            newest.get("slot_count", 0),
            most.get("slot_bytes", 0),
            added["lent"],
            added["copied"],
            most.get("largest_bytes", 0),
            newest.get("share_bytes", 0),
        ),
        restarts=added["restarts"],
        failures=added["failures"],
        machine=machine,
    )
    return judged(stats)


_OF_NEWEST = ("epoch", "kind", "num_workers", "persistent_workers", "is_over")


def _worker_stats(sums: Sums, number: int) -> WorkerStats:
    added, span_ns = sums.added, sums.added[number, "span"]
    return WorkerStats(
        worker_id=number,
        pid=sums.newest.get((number, "pid")),
        batches=added[number, "batches"],
        busy_share=min(1.0, added[number, "busy"] / span_ns) if span_ns else 0.0,
        pss_bytes=sums.newest.get((number, "pss_bytes")),
        **{f"{name}_s": added[number, name] / _NS for name in ("busy", "idle", "cpu", "stalled")},
    )
