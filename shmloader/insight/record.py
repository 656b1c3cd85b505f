"""What is recorded of epochs: some bytes for each call of ``iter()`` and ``next()``.

The consumer's thread alone writes. Any thread may read: the sums are computed then. What a reader
needs at one moment is a single value, so that it counts each call and each epoch exactly once.
"""

import itertools
import json
import operator
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmloader.insight import measurements
from shmloader.insight.measurements import Counts, Readings, usage_of
from shmloader.insight.sums import CAUSES, NO_BATCH, Sums, columns_of, pack, stages_of, tabulate

# With more calls than this, they are summed up, so that memory is bounded: a call takes 200 bytes.
_MOST_CALLS = 2_000
# Summing up costs as much as several batches, so that only some epochs at once are.
_MOST_RECENT = 4

# Tracks of a trace.
_CONSUMER, _STAGE, _FIRST_WORKER = 1, 2, 10

# What of a record becomes a field of the statistics.
_FACTS = (
    "epoch", "kind", "num_workers", "persistent_workers", "in_order", "fetch_concurrency",
    "has_transform", "is_over",
)  # fmt: skip
_facts_of = operator.attrgetter(*_FACTS)

Event = dict[str, Any]


@dataclass(slots=True, eq=False)
class Record:
    """What was recorded of one epoch.

    Attributes:
        epoch: Number of the epoch.
        kind, num_workers, persistent_workers, in_order, fetch_concurrency, has_transform: See
            :class:`~shmloader.insight.stats.LoaderStats`.
        counts: Counts of the engine; None without one.
        readings: Usage of the workers; None without workers of ours.
        failed: The loader's list of failures, with their ``total``; None if none is kept.
        begin_ns: When the epoch began.
        is_over: Whether the epoch has ended or was given up.
        failures: Batches that raised.
        stage: The name of what is done to batches after the engine or, without workers, after they
            are collated.
        most_calls: How many calls are kept before they are summed up. A trace keeps all.
        calls: The sums of earlier calls (None before any), and the later calls.
    """

    epoch: int | None
    kind: str
    num_workers: int
    persistent_workers: bool = False
    in_order: bool = True
    fetch_concurrency: int = 0
    has_transform: bool = False
    counts: Counts | None = None
    readings: Readings | None = None
    failed: Any = None
    begin_ns: int = field(default_factory=time.monotonic_ns)
    is_over: bool = False
    failures: int = 0
    stage: str = "build"
    most_calls: int = _MOST_CALLS
    calls: tuple[Sums | None, list[bytes]] = field(default_factory=lambda: (None, []))
    _final: Sums | None = None
    _at_start: Sums | None = None
    _consumer: int = 0

    def __post_init__(self) -> None:
        if self.kind != "in-process":  # such epochs may be many and short
            self._consumer = threading.get_native_id()
            self._at_start = self._read()

    def add(self, asked_ns: int, received_ns: int, draw_ns: int, times: Any, about: Any) -> None:
        """Add a call: see :mod:`shmloader.insight.sums`.

        Args:
            asked_ns: When it began.
            received_ns: When it returned.
            draw_ns: How much of that time was spent in the sampler.
            times: The packed times of its batch; None without a batch.
            about: The name of the stage, and when that began and ended; None if nothing was done.
                Without a batch, one of ``CAUSES``.
        """
        calls, cause = self.calls[1], 0
        began_ns = ended_ns = received_ns
        if times is None:
            cause, times = CAUSES[about], NO_BATCH
        elif about is not None:
            self.stage, began_ns, ended_ns = about
        calls.append(pack(cause, asked_ns, received_ns, draw_ns, began_ns, ended_ns) + times)
        if len(calls) > self.most_calls:
            self.calls = (self._sum_up(), [])

    def begin(self, draw_ns: int = 0) -> None:
        """Add the call of ``iter()``, which returns now, after ``draw_ns`` in the sampler."""
        self.add(self.begin_ns, time.monotonic_ns(), draw_ns, None, "start")

    def end(self) -> None:
        """End the record: no batch follows. May be called again."""
        if not self.is_over:
            if self.kind != "in-process":
                is_long = time.monotonic_ns() - self.begin_ns > measurements.LONG_NS
                self._final = self._read(thoroughly=is_long)
            self.is_over = True
            self.counts = self.readings = self.failed = None

    def _sum_up(self) -> Sums:
        before, calls = self.calls
        sums = Sums() if before is None else before.copy()
        is_local = self.kind == "in-process"
        sums.add(list(calls), self.stage, in_order=self.in_order, is_local=is_local)
        return sums

    def sums(self) -> Sums:
        """Return what was recorded so far, with the workers' memory. Any thread may call it."""
        sums = self._sum_up()
        sums.finish(self.begin_ns)
        sums.merge(self._read(thoroughly=True))
        if self._at_start is not None:
            for name, before in self._at_start.added.items():
                if name in sums.added:  # less than before is the time of a worker's replacement
                    sums.added[name] = max(0, sums.added[name] - before)
        sums.newest.update(zip(_FACTS, _facts_of(self), strict=True))
        return sums

    def _read(self, *, thoroughly: bool = False) -> Sums:
        """Return what was counted and used since the engine and the workers began."""
        counts, readings, failed = self.counts, self.readings, self.failed
        if self._final is not None:  # looked at last, since another thread may end the epoch
            return self._final
        sums = Sums()
        added, newest = sums.added, sums.newest
        if self.kind != "in-process":
            added["cpu"] = time.process_time_ns()
            added["consumer_cpu"] = usage_of(self._consumer, is_thread=True).cpu_ns
        added["failures"] = self.failures + (failed.total if failed is not None else 0)
        if counts is not None:
            for name in ("lent", "copied", "restarts"):
                added[name] = getattr(counts, name)
            sums.set_most(count=counts.slot_count, nbytes=counts.most_bytes)
        for worker_id, usage in enumerate(readings.read(thoroughly=thoroughly) if readings else ()):
            added[worker_id, "cpu"], added[worker_id, "stalled"] = usage.cpu_ns, usage.stalled_ns
            known = {"pid": usage.pid, "pss_bytes": usage.pss_bytes}
            newest |= {(worker_id, name): value for name, value in known.items() if value}
        return sums


