"""Says what limits the speed and what to change, by rules over the statistics. Pure.

First comes what may end the run (memory), then whether there is anything to gain. The cause is
then read from where the next batch was while the consumer waited
(:class:`~shmloader.insight.WaitPlaces`): these places form groups, and the group with the largest
share of the wait is the cause. If a second group has nearly as much, both are named, so that two
similar epochs do not name one each.

If the workers had not loaded the next batch yet, further rules say why. They are tried in order,
and two rules that advise the opposite of each other have a gap between their thresholds: "add
workers" and "use fewer workers" never follow each other in similar epochs.

The rules are a table (``_RULES``), and so are the texts (``_TEXTS``), one for each finding. The
module is long because both tables stand in it.
"""

import enum
from collections.abc import Callable
from typing import Any

from shmloader.insight.figures import Figures
from shmloader.insight.text import counted, seconds, size

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
    finding = _find("before", facts)
    if finding is not None:
        return finding, _TEXTS[finding].format_map(facts.words(0.0))
    groups = facts.groups
    first, second = sorted(groups, key=groups.__getitem__, reverse=True)[:2]
    named = [first]
    if groups[second] and groups[second] >= SECOND_CAUSE * groups[first]:
        # In a fixed order, because either may be the larger one next time.
        named = [name for name in groups if name in (first, second)]
    found: dict[Finding, str] = {}
    for group in named:
        cause = _find(group, facts)
        assert cause is not None  # the last rule of a group always holds
        found.setdefault(cause, _TEXTS[cause].format_map(facts.words(groups[group])))
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


def _find(group: str, facts: "_Facts") -> Finding | None:
    """Return the finding of the first rule of a group that holds."""
    holds = (finding for name, finding, rule in _RULES if name == group and rule(facts))
    return next(holds, None)


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
        used_bytes: The memory that the loader takes.
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
        # The process's time includes that of threads.
        used_s = stats.consumer.process_cpu_s + (0.0 if stats.kind == "threads" else cpu_s)
        self.uses_cores = used_s > CORES_SHARE * stats.machine.cores * stats.elapsed_s
        self.used_bytes = stats.slots.nbytes + sum(each.pss_bytes or 0 for each in stats.workers)

    @property
    def is_near_a_limit(self) -> bool:
        """Whether the largest batch nearly fills its share, or the machine's memory is short."""
        free = self.stats.machine.free_bytes
        if self._fills_share:
            return True
        return free is not None and free < FREE_SHARE * (free + self.used_bytes)

    @property
    def lack_cores(self) -> bool:
        """Whether the workers compute, and often lack a core."""
        is_computing = self.wanted_s > COMPUTING_SHARE * self.busy_s
        return is_computing and self.stalled_s > STALLED_SHARE * self.busy_s

    @property
    def consumer_lacks_core(self) -> bool:
        """Whether the consumer lacked a core while batches were delivered.

        It is not known how much of the time without a core was in ``next()``. While batches are
        delivered, the consumer has or wants a core all the time, so the same share as elsewhere is
        assumed there.
        """
        cpu_s, stalled_s = self.stats.consumer.cpu_s, self.stats.consumer.stalled_s
        if cpu_s is None or stalled_s is None:
            return False
        return bool(stalled_s > STALLED_SHARE * max(self.groups["delivery"], cpu_s + stalled_s))

    @property
    def has_too_many_workers(self) -> bool:
        """Whether there are more workers than cores."""
        return self.stats.num_workers > self.stats.machine.cores

    @property
    def may_add_workers(self) -> bool:
        """Whether there are cores left, or the workers mostly wait for something else."""
        is_waiting = self.wanted_s < WAITING_SHARE * self.busy_s
        return self.stats.num_workers < self.stats.machine.cores or is_waiting

    @property
    def _fills_share(self) -> bool:
        slots = self.stats.slots
        return slots.largest_bytes > (1 - FREE_SHARE) * slots.share_bytes > 0

    @property
    def _memory(self) -> str:
        slots, machine = self.stats.slots, self.stats.machine
        if self._fills_share:
            return (
                f"the largest batch took {size(slots.largest_bytes)} of the "
                f"{size(slots.share_bytes)} that shm_size leaves for each; raise shm_size, or"
            )
        free = size(machine.free_bytes or 0)
        return f"the loader takes {size(self.used_bytes)}, and {free} is free ({machine.limit});"

    @property
    def _start(self) -> str:
        if not self.stats.num_workers:
            return "iter(): make the start of the sampler or the dataset cheaper"
        once = "" if self.stats.persistent_workers else "with persistent_workers=True "
        return f"the start and the end of workers: {once}this is paid once"

    @property
    def _add(self) -> str:
        if self.stats.kind == "executor":
            return ": give the executor more processes and raise num_workers=, or make that cheaper"
        if self.stats.num_workers < self.stats.machine.cores:
            return f": add workers ({self.stats.num_workers} of {_cores(self.stats)} are used)"
        return (
            ", where they wait more than they compute: add workers, even more than the "
            f"{_cores(self.stats)}"
        )

    def words(self, spent_s: float) -> dict[str, Any]:
        """Return the values that the texts name, for a cause of ``spent_s`` of waiting."""
        stats, slots = self.stats, self.stats.slots
        work = {name: getattr(stats.stages, name).total_s for name in ("fetch", "collate")}
        where, remedy = max(work, key=work.__getitem__), "make that cheaper"
        if stats.kind == "in-process":
            where = max(_NAMES, key=self.places.__getitem__)
            if where in ("fetch", "collate"):  # workers would take over nothing else
                remedy = f"give the loader workers (num_workers=; {_cores(stats)} may be used)"
        busy_share = sum(worker.busy_share for worker in self.working) / max(1, len(self.working))
        return {
            "part": _share(spent_s, stats.wait.total_s),
            "spent": f"{seconds(spent_s)} of {seconds(stats.wait.total_s)}",
            "waited": f"{stats.wait.share:.1%}",
            "cores": _cores(stats),
            "workers": stats.num_workers,
            "busy": f"workers were busy {busy_share:.0%}, mostly in {_NAMES[where]}",
            "where": _NAMES[where],
            "remedy": remedy,
            "collate": _share(work["collate"], self.busy_s),
            "slow": stats.load_p99_s / (stats.load_p50_s or 1.0),
            "copied": f"{slots.copied} of {slots.copied + slots.lent}",
            "memory": self._memory,
            "start": self._start,
            "add": self._add,
            "turns": _TURNS if stats.kind == "threads" else "",
        }


