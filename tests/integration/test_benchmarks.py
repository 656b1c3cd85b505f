"""The benchmarks run and agree on the content; how fast anything is stays untested."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.late import compile_library, reason_to_skip

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 170


def run(
    name: str, *arguments: str, deadline_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )


def test_throughput_prints_its_table_and_one_content_hash_for_all_loaders(tmp_path):
    result_file = tmp_path / "runs.json"
    done = run("throughput.py", "--smallest", f"--json={result_file}")

    assert done.returncode == 0, done.stdout + done.stderr
    for workload in "abcde":
        for loader in ("shmloader", "torch", "ceiling"):
            row = rf"^\| \({workload}\) [^|]+\| {loader} +\| [\d,]+ +\|"
            assert re.search(row, done.stdout, re.MULTILINE), done.stdout
        agreement = (
            rf"^content hash \({workload}\), first \d+ batches: "
            r"[0-9a-f]{32} shmloader = torch = ceiling$"
        )
        assert re.search(agreement, done.stdout, re.MULTILINE), done.stdout
    assert result_file.stat().st_size > 0


def test_plans_prints_the_figures_of_its_ways_and_the_times(tmp_path):
    arguments = (f"--record={tmp_path / 'runs.jsonl'}", f"--results={tmp_path / 'RESULTS.md'}")
    done = run("plans.py", "--smallest", *arguments)

    assert done.returncode == 0, done.stdout + done.stderr
    time = r"[\d.]+ \|"
    for row in (
        r"\| packed, balanced by attention \| 0\.9\d+ \| 0\.0000 \| 1\.\d+ \| 1\.\d+ \|",
        r"\| packed, random order \| 0\.9\d+ \| 0\.0000 \| 1\.\d+ \| 1\.\d+ \|",
        r"\| padded, random order \| 0\.9\d+ \| 0\.\d+ \| 1\.\d+ \| 1\.\d+ \|",
        rf"\| 1,000,000 \| {time} {time} {time}",
        r"\| fill: 0\.99\d+ \| ≥ 0\.99 \| reached \|",
    ):
        assert re.search(f"^{row}$", done.stdout, re.MULTILINE), done.stdout
    assert "## Batches of a token budget" in (tmp_path / "RESULTS.md").read_text()


def test_streams_prints_sizes_times_and_whether_an_epoch_is_exact(tmp_path):
    arguments = (f"--record={tmp_path / 'runs.jsonl'}", f"--results={tmp_path / 'RESULTS.md'}")
    done = run("streams.py", "--smallest", *arguments)

    assert done.returncode == 0, done.stdout + done.stderr
    for row in (
        r"\| state, window, bytes: \d{1,3}(,\d{3})? \| ≤ 2048 \| reached \|",
        r"\| 10,000 shards \| go on, 2 workers \| next_s \| [\d.e-]+ \|",
        r"\| rolling, tar, go on, s: [\d.e-]+ \| ≤ 1 \| .*\|",
        r"\| server, exact: 1 \| ≥ 1 \| reached \|",
    ):
        assert re.search(f"^{row}$", done.stdout, re.MULTILINE), done.stdout
    assert "## Streams of shards" in (tmp_path / "RESULTS.md").read_text()


def test_verdicts_prints_what_was_found_for_each_kind_of_limit():
    done = run("verdicts.py", "--smallest", "--kinds", "slow collate", "start-up")

    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("slow collate", "start-up"):
        row = rf"^\| {kind} \| [01] of 1 \| [a-z -]+: 1 \| [\d.,]+ → [\d.,]+ \|$"
        assert re.search(row, done.stdout, re.MULTILINE), done.stdout


@pytest.fixture
def _late_device():
    if reason := reason_to_skip():
        pytest.skip(reason)
    compile_library()


@pytest.mark.usefixtures("_late_device")
def test_the_probe_of_an_accelerator_measures_each_of_its_parts(tmp_path):
    result_file = tmp_path / "probe.json"
    done = run("probe.py", "--device=late", "--smallest", f"--json={result_file}")

    assert done.returncode == 0, done.stdout + done.stderr
    figure = r"[\d.,e+-]+ \|"
    for row in (
        rf"\| 2 \| {figure} {figure}",
        rf"\| 256 \| {figure} {figure} {figure}",
        rf"\| 1, pinned \| {figure} {figure}",
        rf"\| [1-9]\d* registrations of 2 MiB \| {figure} {figure} {figure}",
    ):
        assert re.search(rf"^{row}$", done.stdout, re.MULTILINE), done.stdout
    assert "not measured" not in done.stdout
    found = json.loads(result_file.read_text())
    assert [row["KiB"] for row in found["bandwidth, GB/s"]] == [64, 256]


@pytest.mark.timeout(600)  # all tests of tests/cuda, and eleven runs of the benchmark
@pytest.mark.usefixtures("_late_device")
def test_make_gpu_writes_what_all_of_its_steps_find(tmp_path):
    arguments = ("--device=late", "--smallest", "--workers=1", f"--out={tmp_path}")
    done = run("gpu.py", *arguments, deadline_s=500)

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [found[step]["failure"] for step in ("probe", "tests", "benchmark")] == ["", "", ""]
    assert "failed" not in found["tests"]
    assert len(found["tests"]["passed"]) > 20
    runs = found["benchmark"]["runs"]
    assert len(runs) == 11
    assert all(one["wrong"] == 0 and len(one["epochs"]) == 2 for one in runs)
    page = (tmp_path / "gpu.md").read_text()
    assert "\n| no wrong batch | 0 wrong in 11 runs | reached |\n" in page
    for row in (
        r"image \| 0 \| ceiling",
        r"image \+ label \| 10 \| torch",
        r"114 fields \| 0 \| shm",
    ):
        assert re.search(rf"^\| {row}", page, re.MULTILINE), page
    assert page in done.stdout


@pytest.mark.parametrize("name", ["probe.py", "device.py", "gpu.py"])
def test_what_measures_an_accelerator_says_so_in_a_line_if_there_is_none(name):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    done = run(name)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"There is no accelerator: torch \S+ finds none .+\.\n", done.stdout)
    assert done.stderr == ""


SPREAD = r"[\d.,]+ \([\d.,]+–[\d.,]+\)"
STRAGGLERS = ["torch", "round robin", "idle takes oldest"]
SEED_COSTS = ["TensorDataset", "code, no draws", "code, six draws on an image"]

# What lines of the output begin with.
TABLES: dict[str, list[str]] = {
    "sharded.py": [
        rf"\| \(a\) [^|]+\| rank \| [^|]+\| {SPREAD} \| {SPREAD} \|$",
        r"order of 100,000 samples, .* MB of memory$",
    ],
    "seed_cost.py": [
        *(
            rf"\| a sample: {part} \| [\d.,]+ \("
            for part in ("the digest", "random", "numpy.random", "torch")
        ),
        *(
            rf"\| {kind} \| {workers} \| ([\d.,]+ \([^|]+ \| ){{3}}-?[\d.,]+ \("
            for kind in SEED_COSTS
            for workers in (0, 2)
        ),
    ],
    "stragglers.py": [
        line
        for workers in (2, 8)
        for loader in STRAGGLERS
        for line in (
            rf"\| {workers} \| {loader} \| {SPREAD} \| ",
            rf"waits in next\(\), {workers} workers, {loader}, all rounds\n.* \d+ ?#*$",
        )
    ]
    + ["content: the same for all loaders$"],
    "pipeline.py": [r"\| a coroutine[^|]+\| \d+ \(\d+–\d+\) \| \d+ \(\d+–\d+\) \|"],
    "statistics_cost.py": [r"\| the difference \| -?[\d.,]+ \("],
    "arrays.py": [
        *(
            rf"\| {loader}, shuffled \| {SPREAD} \| "
            for loader in ("torch", "shmloader", "ceiling")
        ),
        r"content hash, shuffled: [0-9a-f]{16}$",
    ],
    "memory.py": [
        *(rf"\| {loader}, fork \| [\d,]+ \| -?[\d,]+ \| " for loader in ("plain", "share")),
        "content: the same for all loaders$",
    ],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_benchmark_prints_its_table(name):
    done = run(name, "--smallest")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in TABLES[name]:
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), (line, done.stdout)


@pytest.mark.timeout(600)  # torchrun starts two ranks nine times
def test_the_benchmark_of_shared_workers_prints_its_table():
    done = run("host_workers.py", "--smallest", "--anew", deadline_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in (
        r"\| even: samples/s \| [\d,]+ \| [\d,]+ \|  \| [\d,]+ \| \d+\.\d+ \| ≥ 0.97 .+ \|",
        r"\| strings: memory to the list \| -?\d+\.\d+ \|  \|  \|  \|  \| ≤ 1\.2 \| .+ \|",
        r"\| main2: µs of CPU a batch \| \d+ \| \d+ \| \d+ \| \d+ \| .+ \| ≤ 35 \| .+ \|",
    ):
        assert re.search(f"^{row}$", done.stdout, re.MULTILINE), done.stdout


def test_a_run_of_ranks_that_fails_says_last_why():
    done = run("host_workers.py", "--smallest", "--run", "even", "unknown", "0")
    assert done.returncode == 1
    assert done.stdout == ""
    reason = r"rank [01]: ValueError: the kind should be one of torch, own, host, but got 'unknown'"
    assert re.fullmatch(reason, done.stderr.splitlines()[-1]), done.stderr


PEERS = {
    "torch": "torch",
    "torchdata": "torchdata",
    "SPDL, threads": "spdl",
    "SPDL, subprocess": "spdl",
    "SPDL, processes": "spdl",
    "SeqTools": "seqtools",
    "grain": "grain",
}


@pytest.mark.timeout(600)  # with all of them there, of which some take long to start
def test_the_comparison_with_other_loaders_measures_who_is_there_and_names_who_is_not(tmp_path):
    results = tmp_path / "RESULTS.md"
    section = "<!-- begin another.py -->\nof another benchmark\n<!-- end another.py -->\n"
    results.write_text(f"# Old\n\n{section}")
    arguments = ("--smallest", "--rows=E", f"--record={tmp_path / 'runs.jsonl'}")
    done = run("peers.py", *arguments, f"--results={results}", deadline_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    text = results.read_text()
    assert "# Old" not in text
    assert text.endswith(f"\n\n{section}")
    for peer, module in PEERS.items():
        is_there = importlib.util.find_spec(module) is not None
        told = r"[\d.,]+ \| [\d.,]+ \| " if is_there else "absent: ModuleNotFoundError: "
        assert re.search(rf"^\| {peer} \| {told}", text, re.MULTILINE), text
    assert re.search(r"^\| shmloader \| [\d.,]+ \| ", text, re.MULTILINE), text
    names = "shmloader, shmloader, seed, torch"
    assert re.search(rf"^Content: `[0-9a-f]{{32}}` {names}", text, re.MULTILINE), text
    assert "</svg>" in (tmp_path / "results" / "E.svg").read_text()

    again = run("peers.py", *arguments, f"--results={results}")
    assert again.returncode == 0, again.stderr
    assert "round 1" not in again.stderr  # all that is asked for is recorded
    assert " runs are recorded already " in again.stderr
