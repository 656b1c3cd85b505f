"""``shmloader report``: writes a web page that shows a trace. The page needs no network.

The page's script writes only texts of this module into the page as HTML, and nothing of the trace.
"""

import argparse
import html
import itertools
import json
import re
from collections.abc import Iterator
from importlib import resources
from operator import itemgetter
from pathlib import Path
from typing import Any

from shmloader.cli.target import UsageError
from shmloader.grammar import seconds
from shmloader.insight.figures import PLACES, STAGES

# A screen is a few thousand pixels wide. With more batches than that, each bar of a chart is a mean
# of several. This limit keeps the page fast.
_MAX_BATCHES = 20_000

# The names of slices that belong to a numbered batch.
_OF_BATCH = re.compile(r"(next\(\) → batch|batch|send|build|pin|device) (\d{1,15})")

# The colours of the places that have none of their own: names of stages, or "wait".
_PLACE_COLOURS = {
    "start": "slot",
    "draw": "reorder",
    "send": "slot",
    "end": "slot",
    "other": "wait",
}

# What reading anything else than a trace raises.
_WRONG = (
    ValueError, TypeError, LookupError, ArithmeticError, RecursionError, AttributeError,
)  # fmt: skip

# When a call began and how long it took, in milliseconds.
_Span = tuple[float, float]


