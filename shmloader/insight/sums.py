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
* for a call without a batch, None, and where the next batch was: one of
  :data:`~shmloader.insight.measurements.PLACES`, or :data:`ITER` for a call of ``iter()``.
"""

import collections
import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, Self

from shmloader.insight.histogram import Histogram
from shmloader.insight.measurements import PLACES, STAGES, BatchTimes, Usage

#: In place of a place, for a call of ``iter()``.
ITER = "iter()"

Call = tuple[int, int, int, Any, Any, int]

# The number of waits that are remembered, to tell whether a worker was idle meanwhile. A worker is
# idle for no longer than the consumer takes for a window of batches.
_WAITS_KEPT = 512


@dataclasses.dataclass(slots=True)
class WorkerSums:
    """Sums over the batches of one worker that were delivered.

    ``idle_ns`` and ``idle_awaited_ns`` are about the time between the worker's batches, so they
    leave out its start and the epoch's end, when there is nothing left to load.
    """

    batches: int = 0
    busy_ns: int = 0
    fetch_ns: int = 0
    collate_ns: int = 0
    idle_ns: int = 0
    idle_awaited_ns: int = 0
    span_ns: int = 0
    cpu_ns: int = 0
    stalled_ns: int | None = None
    pss_bytes: int | None = None
    pid: int | None = None
    # When its first batch began, and its last one ended; 0 for the sum of several epochs.
    first_ns: int = 0
    last_ns: int = 0

    def finish(self, ended_ns: int) -> None:
        """Compute what depends on the epoch's end. No batch may be added after that."""
        if self.first_ns:
            self.span_ns = max(0, ended_ns - self.first_ns)
            self.idle_ns = max(0, self.last_ns - self.first_ns - self.busy_ns)
            self.first_ns = self.last_ns = 0

    def add_usage(self, now: Usage, then: Usage) -> None:
        """Add what the worker has used between two readings."""
        self.cpu_ns = now.cpu_ns - then.cpu_ns
        if now.stalled_ns is not None:
            self.stalled_ns = now.stalled_ns - (then.stalled_ns or 0)
        self.pss_bytes, self.pid = now.pss_bytes, now.pid

    def merge(self, later: Self) -> None:
        """Add the sums of the same worker in a later epoch."""
        for name in (
            "batches", "busy_ns", "fetch_ns", "collate_ns", "idle_ns", "idle_awaited_ns",
            "span_ns", "cpu_ns", "stalled_ns",
        ):  # fmt: skip
            setattr(self, name, added(getattr(self, name), getattr(later, name)))
        self.pss_bytes = later.pss_bytes or self.pss_bytes
        self.pid = later.pid or self.pid


def added(one: int | None, other: int | None) -> int | None:
    """Return the sum of two numbers, of which one or both may not be known."""
    return other if one is None else one if other is None else one + other


