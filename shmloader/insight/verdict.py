"""Says what limits the speed and what to change, by rules over the statistics. Pure.

First comes what may end the run (memory), then whether there is anything to gain. The cause is
then read from where the next batch was while the consumer waited
(:class:`~shmloader.insight.WaitPlaces`): these places form groups, and the group with the largest
share of the wait is the cause. If a second group has nearly as much, both are named, so that two
similar epochs do not name one each.

If the workers had not loaded the next batch yet, further rules say why. They are tried in order,
and two rules that advise the opposite of each other have a gap between their thresholds: "add
workers" and "use fewer workers" never follow each other in similar epochs.

The module is long because all rules stand in it, in the order in which they are tried.
"""

import dataclasses
import enum
from typing import TYPE_CHECKING

from shmloader.insight.text import counted, seconds, size

if TYPE_CHECKING:
    from shmloader.insight.snapshot import LoaderStats

#: A consumer that waits for a smaller share of its time than this would gain nothing.
IDLE_SHARE = 0.05
#: A consumer that waits for a smaller share than this has little to gain, and the verdict says so.
LITTLE_SHARE = 0.1
#: A second cause is named as well if its share of the wait is at least this part of the first's.
SECOND_CAUSE = 0.75
#: Workers are held up by a slow batch if, while the consumer waits for it, the workers that do not
#: load it are idle for a larger share of the time than this.
HELD_UP_SHARE = 0.5
#: More batches loaded ahead would help if each worker, on average, is idle while the consumer does
#: not wait, for longer than this share of the time that the consumer waits for the workers.
AHEAD_SHARE = 0.5
#: Workers that wait for a core for a larger share of their busy time than this compete for cores.
#: So does a consumer that waits for a core for a larger share of the time in which it has or wants
#: one.
STALLED_SHARE = 0.3
#: Workers wait for something else, such as a disk, if they have or want a core for less than the
#: first share of their busy time. They compute if they do so for more than the second share.
WAITING_SHARE, COMPUTING_SHARE = 0.4, 0.6
#: Where no core was free although the workers and the consumer's process use a smaller share of all
#: cores than this, others use the cores, too.
CORES_SHARE = 0.6
#: Collating is slow where it takes a larger share of the workers' time than this.
COLLATE_SHARE = 0.5
#: Slots are held where a larger share of the batches than this was copied out of them.
COPIED_SHARE = 0.5
#: Memory is near its limit where less than this share of it is free.
FREE_SHARE = 0.1

# Groups of places, which are fields of WaitPlaces. The places of a group have the same cause.
_GROUPS = {
    "start": ("start", "end"),
    "draw": ("draw",),
    "work": ("send", "queue", "fetch", "collate", "encode"),
    "delivery": ("transport", "build"),
    "pin": ("pin",),
    "device": ("device",),
    "errors": ("other",),
}


class Finding(enum.Enum):
    """The rule that made the verdict."""

    NOTHING_YET = "nothing yet"
    MEMORY = "memory near the limit"
    NOTHING_TO_GAIN = "nothing to gain"
    SEVERAL = "several causes"
    START_UP = "start-up"
    IN_PROCESS = "no workers"
    SAMPLER = "slow sampler"
    PINNING = "pinning"
    DEVICE_COPY = "device copy"
    SLOTS_HELD = "slots held by the consumer"
    DELIVERY = "delivering"
    ERRORS = "errors in place of batches"
    CORES_TAKEN = "cores taken by others"
    TOO_MANY_WORKERS = "too many workers"
    STRAGGLERS = "stragglers"
    BURSTS = "wanted in bursts"
    SLOW_COLLATE = "slow collate"
    TOO_FEW_WORKERS = "too few workers"
    CORES_BUSY = "all cores busy"
    EXECUTOR_BUSY = "executor busy"
    OTHER_LOADER = "another loader"


def judge(stats: "LoaderStats") -> tuple[Finding, str]:
    """Return the rule that holds, and its sentence."""
    if not stats.batches:
        return Finding.NOTHING_YET, "No batch has been delivered yet."
    share = stats.wait.share
    found = _near_a_limit(stats) or _nothing_to_gain(stats)
    if found is not None:
        return found
    finding, text = _cause(stats)
    little = " (there is little to gain)" if share < LITTLE_SHARE else ""
    return finding, f"The consumer waited {share:.0%} of the time for data{little}; {text}"


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
    if stats.kind in ("torch", "other"):
        return Finding.OTHER_LOADER, _of_another_loader(stats)
    places = stats.wait.places._asdict()
    groups = {name: sum(places[one] for one in of) for name, of in _GROUPS.items()}
    first, second = sorted(groups, key=groups.__getitem__, reverse=True)[:2]
    if groups[second] < SECOND_CAUSE * groups[first] or not groups[second]:
        return _of_group(stats, first)
    # In a fixed order, because either may be the larger one next time.
    named = [name for name in _GROUPS if name in (first, second)]
    (finding, one), (other_finding, other) = (_of_group(stats, name) for name in named)
    if finding is other_finding:  # without workers, the consumer's own thread does it all
        return _of_group(stats, first)
    return Finding.SEVERAL, (
        f"there are two causes of about the same weight. First, {one} Second, {other}"
    )