def _share(part: float, whole: float) -> str:
    return f"{min(1.0, part / whole):.0%}" if whole else "0%"


def _cores(stats: Figures) -> str:
    return counted(stats.machine.cores, "core")


# The group of places whose wait a rule explains, what it finds, and when it holds if no earlier
# rule of the group does. Rules of "before" are tried first. A loader without workers has its own
# rules only where the wait was for something that another thread could not do.
_RULES: tuple[tuple[str, Finding, Callable[[_Facts], bool]], ...] = (
    ("before", Finding.NOTHING_YET, lambda facts: not facts.stats.batches),
    ("before", Finding.MEMORY, lambda facts: facts.is_near_a_limit),
    ("before", Finding.NOTHING_TO_GAIN, lambda facts: facts.stats.wait.share < IDLE_SHARE),
    ("errors", Finding.OTHER_LOADER, lambda facts: facts.stats.kind in ("torch", "other")),
    ("start", Finding.START_UP, lambda _: True),
    ("draw", Finding.SAMPLER, lambda _: True),
    ("errors", Finding.ERRORS, lambda _: True),
    *(
        (group, Finding.IN_PROCESS, lambda facts: facts.stats.kind == "in-process")
        for group in ("work", "delivery", "pin", "device")
    ),
    (
        "work",
        Finding.EXECUTOR_BUSY,
        lambda facts: (
            facts.stats.kind == "executor"
            and 2 * (facts.places["send"] + facts.places["queue"]) > facts.groups["work"]
        ),
    ),
    ("work", Finding.TOO_FEW_WORKERS, lambda facts: facts.stats.kind == "executor"),
    (
        "work",
        Finding.TOO_MANY_WORKERS,
        lambda facts: facts.lack_cores and facts.has_too_many_workers,
    ),
    ("work", Finding.CORES_BUSY, lambda facts: facts.lack_cores and facts.uses_cores),
    ("work", Finding.CORES_TAKEN, lambda facts: facts.lack_cores),
    (
        "work",
        Finding.STRAGGLERS,
        # At least one worker is busy: it loads the batch that the consumer waits for.
        lambda facts: (
            facts.idle_awaited_s
            > HELD_UP_SHARE * facts.groups["work"] * max(1, len(facts.working) - 1)
        ),
    ),
    (
        "work",
        Finding.BURSTS,
        lambda facts: facts.idle_s > AHEAD_SHARE * facts.groups["work"] * len(facts.working),
    ),
    (
        "work",
        Finding.SLOW_COLLATE,
        lambda facts: facts.stats.stages.collate.total_s > COLLATE_SHARE * facts.busy_s,
    ),
    ("work", Finding.TOO_FEW_WORKERS, lambda facts: facts.may_add_workers),
    ("work", Finding.CORES_BUSY, lambda _: True),
    (
        "delivery",
        Finding.SLOTS_HELD,
        lambda facts: (
            facts.stats.slots.copied
            > COPIED_SHARE * (facts.stats.slots.copied + facts.stats.slots.lent)
        ),
    ),
    (
        "delivery",
        Finding.CORES_TAKEN,
        lambda facts: facts.consumer_lacks_core and not facts.uses_cores,
    ),
    (
        "delivery",
        Finding.TOO_MANY_WORKERS,
        lambda facts: facts.consumer_lacks_core and facts.has_too_many_workers,
    ),
    ("delivery", Finding.CORES_BUSY, lambda facts: facts.consumer_lacks_core),
    ("delivery", Finding.DELIVERY, lambda _: True),
    ("pin", Finding.PINNING, lambda _: True),
    ("device", Finding.DEVICE_COPY, lambda _: True),
)

