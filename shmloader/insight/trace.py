"""A trace of batches, in the format that ui.perfetto.dev and chrome://tracing read.

The trace has one process, with a track for each worker, the engine, the thread of a stage, and the
consumer. Iterators that are at work at the same time have separate tracks. A batch is a slice on
each of these tracks. Flow arrows connect its slices: sent by the engine, loaded by a worker, built
by the engine, pinned or copied, taken by the consumer.

**Guarantees.** Two slices on a track are either disjoint or nested, since Perfetto leaves out
others. Each point at which an arrow begins, passes or ends is inside a slice and before the slice's
end, since Perfetto leaves out other arrows.
"""

import bisect
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shmloader.insight.measurements import BatchTimes, WorkTimes
from shmloader.insight.record import Part
from shmloader.insight.sums import ITER, Call

_CONSUMER, _ENGINE, _STAGE, _FIRST_WORKER = 1, 2, 3, 10
# Distance from the track numbers of one iterator to those of the next.
_LANE = 1_000_000
_PID = 1
# Maximum length of a slice that is there only for an arrow to start from.
_INSTANT_NS = 1_000

Event = dict[str, Any]


class Traced(NamedTuple):
    """One call of ``next()`` or of ``iter()``.

    Attributes:
        epoch: Number of the epoch.
        asked_ns: When it was called.
        taken_ns: When it returned.
        times: The times of the batch; None if the consumer's thread loaded it, or if the call
            returned no batch whose times are known.
        stage: Name of the stage after the engine, and when that began and ended; or None.
        here: Times of a batch that the consumer's thread loaded; or None.
        name: Name of what was called; for a batch in ``here``, of the stage after collate.
    """

    epoch: int | None
    asked_ns: int
    taken_ns: int
    times: BatchTimes | None = None
    stage: tuple[str, int, int] | None = None
    here: WorkTimes | None = None
    name: str = "next()"

    @classmethod
    def of(cls, call: Call, epoch: int | None, *, is_local: bool) -> "Traced":
        """Return a call of an epoch."""
        asked_ns, taken_ns, _, times, about, _ = call
        if times is None:
            return cls(epoch, asked_ns, taken_ns, name=ITER if about == ITER else "next()")
        if is_local:
            return cls(epoch, asked_ns, taken_ns, here=WorkTimes(*times), name=about)
        return cls(epoch, asked_ns, taken_ns, BatchTimes(*times), about)

    @property
    def is_batch(self) -> bool:
        """Whether the call returned a batch whose times are known."""
        return self.times is not None or self.here is not None

    @property
    def built_ns(self) -> int:
        """When the engine had built the batch."""
        return self.taken_ns if self.stage is None else self.stage[1]


class Trace:
    """The parts of epochs that are recorded for a file.

    Attributes:
        parts: One part for each epoch.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self._begun_ns = time.monotonic_ns()

    def write(self, path: Path, about: dict[str, Any]) -> None:
        """Write the trace.

        Args:
            path: Path of the file.
            about: Values for "otherData" of the trace.

        Raises:
            OSError: If the file cannot be written.
        """
        trace = {
            "traceEvents": list(self._events()),
            "displayTimeUnit": "ms",
            "otherData": {"producer": "shmloader", **about},
        }
        with path.open("w", encoding="utf-8") as file:
            json.dump(trace, file, separators=(",", ":"))

    def _events(self) -> Iterator[Event]:
        lanes: dict[int, list[Traced]] = {}
        for part in self.parts:
            record, is_local = part.record, part.record.kind == "in-process"
            lanes.setdefault(record.lane, []).extend(
                Traced.of(call, record.epoch, is_local=is_local) for call in part.calls
            )
        calls = itertools.chain.from_iterable(lanes.values())
        base_ns = min(map(_first_ns, calls), default=self._begun_ns)
        yield from _names(lanes)
        number = 0
        for lane, own_calls in lanes.items():
            edges = _edges(own_calls)
            for call, following in itertools.pairwise([*own_calls, None]):
                assert call is not None
                for event in _events_of(call, number, following, edges):
                    event["ts"] = (event["ts"] - base_ns) / 1e3
                    if "dur" in event:
                        event["dur"] /= 1e3
                    if event["tid"]:
                        event["tid"] += lane * _LANE
                    yield event
                number += call.is_batch


def _names(lanes: dict[int, list[Traced]]) -> Iterator[Event]:
    tracks = {}
    for number, call in ((number, call) for number, calls in lanes.items() for call in calls):
        lane = number * _LANE
        which = f" (iterator {number + 1})" if number else ""
        tracks[_CONSUMER + lane] = f"consumer{which}"
        if call.times is not None:
            tracks[_ENGINE + lane] = f"engine{which}"
            worker_id = call.times.worker_id
            tracks[_FIRST_WORKER + worker_id + lane] = f"worker {worker_id}{which}"
        if call.stage is not None and call.stage[0] != "build":
            tracks[_STAGE + lane] = f"{call.stage[0]} thread{which}"
    yield {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": "shmloader"}}
    for track, name in sorted(tracks.items()):
        about = {"pid": _PID, "tid": track}
        yield {"ph": "M", "name": "thread_name", **about, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **about, "args": {"sort_index": track}}


def _edges(calls: Iterable[Traced]) -> list[int]:
    """Return when slices begin or end on an engine's track, in order."""
    edges = set()
    for call in calls:
        if call.times is not None:
            edges |= {call.times.sent_ns, call.times.handed_ns, call.built_ns}
    return sorted(edges)


