"""The programs of benchmarks: the comparison with other loaders, and what ``make gpu`` shows."""

import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.process.support import wait_for_end

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    """Return a function that imports a module of benchmarks/, for this test alone."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def report(program):
    return program("_report")


@pytest.fixture
def fresh(program):
    return program("_fresh")


@pytest.fixture
def record(program):
    return program("_record").Record


@pytest.fixture
def made_up(program):
    run = program("_record").Run

    def make(peer, round_, *, case="A", error=None, **figures):
        return run(case, peer, round_, None if error else figures, error)

    return make


def test_a_cell_has_the_median_with_least_and_most(report, made_up):
    figure = report.Figure("us", "µs", ",.1f", less=True, scale=10)
    runs = [made_up("torch", n, us=us) for n, us in enumerate((300, 100, 200))]
    assert report.cell(runs, figure) == "2,000.0 (1,000.0–3,000.0)"
    assert report.cell(runs[:1], figure) == "3,000.0"
    assert report.cell([made_up("torch", 0, error="it broke")], figure) == ""


@pytest.mark.parametrize(("less", "expected"), [(True, [3.0, 2.0]), (False, [1 / 3, 0.5])])
def test_ratios_are_of_runs_of_one_round(report, made_up, less, expected):
    figure = report.Figure("x", "x", ".1f", less=less)
    runs = [
        made_up("shmloader", 0, x=1.0),
        made_up("torch", 1, x=8.0),
        made_up("torch", 0, x=3.0),
        made_up("shmloader", 1, x=4.0),
        made_up("shmloader", 2, x=5.0),  # of a round without the other
        made_up("torch", 2, error="it broke"),
    ]
    assert report.ratios(runs, "A", "shmloader", "torch", figure) == pytest.approx(expected)


def test_a_table_says_why_a_loader_has_no_figures(report, made_up):
    runs = [
        made_up("shmloader", 0, us_per_batch=20.0, main_us=10.0, first_s=0.1),
        made_up("torch", 0, error="no end after 120 s"),
        made_up("torch", 1, us_per_batch=40.0, main_us=10.0, first_s=0.1),
        made_up("SeqTools", 0, error="exit code 1: Odd: a | b"),
    ]
    lines = report.table(
        runs, "A", ["shmloader", "torch", "SeqTools", "grain", "torchdata"],
        {("A", "grain"): "absent: No module named 'grain'"},
    )  # fmt: skip
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert lines[2].startswith("| shmloader | 20.0 | 10 | 0.10 | 1.00 |")
    assert lines[3].startswith("| torch (1 of 2 runs failed) | 40.0 |")
    assert lines[4].startswith("| SeqTools | **exit code 1: Odd: a \\| b** |")
    assert lines[5].startswith("| grain | absent: No module named 'grain' |")
    assert lines[6].startswith("| torchdata | not run |")


def test_where_we_lose_is_said_as_well(report, made_up):
    peers = ["shmloader", "shmloader, share", "torch", "SPDL, threads"]
    runs = [
        made_up("shmloader", 0, case="G", grown_mb=300.0, first_s=2.0),
        made_up("shmloader, share", 0, case="G", grown_mb=200.0, first_s=4.0),
        made_up("torch", 0, case="G", grown_mb=400.0, first_s=8.0),
        made_up("SPDL, threads", 0, case="G", grown_mb=100.0, first_s=9.0),
    ]
    found = {one.figure.key: one for one in report.standing(runs, "G", peers)}
    grown, first = found["grown_mb"], found["first_s"]
    assert grown[1:] == ("shmloader, share", "SPDL, threads", pytest.approx(0.5), [0.5])
    assert first[1:] == ("shmloader", "torch", pytest.approx(4.0), [4.0])

    text = report.report(runs, {"G": peers}, {"date": "today"}, {}, {"torch": "as it is."}, {})
    lost = "shmloader, share | SPDL, threads | 0.50 | 0.50–0.50 | **we lose** |"
    assert f"| G | PSS of all processes, MB more | {lost}" in text
    assert "| G | first batch, s | shmloader | torch | 4.00 | 4.00–4.00 | we lead |" in text
    assert "- date: today\n" in text


@pytest.mark.parametrize(
    ("ours", "expected"),
    [([3, 3, 3], "we lead"), ([1, 1, 1], "**we lose**"), ([3, 1, 3], "rounds differ")],
)
def test_who_leads_is_said_if_all_rounds_agree(ours, expected, report, made_up):
    runs = [
        made_up(peer, round_, case="H", batches_per_s=float(rate))
        for peer, rates in (("shmloader", ours), ("torch", [2, 2, 2]))
        for round_, rate in enumerate(rates)
    ]
    (found,) = report.standing(runs, "H", ["shmloader", "torch"])
    assert found.verdict == expected


def test_other_content_is_told(report, made_up):
    runs = [
        made_up(peer, 0, content=content, us_per_batch=1.0)
        for peer, content in (("shmloader", "aa"), ("torch", "aa"), ("grain", "bb"))
    ]
    assert report.contents(runs, "A") == {"aa": ["shmloader", "torch"], "bb": ["grain"]}
    text = report.report(runs, {"A": ["shmloader", "torch", "grain"]}, {}, {}, {}, {})
    assert "Content DIFFERS: `aa` shmloader, torch; `bb` grain." in text


def test_a_campaign_goes_on_where_it_was_interrupted(record, made_up, tmp_path):
    path = tmp_path / "build" / "runs.jsonl"
    about = {"torch": "2.13.0", "workers": 2}
    first = record(path, about)
    first.add(made_up("torch", 0, us_per_batch=1.0))
    first.add(made_up("grain", 0, error="it broke"))
    with path.open("a") as file:
        file.write('{"case": "A", "peer": "torch", "rou')  # killed meanwhile

    again = record(path, about)
    assert again.runs == first.runs
    assert again.has(0, "A", "torch")
    assert again.has(0, "A", "grain")
    assert again.has_whole(0, "A", "torch")
    assert not again.has_whole(0, "A", "grain")
    assert not again.has(1, "A", "torch")
    assert not again.has(0, "B", "torch")
    again.add(made_up("torch", 1, us_per_batch=2.0))
    assert [run.round for run in record(path, about).runs] == [0, 0, 1]
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("session", ["its own", "the run's"])
def test_a_run_that_hangs_is_ended_with_its_children(fresh, tmp_path, session):
    program = tmp_path / "hangs.py"
    pids = tmp_path / "pids"
    program.write_text(
        "import os, pathlib, signal, sys\n"
        "child = os.fork()\n"
        "if child:\n"
        "    pathlib.Path(sys.argv[1]).write_text(f'{os.getpid()} {child}')\n"
        f"elif {session == 'its own'}:\n"
        "    os.setsid()\n"
        "signal.pause()\n"
    )
    began = time.monotonic()
    assert fresh.try_anew(str(program), [str(pids)], 1.0) == "no end after 1 s"
    assert time.monotonic() - began < 60
    # On a machine that is busy enough it has not come so far; then there is nothing to see.
    for pid in map(int, pids.read_text().split() if pids.exists() else []):
        wait_for_end(pid)  # nobody waits for the child


def test_what_an_end_brings_forth_before_the_reason_hides_nothing(fresh, tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(
        "import sys\n"
        "class Noisy:\n"
        "    def __del__(self):\n"
        "        raise OSError('and then')\n"
        "Noisy()\n"
        "sys.exit('this is why')\n"
    )
    assert fresh.try_anew(str(program), [], 60.0) == "exit code 1: this is why"


# The chart of the README shows what RESULTS.md says, and a row that we lose --------------------


@pytest.fixture
def chart(program):
    return program("chart")


def test_the_chart_has_three_rows_beside_torch_and_one_that_we_lose(chart):
    text = chart.RESULTS.read_text()
    picked = [chart.pick(chart.read_table(text, *row[:2]), less=row.less) for row in chart.ROWS]
    are_lost = []
    for row, figures in zip(chart.ROWS, picked, strict=True):
        ours, torchs, other = figures.values()
        assert (ours < torchs) if row.less else (ours > torchs)
        are_lost.append((ours > 1.05 * other) if row.less else (1.05 * ours < other))
    assert are_lost == [False, False, False, True]


def test_the_readme_says_in_words_what_its_chart_shows(chart):
    text = chart.RESULTS.read_text()
    shown = re.search(
        r"!\[([^]]*)\]\(benchmarks/results/summary\.svg\)", (ROOT / "README.md").read_text()
    )
    assert shown
    for row in chart.ROWS:
        figures = chart.pick(chart.read_table(text, row.heading, row.column), less=row.less)
        ours, torchs, _ = figures.values()
        for figure in (ours, torchs):
            assert (f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}") in shown[1]


@pytest.mark.slow
def test_the_chart_is_drawn_as_svg(chart, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "chart.svg"
    # In a process of its own: matplotlib keeps the files of its fonts open.
    code = "import chart, sys; chart.draw(chart.RESULTS.read_text(), chart.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, picture], cwd=ROOT / "benchmarks", check=True)
    assert "<svg" in picture.read_text()


# What `make gpu` makes of its steps: verdicts, the check of batches, limits of time ------------


@pytest.fixture
def device(program):
    return program("device")


@pytest.fixture
def gpu(program):
    return program("gpu")


def found_with(device, *, ours=100.0, ceiling=100.0, torchs=20.0, idle=0.01, wrong=0):
    """What a benchmark found, with the same figures for all workloads."""
    rates = {"shmloader": ours, "ceiling": ceiling, "torch": torchs}
    # The first epoch, in which workers start, is not to count.
    return {
        "runs": [
            {
                **run._asdict(),
                "wrong": wrong,
                "epochs": [
                    {"batches/s": 1.0, "idle": 1.0},
                    {"batches/s": rates[run.loader], "idle": idle},
                ],
            }
            for run in device.runs_of(smallest=False)
        ]
    }


def probed_with(ratio):
    row = {"KiB": 39_424, "registered": 50.0 * ratio, "pinned": 50.0, "pageable": 9.0}
    small = {"KiB": 64, "registered": 1.0, "pinned": 50.0, "pageable": 9.0}
    return {"bandwidth, GB/s": [small, row]}


CONTENT, COPIES, LOADER, IDLE, SPEED = 0, 1, 2, 3, 6


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("goal", "change", "ratio", "verdict"),
    [
        (CONTENT, {}, 1.0, "reached"),
        (CONTENT, {"wrong": 1}, 1.0, "missed"),
        (COPIES, {}, 0.95, "reached"),
        (COPIES, {}, 0.94, "missed"),
        (LOADER, {"ours": 95.0}, 1.0, "reached"),
        (LOADER, {"ours": 94.0}, 1.0, "missed"),
        (IDLE, {"idle": 0.02}, 1.0, "reached"),
        (IDLE, {"idle": 0.021}, 1.0, "missed"),
        (IDLE, {"idle": None}, 1.0, "not measured"),
        (SPEED, {"ours": 60.0}, 1.0, "reached"),
        (SPEED, {"ours": 59.0}, 1.0, "missed"),
        (SPEED, {"ours": 59.0, "ceiling": 59.0}, 1.0, "does not apply"),
    ],
)
def test_a_goal_is_judged_by_the_epochs_after_the_first(device, goal, change, ratio, verdict):
    goals = device.judge(found_with(device, **change), probed_with(ratio))
    assert goals[goal].verdict == verdict


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda batches: batches, 0),
        (lambda batches: [*batches[:2], batches[2] + 1, *batches[3:]], 1),
        (lambda batches: [batches[1], batches[0], *batches[2:]], 2),
        (lambda batches: batches[:-1], 1),
        (lambda batches: [*batches, batches[0]], 1),
    ],
)
@pytest.mark.usefixtures("late")
def test_each_batch_that_is_wrong_or_missing_or_too_much_is_counted(program, device, change, wrong):
    accelerator = program("_accelerator").Accelerator(torch.device("late:0"))
    data = device.Resident("image", device.Shape((3, 4, 4), 8, 6, 1, 8), 1.0)
    steps = device.Steps(accelerator, 0, 8, data.checksums())
    for batch in change([data.batch(number) for number in range(data.batches)]):
        steps.run(batch.to("late"))
    assert steps.wrong_count() == wrong


def test_a_step_that_fails_is_on_the_page_with_its_last_line(gpu, tmp_path):
    failure = gpu.run_step(
        [sys.executable, "-c", "raise SystemExit('no memory')"], 20, tmp_path / "log"
    )
    assert failure == "exit code 1: no memory"
    steps = {name: {"failure": failure} for name in ("probe", "tests", "benchmark")}
    page = gpu.page_of(json.loads(json.dumps({"machine": {}, **steps})))
    assert page.count("**Failed**: exit code 1: no memory") == 3
    assert "device: unknown" in page