def _of_another_loader(stats: "LoaderStats") -> str:
    if stats.kind == "torch":
        return (
            "what the loader does meanwhile is not known: torch's own iterator loads, since the "
            "dataset is a data pipe, or this system has no memfd or pidfd."
        )
    return "what the loader does meanwhile is not known, since it is not one of shmloader's."


def _of_group(stats: "LoaderStats", group: str) -> tuple[Finding, str]:
    """Return the rule of a group of places, and its sentence, which does not begin with a capital.

    Args:
        stats: The statistics.
        group: A key of ``_GROUPS``.
    """
    places, waited_s = stats.wait.places, stats.wait.total_s
    if group == "start":
        return Finding.START_UP, _of_start(stats)
    if group == "draw":
        return Finding.SAMPLER, (
            f"for {_share(places.draw, waited_s)} of that, the batch sampler was drawing indices, "
            "which it does on the consumer's thread: make the sampler cheaper, for example by "
            "drawing many indices at once."
        )
    if stats.kind == "in-process" and group != "errors":
        return Finding.IN_PROCESS, _of_this_thread(stats, group)
    if group == "work":
        return _of_the_workers(stats) if stats.kind != "executor" else _of_an_executor(stats)
    return _of_delivery(stats) if group == "delivery" else _of_a_stage(stats, group)


def _of_a_stage(stats: "LoaderStats", group: str) -> tuple[Finding, str]:
    places, waited_s = stats.wait.places, stats.wait.total_s
    if group == "pin":
        return Finding.PINNING, (
            f"for {_share(places.pin, waited_s)} of that, the next batch was being pinned: copy "
            "batches straight to the device (device=), or use smaller types (uint8, converted "
            "there)."
        )
    if group == "device":
        return Finding.DEVICE_COPY, (
            f"for {_share(places.device, waited_s)} of that, the next batch was being copied to "
            "the device: use smaller types (uint8, converted by device_transform=), or make "
            "device_transform= cheaper."
        )
    return Finding.ERRORS, (
        f"for {_share(places.other, waited_s)} of that, an error was raised in place of a batch: "
        "fix these samples, or skip them (on_error=)."
    )


def _of_delivery(stats: "LoaderStats") -> tuple[Finding, str]:
    copied, lent = stats.slots.copied, stats.slots.lent
    if copied > COPIED_SHARE * (copied + lent):
        return Finding.SLOTS_HELD, (
            f"{copied} of {copied + lent} batches were copied out of their slots, since too many "
            "earlier ones were still held: drop each batch after use, or keep clones of the parts "
            "that you need."
        )
    places = stats.wait.places
    spent_s = places.transport + places.build
    if _consumer_stalls(stats, spent_s):
        return _of_a_stalled_consumer(stats, spent_s)
    return Finding.DELIVERY, (
        f"for {_share(spent_s, stats.wait.total_s)} of that, the next "
        "batch was loaded and being delivered: use a larger batch_size, return tensors instead of "
        "Python objects, or make device_transform= cheaper."
    )


def _consumer_stalls(stats: "LoaderStats", spent_s: float) -> bool:
    """Return whether the consumer lacked a core while batches were delivered, for ``spent_s``.

    It is not known how much of the time without a core was in ``next()``. During ``spent_s`` the
    consumer has or wants a core all the time, so the same share as elsewhere is assumed there.
    """
    cpu_s, stalled_s = stats.consumer.cpu_s, stats.consumer.stalled_s
    if cpu_s is None or stalled_s is None:
        return False
    return stalled_s > STALLED_SHARE * max(spent_s, cpu_s + stalled_s)


