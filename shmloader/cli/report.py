"""``shmloader report``: writes a web page that shows a trace. The page needs no network.

Any program may have written the trace, so every field is checked here, and the page's script can
rely on the fields.
"""

import argparse
import dataclasses
import html
import itertools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from shmloader.cli.target import UsageError
from shmloader.grammar import seconds
from shmloader.insight.figures import PLACES, STAGES

# A screen is a few thousand pixels wide. With more batches than that, each bar of a chart is a mean
# of several. This limit keeps the page fast.
_MAX_BATCHES = 20_000

_TAKEN = re.compile(r"next\(\) → batch (\d{1,15})")
_LOADED = re.compile(r"batch (\d{1,15})")
_SENT = re.compile(r"send (\d{1,15})")
_BUILT = re.compile(r"build (\d{1,15})")
_STAGED = re.compile(r"(pin|device) (\d{1,15})")

_WAITS = ("share", "total_s", "startup_s", "p50_s", "p99_s")

# The colours of the places that have none of their own: names of stages, or "wait".
_PLACE_COLOURS = {
    "start": "slot",
    "draw": "reorder",
    "send": "slot",
    "end": "slot",
    "other": "wait",
}

# Thirty years in microseconds. JavaScript's numbers of that size still resolve a quarter of one.
_MAX_AMOUNT = 1e15


@dataclasses.dataclass(slots=True)
class TracedBatch:
    """A batch in a trace. Times are in milliseconds since the earliest moment in the trace.

    Attributes:
        number: Its number in the trace.
        epoch: The epoch's number.
        asked: When ``next()`` was called for it.
        taken: When ``next()`` returned it.
        worker: The worker that loaded it; None for the consumer itself.
        sent: When its task was sent to the worker.
        began: When the worker, or the consumer itself, began to load it.
        done: When the worker had finished it.
        handed: When the engine began to build it.
        stage_began: When the thread that pins, or copies to a device, began with it.
        samples: Its number of samples.
        nbytes: Its size in bytes.
        lent: How many slots were lent when it was handed over.
        stage_ms: How long each of :data:`~shmloader.insight.figures.STAGES` took.
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
    stage_ms: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class TracedRun:
    """What a trace says about a run of a loader.

    Attributes:
        batches: The batches, in the order in which they were taken.
        begins: For each call of ``iter()``, when it began and how long it took, in milliseconds.
        waits: For each call of ``next()``, when it began and how long it took, in milliseconds.
        uses: When the consumer worked between two calls, and for how long, in milliseconds.
        verdict: The verdict, a sentence.
        table: The statistics as they print.
        epochs: The epochs that were recorded, in words.
        figures: The most important figures: names and values.
        places: Where the next batch was while the consumer waited: the name of the place, what it
            means, and the seconds of waiting. Places with no waiting are left out.

    The calls of ``next()`` include those that found the epoch's end and returned no batch, as the
    figures do.
    """

    batches: list[TracedBatch]
    begins: list[tuple[float, float]]
    waits: list[tuple[float, float]]
    uses: list[tuple[float, float]]
    verdict: str
    table: str
    epochs: str
    figures: list[tuple[str, str]]
    places: list[tuple[str, str, float]]


def read_trace(path: Path) -> TracedRun:
    """Read what ``loader.trace()`` has written.

    Raises:
        UsageError: If the file cannot be read, is not such a trace, or has no batch.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        about = trace["otherData"]
        if about["producer"] != "shmloader":
            raise UsageError(f"{path} is not a trace that loader.trace() wrote")
        events = trace["traceEvents"]
        batches = _read_batches(events)
        if not batches:
            raise UsageError(
                f"there is no batch in {path}: nothing was taken while it was recorded"
            )
        begins, waits = _read_calls(events, "iter()"), _read_calls(events, "next()")
        run = TracedRun(
            batches,
            begins,
            waits,
            _uses_between(begins, waits),
            _text(about["verdict"]),
            _text(about["table"]),
            _epochs_of(about["stats"]),
            _figures_of(about["stats"]),
            _places_of(about["stats"]["wait"]["places"]),
        )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a trace: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a trace that loader.trace() wrote") from error
    return run


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


def _text(value: str) -> str:
    """Return a text that any encoding of Unicode can write."""
    return value.encode("utf-8", "replace").decode("utf-8")


def _amount(value: object) -> float:
    """Check a time, a share or a rate.

    Raises:
        ValueError: If it is not a number, or too large for the page's script to calculate with.
    """
    if type(value) not in {int, float} or not -_MAX_AMOUNT <= value <= _MAX_AMOUNT:  # type: ignore[operator]
        raise ValueError(f"{value!r:.40} is not a time, share or rate")
    return float(value)  # type: ignore[arg-type]


def _number_of(value: object) -> int:
    """Check a count, or the number of a batch, worker or epoch.

    Raises:
        ValueError: If it is not a whole number from 0 up.
    """
    if type(value) is not int or not 0 <= value <= _MAX_AMOUNT:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def _span(event: dict[str, Any]) -> tuple[float, float]:
    """Return when a slice began, and how long it took, in milliseconds."""
    return _amount(event["ts"]) / 1e3, _amount(event["dur"]) / 1e3


def _epochs_of(stats: dict[str, Any]) -> str:
    if stats["epoch"] is not None:
        return f"epoch {_number_of(stats['epoch'])}"
    return f"{_number_of(stats['epochs'])} epochs"


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
        figures.append(("workers busy, mean", f"{sum(shares) / len(shares):.0%}"))
    figures.append(("samples a second", f"{_amount(stats['samples_per_s']):,.0f}"))
    return figures


