"""Makes the statistics of what was recorded, and says what limits the speed and what to change.

The verdict is made by a table of rules over the statistics.

First comes what may end the run (memory), then whether there is anything to gain. The other rules
go by where the next batch was while the consumer waited (``wait.causes``). These causes form
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
#: Slots are held where a larger share of the batches than this was copied out of them.
COPIED_SHARE = 0.5
#: Memory is near its limit where less than this share of it is free.
FREE_SHARE = 0.1

# Groups of causes, which have the same remedy.
_GROUPS = {
    "start": ("start", "end"),
    "draw": ("draw",),
    "work": ("slot", "queue", "fetch", "collate", "encode"),
    "delivery": ("transport", "build"),
    "copy": ("pin", "device"),
    "other": ("other",),
}
# What adding workers means for these kinds of workers.
_ADDED = {
    "executor": ": raise num_workers=, and give the executor more processes",
    "threads": "; Python code runs in one thread at a time: for that, leave out thread_pool=True",
}


_TEXTS = {
    Finding.NOTHING_YET: "No batch has been delivered yet.",
    Finding.MEMORY: (
        "Memory is near its limit: {memory}. Lower num_workers, prefetch_factor or batch_size, or "
        "raise shm_size, before a larger batch raises SharedMemoryError."
    ),
    Finding.NOTHING_TO_GAIN: (
        "The loader is not the limit: the consumer waited {share:.1%} of the time for data, and "
        "has nothing to gain from a faster one."
    ),
    Finding.START_UP: (
        "{waited}{took} of {total} of waiting was for the start and the end of workers, which "
        "persistent_workers=True pays only once, or for the start of the sampler or the dataset."
    ),
    Finding.SAMPLER: (
        "{part}the batch sampler was drawing indices on the consumer's thread: make the sampler "
        "cheaper, for example by drawing many indices at once."
    ),
    Finding.UNKNOWN: (
        "{part}an error was raised in place of a batch (skip bad samples by on_error=), or the "
        "loader is not one of shmloader's."
    ),
    Finding.COPYING: (
        "{part}the next batch was being pinned or copied to the device: copy batches straight to "
        "it (device=), use smaller types (uint8, converted there), or make device_transform= "
        "cheaper."
    ),
    Finding.SLOTS_HELD: (
        "{waited}{copied} of {all} batches were copied out of their slots, since too many earlier "
        "ones were still held: drop each batch after use, or keep clones of the parts that you "
        "need."
    ),
    Finding.DELIVERY: (
        "{part}the next batch was loaded and being delivered: use a larger batch_size, return "
        "tensors instead of Python objects, or make device_transform= cheaper."
    ),
    Finding.CORES_BUSY: (
        "{waited}{busy}, and none of {cores} is free: {lower}end other programs on this machine, "
        "make that, or what is done with each batch, cheaper, or use more cores."
    ),
    Finding.TOO_FEW_AHEAD: (
        "{waited}workers had nothing to do meanwhile, since batches are wanted in bursts, or a "
        "slow one holds up those behind it. Raise prefetch_factor, or let later batches come first "
        "(in_order=False)."
    ),
    Finding.TOO_FEW_WORKERS: "{waited}{busy}: add workers ({count} for {cores}){added}.",
}


def judged(stats: LoaderStats) -> LoaderStats:
    """Return the statistics with their finding and verdict, by the first rule that holds."""
    wait, slots, machine, count = stats.wait, stats.slots, stats.machine, stats.num_workers
    groups = {name: sum(getattr(wait.causes, one) for one in of) for name, of in _GROUPS.items()}
    cause = max(groups, key=groups.__getitem__)
    working = [worker for worker in stats.workers if worker.batches]
    busy_s = sum(worker.busy_s for worker in working)
    idle_s = sum(worker.idle_s for worker in working)
    # A worker's CPU time includes its start, and it can lack a core between two batches, too. No
    # more than its busy time counts.
    ran_s = sum(min(one.cpu_s, one.busy_s) for one in working)
    stalled_s = sum(min(one.stalled_s, max(0.0, one.busy_s - one.cpu_s)) for one in working)
    wanted_s = ran_s + stalled_s
    is_stalled = wanted_s > COMPUTING_SHARE * busy_s and stalled_s > STALLED_SHARE * busy_s
    is_computing = count >= machine.cores and wanted_s >= WAITING_SHARE * busy_s
    others = max(1, len(working) - 1)
    is_ahead = stats.kind == "executor" or idle_s <= AHEAD_SHARE * groups["work"] * others
    used = slots.nbytes + sum(worker.pss_bytes or 0 for worker in stats.workers)
    free = machine.free_bytes
    is_full = slots.largest_bytes > (1 - FREE_SHARE) * slots.share_bytes > 0
    memory = f"the loader takes {size(used)}, and {size(free or 0)} is free ({machine.limit})"
    if is_full:
        memory = f"the largest batch took {size(slots.largest_bytes)} of the "
        memory += f"{size(slots.share_bytes)} that shm_size leaves for each"
    rules = (
        (Finding.NOTHING_YET, not stats.batches),
        (Finding.MEMORY, is_full or (free is not None and free < FREE_SHARE * (free + used))),
        (Finding.NOTHING_TO_GAIN, wait.share < IDLE_SHARE),
        (Finding.START_UP, cause == "start"),
        (Finding.SAMPLER, cause == "draw"),
        (Finding.UNKNOWN, cause == "other"),
        (Finding.COPYING, cause == "copy"),
        (
            Finding.SLOTS_HELD,
            cause == "delivery" and slots.copied > COPIED_SHARE * (slots.copied + slots.lent),
        ),
        (Finding.DELIVERY, cause == "delivery"),
        (Finding.CORES_BUSY, is_stalled or (is_computing and is_ahead)),
        (Finding.TOO_FEW_AHEAD, not is_ahead),
        (Finding.TOO_FEW_WORKERS, True),
    )
    waited = f"The consumer waited {wait.share:.0%} of the time for data; "
    where = "`collate_fn`" if stats.stages.collate > stats.stages.fetch else "`__getitem__`"
    shares, who = [worker.busy_share for worker in working], "this process loaded"
    if count:
        who = f"workers were busy {sum(shares) / max(1, len(shares)):.0%}"
    finding = next(finding for finding, holds in rules if holds)
    verdict = _TEXTS[finding].format(
        memory=memory,
        share=wait.share,
        waited=waited,
        part=f"{waited}for {min(1.0, groups[cause] / (wait.total_s or 1.0)):.0%} of that, ",
        took=seconds(groups[cause]),
        total=seconds(wait.total_s),
        copied=slots.copied,
        all=slots.copied + slots.lent,
        busy=f"{who}, mostly in {where}",
        lower="lower num_workers, " * (is_stalled and count > machine.cores),
        count=count,
        cores=counted(machine.cores, "core"),
        added=_ADDED.get(stats.kind, ""),
    )
    return replace(stats, finding=finding, verdict=verdict)


def snapshot(sums: Sums | None, epochs: int, machine: Machine) -> LoaderStats:
    """Return the statistics of what was recorded.

    Args:
        sums: The sums; None before the first epoch.
        epochs: Number of epochs in them.
        machine: What the machine offers this process.
    """
    if sums is None or not sums.newest:
        return LoaderStats(machine=machine)
    added, newest, times = sums.added, sums.newest, Times._fields
    elapsed_s, total_s = max(1, added["elapsed"]) / _NS, added["waited"] / _NS
    causes = {name: added["wait", name] / _NS for name in times}
    causes["build"] = max(0.0, total_s - sum(causes.values()))
    most = dict(sums.most)
    longest_ns = most.pop("next", 0)
    numbers = sorted({name[0] for name in (*added, *newest) if isinstance(name[0], int)})
    stats = LoaderStats(
        **{name: value for name, value in newest.items() if isinstance(name, str)},
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
            Times(**causes),
        ),
        stages=Times(*(added["stage", name] / _NS for name in times)),
        workers=tuple(_worker_stats(sums, number) for number in numbers),
        slots=SlotStats(lent=added["lent"], copied=added["copied"], **most),
        restarts=added["restarts"],
        failures=added["failures"],
        machine=machine,
    )
    return judged(stats)


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
