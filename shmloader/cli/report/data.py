"""What a trace tells of each batch.

A trace is a file that anyone may have written: every field is checked here, so that what is made
of it need not expect anything else.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NoReturn

from shmloader.cli.target import UsageError
from shmloader.insight.measurements import STAGES
from shmloader.insight.text import seconds

_TAKEN = re.compile(r"next\(\) → batch (\d{1,15})")
_LOADED = re.compile(r"batch (\d{1,15})")
_SENT = re.compile(r"send (\d{1,15})")
_BUILT = re.compile(r"build (\d{1,15})")
_STAGED = re.compile(r"(pin|device) (\d{1,15})")

_WAITS = ("share", "total_s", "startup_s", "p50_s", "p99_s")

# Microseconds: thirty years, of which JavaScript's numbers still have a quarter.
_MOST = 1e15


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
        parts: How long each of :data:`~shmloader.insight.measurements.STAGES` took.
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
        epoch: What the verdict and the figures are of; there may be other epochs in the trace.
        figures: The most telling ones: a name and a value.
    """

    batches: list[BatchOfTrace]
    begins: list[tuple[float, float]]
    waits: list[tuple[float, float]]
    verdict: str
    table: str
    epoch: str
    figures: list[tuple[str, str]]


def read_trace(path: Path) -> RunOfTrace:
    """Read what ``loader.trace()`` has written.

    Raises:
        UsageError: If that is not there, or something else.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        about = trace["otherData"]
        if about["producer"] != "shmloader":
            raise UsageError(f"{path} is no trace of loader.trace()")
        events = trace["traceEvents"]
        batches = _read_batches(events)
        if not batches:
            raise UsageError(
                f"there is no batch in {path}: nothing was taken while it was recorded"
            )
        begins, waits = _read_calls(events, "iter()"), _read_calls(events, "next()")
        run = RunOfTrace(
            batches,
            begins,
            waits,
            _text(about["verdict"]),
            _text(about["table"]),
            f"epoch {_number_of(about['stats']['epoch'])}",
            _figures_of(about["stats"]),
        )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no trace: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no trace of loader.trace()") from error
    return run


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number that JSON has")


def _text(value: str) -> str:
    """A text that any encoding of Unicode can write."""
    return value.encode("utf-8", "replace").decode("utf-8")


def _amount(value: object) -> float:
    """A time, a share or a rate.

    Raises:
        ValueError: If it is none, or so large that a page could not count up to it.
    """
    if type(value) not in {int, float} or not -_MOST <= value <= _MOST:  # type: ignore[operator]
        raise ValueError(f"{value!r:.40} is no time, share or rate")
    return float(value)  # type: ignore[arg-type]


def _number_of(value: object) -> int:
    """A count, or the number of something.

    Raises:
        ValueError: If it is none.
    """
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _span(event: dict[str, Any]) -> tuple[float, float]:
    """When a slice began, and how long it took; ms."""
    return _amount(event["ts"]) / 1e3, _amount(event["dur"]) / 1e3


def _figures_of(stats: dict[str, Any]) -> list[tuple[str, str]]:
    wait = {name: _amount(stats["wait"][name]) for name in _WAITS}
    figures = [
        ("waited for data", f"{wait['share']:.0%}, {seconds(wait['total_s'])}"),
        ("of that, first batch", seconds(wait["startup_s"])),
        ("next(), median", seconds(wait["p50_s"])),
        ("next(), 99 % within", seconds(wait["p99_s"])),
    ]
    shares = [
        _amount(worker["busy_share"])
        for worker in stats["workers"]
        if _number_of(worker["batches"])
    ]
    if shares:
        figures.append(("workers busy", f"{sum(shares) / len(shares):.0%} of {len(shares)}"))
    figures.append(("samples a second", f"{_amount(stats['samples_per_s']):,.0f}"))
    return figures


def _read_calls(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        _span(event) for event in events if event["ph"] == "X" and event["name"].startswith(name)
    ]


def _read_batches(events: list[dict[str, Any]]) -> list[BatchOfTrace]:
    slices = [event for event in events if event["ph"] == "X"]
    batches: dict[int, BatchOfTrace] = {}
    for event in slices:
        if found := _TAKEN.fullmatch(event["name"]):
            number, (asked, took) = int(found[1]), _span(event)
            epoch = _number_of(event["args"]["epoch"])
            batches[number] = BatchOfTrace(number, epoch, asked, asked + took)
    last: BatchOfTrace | None = None
    for event in slices:
        began, took = _span(event)
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
    lent = {
        _amount(event["ts"]) / 1e3: _number_of(event["args"]["lent"])
        for event in events
        if event["ph"] == "C"
    }
    ordered = [batches[number] for number in sorted(batches)]
    _derive(ordered, lent)
    return ordered


def _note_loaded(batch: BatchOfTrace, began: float, took: float, about: dict[str, Any]) -> None:
    batch.worker, batch.began, batch.done = _number_of(about["worker"]), began, began + took
    batch.samples, batch.nbytes = _number_of(about["samples"]), _number_of(about["bytes"])
    batch.parts["slot"] = _amount(about["slot_us"]) / 1e3
    batch.parts["transport"] = _amount(about["transport_us"]) / 1e3


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
