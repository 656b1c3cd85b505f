"""What a trace tells of each batch."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from shmloader.commands.target import UsageError
from shmloader.stats.times import STAGES

_TAKEN = re.compile(r"next\(\) → batch (\d+)")
_LOADED = re.compile(r"batch (\d+)")
_SENT = re.compile(r"send (\d+)")
_BUILT = re.compile(r"build (\d+)")
_STAGED = re.compile(r"(pin|device) (\d+)")


@dataclasses.dataclass(slots=True)
class BatchOfTrace:
    """A batch; times in milliseconds since the trace began.

    Attributes:
        number: In the trace.
        epoch: Number of its epoch.
        asked: When ``next()`` was called for it.
        taken: When it returned.
        worker: Who loaded it; None for the consumer itself.
        sent: When it was sent to its worker.
        began: When that began with it.
        done: When that had done it.
        handed: When the engine began to build it.
        stage_began: When the thread of a stage began with it.
        samples: In it.
        nbytes: In it.
        parts: How long each of :data:`~shmloader.stats.times.STAGES` took.
        lent: Slots that were lent when it was handed over.
    """

    number: int
    epoch: int
    asked: float
    taken: float
    worker: int | None = None
    sent: float = 0.0
    began: float = 0.0
    done: float = 0.0
    handed: float = 0.0
    stage_began: float = 0.0
    samples: int = 0
    nbytes: int = 0
    lent: int = 0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class RunOfTrace:
    """A run.

    Attributes:
        batches: In the order in which they were taken.
        begins: All calls of ``iter()``: when, and for how long; ms.
        waits: Likewise of ``next()``.
        verdict: The sentence.
        table: The statistics as they print.
        stats: The same as fields of ``LoaderStats``.
    """

    batches: list[BatchOfTrace]
    begins: list[tuple[float, float]]
    waits: list[tuple[float, float]]
    verdict: str
    table: str
    stats: dict[str, Any]


def read_trace(path: Path) -> RunOfTrace:
    """Read what ``loader.trace()`` has written.

    Raises:
        UsageError: If that is not there, or something else.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        about = trace["otherData"]
        if about["producer"] != "shmloader":
            raise UsageError(f"{path} is no trace of loader.trace()")
        events = trace["traceEvents"]
        batches = _read_batches(events)
        begins, waits = _read_calls(events, "iter()"), _read_calls(events, "next()")
        run = RunOfTrace(batches, begins, waits, about["verdict"], about["table"], about["stats"])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no trace: {error}") from error
    except (LookupError, TypeError) as error:
        raise UsageError(f"{path} is no trace of loader.trace()") from error
    if not batches:
        raise UsageError(f"there is no batch in {path}: nothing was taken while it was recorded")
    return run


def _read_calls(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (event["ts"] / 1e3, event["dur"] / 1e3)
        for event in events
        if event["ph"] == "X" and event["name"].startswith(name)
    ]


def _read_batches(events: list[dict[str, Any]]) -> list[BatchOfTrace]:
    slices = [event for event in events if event["ph"] == "X"]
    batches: dict[int, BatchOfTrace] = {}
    for event in slices:
        if found := _TAKEN.fullmatch(event["name"]):
            number, asked = int(found[1]), event["ts"] / 1e3
            taken = asked + event["dur"] / 1e3
            batches[number] = BatchOfTrace(number, event["args"]["epoch"], asked, taken)
    last: BatchOfTrace | None = None
    for event in slices:
        began, took = event["ts"] / 1e3, event["dur"] / 1e3
        if event["name"] in STAGES:
            # It follows the slice that it is a part of.
            if last is not None:
                last.parts[event["name"]] = took
                last.began = last.began or began
        elif found := _TAKEN.fullmatch(event["name"]):
            last = batches[int(found[1])]
        elif found := _LOADED.fullmatch(event["name"]):
            last = batches[int(found[1])]
            _note_loaded(last, began, took, event["args"])
        elif found := _SENT.fullmatch(event["name"]):
            batches[int(found[1])].sent = began
        elif found := _BUILT.fullmatch(event["name"]):
            batch = batches[int(found[1])]
            batch.handed, batch.parts["build"] = began, took
        elif found := _STAGED.fullmatch(event["name"]):
            batch = batches[int(found[2])]
            batch.stage_began, batch.parts[found[1]] = began, took
    lent = {event["ts"] / 1e3: event["args"]["lent"] for event in events if event["ph"] == "C"}
    ordered = [batches[number] for number in sorted(batches)]
    _derive(ordered, lent)
    return ordered


def _note_loaded(batch: BatchOfTrace, began: float, took: float, about: dict[str, Any]) -> None:
    batch.worker, batch.began, batch.done = about["worker"], began, began + took
    batch.samples, batch.nbytes = about["samples"], about["bytes"]
    batch.parts["slot"] = about["slot_us"] / 1e3
    batch.parts["transport"] = about["transport_us"] / 1e3


def _derive(batches: list[BatchOfTrace], lent: dict[float, int]) -> None:
    """What lies between the slices: waiting for a worker, for earlier batches, for the consumer."""
    turn, epoch = 0.0, -1
    for batch in batches:
        if batch.worker is None:
            continue
        if batch.epoch != epoch:
            turn, epoch = 0.0, batch.epoch
        here = batch.done + batch.parts["transport"]
        turn = max(turn, here)
        batch.parts["queue"] = max(0.0, batch.began - batch.sent)
        batch.parts["reorder"] = turn - here
        ready = max(0.0, batch.handed - turn)
        staged = batch.parts.get("pin", 0.0) + batch.parts.get("device", 0.0)
        if staged:
            ready += max(0.0, batch.asked - batch.stage_began - staged)
        batch.parts["ready"] = ready
        batch.lent = lent.get(batch.handed, 0)