def report(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the trace cannot be read, or the page cannot be written.
    """
    page = options.output or options.trace.with_suffix(".html")
    if page.absolute() == options.trace.absolute():
        raise UsageError(f"{page} is the trace: name another file for the page (-o)")
    try:
        text = _page_of(*read_trace(options.trace))
        page.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        what = "read" if error.filename == str(options.trace) else "write"
        raise UsageError(f"cannot {what} {error.filename}: {error.strerror}") from error
    except _WRONG as error:
        text = f"{options.trace} is not a trace that loader.trace() wrote"
        raise UsageError(text) from error
    print(f"page: {page}")


def read_trace(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read what ``loader.trace()`` has written.

    Returns:
        The data for the page's script, with times in milliseconds since the earliest moment in the
        trace, and the page's texts. The data has

        * ``batches``: for each batch its ``number``, ``epoch``, ``worker`` (None for the consumer
          itself), ``samples``, ``nbytes``, how many slots were ``lent`` when it was handed over,
          and ``stage_ms``, how long each of its stages took; when ``next()`` was called
          (``asked``) and returned it (``taken``), when its task was ``sent``, when its loading
          ``began`` and was ``done``, when the engine began to build it (``handed``), and when the
          thread that pins or copies began with it (``stage_began``);
        * ``begins`` and ``waits``: when each call of ``iter()`` and of ``next()`` began, and how
          long it took, also the calls of ``next()`` that found an epoch's end;
        * ``uses``: when the consumer worked between two calls, and for how long;
        * ``figures``: names and values of the most important figures;
        * ``places``: where the next batch was while the consumer waited: a colour, a text, and the
          time. Places with hardly any waiting are left out.

    Raises:
        UsageError: If the trace has no batch.
        OSError: If the file cannot be read.
        ValueError, TypeError, LookupError, ArithmeticError, RecursionError, AttributeError: If it
            is not a trace that ``loader.trace()`` wrote.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    about, events = trace["otherData"], trace["traceEvents"]
    stats = about["stats"]
    slices = [event for event in events if event["ph"] == "X"]
    lent = {event["ts"]: event["args"]["lent"] for event in events if event["ph"] == "C"}
    batches = _read_batches(slices, lent)
    if not batches:
        raise UsageError(f"there is no batch in {path}: nothing was taken while it was recorded")
    begins, waits = _read_calls(slices, "iter()"), _read_calls(slices, "next()")
    spent_s = dict(zip(PLACES, stats["wait"]["places"], strict=True))
    least_s = max(spent_s.values()) / 1000
    data = {
        "stages": list(STAGES),
        "batches": batches,
        "begins": begins,
        "waits": waits,
        "uses": _uses_between(begins, waits),
        "figures": list(_figures_of(stats)),
        "places": [
            [_PLACE_COLOURS.get(name, name), PLACES[name], spent * 1e3]
            for name, spent in spent_s.items()
            if spent > 0 and spent >= least_s
        ],
    }
    epoch, verdict, table = stats["epoch"], about["verdict"], about["table"]
    texts = {
        "epochs": html.escape(f"{stats['epochs']} epochs" if epoch is None else f"epoch {epoch}"),
        "verdict": re.sub("`(.+?)`", r"<code>\1</code>", html.escape(verdict)),
        # The table ends with the verdict, which the page shows at the top.
        "table": html.escape(table.removesuffix(verdict).rstrip()),
    }
    return data, texts


def _figures_of(stats: dict[str, Any]) -> Iterator[tuple[str, str]]:
    wait = stats["wait"]
    yield "waited for data", f"{wait['share']:.0%}, {seconds(wait['total_s'])}"
    yield "of that, first batch", seconds(wait["startup_s"])
    yield "next(), median", seconds(wait["p50_s"])
    yield "next(), 99 % within", seconds(wait["p99_s"])
    shares = [worker["busy_share"] for worker in stats["workers"] if worker["batches"]]
    if shares:
        yield "workers busy, mean", f"{sum(shares) / len(shares):.0%}"
    yield "samples a second", f"{stats['samples_per_s']:,.0f}"


def _span(event: dict[str, Any]) -> _Span:
    return event["ts"] / 1e3, event["dur"] / 1e3


def _read_calls(slices: list[dict[str, Any]], name: str) -> list[_Span]:
    return [_span(event) for event in slices if event["name"].startswith(name)]


def _uses_between(begins: list[_Span], waits: list[_Span]) -> list[_Span]:
    """Return the times between two calls, unless the second one is ``iter()``."""
    calls = [(*span, False) for span in begins] + [(*span, True) for span in waits]
    return [
        (at + took, following - at - took)
        for (at, took, _), (following, _, is_next) in itertools.pairwise(sorted(calls))
        if is_next and following > at + took
    ]


def _read_batches(slices: list[dict[str, Any]], lent: dict[float, int]) -> list[dict[str, Any]]:
    """Return the batches, in the order in which they were taken.

    Args:
        slices: The slices of the trace.
        lent: How many slots were lent, by the time in microseconds.
    """
    batches: dict[str, dict[str, Any]] = {}
    named = [(event, _OF_BATCH.fullmatch(event["name"])) for event in slices]
    for event, found in named:
        if found and found[1].startswith("next()"):
            asked, took = _span(event)
            batches[found[2]] = {
                "number": int(found[2]), "epoch": event["args"]["epoch"], "asked": asked,
                "taken": asked + took, "worker": None, "sent": 0.0, "began": 0.0, "done": 0.0,
                "handed": 0.0, "stage_began": 0.0, "samples": 0, "nbytes": 0, "lent": 0,
                "stage_ms": {},
            }  # fmt: skip
    last: dict[str, Any] = {}
    for event, found in named:
        began, took = _span(event)
        if found is None:
            # The slice of a stage follows the slice that contains it.
            if event["name"] in STAGES and last:
                last["stage_ms"][event["name"]] = took
                last["began"] = last["began"] or began
            continue
        batch = batches[found[2]]
        match found[1]:
            case "send":
                batch["sent"] = began
            case "build":
                batch["handed"], batch["stage_ms"]["build"] = began, took
                batch["lent"] = lent.get(event["ts"], 0)
            case "pin" | "device" as stage:
                batch["stage_began"], batch["stage_ms"][stage] = began, took
            case "batch":
                last, about = batch, event["args"]
                batch |= {"worker": about["worker"], "began": began, "done": began + took}
                batch |= {"samples": about["samples"], "nbytes": about["bytes"]}
                batch["stage_ms"]["slot"] = about["slot_us"] / 1e3
                batch["stage_ms"]["transport"] = about["transport_us"] / 1e3
            case _:
                last = batch
    ordered = sorted(batches.values(), key=itemgetter("number"))
    _derive([batch for batch in ordered if batch["worker"] is not None])
    return ordered


def _derive(batches: list[dict[str, Any]]) -> None:
    """Derive the waits between slices: for a worker, for earlier batches, and for the consumer."""
    turn, epoch = 0.0, -1
    for batch in batches:
        if batch["epoch"] != epoch:
            turn, epoch = 0.0, batch["epoch"]
        stage_ms = batch["stage_ms"]
        arrived = batch["done"] + stage_ms["transport"]
        turn = max(turn, arrived)
        ready = max(0.0, batch["handed"] - turn)
        staged = stage_ms.get("pin", 0.0) + stage_ms.get("device", 0.0)
        if staged:
            ready += max(0.0, batch["asked"] - batch["stage_began"] - staged)
        stage_ms |= {"queue": max(0.0, batch["began"] - batch["sent"])}
        stage_ms |= {"reorder": turn - arrived, "ready": ready}


def _page_of(data: dict[str, Any], texts: dict[str, str]) -> str:
    """Return the page: ``report.html`` with the data and the texts in it."""
    shown = {key: _rounded(value[:_MAX_BATCHES]) for key, value in data.items()}
    shown["left_out"] = max(0, len(data["batches"]) - _MAX_BATCHES)
    written = json.dumps(shown, separators=(",", ":"), allow_nan=False)
    # "</script>" would end the script around the data, and "<!--" would change where it ends.
    fields = {**texts, "data": written.replace("<", "\\u003c")}
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    # All at once, because a field may contain text that looks like the mark of another field.
    return re.sub("{{([a-z]+)}}", lambda match: fields[match[1]], template)


def _rounded(value: Any) -> Any:
    """Return a value with all its times to a tenth of a microsecond, which keeps the page small."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
