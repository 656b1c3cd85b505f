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
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shmloader.insight.measurements import BatchTimes
from shmloader.insight.record import Part
from shmloader.insight.sums import ITER, Call

_CONSUMER, _ENGINE, _STAGE, _FIRST_WORKER = 1, 2, 3, 10
# Distance from the track numbers of one iterator to those of the next.
_LANE = 1_000_000
_PID = 1
# Maximum length of a slice that is there only for an arrow to start from.
_INSTANT_NS = 1_000

Event = dict[str, Any]


def write_trace(parts: Sequence[Part], path: Path, about: dict[str, Any]) -> None:
    """Write a trace.

    Args:
        parts: What was recorded, a part for each epoch.
        path: Path of the file.
        about: Values for "otherData" of the trace.

    Raises:
        OSError: If the file cannot be written.
    """
    lanes: dict[int, _Lane] = {}
    for part in parts:
        lanes.setdefault(part.record.lane, _Lane()).calls += [(part, call) for call in part.calls]
    events, number = list[Event](), 0
    tracks: dict[int, str] = {}
    for index, lane in lanes.items():
        number = lane.write(number)
        for event in lane.events:
            event["tid"] += index * _LANE if event["tid"] else 0
        which = f" (iterator {index + 1})" if index else ""
        tracks |= {track + index * _LANE: name + which for track, name in lane.tracks.items()}
        events += lane.events
    base_ns = min((event["ts"] for event in events), default=0)
    for event in events:
        event["ts"] = (event["ts"] - base_ns) / 1e3
        if "dur" in event:
            event["dur"] /= 1e3
    trace = {
        "traceEvents": [*_names(tracks), *events],
        "displayTimeUnit": "ms",
        "otherData": {"producer": "shmloader", **about},
    }
    with path.open("w", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"))


def _names(tracks: dict[int, str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": "shmloader"}}
    for track, name in sorted(tracks.items()):
        about = {"ph": "M", "pid": _PID, "tid": track}
        yield {**about, "name": "thread_name", "args": {"name": name}}
        yield {**about, "name": "thread_sort_index", "args": {"sort_index": track}}


class _Lane:
    """The tracks of the iterators that follow each other. Times are in ns.

    Attributes:
        calls: The calls, with the parts that they belong to.
        events: The events.
        tracks: The names of the tracks.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Part, Call]] = []
        self.events: list[Event] = []
        self.tracks: dict[int, str] = {}
        # When slices begin or end on the engine's track.
        self._edges: list[int] = []

    def write(self, number: int) -> int:
        """Make the events of all calls. Returns the number of the batch that would be the next.

        Args:
            number: The number of the first batch.
        """
        for part, (_, taken_ns, _, times, stage, _) in self.calls:
            if times is not None and part.record.kind != "in-process":
                known = BatchTimes(*times)
                built_ns = stage[1] if stage else taken_ns
                self._edges += [known.sent_ns, known.handed_ns, built_ns]
        self._edges.sort()
        following = [*self.calls[1:], None]
        for (part, call), later in zip(self.calls, following, strict=True):
            asked_ns, taken_ns, _, times, about, _ = call
            args: dict[str, Any] = {"epoch": part.record.epoch}
            if times is None:
                name = ITER if about == ITER else "next()"
                self._add(_CONSUMER, "consumer", name, asked_ns, taken_ns, **args)
                continue
            args["batch"], name = number, f"next() → batch {number}"
            self._add(_CONSUMER, "consumer", name, asked_ns, taken_ns, **args)
            if later is not None and later[0] is part:
                self._add(_CONSUMER, "consumer", f"use batch {number}", taken_ns, later[1][0])
            if part.record.kind == "in-process":
                began_ns, fetch_ns, collate_ns, stage_ns, _ = times
                self._add_work(_CONSUMER, "consumer", (began_ns, fetch_ns, collate_ns))
                collated_ns = began_ns + fetch_ns + collate_ns
                ended_ns = min(taken_ns, collated_ns + stage_ns)
                self._add(_CONSUMER, "consumer", about, collated_ns, ended_ns)
            else:
                self._add_batch(number, call, args)
            number += 1
        return number

    def _add_batch(self, number: int, call: Call, args: dict[str, Any]) -> None:
        """Add the slices, the arrow and the counter of an engine's batch."""
        asked_ns, taken_ns, _, fields, stage, _ = call
        times = BatchTimes(*fields)
        began_ns, fetch_ns, collate_ns, encode_ns, sample_count = times.work
        ended_ns = began_ns + fetch_ns + collate_ns + encode_ns
        args |= {
            "worker": times.worker_id,
            "samples": sample_count,
            "bytes": times.nbytes,
            "slot_us": (times.sent_ns - times.offered_ns) / 1e3,
            "transport_us": (times.seen_ns - max(times.looked_ns, ended_ns)) / 1e3,
        }
        # A short slice, which crosses no edge of another one.
        later = bisect.bisect_right(self._edges, times.sent_ns)
        sent_ns = min([times.sent_ns + _INSTANT_NS, *self._edges[later : later + 1]])
        self._add(_ENGINE, "engine", f"send {number}", times.sent_ns, sent_ns)
        track, name = _FIRST_WORKER + times.worker_id, f"worker {times.worker_id}"
        self._add(track, name, f"batch {number}", began_ns, ended_ns, **args)
        self._add_work(track, name, (began_ns, fetch_ns, collate_ns))
        self._add(track, name, "encode", ended_ns - encode_ns, ended_ns)
        built_ns = stage[1] if stage else taken_ns
        self._add(_ENGINE, "engine", f"build {number}", times.handed_ns, built_ns)
        stops = [(_ENGINE, times.sent_ns), (track, began_ns), (_ENGINE, times.handed_ns)]
        if stage and stage[0] != "build":
            kind, stage_began_ns, stage_ended_ns = stage
            name = f"{kind} {number}"
            self._add(_STAGE, f"{kind} thread", name, stage_began_ns, stage_ended_ns)
            stops.append((_STAGE, stage_began_ns))
        # Just before the end of next(), to be inside its slice.
        stops.append((_CONSUMER, max(asked_ns, taken_ns - 1)))
        for (track, when_ns), phase in zip(stops, f"s{'t' * (len(stops) - 2)}f", strict=True):
            arrow: Event = {"ph": phase, "cat": "flow", "name": "batch", "id": number}
            arrow |= {"pid": _PID, "tid": track, "ts": when_ns}
            self.events.append(arrow | ({"bp": "e"} if phase == "f" else {}))
        count: Event = {"ph": "C", "name": "slots lent", "pid": _PID, "tid": 0}
        self.events.append(count | {"ts": times.handed_ns, "args": {"lent": times.lent_count}})

    def _add_work(self, track: int, track_name: str, work: tuple[int, int, int]) -> None:
        """Add the slices of fetch and collate."""
        began_ns, fetch_ns, collate_ns = work
        fetched_ns = began_ns + fetch_ns
        self._add(track, track_name, "fetch", began_ns, fetched_ns)
        self._add(track, track_name, "collate", fetched_ns, fetched_ns + collate_ns)

    def _add(
        self, track: int, track_name: str, name: str, began_ns: int, ended_ns: int, **args: Any
    ) -> None:
        """Add a slice."""
        self.tracks[track] = track_name
        event: Event = {"ph": "X", "cat": "batch", "name": name, "pid": _PID, "tid": track}
        event |= {"ts": began_ns, "dur": max(0, ended_ns - began_ns)}
        self.events.append(event | ({"args": args} if args else {}))