def _places_of(values: object) -> list[tuple[str, str, float]]:
    if not isinstance(values, list) or len(values) != len(PLACES):
        raise ValueError("the places of the wait are not a list with a value for each place")
    spent = dict(zip(PLACES, map(_amount, values), strict=True))
    return [(name, PLACES[name], spent_s) for name, spent_s in spent.items() if spent_s]


def _read_calls(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        _span(event) for event in events if event["ph"] == "X" and event["name"].startswith(name)
    ]


def _uses_between(
    begins: list[tuple[float, float]], waits: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the times between two calls, unless the second one is ``iter()``."""
    calls = [(at, took, False) for at, took in begins] + [(at, took, True) for at, took in waits]
    return [
        (at + took, following - at - took)
        for (at, took, _), (following, _, is_next) in itertools.pairwise(sorted(calls))
        if is_next and following > at + took
    ]


def _read_batches(events: list[dict[str, Any]]) -> list[TracedBatch]:
    slices = [event for event in events if event["ph"] == "X"]
    batches: dict[int, TracedBatch] = {}
    for event in slices:
        if found := _TAKEN.fullmatch(event["name"]):
            number, (asked, took) = int(found[1]), _span(event)
            epoch = _number_of(event["args"]["epoch"])
            batches[number] = TracedBatch(number, epoch, asked, asked + took)
    last: TracedBatch | None = None
    for event in slices:
        began, took = _span(event)
        if event["name"] in STAGES:
            # The slice of a stage follows the slice that contains it.
            if last is not None:
                last.stage_ms[event["name"]] = took
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
            batch.handed, batch.stage_ms["build"] = began, took
        elif found := _STAGED.fullmatch(event["name"]):
            batch = batches[int(found[2])]
            batch.stage_began, batch.stage_ms[found[1]] = began, took
    lent = {
        _amount(event["ts"]) / 1e3: _number_of(event["args"]["lent"])
        for event in events
        if event["ph"] == "C"
    }
    ordered = [batches[number] for number in sorted(batches)]
    _derive(ordered, lent)
    return ordered


def _note_loaded(batch: TracedBatch, began: float, took: float, about: dict[str, Any]) -> None:
    batch.worker, batch.began, batch.done = _number_of(about["worker"]), began, began + took
    batch.samples, batch.nbytes = _number_of(about["samples"]), _number_of(about["bytes"])
    batch.stage_ms["slot"] = _amount(about["slot_us"]) / 1e3
    batch.stage_ms["transport"] = _amount(about["transport_us"]) / 1e3


def _derive(batches: list[TracedBatch], lent: dict[float, int]) -> None:
    """Derive the waits between slices: for a worker, for earlier batches, and for the consumer."""
    turn, epoch = 0.0, -1
    for batch in batches:
        if batch.worker is None:
            continue
        if batch.epoch != epoch:
            turn, epoch = 0.0, batch.epoch
        here = batch.done + batch.stage_ms["transport"]
        turn = max(turn, here)
        batch.stage_ms["queue"] = max(0.0, batch.began - batch.sent)
        batch.stage_ms["reorder"] = turn - here
        ready = max(0.0, batch.handed - turn)
        staged = batch.stage_ms.get("pin", 0.0) + batch.stage_ms.get("device", 0.0)
        if staged:
            ready += max(0.0, batch.asked - batch.stage_began - staged)
        batch.stage_ms["ready"] = ready
        batch.lent = lent.get(batch.handed, 0)


def report(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the trace cannot be read, or the page cannot be written.
    """
    page = options.output or options.trace.with_suffix(".html")
    if page.absolute() == options.trace.absolute():
        raise UsageError(f"{page} is the trace: name another file for the page (-o)")
    run = read_trace(options.trace)
    try:
        page.write_text(_page_of(run), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error
    print(f"page: {page}")


def _page_of(run: TracedRun) -> str:
    """Return the page of a run: ``report.html`` with the run's data in it."""
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    data = json.dumps(_data_of(run), separators=(",", ":"), allow_nan=False)
    fields = {
        # "</script>" would end the script around the data, and "<!--" would change where it ends.
        "data": data.replace("<", "\\u003c"),
        "epochs": html.escape(run.epochs),
        "verdict": re.sub("`(.+?)`", r"<code>\1</code>", html.escape(run.verdict)),
        # The table ends with the verdict, which the page shows at the top.
        "table": html.escape(run.table.removesuffix(run.verdict).rstrip()),
    }
    # All at once, because a field may contain text that looks like the mark of another field.
    return re.sub("{{([a-z]+)}}", lambda match: fields[match[1]], template)


def _data_of(run: TracedRun) -> dict[str, Any]:
    """Return what the page's script reads."""
    least_s = max((spent_s for _, _, spent_s in run.places), default=0.0) / 1000
    return {
        "stages": list(STAGES),
        "left_out": max(0, len(run.batches) - _MAX_BATCHES),
        "batches": [_rounded(dataclasses.asdict(batch)) for batch in run.batches[:_MAX_BATCHES]],
        "begins": _rounded(run.begins[:_MAX_BATCHES]),
        "waits": _rounded(run.waits[:_MAX_BATCHES]),
        "uses": _rounded(run.uses[:_MAX_BATCHES]),
        "figures": run.figures,
        "places": [
            [_PLACE_COLOURS.get(name, name), text, spent_s * 1e3]
            for name, text, spent_s in run.places
            if spent_s >= least_s
        ],
    }


def _rounded(value: Any) -> Any:
    """Return a value with all its times to a tenth of a microsecond, which keeps the page small."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