# The texts name values of `_Facts.words`. Those of causes follow a semicolon.
_TEXTS = {
    Finding.NOTHING_YET: "No batch has been delivered yet.",
    Finding.MEMORY: (
        "Memory is near its limit: {memory} lower num_workers, prefetch_factor or batch_size, "
        "before a larger batch raises SharedMemoryError."
    ),
    Finding.NOTHING_TO_GAIN: (
        "The loader is not the limit: the consumer waited {waited} of the time for data, and has "
        "nothing to gain from a faster one."
    ),
    Finding.OTHER_LOADER: (
        "what the loader does meanwhile is not known: torch's own iterator loads (a data pipe, or "
        "no memfd or pidfd), or a loader that is not one of shmloader's."
    ),
    Finding.START_UP: ("{spent} of waiting was for {start}."),
    Finding.SAMPLER: (
        "for {part} of that, the batch sampler was drawing indices, which it does on the "
        "consumer's thread: make the sampler cheaper, for example by drawing many indices at once."
    ),
    Finding.ERRORS: (
        "for {part} of that, an error was raised in place of a batch: fix these samples, or skip "
        "them (on_error=)."
    ),
    Finding.IN_PROCESS: "it loads the data itself, mostly in {where}: {remedy}.",
    Finding.EXECUTOR_BUSY: (
        "the next batch's task mostly waited for the executor or was on its way: raise "
        "num_workers= if the executor has idle processes, otherwise give it more. If the network "
        "is slow, use smaller types (uint8, converted here)."
    ),
    Finding.TOO_MANY_WORKERS: (
        "{workers} workers compete for {cores}, with the consumer and perhaps other programs, and "
        "often no core was free: lower num_workers."
    ),
    Finding.CORES_TAKEN: (
        "workers or the consumer often wanted to run when no core was free. Stop other programs on "
        "this machine ({cores}), or lower num_workers or torch.set_num_threads()."
    ),
    Finding.STRAGGLERS: (
        "a slow batch holds up those behind it (one in a hundred takes {slow:.0f} times as long as "
        "the median), and other workers have nothing to do meanwhile. Let later batches come first "
        "(in_order=False), or raise prefetch_factor."
    ),
    Finding.BURSTS: (
        "batches are wanted in bursts, and too few are loaded ahead: raise prefetch_factor."
    ),
    Finding.SLOW_COLLATE: (
        "workers spent {collate} of their time in collate_fn: move work from there to the dataset, "
        "or let it write into shmloader.empty()."
    ),
    Finding.TOO_FEW_WORKERS: ("{busy}{add}.{turns}"),
    Finding.CORES_BUSY: (
        "{busy}, and the workers and the consumer use most of {cores}: make `__getitem__` and "
        "`collate_fn`, or what is done with each batch, cheaper, or use more cores.{turns}"
    ),
    Finding.SLOTS_HELD: (
        "{copied} batches were copied out of their slots, since too many earlier ones were still "
        "held: drop each batch after use, or keep clones of the parts that you need."
    ),
    Finding.DELIVERY: (
        "for {part} of that, the next batch was loaded and being delivered: use a larger "
        "batch_size, return tensors instead of Python objects, or make device_transform= cheaper."
    ),
    Finding.PINNING: (
        "for {part} of that, the next batch was being pinned: copy batches straight to the device "
        "(device=), or use smaller types (uint8, converted there)."
    ),
    Finding.DEVICE_COPY: (
        "for {part} of that, the next batch was being copied to the device: use smaller types "
        "(uint8, converted by device_transform=), or make device_transform= cheaper."
    ),
}
_TURNS = " Threads run Python code one at a time: for that, leave out thread_pool=True."