def _instant(edges: list[int], began_ns: int) -> int:
    """Return the end of a short slice that crosses no edge."""
    following = bisect.bisect_right(edges, began_ns)
    ended_ns = began_ns + _INSTANT_NS
    return min(ended_ns, edges[following]) if following < len(edges) else ended_ns


def _first_ns(call: Traced) -> int:
    if call.times is None:
        return call.asked_ns
    return min(call.asked_ns, call.times.offered_ns, call.times.work[0])


def _slice(track: int, name: str, began_ns: int, ended_ns: int, **args: Any) -> Event:
    event: Event = {
        "ph": "X",
        "cat": "batch",
        "name": name,
        "pid": _PID,
        "tid": track,
        "ts": began_ns,
        "dur": max(0, ended_ns - began_ns),
    }
    if args:
        event["args"] = args
    return event


def _count(name: str, when_ns: int, **values: int) -> Event:
    return {"ph": "C", "name": name, "pid": _PID, "tid": 0, "ts": when_ns, "args": values}


def _events_of(
    call: Traced, number: int, following: Traced | None, edges: list[int]
) -> Iterator[Event]:
    """Yield the slices, arrows and counters of one call; times in ns."""
    about: dict[str, Any] = {"epoch": call.epoch}
    name = call.name
    if call.is_batch:
        about["batch"], name = number, f"next() → batch {number}"
    yield _slice(_CONSUMER, name, call.asked_ns, call.taken_ns, **about)
    if call.here is not None:
        yield from _loaded_here(call.here, call.name, call.taken_ns)
    if call.is_batch and following is not None and following.epoch == call.epoch:
        yield _slice(_CONSUMER, f"use batch {number}", call.taken_ns, following.asked_ns)
    times = call.times
    if times is None:
        return
    track = _FIRST_WORKER + times.worker_id
    began_ns, fetch_ns, collate_ns, encode_ns, sample_count = times.work
    about |= {"worker": times.worker_id, "samples": sample_count, "bytes": times.nbytes}
    ended_ns = began_ns + fetch_ns + collate_ns + encode_ns
    about |= {
        "slot_us": (times.sent_ns - times.offered_ns) / 1e3,
        "transport_us": (times.seen_ns - max(times.looked_ns, ended_ns)) / 1e3,
    }
    yield _slice(_ENGINE, f"send {number}", times.sent_ns, _instant(edges, times.sent_ns))
    fetched_ns, collated_ns = began_ns + fetch_ns, began_ns + fetch_ns + collate_ns
    yield _slice(track, f"batch {number}", began_ns, ended_ns, **about)
    yield _slice(track, "fetch", began_ns, fetched_ns)
    yield _slice(track, "collate", fetched_ns, collated_ns)
    yield _slice(track, "encode", collated_ns, ended_ns)
    yield _slice(_ENGINE, f"build {number}", times.handed_ns, call.built_ns)
    stops = [(_ENGINE, times.sent_ns), (track, began_ns), (_ENGINE, times.handed_ns)]
    if call.stage is not None and call.stage[0] != "build":
        kind, stage_began_ns, stage_ended_ns = call.stage
        yield _slice(_STAGE, f"{kind} {number}", stage_began_ns, stage_ended_ns)
        stops.append((_STAGE, stage_began_ns))
    # Just before the end of next(), to be inside its slice.
    stops.append((_CONSUMER, max(call.asked_ns, call.taken_ns - 1)))
    yield from _arrows(number, stops)
    yield _count("slots lent", times.handed_ns, lent=times.lent_count)


def _loaded_here(work: WorkTimes, stage: str, taken_ns: int) -> Iterator[Event]:
    fetched_ns = work.began_ns + work.fetch_ns
    collated_ns = fetched_ns + work.collate_ns
    yield _slice(_CONSUMER, "fetch", work.began_ns, fetched_ns)
    yield _slice(_CONSUMER, "collate", fetched_ns, collated_ns)
    yield _slice(_CONSUMER, stage, collated_ns, min(taken_ns, collated_ns + work.encode_ns))


def _arrows(number: int, stops: list[tuple[int, int]]) -> Iterator[Event]:
    """Yield one arrow through a batch's slices, in the order of time."""
    for index, (track, when_ns) in enumerate(stops):
        phase = "s" if index == 0 else "f" if index == len(stops) - 1 else "t"
        event: Event = {
            "ph": phase,
            "cat": "flow",
            "name": "batch",
            "id": number,
            "pid": _PID,
            "tid": track,
            "ts": when_ns,
        }
        if phase == "f":
            event["bp"] = "e"
        yield event
