"""Traces are what Perfetto reads: the format, and the nesting of slices. And the page of a trace.

The page is looked at in a real browser, at two widths, for a run of each kind.
"""

import collections
import html
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shmloader import DataLoader
from shmloader.cli.main import main
from shmloader.cli.report import read_trace
from shmloader.insight.stats import PARTS
from tests.process.support import Bad, Calls, Numbers

pytestmark = pytest.mark.timeout(120)

# What the trace event format asks of each phase that is used here.
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"name": str, "pid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float)},
}


def ns(event: dict[str, Any], field: str) -> int:
    """A time in nanoseconds; the format has microseconds."""
    return round(event[field] * 1000)


def check_format(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    for event in events:
        for field, kind in FIELDS[event["ph"]].items():
            assert isinstance(event[field], kind), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
    check_nesting(events)
    return events


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    tracks = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On a track, two slices lie apart, or one in the other."""
    for track in slices(events).values():
        open_until: list[int] = []
        for event in sorted(track, key=lambda one: (one["ts"], -one["dur"])):
            end = ns(event, "ts") + ns(event, "dur")
            while open_until and open_until[-1] <= ns(event, "ts"):
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def names_of(events: list[dict[str, Any]]) -> set[str]:
    return {event["args"]["name"] for event in events if event["name"] == "thread_name"}


def loader_of(**options: Any) -> DataLoader:
    return DataLoader(Calls(lambda index: torch.full((64,), index), 40), 4, **options)


def traced(loader: DataLoader, folder: Path) -> list[dict[str, Any]]:
    """Trace an epoch, and return its events."""
    with loader, loader.trace(folder / "run.json"):
        for _ in loader:
            pass
    return check_format(folder / "run.json")


@pytest.mark.parametrize(
    ("options", "tracks"),
    [
        ({"num_workers": 2}, {"worker 0", "worker 1", "consumer"}),
        ({"num_workers": 2, "seed": 0}, {"worker 0", "worker 1", "consumer"}),
        ({"num_workers": 1, "thread_pool": True}, {"worker 0", "consumer"}),
        ({}, {"consumer"}),
    ],
)
def test_a_trace_is_in_the_format_and_has_a_track_for_each(tmp_path, options, tracks) -> None:
    events = traced(loader_of(**options), tmp_path)
    assert names_of(events) - {"worker 0", "worker 1"} == tracks - {"worker 0", "worker 1"}
    assert names_of(events) <= tracks
    takes = [event for event in events if event["name"].startswith("next() → batch")]
    assert len(takes) == 10
    (begun,) = (event for event in events if event["name"] == "iter()")
    assert begun["ts"] + begun["dur"] <= takes[0]["ts"]
    loads = [event for event in events if event["name"].startswith("batch ")]
    assert len(loads) == (10 if options else 0)


@pytest.mark.parametrize("kind", ["pin", "device"])
@pytest.mark.usefixtures("late")
def test_the_thread_of_a_stage_has_a_track(tmp_path, kind) -> None:
    options = {"pin_memory": True} if kind == "pin" else {"device": "late"}
    assert f"{kind} thread" in names_of(traced(loader_of(num_workers=2, **options), tmp_path))


def test_epochs_that_begin_in_the_block_are_traced_until_its_end(tmp_path) -> None:
    path = tmp_path / "run.json"
    with loader_of(num_workers=1, persistent_workers=True) as loader:
        batches = iter(loader)
        next(batches)
        with loader.trace(path):
            next(batches)
            with pytest.raises(RuntimeError, match="recorded already"), loader.trace(path):
                pass
            batches = iter(loader)
            next(batches)
        list(batches)
        events = check_format(path)
        assert sum(event["name"].startswith("next()") for event in events) == 1


def test_each_epoch_is_a_process_of_the_trace(tmp_path) -> None:
    """Also those of iterators at the same time, whose slices would cross on one track."""
    path = tmp_path / "run.json"
    with DataLoader(Calls(slow, 6), num_workers=1) as loader, loader.trace(path):
        for _, _ in zip(loader, loader, strict=True):
            pass
    events = check_format(path)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["epoch 0", "epoch 1"]
    assert {event["pid"] for event in events} == {1, 2}


def test_a_block_that_raises_leaves_a_trace(tmp_path) -> None:
    with pytest.raises(Bad):
        traced(DataLoader(Numbers(8, 5), num_workers=1), tmp_path)
    events = check_format(tmp_path / "run.json")
    assert sum(event["name"].startswith("batch ") for event in events) == 5


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path) -> None:
    with (
        loader_of() as loader,
        pytest.raises(FileNotFoundError),
        loader.trace(tmp_path / "no" / "run.json"),
    ):
        raise AssertionError("the block was entered")
    with loader.trace(tmp_path / "run.json"):
        pass
    assert check_format(tmp_path / "run.json") == []


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
REASON = "there is no chromium here to look at the page with"
BATCHES = 12
# A trace, but for its events.
ABOUT = '{"traceEvents": [%s], "otherData": {"table": "", "stats": {}}}'

# Run in the page after its own script: what a test cannot see in a picture.
PROBE = """
<script>
addEventListener("error", event => { document.body.dataset.error = event.message; });
document.body.dataset.width = innerWidth;
document.body.dataset.wide = document.documentElement.scrollWidth - innerWidth;
// Text that is wider than its element, or an element that reaches out of the one around it. Only
// the table of all figures is scrolled sideways, by itself.
document.body.dataset.cut = [...document.querySelectorAll("main *:not(pre)")].filter(element => {
  const box = element.getBoundingClientRect();
  const around = element.parentElement.getBoundingClientRect();
  return box.width && (element.clientWidth && element.scrollWidth > element.clientWidth + 1
    || box.right > around.right + 1 || box.left < around.left - 1);
}).map(element => element.tagName + " " + element.textContent.trim().slice(0, 40)).join("; ");
const colours = {};
for (const canvas of document.querySelectorAll("canvas")) {
  const bits = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const found = new Set();
  for (let i = 0; i < bits.length; i += 4) {
    if (bits[i + 3] === 255) {
      found.add("#" + [0, 1, 2].map(k => bits[i + k].toString(16).padStart(2, "0")).join(""));
    }
  }
  colours[canvas.id] = [...found];
}
document.body.dataset.colours = JSON.stringify(colours);
</script>
"""
# Put the page of a frame in place of the page around it.
SHOW_FRAME = """
<script>
onload = () => document.documentElement.replaceWith(
  frames[0].document.documentElement.cloneNode(true));
</script>
"""
FETCH, WAIT, USE, READY = "#2f6fde", "#d8432f", "#b9c3d0", "#a9d6a0"


def slow(index: int) -> torch.Tensor:
    time.sleep(0.02)
    return torch.full((8,), index)


def record(path: Path, *, is_bound: bool, **options: Any) -> Path:
    """A trace of a run whose workers are the limit, or of one whose consumer is."""
    options = {"num_workers": 2, **options}
    quick = Calls(lambda index: torch.full((8,), index), BATCHES)
    loader = DataLoader(Calls(slow, BATCHES) if is_bound else quick, **options)
    with loader, loader.trace(path):
        for _ in loader:
            time.sleep(0.0 if is_bound else 0.02)
    return path


def browse(page: Path, width: int) -> str:
    assert BROWSER is not None
    text = page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>")
    # No window is narrower than 500 pixels, but a frame may be.
    frame = f'<iframe width="{width}" height="1600" srcdoc="{html.escape(text)}"></iframe>'
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(f'<!doctype html><meta charset="utf-8">{frame}{SHOW_FRAME}', encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={page.parent / 'profile'}",
            "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.skipif(BROWSER is None, reason=REASON)
@pytest.mark.parametrize(("is_bound", "width"), [(True, 1280), (False, 400)])
def test_a_browser_draws_the_page(tmp_path, is_bound, width) -> None:
    trace = record(tmp_path / "run.json", is_bound=is_bound)
    assert main(["report", str(trace), "-o", str(tmp_path / "page.html")]) == 0
    seen = browse(tmp_path / "page.html", width)
    assert f'data-drawn="{BATCHES}"' in seen
    assert "data-error" not in seen
    _, text, spent_ms = max(read_trace(trace)[0]["causes"], key=lambda place: place[2])
    assert f"<span>{text}</span><b>{shown(spent_ms)}</b>" in seen
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', seen))
    assert int(found["wide"]) <= 0, "it has to be scrolled sideways"
    assert found["width"] == str(width)
    assert not found["cut"], "text is cut"
    colours = json.loads(html.unescape(found["colours"]))
    assert set(colours) == {"timeline", "stack", "waits", "stock"}
    assert WAIT in colours["waits"]
    if is_bound:
        assert {FETCH, WAIT} <= set(colours["timeline"])
        assert FETCH in colours["stack"]
    else:
        assert USE in colours["timeline"]
        assert READY in colours["stack"]
        assert READY in colours["stock"]


def shown(spent_ms: float) -> str:
    return f"{spent_ms / 1e3:.2f} s" if spent_ms >= 1000 else f"{spent_ms:.3g} ms"


# What would end the page's script, or be taken for a place of its template.
HOSTILE = "{{data}} {{table}} </script> <!--<script> `<b>` $\\frac$ \ud800 &amp; \u2028"


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.skipif(BROWSER is None, reason=REASON)
def test_a_browser_draws_the_page_whatever_the_trace_says(tmp_path) -> None:
    trace = json.loads(record(tmp_path / "run.json", is_bound=False).read_text())
    trace["otherData"]["stats"]["verdict"] = HOSTILE
    trace["otherData"]["table"] = f"{HOSTILE}\nand more"
    for number, event in enumerate(trace["traceEvents"]):
        if "ts" in event:
            event["ts"] += 3e14
        if "stage_ms" in event.get("args", ()):
            event["args"]["worker"] = number * 10_000
    # Calls of iter() for which a browser has no stack.
    begin = next(event for event in trace["traceEvents"] if event["name"].startswith("iter()"))
    trace["traceEvents"] += [begin] * 200_000
    (tmp_path / "run.json").write_text(json.dumps(trace))
    assert main(["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "page.html")]) == 0
    seen = browse(tmp_path / "page.html", 800)
    assert f'data-drawn="{BATCHES}"' in seen
    assert "data-error" not in seen
    shown = HOSTILE.replace("\ud800", "?").replace("&", "&amp;").replace("<", "&lt;")
    shown = shown.replace(">", "&gt;")
    assert f'<pre id="table">{shown}\nand more</pre>' in seen
    assert f"<h1>{shown}</h1>" in seen


def test_the_page_is_by_itself_and_says_the_verdict(tmp_path, capsys) -> None:
    trace = record(tmp_path / "run.json", is_bound=True, num_workers=0)
    assert main(["report", str(trace)]) == 0
    assert "page: " in capsys.readouterr().out
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|src=|@import", page)
    assert "{{" not in page
    said = json.loads(trace.read_text())["otherData"]["stats"]["verdict"]
    assert f"<h1>{html.escape(said)}</h1>" in page
    assert page.count("Your loop waited") == 1
    assert "12 batches, 12 samples" in page
    assert "where the time goes · epoch 0<" in page


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 0}, {"seed": 0}, {"thread_pool": True}, {"in_order": False}]
)
def test_the_figures_are_those_of_the_charts(tmp_path, options) -> None:
    options = {"num_workers": 2, **options}
    with DataLoader(Calls(slow, BATCHES), batch_size=2, **options) as loader:
        with loader.trace(tmp_path / "run.json"):
            for _ in range(2):
                for _ in loader:
                    time.sleep(0.002)
        list(loader)  # after the block
    run, texts = read_trace(tmp_path / "run.json")
    stats = json.loads((tmp_path / "run.json").read_text())["otherData"]["stats"]
    assert len(run["batches"]) == stats["batches"] == BATCHES
    assert texts["epochs"] == "2 epochs"
    assert stats["epochs"] == 2
    wait = stats["wait"]
    took = [took for _, took in run["waits"]]
    assert wait["total_s"] * 1e3 == pytest.approx(sum(took) + sum(t for _, t in run["begins"]))
    assert sum(wait["causes"]) == pytest.approx(wait["total_s"])
    assert wait["max_s"] * 1e3 == pytest.approx(max(took))
    assert wait["p50_s"] * 1e3 == pytest.approx(sorted(took)[(len(took) - 1) // 2], rel=0.07)
    firsts = [
        spent + next(took for when, took in run["waits"] if when >= at + spent - 1e-3)
        for at, spent in run["begins"]
    ]
    assert wait["startup_s"] * 1e3 == pytest.approx(sum(firsts))
    for name in ("fetch", "collate", "ready"):
        spent_s = stats["stages"][list(PARTS).index(name)]
        spent_ms = sum(batch["stage_ms"].get(name, 0) for batch in run["batches"])
        assert spent_s * 1e3 == pytest.approx(spent_ms)
    if options["num_workers"]:
        assert sum(worker["batches"] for worker in stats["workers"]) == BATCHES
    assert stats["nbytes"] == sum(batch["nbytes"] for batch in run["batches"])
    assert stats["samples"] == sum(batch["samples"] for batch in run["batches"])
    spent_ms = {PARTS[name]: 1e3 * s for name, s in zip(PARTS, wait["causes"], strict=True)}
    assert run["causes"]
    assert all(shown_ms == spent_ms[text] > 0 for _, text, shown_ms in run["causes"])
    # From iter() to the end of the last next(), without the time between.
    ends = [at + took for at, took in run["waits"]]
    second = run["begins"][1][0]
    elapsed = max(end for end in ends if end < second) - run["begins"][0][0]
    assert stats["elapsed_s"] * 1e3 == pytest.approx(elapsed + max(ends) - second)
    assert wait["share"] == pytest.approx(wait["total_s"] / stats["elapsed_s"])


def check_refusal(capsys: Any, text: str, *arguments: object) -> None:
    assert main(["report", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read"),
        ("no json", "is not a trace"),
        ("[1]", "is not a trace that loader.trace() wrote"),
        ('{"otherData": null}', "is not a trace that loader.trace() wrote"),
        (
            ABOUT % '{"ph": "X", "args": {"stage_ms": {}}}',
            "is not a trace that loader.trace() wrote",
        ),
        ("[" * 100_000, "is not a trace"),
        (ABOUT % "", "there is no batch in"),
    ],
)
def test_what_is_no_trace_is_told_in_one_line(tmp_path, capsys, content, text) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    check_refusal(capsys, text, tmp_path / "run.json")


def test_a_page_that_must_not_or_cannot_be_written_is_told_in_one_line(tmp_path, capsys) -> None:
    trace = record(tmp_path / "run.json", is_bound=False)
    before = trace.read_bytes()
    for page, text in {
        trace: "run.json is the trace",
        tmp_path / "no" / "a": "cannot write",
    }.items():
        check_refusal(capsys, text, trace, "-o", page)
    assert trace.read_bytes() == before