def _of_a_stalled_consumer(stats: "LoaderStats", spent_s: float) -> tuple[Finding, str]:
    stalled = (
        f"for {_share(spent_s, stats.wait.total_s)} of that, the next batch was loaded, but no "
        "core was free for the consumer to take it"
    )
    if not _work_of(stats).uses_cores:
        return Finding.CORES_TAKEN, (
            f"{stalled}. Stop other programs on this machine ({_cores(stats)})."
        )
    if stats.num_workers > stats.machine.cores:
        return Finding.TOO_MANY_WORKERS, (
            f"{stalled}: {stats.num_workers} workers compete with it for {_cores(stats)}; lower "
            "num_workers."
        )
    return Finding.CORES_BUSY, f"{stalled}: {_OWN_CORES.format(cores=_cores(stats))}"


def _of_start(stats: "LoaderStats") -> str:
    places = stats.wait.places
    spent_s = places.start + places.end
    of_all = f"{seconds(spent_s)} of {seconds(stats.wait.total_s)} of waiting was for"
    if not stats.num_workers:
        return f"{of_all} iter(): make the start of the sampler or the dataset cheaper."
    condition = "" if stats.persistent_workers else "with persistent_workers=True "
    return f"{of_all} the start and the end of workers: {condition}this is paid once."


def _of_this_thread(stats: "LoaderStats", group: str) -> str:
    places = stats.wait.places._asdict()
    busiest = max(_GROUPS[group], key=places.__getitem__)
    remedy = "make that cheaper, or raise batch_size"  # workers would not take that over
    if group == "work":
        remedy = f"give the loader workers (num_workers=; this process may use {_cores(stats)})"
    return f"it loads the data itself, mostly in {_NAMES[busiest]}: {remedy}."


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """What the workers did.

    Attributes:
        busy: How busy they were, in words.
        busy_s: Seconds in which they loaded batches, summed over the workers.
        wanted_s: Seconds in which they had a core, or wanted one and none was free.
        stalled_s: Seconds of ``busy_s`` in which they wanted a core and none was free.
        uses_cores: Whether the workers and the consumer's process use most of the cores.
    """

    busy: str
    busy_s: float
    wanted_s: float
    stalled_s: float
    uses_cores: bool


def _work_of(stats: "LoaderStats") -> _Work:
    working = [worker for worker in stats.workers if worker.batches]
    share = sum(worker.busy_share for worker in working) / max(1, len(working))
    cpu_s = stalled_s = 0.0
    for worker in working:
        # What a worker used before its first batch is not known separately. It is left out as if
        # the worker had used, or wanted, a core all the time until then.
        span_s = worker.busy_s / worker.busy_share if worker.busy_share else 0.0
        start_s = max(0.0, stats.elapsed_s - span_s)
        ran_s = max(0.0, worker.cpu_s - start_s)
        cpu_s += ran_s
        # A worker can lack a core also between two batches. At most the part of its busy time in
        # which it did not run counts.
        waited_s = max(0.0, (worker.stalled_s or 0.0) - start_s)
        stalled_s += min(waited_s, max(0.0, worker.busy_s - ran_s))
    used_s = stats.consumer.process_cpu_s
    if stats.kind != "threads":  # used_s includes their CPU time
        used_s += cpu_s
    return _Work(
        f"workers were busy {share:.0%}",
        sum(worker.busy_s for worker in working),
        cpu_s + stalled_s,
        stalled_s,
        used_s > CORES_SHARE * stats.machine.cores * stats.elapsed_s,
    )


def _of_the_workers(stats: "LoaderStats") -> tuple[Finding, str]:
    """Return why the workers had not loaded the next batch yet."""
    work = _work_of(stats)
    is_computing = work.wanted_s > COMPUTING_SHARE * work.busy_s
    if is_computing and work.stalled_s > STALLED_SHARE * work.busy_s:
        return _of_cores(stats, work)
    working = [worker for worker in stats.workers if worker.batches]
    awaited_s = sum(getattr(stats.wait.places, name) for name in _GROUPS["work"])
    idle_awaited_s = sum(worker.idle_awaited_s for worker in working)
    # At least one worker is busy: it loads the batch that the consumer waits for.
    if idle_awaited_s > HELD_UP_SHARE * awaited_s * max(1, len(working) - 1):
        return Finding.STRAGGLERS, _of_stragglers(stats, idle_awaited_s / len(working), awaited_s)
    idle_ahead_s = sum(worker.idle_s for worker in working) - idle_awaited_s
    if idle_ahead_s > AHEAD_SHARE * awaited_s * len(working):
        return Finding.BURSTS, (
            f"{work.busy}, since batches are wanted in bursts and too few are loaded ahead: raise "
            "prefetch_factor."
        )
    return _of_their_work(stats, work)


