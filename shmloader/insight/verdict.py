"""Says what limits the speed and what to change, by rules over the statistics. Pure.

First comes what may end the run (memory), then whether there is anything to gain. The cause is
then read from where the next batch was while the consumer waited
(:class:`~shmloader.insight.figures.WaitPlaces`): these places form groups, and the group with the
largest share of the wait is the cause. If a second group has nearly as much, both are named, so
that two similar epochs do not name one each.

If the workers had not loaded the next batch yet, further rules say why. They are tried in order,
and two rules that advise the opposite of each other have a gap between their thresholds: "add
workers" and "use fewer workers" never follow each other in similar epochs.
"""

import enum

from shmloader.grammar import counted, seconds, size
from shmloader.insight.figures import Figures

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
_NAMES = {
    "fetch": "`__getitem__`",
    "collate": "`collate_fn`",
    "encode": "encoding",
    "build": "delivering batches (and `device_transform`)",
    "pin": "pinning",
    "device": "copying to the device and `device_transform`",
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


def judge(stats: Figures) -> tuple[Finding, str]:
    """Return the rule that holds, and its sentence."""
    facts = _Facts(stats)
    finding = _before_causes(facts)
    if finding is not None:
        return finding, _text(finding, facts, 0.0)
    groups = facts.groups
    first, second = sorted(groups, key=groups.__getitem__, reverse=True)[:2]
    named = [first]
    if groups[second] and groups[second] >= SECOND_CAUSE * groups[first]:
        # In a fixed order, because either may be the larger one next time.
        named = [name for name in groups if name in (first, second)]
    found: dict[Finding, str] = {}
    for group in named:
        cause = _cause(group, facts)
        found.setdefault(cause, _text(cause, facts, groups[group]))
    share = stats.wait.share
    little = " (there is little to gain)" if share < LITTLE_SHARE else ""
    waited = f"The consumer waited {share:.0%} of the time for data{little}; "
    cause, *others = found
    if not others:
        return cause, waited + found[cause]
    return Finding.SEVERAL, (
        f"{waited}there are two causes of about the same weight. First, {found[cause]} "
        f"Second, {found[others[0]]}"
    )


def _before_causes(facts: "_Facts") -> Finding | None:
    """Return what is found before any cause is looked for."""
    if not facts.stats.batches:
        return Finding.NOTHING_YET
    free = facts.stats.machine.free_bytes
    is_short = free is not None and free < FREE_SHARE * (free + facts.used_bytes)
    if facts.fills_share or is_short:
        return Finding.MEMORY
    return Finding.NOTHING_TO_GAIN if facts.stats.wait.share < IDLE_SHARE else None


def _cause(group: str, facts: "_Facts") -> Finding:
    """Return why the consumer waited for a group of places."""
    kind, slots = facts.stats.kind, facts.stats.slots
    too_many = facts.has_too_many_workers
    # For each group, the first rule that holds.
    rules = {
        "start": [(True, Finding.START_UP)],
        "draw": [(True, Finding.SAMPLER)],
        "work": [(kind == "in-process", Finding.IN_PROCESS), *_rules_of_work(facts)],
        "delivery": [
            (kind == "in-process", Finding.IN_PROCESS),
            (slots.copied > COPIED_SHARE * (slots.copied + slots.lent), Finding.SLOTS_HELD),
            (not facts.consumer_lacks_core, Finding.DELIVERY),
            (not facts.uses_cores, Finding.CORES_TAKEN),
            (True, Finding.TOO_MANY_WORKERS if too_many else Finding.CORES_BUSY),
        ],
        "pin": [(True, Finding.IN_PROCESS if kind == "in-process" else Finding.PINNING)],
        "device": [(True, Finding.IN_PROCESS if kind == "in-process" else Finding.DEVICE_COPY)],
        "errors": [
            (kind in ("torch", "other"), Finding.OTHER_LOADER),
            (True, Finding.ERRORS),
        ],
    }
    return next(finding for holds, finding in rules[group] if holds)


def _rules_of_work(facts: "_Facts") -> list[tuple[bool, Finding]]:
    """Return the rules about why the workers had not loaded the next batch yet."""
    stats, places, work_s, busy_s = facts.stats, facts.places, facts.groups["work"], facts.busy_s
    is_executor, cores = stats.kind == "executor", stats.machine.cores
    is_queued = 2 * (places["send"] + places["queue"]) > work_s
    computes = facts.wanted_s > COMPUTING_SHARE * busy_s
    lack_cores = computes and facts.stalled_s > STALLED_SHARE * busy_s
    may_add = stats.num_workers < cores or facts.wanted_s < WAITING_SHARE * busy_s
    # At least one worker is busy: it loads the batch that the consumer waits for.
    held_up_s = HELD_UP_SHARE * work_s * max(1, len(facts.working) - 1)
    return [
        (is_executor and is_queued, Finding.EXECUTOR_BUSY),
        (is_executor, Finding.TOO_FEW_WORKERS),
        (lack_cores and facts.has_too_many_workers, Finding.TOO_MANY_WORKERS),
        (lack_cores and facts.uses_cores, Finding.CORES_BUSY),
        (lack_cores, Finding.CORES_TAKEN),
        (facts.idle_awaited_s > held_up_s, Finding.STRAGGLERS),
        (facts.idle_s > AHEAD_SHARE * work_s * len(facts.working), Finding.BURSTS),
        (stats.stages.collate.total_s > COLLATE_SHARE * busy_s, Finding.SLOW_COLLATE),
        (may_add, Finding.TOO_FEW_WORKERS),
        (True, Finding.CORES_BUSY),
    ]


class _Facts:
    """What the rules look at. All times are in seconds.

    Attributes:
        stats: The statistics.
        places: Where the next batch was while the consumer waited.
        groups: The sums of ``places`` over the places of each group.
        working: The workers that loaded batches.
        busy_s: Time in which they loaded batches, summed over them.
        wanted_s: Time in which they had a core, or wanted one and none was free.
        stalled_s: Part of ``busy_s`` in which they wanted a core and none was free.
        idle_s: Time between their batches in which the consumer did not wait for the workers.
        idle_awaited_s: Time between their batches in which the consumer waited for another's.
        uses_cores: Whether the workers and the consumer's process use most of the cores.
        has_too_many_workers: Whether there are more workers than cores.
        consumer_lacks_core: Whether the consumer lacked a core while batches were delivered.
        used_bytes: The memory that the loader takes.
        fills_share: Whether the largest batch nearly fills its share of the shared memory.
    """

    def __init__(self, stats: Figures) -> None:
        self.stats = stats
        self.places = stats.wait.places._asdict()
        self.groups = {name: sum(self.places[one] for one in of) for name, of in _GROUPS.items()}
        working = self.working = [worker for worker in stats.workers if worker.batches]
        self.busy_s = sum(worker.busy_s for worker in working)
        cpu_s = self.stalled_s = 0.0
        for worker in working:
            # What a worker used before its first batch is not known separately. It is left out as
            # if the worker had used, or wanted, a core all the time until then.
            span_s = worker.busy_s / worker.busy_share if worker.busy_share else 0.0
            start_s = max(0.0, stats.elapsed_s - span_s)
            ran_s = max(0.0, worker.cpu_s - start_s)
            cpu_s += ran_s
            # A worker can lack a core also between two batches. At most the part of its busy time
            # in which it did not run counts.
            waited_s = max(0.0, (worker.stalled_s or 0.0) - start_s)
            self.stalled_s += min(waited_s, max(0.0, worker.busy_s - ran_s))
        self.wanted_s = cpu_s + self.stalled_s
        self.idle_awaited_s = sum(worker.idle_awaited_s for worker in working)
        self.idle_s = sum(worker.idle_s for worker in working) - self.idle_awaited_s
        consumer, slots, cores = stats.consumer, stats.slots, stats.machine.cores
        # The process's time includes that of threads.
        used_s = consumer.process_cpu_s + (0.0 if stats.kind == "threads" else cpu_s)
        self.uses_cores = used_s > CORES_SHARE * cores * stats.elapsed_s
        self.has_too_many_workers = stats.num_workers > cores
        # How much of the time without a core was in next() is not known. While batches are
        # delivered, the consumer has or wants a core all the time, so the same share as elsewhere
        # is assumed there.
        stalled_s = consumer.stalled_s or 0.0
        core_s = max(self.groups["delivery"], (consumer.cpu_s or 0.0) + stalled_s)
        self.consumer_lacks_core = consumer.cpu_s is not None and stalled_s > STALLED_SHARE * core_s
        self.used_bytes = slots.nbytes + sum(each.pss_bytes or 0 for each in stats.workers)
        self.fills_share = slots.largest_bytes > (1 - FREE_SHARE) * slots.share_bytes > 0


def _text(finding: Finding, facts: _Facts, spent_s: float) -> str:
    """Return the sentence of a finding, for a cause of ``spent_s`` of waiting.

    The sentences of causes follow a semicolon.
    """
    stats, slots, machine = facts.stats, facts.stats.slots, facts.stats.machine
    cores, wait_s = counted(machine.cores, "core"), stats.wait.total_s
    work = {name: getattr(stats.stages, name).total_s for name in ("fetch", "collate")}
    where, remedy = max(work, key=work.__getitem__), "make that cheaper"
    if stats.kind == "in-process":
        where = max(_NAMES, key=facts.places.__getitem__)
        if where in ("fetch", "collate"):  # workers would take over nothing else
            remedy = f"give the loader workers (num_workers=; {cores} may be used)"
    memory = f"the loader takes {size(facts.used_bytes)}, and {size(machine.free_bytes or 0)} is "
    memory += f"free ({machine.limit});"
    if facts.fills_share:
        memory = f"the largest batch took {size(slots.largest_bytes)} of the "
        memory += f"{size(slots.share_bytes)} that shm_size leaves for each; raise shm_size, or"
    start = "iter(): make the start of the sampler or the dataset cheaper"
    if stats.num_workers:
        once = "" if stats.persistent_workers else "with persistent_workers=True "
        start = f"the start and the end of workers: {once}this is paid once"
    add = ", where they wait more than they compute: add workers, even more than the " + cores
    if stats.kind == "executor":
        add = ": give the executor more processes and raise num_workers=, or make that cheaper"
    elif stats.num_workers < machine.cores:
        add = f": add workers ({stats.num_workers} of {cores} are used)"
    busy_share = sum(worker.busy_share for worker in facts.working) / max(1, len(facts.working))
    busy = f"workers were busy {busy_share:.0%}, mostly in {_NAMES[where]}"
    turns = ""
    if stats.kind == "threads":
        turns = " Threads run Python code one at a time: for that, leave out thread_pool=True."
    part = f"for {min(1.0, spent_s / (wait_s or 1.0)):.0%} of that, "
    collate_share = min(1.0, work["collate"] / (facts.busy_s or 1.0))
    slow = stats.load_p99_s / (stats.load_p50_s or 1.0)
    return {
        Finding.NOTHING_YET: "No batch has been delivered yet.",
        Finding.MEMORY: (
            f"Memory is near its limit: {memory} lower num_workers, prefetch_factor or batch_size, "
            "before a larger batch raises SharedMemoryError."
        ),
        Finding.NOTHING_TO_GAIN: (
            f"The loader is not the limit: the consumer waited {stats.wait.share:.1%} of the time "
            "for data, and has nothing to gain from a faster one."
        ),
        Finding.OTHER_LOADER: (
            "what the loader does meanwhile is not known: torch's own iterator loads (a data "
            "pipe, or no memfd or pidfd), or a loader that is not one of shmloader's."
        ),
        Finding.START_UP: (f"{seconds(spent_s)} of {seconds(wait_s)} of waiting was for {start}."),
        Finding.SAMPLER: (
            f"{part}the batch sampler was drawing indices, which it does on the consumer's thread: "
            "make the sampler cheaper, for example by drawing many indices at once."
        ),
        Finding.ERRORS: (
            f"{part}an error was raised in place of a batch: fix these samples, or skip them "
            "(on_error=)."
        ),
        Finding.IN_PROCESS: f"it loads the data itself, mostly in {_NAMES[where]}: {remedy}.",
        Finding.EXECUTOR_BUSY: (
            "the next batch's task mostly waited for the executor or was on its way: raise "
            "num_workers= if the executor has idle processes, otherwise give it more. If the "
            "network is slow, use smaller types (uint8, converted here)."
        ),
        Finding.TOO_MANY_WORKERS: (
            f"{stats.num_workers} workers compete for {cores}, with the consumer and perhaps other "
            "programs, and often no core was free: lower num_workers."
        ),
        Finding.CORES_TAKEN: (
            "workers or the consumer often wanted to run when no core was free. Stop other "
            f"programs on this machine ({cores}), or lower num_workers or torch.set_num_threads()."
        ),
        Finding.STRAGGLERS: (
            f"a slow batch holds up those behind it (one in a hundred takes {slow:.0f} times as "
            "long as the median), and other workers have nothing to do meanwhile. Let later "
            "batches come first (in_order=False), or raise prefetch_factor."
        ),
        Finding.BURSTS: (
            "batches are wanted in bursts, and too few are loaded ahead: raise prefetch_factor."
        ),
        Finding.SLOW_COLLATE: (
            f"workers spent {collate_share:.0%} of their time in collate_fn: move work from there "
            "to the dataset, or let it write into shmloader.empty()."
        ),
        Finding.TOO_FEW_WORKERS: f"{busy}{add}.{turns}",
        Finding.CORES_BUSY: (
            f"{busy}, and the workers and the consumer use most of {cores}: make `__getitem__` and "
            f"`collate_fn`, or what is done with each batch, cheaper, or use more cores.{turns}"
        ),
        Finding.SLOTS_HELD: (
            f"{slots.copied} of {slots.copied + slots.lent} batches were copied out of their "
            "slots, since too many earlier ones were still held: drop each batch after use, or "
            "keep clones of the parts that you need."
        ),
        Finding.DELIVERY: (
            f"{part}the next batch was loaded and being delivered: use a larger batch_size, return "
            "tensors instead of Python objects, or make device_transform= cheaper."
        ),
        Finding.PINNING: (
            f"{part}the next batch was being pinned: copy batches straight to the device "
            "(device=), or use smaller types (uint8, converted there)."
        ),
        Finding.DEVICE_COPY: (
            f"{part}the next batch was being copied to the device: use smaller types (uint8, "
            "converted by device_transform=), or make device_transform= cheaper."
        ),
    }[finding]
