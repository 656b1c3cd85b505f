"""The page of a trace: in a real browser, at two widths, for a run of each kind."""

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
from tests.process.support import Calls

pytestmark = pytest.mark.timeout(170)

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
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
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium here to look at the page with")
@pytest.mark.parametrize(("is_bound", "width"), [(True, 1280), (False, 400)])
def test_a_browser_draws_the_page(tmp_path, is_bound, width) -> None:
    trace = record(tmp_path / "run.json", is_bound=is_bound)
    assert main(["report", str(trace), "-o", str(tmp_path / "page.html")]) == 0
    seen = browse(tmp_path / "page.html", width)
    assert f'data-drawn="{BATCHES}"' in seen
    assert "data-error" not in seen
    _, text, spent_ms = max(read_trace(trace)[0]["causes"], key=lambda place: place[2])
    assert f"<span>{text}</span><b>{shown(spent_ms)}</b>" in seen
    wide = re.search(r'data-wide="(-?\d+)"', seen)
    assert wide is not None
    assert int(wide[1]) <= 0, "it has to be scrolled sideways"
    assert f'data-width="{width}"' in seen
    cut = re.search(r'data-cut="([^"]*)"', seen)
    assert cut is not None
    assert not cut[1], "text is cut"
    found = re.search(r'data-colours="([^"]+)"', seen)
    assert found is not None
    colours = json.loads(found[1].replace("&quot;", '"'))
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
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium here to look at the page with")
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
    assert main(["report", str(tmp_path / "run.json")]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_a_page_that_must_not_or_cannot_be_written_is_told_in_one_line(tmp_path, capsys) -> None:
    trace = record(tmp_path / "run.json", is_bound=False)
    before = trace.read_bytes()
    for page, text in {
        trace: "run.json is the trace",
        tmp_path / "no" / "a": "cannot write",
    }.items():
        assert main(["report", str(trace), "-o", str(page)]) == 2
        said = capsys.readouterr().err
        assert text in said
        assert said.count("\n") == 1
    assert trace.read_bytes() == before