@dataclasses.dataclass(slots=True)
class Sums:
    """The sums over the calls of one epoch, or of several.

    Attributes:
        in_order: Whether batches wait for earlier ones.
        is_local: Whether the consumer's thread loads the batches.
        last_ns: When the last call returned.
        iter_ns: Time in ``iter()``.
        startup_ns: ``iter_ns`` and the wait for the first batch of each epoch.
        waits: The times of the calls of ``next()``.
        loads: The times that workers took for batches.
        stages: The time in each stage, in ns, summed over the batches.
        waited: Where the next batch was while the consumer waited, in ns; :meth:`places` adds what
            is left.
        workers: The sums of each worker, by its number.
    """

    in_order: bool = True
    is_local: bool = False
    last_ns: int = 0
    iter_ns: int = 0
    startup_ns: int = 0
    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    waits: Histogram = dataclasses.field(default_factory=Histogram)
    loads: Histogram = dataclasses.field(default_factory=Histogram)
    stages: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    waited: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    workers: dict[int, WorkerSums] = dataclasses.field(default_factory=dict)
    _is_starting: bool = False
    # When the last batch could be delivered: when it and all before it were here.
    _turn_ns: int = 0
    # From when until when the consumer waited for batches that were not loaded yet.
    _awaited: collections.deque[tuple[int, int]] | None = None

    def copy(self) -> Self:
        """Return a copy."""
        return dataclasses.replace(
            self,
            waits=self.waits.copy(),
            loads=self.loads.copy(),
            stages=dict(self.stages),
            waited=dict(self.waited),
            workers={number: copy.copy(worker) for number, worker in self.workers.items()},
            _awaited=copy.copy(self._awaited),
        )

    def add(self, calls: Iterable[Call]) -> None:
        """Add calls of the same epoch, in their order."""
        waits, loads = [], []
        for call in calls:
            asked_ns, taken_ns, draw_ns, times, about, nbytes = call
            wait_ns = taken_ns - asked_ns
            self.last_ns = taken_ns
            if about == ITER:
                self.iter_ns += wait_ns
                self.startup_ns += wait_ns
                self.waited["draw"] += draw_ns
                self.waited["start"] += wait_ns - draw_ns
                self._is_starting = True
                continue
            waits.append(wait_ns)
            if self._is_starting:
                self.startup_ns += wait_ns
                self._is_starting = False
            if times is None:
                self._add_other(wait_ns, about, nbytes)
            elif self.is_local:
                loads.append(self._add_local(draw_ns, times, about, nbytes))
            else:
                loads.append(self._add_batch(asked_ns, taken_ns, draw_ns, times, about))
        self.waits.note(*waits)
        self.loads.note(*loads)

    def _add_other(self, wait_ns: int, about: str | int, nbytes: int) -> None:
        """Add a call that returned no batch, or one whose times are not known."""
        if isinstance(about, str):
            self.waited[about] += wait_ns
            return
        self.waited["other"] += wait_ns
        self.batches += 1
        self.samples += about
        self.nbytes += nbytes

    def _add_local(
        self, draw_ns: int, work: tuple[int, int, int, int, int], stage: str, nbytes: int
    ) -> int:
        """Add a batch that the consumer's thread loaded. Returns the time to load it."""
        _, fetch_ns, collate_ns, stage_ns, sample_count = work
        for name, spent_ns in (("fetch", fetch_ns), ("collate", collate_ns), (stage, stage_ns)):
            self.stages[name] += spent_ns
            if name != "build":  # `places` computes it
                self.waited[name] += spent_ns
        self.waited["draw"] += draw_ns
        self.batches += 1
        self.samples += sample_count
        self.nbytes += nbytes
        return fetch_ns + collate_ns

    def _add_batch(
        self,
        asked_ns: int,
        taken_ns: int,
        draw_ns: int,
        times: BatchTimes,
        stage: tuple[str, int, int] | None,
    ) -> int:
        """Add a batch of an engine. Returns the time to load it."""
        worker_id, offered_ns, sent_ns, work, looked_ns, seen_ns, handed_ns, nbytes, _ = times
        began_ns, fetch_ns, collate_ns, encode_ns, sample_count = work
        busy_ns = fetch_ns + collate_ns + encode_ns
        end_ns = began_ns + busy_ns
        here_ns = end_ns + seen_ns - max(looked_ns, end_ns)
        turn_ns = max(here_ns, self._turn_ns) if self.in_order else here_ns
        self._turn_ns = turn_ns
        kind, stage_began_ns, stage_ended_ns = stage or ("build", taken_ns, taken_ns)
        ready_ns = max(0, handed_ns - turn_ns)
        if stage is not None:
            ready_ns += max(0, asked_ns - stage_ended_ns)
        sums = self.stages
        sums["slot"] += sent_ns - offered_ns
        sums["queue"] += max(0, began_ns - sent_ns)
        sums["fetch"] += fetch_ns
        sums["collate"] += collate_ns
        sums["encode"] += encode_ns
        sums["transport"] += here_ns - end_ns
        sums["reorder"] += turn_ns - here_ns
        sums["ready"] += ready_ns
        sums["build"] += stage_began_ns - handed_ns
        sums[kind] += stage_ended_ns - stage_began_ns
        self.batches += 1
        self.samples += sample_count
        self.nbytes += nbytes
        worker = self.workers.get(worker_id)
        is_first = worker is None
        if worker is None:
            worker = self.workers[worker_id] = WorkerSums(first_ns=began_ns, last_ns=began_ns)
        if end_ns > asked_ns:
            if self._awaited is None:
                self._awaited = collections.deque(maxlen=_WAITS_KEPT)
            awaited_ns = max(asked_ns, began_ns) if is_first else asked_ns
            self._awaited.append((awaited_ns, end_ns))
        ends = [
            ("send", 0 if is_first else sent_ns),
            ("start" if is_first else "queue", began_ns),
            ("fetch", began_ns + fetch_ns),
            ("collate", end_ns - encode_ns),
            ("encode", end_ns),
            ("transport", handed_ns),
            ("build", stage_began_ns if stage else 0),
            (kind, stage_ended_ns if stage else 0),
        ]
        self._divide_wait(asked_ns, taken_ns, draw_ns, ends)
        worker.idle_awaited_ns += self._awaited_ns(worker.last_ns, began_ns)
        worker.last_ns = end_ns
        worker.batches += 1
        worker.busy_ns += busy_ns
        worker.fetch_ns += fetch_ns
        worker.collate_ns += collate_ns
        return busy_ns

    def _divide_wait(
        self, asked_ns: int, taken_ns: int, draw_ns: int, ends: list[tuple[str, int]]
    ) -> None:
        """Divide the wait for a batch among the places where it was, one after the other.

        Args:
            asked_ns: When the consumer asked for it.
            taken_ns: When the consumer had it.
            draw_ns: How much of that time was spent in the sampler.
            ends: The places, in order, and when the batch left each of them.
        """
        at_ns = asked_ns
        for place, until_ns in ends:
            if until_ns > at_ns:
                if place != "build":  # `places` computes it
                    self.waited[place] += until_ns - at_ns
                at_ns = until_ns
        # In what is left it was built, or another batch was drawn.
        self.waited["draw"] += min(draw_ns, taken_ns - at_ns)

    def _awaited_ns(self, began_ns: int, ended_ns: int) -> int:
        """Return for how long of a span of time the consumer waited for a batch to be loaded."""
        awaited_ns = 0
        for since_ns, until_ns in reversed(self._awaited or ()):
            if until_ns <= began_ns:
                break
            awaited_ns += max(0, min(until_ns, ended_ns) - max(since_ns, began_ns))
        return awaited_ns

    def places(self) -> dict[str, int]:
        """Return where the next batch was while the consumer waited, in ns; see :data:`PLACES`."""
        waited = dict(self.waited)
        # What is left was spent on building and handing over.
        waited["build"] = max(0, self.iter_ns + self.waits.total_ns - sum(waited.values()))
        return waited

    def finish(self) -> None:
        """Compute what depends on the epoch's end. No call may be added after that."""
        self._awaited = None
        for worker in self.workers.values():
            worker.finish(self.last_ns)

    def merge(self, later: Self) -> None:
        """Add the sums of a later epoch, both of which were finished."""
        for name in ("iter_ns", "startup_ns", "batches", "samples", "nbytes"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.waits.add(later.waits)
        self.loads.add(later.loads)
        for ours, theirs in ((self.stages, later.stages), (self.waited, later.waited)):
            for name, spent_ns in theirs.items():
                ours[name] += spent_ns
        for worker_id, sums in later.workers.items():
            self.workers.setdefault(worker_id, WorkerSums()).merge(sums)
