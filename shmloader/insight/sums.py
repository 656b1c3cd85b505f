"""Sums over the calls of ``iter()`` and ``next()``, computed when somebody reads them.

A call is a tuple of six: when it was called and when it returned, both in ns; how much of that time
was spent in the sampler; the times of its batch; what else is known of it; and the bytes of its
batch, if they are not among the times. The times and what else is known are

* for a batch of an engine, the fields of :class:`~shmloader.insight.measurements.BatchTimes`, and
  the name of the stage after the engine with when that began and ended (None without a stage);
* for a batch that the consumer's thread loaded, the fields of
  :class:`~shmloader.insight.measurements.WorkTimes`, but with the time in the stage after collate
  as ``encode_ns``, and the name of that stage;
* for another loader's batch, None, and the number of its samples;
* for a call without a batch, None, and where the next batch was: the name of a place, or
  :data:`ITER` for a call of ``iter()``.
"""

import collections
import math
import operator
from collections.abc import Iterable
from typing import Any, Self

from shmloader.insight.measurements import BatchTimes

#: In place of a place, for a call of ``iter()``.
ITER = "iter()"

Call = tuple[int, int, int, Any, Any, int]

# The number of waits that are remembered, to tell whether a worker was idle meanwhile. A worker is
# idle for no longer than the consumer takes for a window of batches.
_WAITS_KEPT = 512

# Each power of two of a histogram is divided into this many equal parts.
_PARTS_LOG2 = 3
_PARTS = 1 << _PARTS_LOG2

# The times of a batch of an engine that are summed up, in this order, and those of its worker.
_STAGES = (
    "slot", "queue", "fetch", "collate", "encode", "transport", "reorder", "ready", "build",
)  # fmt: skip
_OF_WORKER = ("batches", "busy", "fetch", "collate", "idle_awaited")


class Histogram(collections.Counter[int]):
    """Counts durations in buckets, eight for each power of two.

    Only buckets that have a duration take memory. A percentile is accurate to 7 %.
    """

    def note(self, duration_ns: int) -> None:
        """Count a duration."""
        bits = duration_ns.bit_length()
        shift = max(0, bits - _PARTS_LOG2 - 1)
        self[(shift << _PARTS_LOG2) + (max(0, duration_ns) >> shift)] += 1

    def percentile(self, percent: float) -> int:
        """Return the duration in ns that ``percent`` % of all do not exceed; 0 if there is none."""
        rank, seen = math.ceil(self.total() * percent / 100), 0
        for bucket, count in sorted(self.items()):
            seen += count
            if seen >= rank:
                shift = max(0, (bucket >> _PARTS_LOG2) - 1)
                return (bucket - (shift << _PARTS_LOG2) << shift) + (1 << shift >> 1)
        return 0


class Totals:
    """The sums of one epoch or of several. What is missing is not known, or zero.

    Attributes:
        added: Counts, and times in ns, by name; those of a stage, a place or a worker by a pair:
            ("stage", its name), ("wait", its name), or the worker's number and a name.
        most: Maxima, by name.
        newest: What the newest epoch says, by name.
        waits: The times of the calls of ``next()``.
        loads: The times that workers took for batches.
    """

    __slots__ = ("added", "loads", "most", "newest", "waits")

    def __init__(self) -> None:
        self.added: collections.Counter[Any] = collections.Counter()
        self.most: dict[str, int] = {}
        self.newest: dict[Any, Any] = {}
        self.waits, self.loads = Histogram(), Histogram()

    def set_most(self, **values: int) -> None:
        """Raise maxima to these values."""
        for name, value in values.items():
            self.most[name] = max(value, self.most.get(name, 0))

    def merge(self, later: Self) -> None:
        """Add a later epoch's totals. The time between the two epochs is left out."""
        self.added.update(later.added)
        self.waits.update(later.waits)
        self.loads.update(later.loads)
        self.set_most(**later.most)
        self.newest |= later.newest | {"epoch": None}