class Statistics:
    """The records of all epochs of a loader.

    The consumer's thread begins the epochs, and any thread may read. ``traced`` has the records
    that a trace keeps; None while none is made.
    """

    _newest: Record | None = None
    # The sum of earlier epochs, and the newest ones and those that still run, with their iterators.
    _state: tuple[Sums | None, tuple[tuple[Record, weakref.ref[Any]], ...]] = (None, ())
    epochs = 0
    traced: list[Record] | None = None

    def begin(self, record: Record, iterator: object) -> None:
        """Add the record of an epoch that begins, and its iterator."""
        past, recent = self._state
        if recent:
            self._end_abandoned(iterator)
        if len(recent) >= _MOST_RECENT:
            past = sum_of(past, [other for other, _ in recent if other.is_over])
            recent = tuple(each for each in recent if not each[0].is_over)
        self._state = (past, (*recent, (record, weakref.ref(iterator))))
        if self.traced is not None:
            record.most_calls = sys.maxsize
            self.traced.append(record)
        self._newest = record
        self.epochs += 1

    def end_trace(self) -> list[Record]:
        """Return the records of the epochs that began since ``traced`` was set."""
        records, self.traced = self.traced or [], None
        for record in records:
            record.most_calls = _MOST_CALLS
        return records

    def newest(self) -> Sums | None:
        """Return the sums of the newest epoch; None before the first."""
        self._end_abandoned()
        return None if self._newest is None else self._newest.sums()

    def total(self) -> Sums | None:
        """Return the sum of all epochs; None before the first."""
        self._end_abandoned()
        past, recent = self._state
        return sum_of(past, [record for record, _ in recent]) if recent or past else None

    def _end_abandoned(self, again: object = None) -> None:
        """End the records whose iterators are garbage, or begin ``again``."""
        for record, owner in self._state[1]:
            if owner() in (None, again):
                record.end()


