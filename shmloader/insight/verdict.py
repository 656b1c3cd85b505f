"""Says what limits the speed and what to change, by rules over the statistics. Pure.

First comes what may end the run (memory), then whether there is anything to gain. The cause is
then read from where the next batch was while the consumer waited
(:class:`~shmloader.insight.WaitPlaces`): these places form groups, and the group with the largest
share of the wait is the cause. If a second group has nearly as much, both are named, so that two
similar epochs do not name one each.

If the workers had not loaded the next batch yet, further rules say why. They are tried in order,
and two rules that advise the opposite of each other have a gap between their thresholds: "add
workers" and "use fewer workers" never follow each other in similar epochs.

The rules are a table (``_RULES``): a rule has its group, its finding, when it holds, and its text.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

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
    if not stats.batches:
        return Finding.NOTHING_YET, "No batch has been delivered yet."
    facts = _facts_of(stats)
    found = _first_rule("limits", facts)
    if found is not None:
        return found
    finding, text = _cause(facts)
    share = stats.wait.share
    little = " (there is little to gain)" if share < LITTLE_SHARE else ""
    return finding, f"The consumer waited {share:.0%} of the time for data{little}; {text}"


def _cause(facts: "_Facts") -> tuple[Finding, str]:
    """Return the finding for the group with most of the wait, or for two of about equal weight."""
    groups = facts.groups
    first, second = sorted(groups, key=groups.__getitem__, reverse=True)[:2]
    # In a fixed order, because either may be the larger one next time.
    named = [name for name in groups if name in (first, second)]
    if groups[second] < SECOND_CAUSE * groups[first] or not groups[second]:
        named = [first]
    found = [_first_rule(name, facts) for name in named]
    if len({each[0] for each in found if each}) == 1:  # one thread may do the work of both groups
        found = [_first_rule(first, facts)]
    causes = [each for each in found if each]
    if len(causes) == 1:
        return causes[0]
    return Finding.SEVERAL, (
        "there are two causes of about the same weight. "
        f"First, {causes[0][1]} Second, {causes[1][1]}"
    )


class _Facts(NamedTuple):
    """What the rules look at. All times are in seconds.

    Attributes:
        stats: The statistics.
        places: Where the next batch was while the consumer waited.
        groups: The sums of ``places`` over the places of each group.
        busy_s: Time in which the workers loaded batches, summed over the workers.
        wanted_s: Time in which they had a core, or wanted one and none was free.
        stalled_s: Part of ``busy_s`` in which they wanted a core and none was free.
        idle_s: Time between their batches in which the consumer did not wait for the workers.
        idle_awaited_s: Time between their batches in which the consumer waited for another's.
        awaited_s: Time in which the consumer waited for the workers.
        working: Number of workers that loaded batches.
        uses_cores: Whether the workers and the consumer's process use most of the cores.
        words: The values that the texts name.
    """

    stats: Figures
    places: dict[str, float]
    groups: dict[str, float]
    busy_s: float
    wanted_s: float
    stalled_s: float
    idle_s: float
    idle_awaited_s: float
    awaited_s: float
    working: int
    uses_cores: bool
    words: dict[str, Any]

    @property
    def compete(self) -> bool:
        """Whether the workers compute, and often lack a core."""
        is_computing = self.wanted_s > COMPUTING_SHARE * self.busy_s
        return is_computing and self.stalled_s > STALLED_SHARE * self.busy_s

    @property
    def consumer_stalls(self) -> bool:
        """Whether the consumer lacked a core while batches were delivered.

        It is not known how much of the time without a core was in ``next()``. While batches are
        delivered, the consumer has or wants a core all the time, so the same share as elsewhere is
        assumed there.
        """
        cpu_s, stalled_s = self.stats.consumer.cpu_s, self.stats.consumer.stalled_s
        if cpu_s is None or stalled_s is None:
            return False
        return stalled_s > STALLED_SHARE * max(self.groups["delivery"], cpu_s + stalled_s)

    @property
    def has_more_workers_than_cores(self) -> bool:
        """Whether there are more workers than cores."""
        return self.stats.num_workers > self.stats.machine.cores

    @property
    def used_bytes(self) -> int:
        """The memory that the loader takes."""
        return self.stats.slots.nbytes + sum(each.pss_bytes or 0 for each in self.stats.workers)


def _facts_of(stats: Figures) -> _Facts:
    places = stats.wait.places._asdict()
    groups = {name: sum(places[one] for one in of) for name, of in _GROUPS.items()}
    working = [worker for worker in stats.workers if worker.batches]
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
    idle_awaited_s = sum(worker.idle_awaited_s for worker in working)
    facts = _Facts(
        stats,
        places,
        groups,
        busy_s=sum(worker.busy_s for worker in working),
        wanted_s=cpu_s + stalled_s,
        stalled_s=stalled_s,
        idle_s=sum(worker.idle_s for worker in working) - idle_awaited_s,
        idle_awaited_s=idle_awaited_s,
        awaited_s=sum(places[name] for name in _GROUPS["work"]),
        working=len(working),
        uses_cores=used_s > CORES_SHARE * stats.machine.cores * stats.elapsed_s,
        words={},
    )
    facts.words.update(_words_of(facts, sum(worker.busy_share for worker in working)))
    if stats.kind in ("torch", "other"):
        groups = {stats.kind: 1.0, "": 0.0}
    elif stats.kind == "executor":
        groups = {"executor" if name == "work" else name: of for name, of in groups.items()}
    elif stats.kind == "in-process":
        groups = {name if name in _ALWAYS else f"own {name}": of for name, of in groups.items()}
    return facts._replace(groups=groups)


def _words_of(facts: _Facts, busy_share: float) -> dict[str, Any]:
    stats, places, groups, slots = facts.stats, facts.places, facts.groups, facts.stats.slots
    work = {name: getattr(stats.stages, name).total_s for name in _OF_WORKERS}
    queue_s = places["send"] + places["queue"]
    of_wait = {**groups, "queue": queue_s, "made": groups["work"] - queue_s}
    words = {name: _share(of, stats.wait.total_s) for name, of in of_wait.items()}
    own = {
        f"own_{name}": _NAMES.get(max(_GROUPS[name], key=places.__getitem__), "")
        for name in _GROUPS
    }
    slow, start = "", seconds(groups["start"])
    if stats.load_p50_s:
        factor = stats.load_p99_s / stats.load_p50_s
        slow = f" (one in a hundred takes {factor:.0f} times as long as the median)"
    return {
        **words,
        **own,
        "share": f"{stats.wait.share:.1%}",
        "started": f"{start} of {seconds(stats.wait.total_s)} of waiting was for",
        "cores": counted(stats.machine.cores, "core"),
        "workers": stats.num_workers,
        "busy": f"workers were busy {busy_share / max(1, facts.working):.0%}",
        "where": _NAMES[max(work, key=work.__getitem__)],
        "collate": _share(work["collate"], facts.busy_s),
        "idle": _share(facts.idle_awaited_s / max(1, facts.working), facts.awaited_s),
        "slow": slow,
        "copied": slots.copied,
        "delivered": slots.copied + slots.lent,
        "largest": size(slots.largest_bytes),
        "most": size(slots.share_bytes),
        "used": size(facts.used_bytes),
        "free": size(stats.machine.free_bytes or 0),
        "limit": stats.machine.limit,
        "others": "" if facts.uses_cores else ", and other programs use them too",
        "turns": " Threads run Python code one at a time: for that, leave out thread_pool=True."
        if stats.kind == "threads"
        else "",
    }


def _first_rule(group: str, facts: _Facts) -> tuple[Finding, str] | None:
    for rule in _RULES:
        if group == rule.group and rule.holds(facts):
            return rule.finding, rule.text.format_map(facts.words)
    return None


class _Rule(NamedTuple):
    """A rule of the verdict.

    Attributes:
        group: The group of places that it explains; "limits" for a rule that is tried before.
        finding: What it finds.
        text: The text, with names of ``_Facts.words``. That of a group begins without a capital.
        holds: Whether it holds, if no earlier rule of its group does.
    """

    group: str
    finding: Finding
    text: str
    holds: Callable[[_Facts], bool] = lambda _: True


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

# Groups that have the same rules without workers.
_ALWAYS = ("start", "draw", "errors")

_STALLED = "{busy}, but often wanted to run when no core was free"
_TAKING = (
    "for {delivery} of that, the next batch was loaded, but no core was free for the consumer to "
    "take it"
)
_OWN_CORES = (
    ": the workers and the consumer use most of {cores}; make `__getitem__` and `collate_fn`, or "
    "what is done with each batch, cheaper, or use more cores."
)
_UNKNOWN = "what the loader does meanwhile is not known"
_OWN_THREAD = "it loads the data itself, mostly in "

_RULES = (
    _Rule(
        "limits", Finding.MEMORY,
        "Memory is near its limit: the largest batch took {largest} of the {most} that shm_size "
        "leaves for each; raise shm_size, or lower batch_size or prefetch_factor, before a larger "
        "one raises SharedMemoryError.",
        lambda facts: facts.stats.slots.largest_bytes
        > (1 - FREE_SHARE) * facts.stats.slots.share_bytes
        > 0,
    ),
    _Rule(
        "limits", Finding.MEMORY,
        "Memory is near its limit: the loader takes {used}, and {free} is free ({limit}); lower "
        "num_workers, prefetch_factor or batch_size.",
        lambda facts: facts.stats.machine.free_bytes is not None
        and facts.stats.machine.free_bytes
        < FREE_SHARE * (facts.stats.machine.free_bytes + facts.used_bytes),
    ),
    _Rule(
        "limits", Finding.NOTHING_TO_GAIN,
        "The loader is not the limit: the consumer waited {share} of the time for data, and has "
        "nothing to gain from a faster one.",
        lambda facts: facts.stats.wait.share < IDLE_SHARE,
    ),
    _Rule(
        "torch", Finding.OTHER_LOADER,
        _UNKNOWN + ": torch's own iterator loads, since the dataset is a data pipe, or this system "
        "has no memfd or pidfd.",
    ),
    _Rule(
        "other", Finding.OTHER_LOADER, _UNKNOWN + ", since it is not one of shmloader's."
    ),
    _Rule(
        "start", Finding.START_UP,
        "{started} iter(): make the start of the sampler or the dataset cheaper.",
        lambda facts: not facts.stats.num_workers,
    ),
    _Rule(
        "start", Finding.START_UP,
        "{started} the start and the end of workers: this is paid once.",
        lambda facts: facts.stats.persistent_workers,
    ),
    _Rule(
        "start", Finding.START_UP,
        "{started} the start and the end of workers: with persistent_workers=True this is paid "
        "once.",
    ),
    _Rule(
        "draw", Finding.SAMPLER,
        "for {draw} of that, the batch sampler was drawing indices, which it does on the "
        "consumer's thread: make the sampler cheaper, for example by drawing many indices at once.",
    ),
    _Rule(
        "own work", Finding.IN_PROCESS,
        _OWN_THREAD + "{own_work}: give the loader workers (num_workers=; this process may use "
        "{cores}).",
    ),
    *(
        # Workers would not take these over.
        _Rule(
            f"own {group}", Finding.IN_PROCESS,
            f"{_OWN_THREAD}{{own_{group}}}: make that cheaper, or raise batch_size.",
        )
        for group in ("delivery", "pin", "device")
    ),
    # Why an executor had not made the next batch yet. Its cores are not known here.
    _Rule(
        "executor", Finding.EXECUTOR_BUSY,
        "for {queue} of that, the next batch's task waited for the executor, or was on its way: "
        "raise num_workers= if the executor has idle processes, otherwise give it more. If the "
        "network is slow, use smaller types (uint8, converted here).",
        lambda facts: 2 * (facts.places["send"] + facts.places["queue"]) > facts.awaited_s,
    ),
    _Rule(
        "executor", Finding.TOO_FEW_WORKERS,
        "for {made} of that, the next batch was being made, mostly in {where}: give the executor "
        "more processes and raise num_workers=, or make that cheaper.",
    ),
    # Why the workers had not loaded the next batch yet.
    _Rule(
        "work", Finding.TOO_MANY_WORKERS,
        _STALLED + ": {workers} workers compete for {cores}{others}; lower num_workers.",
        lambda facts: facts.compete and facts.has_more_workers_than_cores,
    ),
    _Rule(
        "work", Finding.CORES_BUSY, _STALLED + _OWN_CORES,
        lambda facts: facts.compete and facts.uses_cores,
    ),
    _Rule(
        "work", Finding.CORES_TAKEN,
        _STALLED + ". Stop other programs on this machine ({cores}), or lower num_workers or "
        "torch.set_num_threads().",
        lambda facts: facts.compete,
    ),
    _Rule(
        "work", Finding.STRAGGLERS,
        "a slow batch{slow} holds up those behind it: each worker had nothing to do for {idle} of "
        "that, on average. Let later batches come first (in_order=False), or raise "
        "prefetch_factor.",
        # At least one worker is busy: it loads the batch that the consumer waits for.
        lambda facts: facts.idle_awaited_s
        > HELD_UP_SHARE * facts.awaited_s * max(1, facts.working - 1),
    ),
    _Rule(
        "work", Finding.BURSTS,
        "{busy}, since batches are wanted in bursts and too few are loaded ahead: raise "
        "prefetch_factor.",
        lambda facts: facts.idle_s > AHEAD_SHARE * facts.awaited_s * facts.working,
    ),
    _Rule(
        "work", Finding.SLOW_COLLATE,
        "{busy}, {collate} of it in collate_fn: move work from there to the dataset, or let it "
        "write into shmloader.empty().",
        lambda facts: facts.stats.stages.collate.total_s > COLLATE_SHARE * facts.busy_s,
    ),
    _Rule(
        "work", Finding.TOO_FEW_WORKERS,
        "{busy}, mostly in {where}: add workers ({workers} of {cores} are used).{turns}",
        lambda facts: facts.stats.num_workers < facts.stats.machine.cores,
    ),
    _Rule(
        "work", Finding.TOO_FEW_WORKERS,
        "{busy}, mostly in {where}, where they wait more than they compute: add workers, even more "
        "than the {cores}.",
        lambda facts: facts.wanted_s < WAITING_SHARE * facts.busy_s,
    ),
    _Rule(
        "work", Finding.CORES_BUSY,
        "{busy}, mostly in {where}, on all of {cores}: make that cheaper, or use more "
        "cores.{turns}",
    ),
    _Rule(
        "delivery", Finding.SLOTS_HELD,
        "{copied} of {delivered} batches were copied out of their slots, since too many earlier "
        "ones were still held: drop each batch after use, or keep clones of the parts that you "
        "need.",
        lambda facts: facts.stats.slots.copied
        > COPIED_SHARE * (facts.stats.slots.copied + facts.stats.slots.lent),
    ),
    _Rule(
        "delivery", Finding.CORES_TAKEN,
        _TAKING + ". Stop other programs on this machine ({cores}).",
        lambda facts: facts.consumer_stalls and not facts.uses_cores,
    ),
    _Rule(
        "delivery", Finding.TOO_MANY_WORKERS,
        _TAKING + ": {workers} workers compete with it for {cores}; lower num_workers.",
        lambda facts: facts.consumer_stalls and facts.has_more_workers_than_cores,
    ),
    _Rule(
        "delivery", Finding.CORES_BUSY, _TAKING + _OWN_CORES,
        lambda facts: facts.consumer_stalls,
    ),
    _Rule(
        "delivery", Finding.DELIVERY,
        "for {delivery} of that, the next batch was loaded and being delivered: use a larger "
        "batch_size, return tensors instead of Python objects, or make device_transform= cheaper.",
    ),
    _Rule(
        "pin", Finding.PINNING,
        "for {pin} of that, the next batch was being pinned: copy batches straight to the device "
        "(device=), or use smaller types (uint8, converted there).",
    ),
    _Rule(
        "device", Finding.DEVICE_COPY,
        "for {device} of that, the next batch was being copied to the device: use smaller types "
        "(uint8, converted by device_transform=), or make device_transform= cheaper.",
    ),
    _Rule(
        "errors", Finding.ERRORS,
        "for {errors} of that, an error was raised in place of a batch: fix these samples, or skip "
        "them (on_error=).",
    ),
)  # fmt: skip


def _share(part: float, whole: float) -> str:
    return f"{min(1.0, part / whole):.0%}" if whole else "0%"
