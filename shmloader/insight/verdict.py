"""Makes the statistics of what was recorded, and says what limits the speed and what to change.

First comes whether there is anything to gain. Otherwise, the verdict goes by where the next batch
was while the consumer waited (``wait.causes``): the group of causes with the largest share of the
wait is named, with its remedy.

**Guarantees:** A verdict is one sentence about the cause, with the wait as the table shows it, and
mostly a second one that says what to do and names an argument.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

from shmloader.grammar import counted, seconds, with_share
from shmloader.insight.stats import (
    Finding,
    LoaderStats,
    SlotStats,
    Times,
    WaitStats,
    WorkerStats,
)
from shmloader.insight.sums import Sums

_NS = 1e9
_COUNTS = ("batches", "samples", "nbytes", "restarts", "failures")

#: A consumer that waits for a smaller share of its time than this would gain nothing.
IDLE_SHARE = 0.05
#: More batches loaded ahead would help if the workers' time without work is a larger share than
#: this of the time in which the consumer waits for them.
AHEAD_SHARE = 0.3
#: Workers compete for cores if they lack one for a larger share of their busy time than this.
STALLED_SHARE = 0.3
#: Workers wait for something else, such as a disk, if they have or want a core for less than the
#: first share of their busy time. They compute if they do so for more than the second share.
WAITING_SHARE, COMPUTING_SHARE = 0.4, 0.6
#: The interpreter's lock holds threads up if this process uses more than the first number of cores.
#: With more than the second number for the workers alone, their code runs without the lock.
LOCKED_CORES = 0.7, 1.2
#: Loading several samples at once helps if each takes longer than this.
LONG_SAMPLE_S = 0.001
#: The loop's own threads, such as torch's, compete with workers if they use more cores than this.
OWN_CORES = 0.1
#: The cores are ours, and not another program's, if we use more than this share of their time.
OURS_SHARE = 0.8
#: Making a batch or handing it over takes longer than this only if it has many parts.
LONG_DELIVERY_S = 0.0002
#: More workers are no help for batches that come faster than this: each costs this process as much.
SHORT_BATCH_S = 0.00005
#: Slots are held where a larger share of the batches than this was copied out of them.
COPIED_SHARE = 0.5

# The causes of waiting, by what they lead to. The last group is told apart further.
_CAUSES = {
    Finding.START_UP: ("start", "end"),
    Finding.SAMPLER: ("draw",),
    Finding.UNKNOWN: ("other",),
    Finding.COPYING: ("pin", "device"),
    Finding.DELIVERY: ("transport", "build"),
    Finding.TOO_FEW_WORKERS: ("slot", "queue", "fetch", "collate", "encode"),
}


def judged(stats: LoaderStats) -> LoaderStats:
    """Return the statistics with their finding and verdict, by the first rule that holds."""
    if not stats.batches:
        return stats
    wait = stats.wait
    loop = f"Your loop waited {with_share(wait.total_s, wait.share)} for data"
    if wait.share < IDLE_SHARE:
        text = f"{loop}, so a faster loader would gain nothing."
        return replace(stats, finding=Finding.NOTHING_TO_GAIN, verdict=text)
    spent = {group: sum(getattr(wait.causes, part) for part in of) for group, of in _CAUSES.items()}
    finding = max(spent, key=spent.__getitem__)
    spent_s = spent[finding]
    match finding:
        case Finding.START_UP:
            cause, remedy = _start_up(stats)
        case Finding.COPYING if wait.causes.pin > wait.causes.device:
            cause = "while a batch was being pinned"
            remedy = "Give device= in place of pin_memory=True: it copies from shared memory."
        case Finding.TOO_FEW_WORKERS if spent_s >= SHORT_BATCH_S * stats.batches:
            finding, cause, remedy = _limit_of_workers(stats, spent_s)
        case Finding.DELIVERY | Finding.TOO_FEW_WORKERS:
            finding, cause, remedy = _limit_of_delivery(stats, spent_s)
        case _:
            cause, remedy = _TEXTS[finding]
    text = f"{loop}, {seconds(spent_s)} of it {cause}. {remedy}".rstrip()
    return replace(stats, finding=finding, verdict=text)


_TEXTS = {
    Finding.SAMPLER: (
        "while the sampler drew indices",
        "Draw faster: a batch_sampler can draw many indices at once.",
    ),
    Finding.UNKNOWN: (
        "in calls of next() that raised",
        "For a map-style dataset, on_error='skip' leaves out bad samples.",
    ),
    Finding.COPYING: (
        "while a batch was copied to the device and transformed there",
        "Send smaller types, such as uint8, and convert them in a cheap device_transform.",
    ),
    Finding.INTERPRETER_LOCK: (
        "while threads took turns at running Python code",
        "Leave out thread_pool=True, so that processes load at the same time.",
    ),
    Finding.DELIVERY: (
        "while finished batches were handed over",
        "Raise batch_size: each batch costs about the same.",
    ),
}


def _start_up(stats: LoaderStats) -> tuple[str, str]:
    is_later = stats.epochs > 1 or bool(stats.epoch)  # the user goes through the data again
    if stats.kind == "in-process" or (stats.persistent_workers and is_later):
        if stats.wait.causes.end > stats.wait.causes.start:
            return "after the epoch's last batch", ""
        return "while iter() started the sampler and the dataset", ""
    is_paid_again = is_later and stats.kind != "executor"
    remedy = "Set persistent_workers=True, so that they start only once." if is_paid_again else ""
    return "while workers started or ended", remedy


def _limit_of_delivery(stats: LoaderStats, wait_s: float) -> tuple[Finding, str, str]:
    """Return what keeps this process from taking batches faster, given the seconds of waiting."""
    slots, (cause, remedy) = stats.slots, _TEXTS[Finding.DELIVERY]
    if slots.copied > COPIED_SHARE * (slots.copied + slots.lent):
        copied = f"{slots.copied} of {slots.copied + slots.lent}"
        cause = f"while {copied} batches were copied, since your loop keeps too many"
        remedy = "Keep clones of the parts that you need: a larger prefetch_factor cannot help."
        return Finding.SLOTS_HELD, cause, remedy
    if wait_s > LONG_DELIVERY_S * stats.batches:
        if _is_locked(stats):  # by this thread, too
            return Finding.INTERPRETER_LOCK, *_TEXTS[Finding.INTERPRETER_LOCK]
        if stats.has_transform:
            cause = "while your loop's thread called device_transform"
            remedy = "Do its work in the dataset: on the CPU, device_transform runs in next()."
        elif stats.wait.causes.build > LONG_DELIVERY_S * stats.batches:
            remedy = "Have collate_fn return few tensors or arrays instead of many Python objects."
    return Finding.DELIVERY, cause, remedy


def _limit_of_workers(stats: LoaderStats, wait_s: float) -> tuple[Finding, str, str]:
    """Return what keeps workers from loading faster, given the seconds of waiting for them."""
    count, cores, stages = stats.num_workers, stats.cores, stats.stages
    what = "collate_fn" if stages.collate > stages.fetch else "the dataset"
    busy_s, ran_s, stalled_s = _used(stats)
    wanted_s = ran_s + stalled_s
    is_stalled = wanted_s > COMPUTING_SHARE * busy_s and stalled_s > STALLED_SHARE * busy_s
    is_computing = count >= cores and ran_s * count > OURS_SHARE * busy_s * cores
    idle_s = [worker.idle_s for worker in stats.workers if worker.batches]
    is_ahead = stats.kind == "executor" or (
        sum(idle_s) <= AHEAD_SHARE * wait_s * max(1, len(idle_s) - 1)
    )
    lacks_cores = is_stalled or (is_computing and is_ahead)
    if _is_locked(stats, lacks_cores=lacks_cores):
        return Finding.INTERPRETER_LOCK, *_TEXTS[Finding.INTERPRETER_LOCK]
    if lacks_cores:
        own_s = max(0.0, stats.cpu_s - (ran_s if stats.kind == "threads" else 0.0))
        cause = f"while workers computed in {what} on {counted(cores, 'core')}"
        remedy = f"Make {what} cheaper, or stop other programs: num_workers cannot help."
        if is_stalled and own_s - stats.consumer_cpu_s > OWN_CORES * stats.elapsed_s:
            cause = "while workers and your loop's own threads shared the cores"
            threads = max(1, cores - count)
            remedy = f"Call torch.set_num_threads({threads}): a larger num_workers cannot help."
        elif is_stalled:
            cause = f"while workers had to wait for one of {counted(cores, 'core')}"
        return Finding.CORES_BUSY, cause, remedy
    if not is_ahead:
        cause = "in bursts, between which workers had nothing to do"
        remedy = "Raise prefetch_factor."
        if stages.reorder > stages.ready:
            cause = "for a slow batch, while other workers had nothing to do"
            # A worker that has all slow batches gets no faster if the others run further ahead.
            if stats.in_order and min(idle_s) < AHEAD_SHARE * sum(idle_s) / len(idle_s):
                remedy = "Set in_order=False, if the order may change."
        return Finding.TOO_FEW_AHEAD, cause, remedy
    is_waiting = 0 < wanted_s < WAITING_SHARE * busy_s
    return Finding.TOO_FEW_WORKERS, *_more_at_once(stats, what, is_waiting=is_waiting)


def _more_at_once(stats: LoaderStats, what: str, *, is_waiting: bool) -> tuple[str, str]:
    """Return the verdict on workers that are all busy, most of which may only wait in a sample."""
    count, cores, most = stats.num_workers, stats.cores, stats.samples // stats.batches
    cause = f"while workers were busy in {what}" if count else f"in {what}, which it runs itself"
    if is_waiting:
        cause = f"while workers waited in {what}, such as for a disk or network"
    is_long = stats.stages.fetch * stats.fetch_concurrency > LONG_SAMPLE_S * stats.samples
    if is_waiting and is_long and what != "collate_fn" and 0 < stats.fetch_concurrency < most:
        remedy = f"Raise fetch_concurrency above {stats.fetch_concurrency}"
        if stats.fetch_concurrency == 1:
            remedy = f"Give fetch_concurrency={min(most, 16)}"
        return cause, f"{remedy}, if several threads may use the dataset at once."
    remedy = f"Raise num_workers above {count}"
    if stats.kind == "executor":
        remedy += ", and give the executor more processes"
    elif count < cores:
        remedy += f": there are {counted(cores, 'core')}"
    elif is_waiting:
        remedy += ", also beyond the cores: waiting needs none"
    return cause, f"{remedy}."


def _used(stats: LoaderStats) -> tuple[float, float, float]:
    """Return the seconds in which workers were busy, used a core, and lacked one."""
    working = [worker for worker in stats.workers if worker.batches]
    # A worker's CPU time includes its start, and it can lack a core between two batches, too. No
    # more than its busy time counts.
    return (
        sum(one.busy_s for one in working),
        sum(min(one.cpu_s, one.busy_s) for one in working),
        sum(min(one.stalled_s, max(0.0, one.busy_s - one.cpu_s)) for one in working),
    )


def _is_locked(stats: LoaderStats, *, lacks_cores: bool = False) -> bool:
    """Return whether the interpreter's lock holds threads up, also if they seem to lack cores."""
    if stats.kind != "threads" or stats.num_workers == 1:
        return False
    busy_s, ran_s, stalled_s = _used(stats)
    least_s, most_s = (cores * stats.elapsed_s for cores in LOCKED_CORES)
    # The consumer's thread needs the lock, too. On a busy machine, all of them may run less.
    wants_lock = ran_s + stalled_s >= WAITING_SHARE * busy_s
    is_limit = lacks_cores or wants_lock or max(ran_s, stats.cpu_s) >= least_s
    has_lock: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return is_limit and ran_s <= most_s and has_lock()


def snapshot(sums: Sums | None, epochs: int, cores: int) -> LoaderStats:
    """Return the statistics of what was recorded in a number of epochs; None before the first."""
    if sums is None or not sums.newest:
        return LoaderStats(cores=cores)
    added, newest, times = sums.added, sums.newest, Times._fields
    elapsed_s, total_s = max(1, added["elapsed"]) / _NS, added["waited"] / _NS
    causes = {name: added["wait", name] / _NS for name in times}
    causes["build"] = max(0.0, total_s - sum(causes.values()))
    most = dict(sums.most)
    longest_ns = most.pop("next", 0)
    numbers = sorted({name[0] for name in (*added, *newest) if isinstance(name[0], int)})
    known = {name: value for name, value in newest.items() if isinstance(name, str)}
    known |= {name: added[name] for name in _COUNTS}
    stats = LoaderStats(
        **known,
        epochs=epochs,
        elapsed_s=elapsed_s,
        cpu_s=added["cpu"] / _NS,
        consumer_cpu_s=added["consumer_cpu"] / _NS,
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
        cores=cores,
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