def sum_of(past: Sums | None, later: Sequence[Record]) -> Sums:
    """Return the sum of earlier epochs and of later ones."""
    whole = Sums() if past is None else past.copy()
    for each in later:
        whole.merge(each.sums())
    return whole


def write_trace(records: Sequence[Record], path: Path, about: dict[str, Any]) -> None:
    """Write a trace in the format that ui.perfetto.dev and chrome://tracing read.

    Each epoch is a process of the trace, with a track for each worker, the thread of a stage, and
    the consumer. A batch is a slice on each of these tracks. The consumer's slice has all that is
    known of the batch, for ``shmloader report``. ``about`` is in "otherData".

    Two slices on a track are either disjoint or nested, since Perfetto leaves out others.
    """
    events, numbers = list[Event](), itertools.count()
    for pid, record in enumerate(records, 1):
        events += [{**event, "pid": pid} for event in _epoch(record, numbers)]
    base_ns = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - base_ns) / 1e3
        for name in ("asked", "taken", "sent", "began", "done", "stage_began"):
            if name in event.get("args", ()):
                event["args"][name] = (event["args"][name] - base_ns) / 1e6
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "shmloader", **about},
    }
    with path.open("w", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"))


def _epoch(record: Record, numbers: Iterator[int]) -> Iterator[Event]:
    """Yield the events of an epoch, with times in ns and without a process."""
    columns = columns_of(record.calls[1])
    stage, is_local, table = record.stage, record.kind == "in-process", tabulate(columns)
    stages = stages_of(table, stage, 0, in_order=record.in_order)
    rows = zip(*(column.tolist() for column in table.values()), strict=True)
    stage_rows = zip(*(column.tolist() for column in stages.values()), strict=True)
    batches = zip(rows, stage_rows, strict=True)
    tracks = {_CONSUMER: "consumer"}
    calls = columns[:3].T.tolist()
    for call, later in itertools.zip_longest(calls, calls[1:]):
        cause, asked_ns, received_ns = call
        if later is not None:
            yield _slice(_CONSUMER, "use", received_ns, later[1])
        if cause:
            name = "iter()" if cause == CAUSES["start"] else "next()"
            yield _slice(_CONSUMER, name, asked_ns, received_ns, epoch=record.epoch)
            continue
        row, spent = next(batches)
        batch, number = dict(zip(table, row, strict=True)), next(numbers)
        about = {
            **{name: batch[name] for name in _FOR_REPORT},
            "number": number,
            "epoch": record.epoch,
            "worker": None if is_local else batch["worker"],
            "stage_ms": {name: ns / 1e6 for name, ns in zip(stages, spent, strict=True)},
        }
        yield _slice(_CONSUMER, f"next() → batch {number}", asked_ns, received_ns, **about)
        track = _CONSUMER if is_local else _FIRST_WORKER + batch["worker"]
        tracks.setdefault(track, f"worker {batch['worker']}")
        stage_track = _CONSUMER if is_local else _STAGE
        steps = [
            (track, "fetch", batch["began"], batch["fetched"]),
            (track, "collate", batch["fetched"], batch["collated"]),
            (track, "encode", batch["collated"], batch["done"]),
            (stage_track, stage, batch["stage_began"], min(batch["stage_ended"], received_ns)),
        ]
        if not is_local:
            yield _slice(track, f"batch {number}", batch["began"], batch["done"])
            if stage != "build":
                tracks[_STAGE] = f"{stage} thread"
        yield from (_slice(*step) for step in steps if step[3] > step[2])
    yield {"ph": "M", "name": "process_name", "args": {"name": f"epoch {record.epoch}"}}
    for track, name in tracks.items():
        yield {"ph": "M", "tid": track, "name": "thread_name", "args": {"name": name}}


_FOR_REPORT = (
    "asked", "taken", "sent", "began", "done", "stage_began", "samples", "nbytes", "lent",
)  # fmt: skip


def _slice(track: int, name: str, began_ns: int, ended_ns: int, **args: Any) -> Event:
    event: Event = {"ph": "X", "cat": "batch", "name": name, "tid": track, "ts": began_ns}
    return event | {"dur": max(0, ended_ns - began_ns) / 1e3} | ({"args": args} if args else {})
