"""A trace of batches, in the format that ui.perfetto.dev and chrome://tracing read.

Each epoch is a process of the trace, with a track for each worker, the thread of a stage, and the
consumer. A batch is a slice on each of these tracks. The consumer's slice has all that is known of
the batch, for ``shmloader report``.

Two slices on a track are either disjoint or nested, since Perfetto leaves out others.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shmloader.insight.record import Record
from shmloader.insight.sums import stages_of, tabulate

_CONSUMER, _STAGE, _FIRST_WORKER = 1, 2, 10

Event = dict[str, Any]


def write_trace(records: Sequence[Record], path: Path, about: dict[str, Any]) -> None:
    """Write a trace of epochs, with ``about`` in its "otherData"."""
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
    calls, is_local = list(record.calls[1]), record.kind == "in-process"
    table, stage = tabulate(calls, is_local=is_local)
    stages = stages_of(table, stage, 0, in_order=record.in_order)
    rows = zip(*(column.tolist() for column in table.values()), strict=True)
    stage_rows = zip(*(column.tolist() for column in stages.values()), strict=True)
    batches = zip(rows, stage_rows, strict=True)
    tracks = {_CONSUMER: "consumer"}
    for call, later in itertools.zip_longest(calls, calls[1:]):
        asked_ns, received_ns, _, times, about, _ = call
        if later is not None:
            yield _slice(_CONSUMER, "use", received_ns, later[0])
        if times is None:
            name = "iter()" if about == "start" else "next()"
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
