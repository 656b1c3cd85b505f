"""Makes the statistics of what was recorded, and says what limits the speed and what to change.

First comes what may end the run (memory), then whether there is anything to gain. Otherwise, the
verdict goes by where the next batch was while the consumer waited (``wait.causes``): the group of
causes with the largest share of the wait is named, with its remedy.

"Add workers" and "lower num_workers" never follow each other in similar epochs: between the
thresholds of these two there is a gap.
"""

from dataclasses import replace

from shmloader.grammar import counted, size
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

# The causes of waiting, by what they lead to. The last group is told apart further.
_CAUSES = {
    Finding.START_UP: ("start", "end"),
    Finding.SAMPLER: ("draw",),
    Finding.UNKNOWN: ("other",),
    Finding.COPYING: ("pin", "device"),
    Finding.DELIVERY: ("transport", "build"),
    Finding.TOO_FEW_WORKERS: ("slot", "queue", "fetch", "collate", "encode"),
}
# What adding workers means for these kinds of workers.
_ADDED = {
    "executor": ": raise num_workers=, and give the executor more processes",
    "threads": "; Python code runs in one thread at a time: for that, leave out thread_pool=True",
}
# What follows "The consumer waited … of the time for data".
_TEXTS = {
    Finding.NOTHING_TO_GAIN: ". It has nothing to gain from a faster loader.",
    Finding.START_UP: (
        "; mostly workers started or ended, which persistent_workers=True pays only once, or the "
        "sampler or the dataset started."
    ),
    Finding.SAMPLER: (
        "; mostly the batch sampler was drawing indices on the consumer's thread: make the sampler "
        "cheaper, for example by drawing many indices at once."
    ),
    Finding.UNKNOWN: (
        "; mostly an error was raised in place of a batch: skip bad samples by on_error=."
    ),
    Finding.COPYING: (
        "; mostly the next batch was being pinned or copied to the device: use device=, smaller "
        "types (uint8, converted there), or a cheaper device_transform=."
    ),
    Finding.SLOTS_HELD: (
        "; {copied} of {all} batches were copied out of their slots, since too many were held: "
        "drop each batch after use, or keep clones of the parts that you need."
    ),
    Finding.DELIVERY: (
        "; mostly the next batch was loaded and being delivered: use a larger batch_size, return "
        "tensors instead of Python objects, or make device_transform= cheaper."
    ),
    Finding.CORES_BUSY: (
        ", which is loaded mostly in {where}, and none of {cores} is free: {lower}end other "
        "programs, make that, or what is done with each batch, cheaper, or use more cores."
    ),
    Finding.TOO_FEW_AHEAD: (
        "; workers had nothing to do meanwhile, since batches are wanted in bursts, or a slow one "
        "holds up those behind it. Raise prefetch_factor, or use in_order=False."
    ),
    Finding.TOO_FEW_WORKERS: (
        ", which is loaded mostly in {where}: add workers ({count} for {cores}){added}."
    ),
}


def judged(stats: LoaderStats) -> LoaderStats:
    """Return the statistics with their finding and verdict, by the first rule that holds."""
    wait, slots, machine, count = stats.wait, stats.slots, stats.machine, stats.num_workers
    if not stats.batches:
        return stats
    if memory := _full_memory(stats):
        verdict = (
            f"Memory is near its limit: {memory}. Lower num_workers, prefetch_factor or "
            "batch_size, or raise shm_size, before a larger batch raises SharedMemoryError."
        )
        return replace(stats, finding=Finding.MEMORY, verdict=verdict)
    causes = {
        finding: sum(getattr(wait.causes, part) for part in of) for finding, of in _CAUSES.items()
    }
    finding = max(causes, key=causes.__getitem__)
    working = [worker for worker in stats.workers if worker.batches]
    busy_s = sum(worker.busy_s for worker in working)
    # A worker's CPU time includes its start, and it can lack a core between two batches, too. No
    # more than its busy time counts.
    ran_s = sum(min(one.cpu_s, one.busy_s) for one in working)
    stalled_s = sum(min(one.stalled_s, max(0.0, one.busy_s - one.cpu_s)) for one in working)
    wanted_s = ran_s + stalled_s
    is_stalled = wanted_s > COMPUTING_SHARE * busy_s and stalled_s > STALLED_SHARE * busy_s
    is_computing = count >= machine.cores and wanted_s >= WAITING_SHARE * busy_s
    idle_s = sum(worker.idle_s for worker in working) / max(1, len(working) - 1)
    is_ahead = stats.kind == "executor" or idle_s <= AHEAD_SHARE * causes[Finding.TOO_FEW_WORKERS]
    if wait.share < IDLE_SHARE:
        finding = Finding.NOTHING_TO_GAIN
    elif finding is Finding.DELIVERY and slots.copied > COPIED_SHARE * (slots.copied + slots.lent):
        finding = Finding.SLOTS_HELD
    elif finding is Finding.TOO_FEW_WORKERS and (is_stalled or (is_computing and is_ahead)):
        finding = Finding.CORES_BUSY
    elif finding is Finding.TOO_FEW_WORKERS and not is_ahead:
        finding = Finding.TOO_FEW_AHEAD
    verdict = f"The consumer waited {wait.share:.1%} of the time for data" + _TEXTS[finding].format(
        copied=slots.copied,
        all=slots.copied + slots.lent,
        where="`collate_fn`" if stats.stages.collate > stats.stages.fetch else "`__getitem__`",
        lower="lower num_workers, " * (is_stalled and count > machine.cores),
        count=count,
        cores=counted(machine.cores, "core"),
        added=_ADDED.get(stats.kind, ""),
    )
    return replace(stats, finding=finding, verdict=verdict)


def _full_memory(stats: LoaderStats) -> str:
    """Return which memory is near its limit; "" if none is."""
    slots, free = stats.slots, stats.machine.free_bytes
    used = slots.nbytes + sum(worker.pss_bytes or 0 for worker in stats.workers)
    if slots.largest_bytes > (1 - FREE_SHARE) * slots.share_bytes > 0:
        largest, share = size(slots.largest_bytes), size(slots.share_bytes)
        return f"the largest batch took {largest} of the {share} that shm_size leaves for each"
    if free is not None and free < FREE_SHARE * (free + used):
        return f"the loader takes {size(used)}, and {size(free)} is free ({stats.machine.limit})"
    return ""


def snapshot(sums: Sums | None, epochs: int, machine: Machine) -> LoaderStats:
    """Return the statistics of what was recorded in a number of epochs; None before the first."""
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
