"""``shmloader report``: writes a web page that shows a trace. The page needs no network.

The page's script writes only texts of this module into the page as HTML, and nothing of the trace.
"""

import argparse
import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from shmloader.cli.target import UsageError
from shmloader.grammar import counted
from shmloader.insight.stats import PARTS

# A screen is a few thousand pixels wide. With more batches than that, each bar of a chart is a mean
# of several. This limit keeps the page fast.
_MAX_BATCHES = 20_000

# The colours of the parts that have none of their own: names of other parts, or "wait".
_COLOURS = {"start": "slot", "draw": "reorder", "end": "slot", "other": "wait"}


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
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        text = f"{options.trace} is not a trace that loader.trace() wrote"
        raise UsageError(text) from error
    print(f"page: {page}")


def read_trace(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read what ``loader.trace()`` has written.

    Returns the data for the page's script, with times in milliseconds, and the page's texts.
    ``begins``, ``waits`` and ``uses`` say when each call of ``iter()`` and of ``next()``, and each
    time between two calls, began and how long it took. Of ``causes``, which have a colour, a text
    and a time, those with hardly any waiting are left out.

    Raises:
        UsageError: If the trace has no batch.
        OSError: If the file cannot be read.
        ValueError, TypeError, LookupError, AttributeError, RecursionError: If it is not a trace
            that ``loader.trace()`` wrote.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    stats, table = trace["otherData"]["stats"], trace["otherData"]["table"]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    batches = [event["args"] for event in slices if "stage_ms" in event.get("args", ())]
    if not batches:
        raise UsageError(f"there is no batch in {path}: no epoch began while it was recorded")

    def spans(name: str) -> list[tuple[float, float]]:
        found = (event for event in slices if event["name"].startswith(name))
        return [(event["ts"] / 1e3, event["dur"] / 1e3) for event in found]

    causes = zip(PARTS, stats["wait"]["causes"], strict=True)
    spent_ms = {name: 1e3 * spent_s for name, spent_s in causes}
    least_ms = max(spent_ms.values()) / 1000
    data = {
        "stages": list(PARTS),
        "batches": batches,
        "begins": spans("iter()"),
        "waits": spans("next()"),
        "uses": spans("use"),
        "causes": [
            [_COLOURS.get(name, name), PARTS[name], spent]
            for name, spent in spent_ms.items()
            if spent > 0 and spent >= least_ms
        ],
    }
    epoch, verdict = stats["epoch"], stats["verdict"]
    texts = {
        "epochs": html.escape(
            counted(stats["epochs"], "epoch") if epoch is None else f"epoch {epoch}"
        ),
        "verdict": html.escape(verdict),
        # The table ends with the verdict, which the page shows at the top.
        "table": html.escape(table.removesuffix(verdict).rstrip()),
    }
    return data, texts


def _page_of(data: dict[str, Any], texts: dict[str, str]) -> str:
    """Return the page: ``report.html`` with the data and the texts in it."""
    shown = {key: value[:_MAX_BATCHES] for key, value in data.items()}
    shown["left_out"] = max(0, len(data["batches"]) - _MAX_BATCHES)
    written = json.dumps(shown, separators=(",", ":"), allow_nan=False)
    # "</script>" would end the script around the data, and "<!--" would change where it ends.
    fields = {**texts, "data": written.replace("<", "\\u003c")}
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    # All at once, because a field may contain text that looks like the mark of another field.
    return re.sub("{{([a-z]+)}}", lambda match: fields[match[1]], template)