class Sums:
    """Adds up the calls of one epoch.

    Args:
        in_order: Whether batches wait for earlier ones.
        is_local: Whether the consumer's thread loads the batches.

    Attributes:
        totals: The sums.
        last_ns: When the last call returned.
    """

    def __init__(self, in_order: bool, *, is_local: bool) -> None:
        self.totals = Totals()
        self.last_ns = 0
        self._in_order, self._is_local = in_order, is_local
        self._is_starting = False
        # When the last batch could be delivered: when it and all before it were here.
        self._turn_ns = 0
        # For each worker, when its first batch began, and its last one ended.
        self._spans: dict[int, tuple[int, int]] = {}
        # The sums for which an entry of a counter would take too long for each batch: the times of
        # _STAGES, and those of _OF_WORKER by worker.
        self._stages = [0] * len(_STAGES)
        self._workers: dict[int, list[int]] = {}
        # From when until when the consumer waited for batches that were not loaded yet.
        self._awaited: collections.deque[tuple[int, int]] = collections.deque(maxlen=_WAITS_KEPT)

    def add(self, calls: Iterable[Call]) -> None:
        """Add calls of the same epoch, in their order."""
        totals, added = self.totals, self.totals.added
        most_ns = 0
        for asked_ns, taken_ns, draw_ns, times, about, nbytes in calls:
            wait_ns = taken_ns - asked_ns
            self.last_ns = taken_ns
            if about == ITER:
                added["iter"] += wait_ns
                added["startup"] += wait_ns
                added["wait", "draw"] += draw_ns
                added["wait", "start"] += wait_ns - draw_ns
                self._is_starting = True
                continue
            added["next"] += wait_ns
            totals.waits.note(wait_ns)
            most_ns = max(most_ns, wait_ns)
            if self._is_starting:
                added["startup"] += wait_ns
                self._is_starting = False
            if times is not None and not self._is_local:
                self._add_batch(asked_ns, taken_ns, draw_ns, times, about)
            elif times is not None:
                self._add_local(draw_ns, times, about)
                self._count(times[4], nbytes)
            else:
                is_batch = not isinstance(about, str)
                added["wait", "other" if is_batch else about] += wait_ns
                if is_batch:
                    self._count(about, nbytes)
        totals.set_most(next=most_ns)

    def clear(self) -> None:
        """Set all sums to zero, in the middle of the epoch."""
        self.totals = Totals()
        self._stages = [0] * len(_STAGES)
        self._workers.clear()
        self._spans = {worker_id: (last, last) for worker_id, (_, last) in self._spans.items()}

    def finish(self, first_ns: int) -> Totals:
        """Return the totals of the time since ``first_ns``. No call may be added after that."""
        added = self.totals.added
        added["elapsed"] = max(0, self.last_ns - first_ns)
        if any(self._stages):
            added.update(
                {("stage", name): ns for name, ns in zip(_STAGES, self._stages, strict=True)}
            )
        for worker_id, sums in self._workers.items():
            of_worker = zip(_OF_WORKER, sums, strict=True)
            added.update({(worker_id, name): value for name, value in of_worker})
        for worker_id, (began_ns, ended_ns) in self._spans.items():
            busy_ns = added[worker_id, "busy"]
            added[worker_id, "span"] = max(0, self.last_ns - began_ns)
            # Only between its batches: not while it started, or had nothing left to load.
            added[worker_id, "idle"] = max(0, ended_ns - began_ns - busy_ns)
        return self.totals

    def _count(self, sample_count: int, nbytes: int) -> None:
        added = self.totals.added
        added["batches"] += 1
        added["samples"] += sample_count
        added["nbytes"] += nbytes

    def _add_local(self, draw_ns: int, work: tuple[int, int, int, int, int], stage: str) -> None:
        """Add a batch that the consumer's thread loaded."""
        added = self.totals.added
        _, fetch_ns, collate_ns, stage_ns, _ = work
        for name, spent_ns in (("fetch", fetch_ns), ("collate", collate_ns), (stage, stage_ns)):
            added["stage", name] += spent_ns
            if name != "build":  # what is left of a wait counts as this
                added["wait", name] += spent_ns
        added["wait", "draw"] += draw_ns
        self.totals.loads.note(fetch_ns + collate_ns)

    def _add_batch(
        self,
        asked_ns: int,
        taken_ns: int,
        draw_ns: int,
        times: BatchTimes,
        stage: tuple[str, int, int] | None,
    ) -> None:
        """Add a batch of an engine."""
        worker_id, offered_ns, sent_ns, work, looked_ns, seen_ns, handed_ns, nbytes, _ = times
        began_ns, fetch_ns, collate_ns, encode_ns, sample_count = work
        busy_ns = fetch_ns + collate_ns + encode_ns
        end_ns = began_ns + busy_ns
        here_ns = end_ns + seen_ns - max(looked_ns, end_ns)
        turn_ns = max(here_ns, self._turn_ns) if self._in_order else here_ns
        self._turn_ns = turn_ns
        stage_name, stage_began_ns, stage_ended_ns = stage or ("", taken_ns, taken_ns)
        ready_ns = max(0, handed_ns - turn_ns)
        added = self.totals.added
        if stage is not None:
            ready_ns += max(0, asked_ns - stage_ended_ns)
            added["stage", stage_name] += stage_ended_ns - stage_began_ns
        spent = (
            sent_ns - offered_ns, max(0, began_ns - sent_ns), fetch_ns, collate_ns, encode_ns,
            here_ns - end_ns, turn_ns - here_ns, ready_ns, stage_began_ns - handed_ns,
        )  # fmt: skip
        self._stages = list(map(operator.add, self._stages, spent))
        self._count(sample_count, nbytes)
        self.totals.loads.note(busy_ns)
        is_first = worker_id not in self._spans
        first_ns, last_ns = self._spans.get(worker_id, (began_ns, began_ns))
        if end_ns > asked_ns:
            self._awaited.append((max(asked_ns, began_ns) if is_first else asked_ns, end_ns))
        at_ns = asked_ns
        if handed_ns > asked_ns or stage is not None:
            # The places where the batch was, one after the other, and when it left each of them.
            # What is left of a wait counts as "build".
            for place, until_ns in (
                ("send", 0 if is_first else sent_ns),
                ("start" if is_first else "queue", began_ns),
                ("fetch", began_ns + fetch_ns),
                ("collate", end_ns - encode_ns),
                ("encode", end_ns),
                ("transport", handed_ns),
                ("build", stage_began_ns if stage else 0),
                (stage_name, stage_ended_ns if stage else 0),
            ):
                if until_ns > at_ns:
                    if place != "build":
                        added["wait", place] += until_ns - at_ns
                    at_ns = until_ns
        # In what is left it was built, or another batch was drawn.
        added["wait", "draw"] += min(draw_ns, taken_ns - at_ns)
        self._spans[worker_id] = first_ns, end_ns
        of_worker = self._workers.setdefault(worker_id, [0] * len(_OF_WORKER))
        awaited_ns = self._awaited_ns(last_ns, began_ns)
        of_worker[:] = map(operator.add, of_worker, (1, busy_ns, fetch_ns, collate_ns, awaited_ns))

    def _awaited_ns(self, began_ns: int, ended_ns: int) -> int:
        """Return for how long of a span of time the consumer waited for a batch to be loaded."""
        awaited_ns = 0
        for since_ns, until_ns in reversed(self._awaited):
            if until_ns <= began_ns:
                break
            awaited_ns += max(0, min(until_ns, ended_ns) - max(since_ns, began_ns))
        return awaited_ns