def _of_an_executor(stats: "LoaderStats") -> tuple[Finding, str]:
    """Return why the executor had not made the next batch yet. Its cores are not known here."""
    places, waited_s = stats.wait.places, stats.wait.total_s
    queue_s = places.send + places.queue
    work_s = places.fetch + places.collate + places.encode
    if queue_s > work_s:
        return Finding.EXECUTOR_BUSY, (
            f"for {_share(queue_s, waited_s)} of that, the next batch's task waited for the "
            "executor, or was on its way: raise num_workers= if the executor has idle "
            "processes, otherwise give it more. If the network is slow, use smaller types (uint8, "
            "converted here)."
        )
    seconds_in = {name: getattr(stats.stages, name).total_s for name in _OF_WORKERS}
    where = _NAMES[max(seconds_in, key=seconds_in.__getitem__)]
    return Finding.TOO_FEW_WORKERS, (
        f"for {_share(work_s, waited_s)} of that, the next batch was being made, mostly in "
        f"{where}: give the executor more processes and raise num_workers=, or make that cheaper."
    )


def _of_cores(stats: "LoaderStats", work: _Work) -> tuple[Finding, str]:
    stalled = f"{work.busy}, but often wanted to run when no core was free"
    if stats.num_workers > stats.machine.cores:
        others = "" if work.uses_cores else ", and other programs use them too"
        return Finding.TOO_MANY_WORKERS, (
            f"{stalled}: {stats.num_workers} workers compete for {_cores(stats)}{others}; "
            "lower num_workers."
        )
    if work.uses_cores:
        return Finding.CORES_BUSY, (f"{stalled}: {_OWN_CORES.format(cores=_cores(stats))}")
    return Finding.CORES_TAKEN, (
        f"{stalled}. Stop other programs on this machine ({_cores(stats)}), or lower num_workers "
        "or torch.set_num_threads()."
    )


def _of_stragglers(stats: "LoaderStats", idle_s: float, awaited_s: float) -> str:
    slow = ""
    if stats.load_p50_s:
        factor = stats.load_p99_s / stats.load_p50_s
        slow = f" (one in a hundred takes {factor:.0f} times as long as the median)"
    return (
        f"a slow batch{slow} holds up those behind it: each worker had nothing to do for "
        f"{_share(idle_s, awaited_s)} of that, on average. Let later batches come first "
        "(in_order=False), or raise prefetch_factor."
    )


def _of_their_work(stats: "LoaderStats", work: _Work) -> tuple[Finding, str]:
    busy, busy_s = work.busy, work.busy_s
    collate_s = stats.stages.collate.total_s
    if collate_s > COLLATE_SHARE * busy_s:
        return Finding.SLOW_COLLATE, (
            f"{busy}, {_share(collate_s, busy_s)} of it in collate_fn: move work from there to the "
            "dataset, or let it write into shmloader.empty()."
        )
    seconds_in = {name: getattr(stats.stages, name).total_s for name in _OF_WORKERS}
    where = f"{busy}, mostly in {_NAMES[max(seconds_in, key=seconds_in.__getitem__)]}"
    turns = ""
    if stats.kind == "threads":
        turns = " Threads run Python code one at a time: for that, leave out thread_pool=True."
    if stats.num_workers < stats.machine.cores:
        return Finding.TOO_FEW_WORKERS, (
            f"{where}: add workers ({stats.num_workers} of {_cores(stats)} are used).{turns}"
        )
    if work.wanted_s < WAITING_SHARE * busy_s:
        return Finding.TOO_FEW_WORKERS, (
            f"{where}, where they wait more than they compute: add workers, even more than the "
            f"{_cores(stats)}."
        )
    return Finding.CORES_BUSY, (
        f"{where}, on all of {_cores(stats)}: make that cheaper, or use more cores.{turns}"
    )


_OWN_CORES = (
    "the workers and the consumer use most of {cores}; make `__getitem__` and `collate_fn`, or "
    "what is done with each batch, cheaper, or use more cores."
)

_OF_WORKERS = ("fetch", "collate", "encode")

_NAMES = {
    "fetch": "`__getitem__`",
    "collate": "`collate_fn`",
    "encode": "encoding",
    # Of a loader without workers:
    "send": "waiting",
    "queue": "waiting",
    "transport": "delivering batches",
    "build": "delivering batches (and `device_transform`)",
    "pin": "pinning",
    "device": "copying to the device and `device_transform`",
}


def _share(part: float, whole: float) -> str:
    return f"{min(1.0, part / whole):.0%}" if whole else "0%"


def _cores(stats: "LoaderStats") -> str:
    return counted(stats.machine.cores, "core")
