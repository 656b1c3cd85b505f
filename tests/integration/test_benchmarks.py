"""The benchmarks run and agree on the content; how fast anything is stays untested."""

import importlib.util
import json
import re
from collections.abc import Iterable

import pytest
import torch

from tests.commands import output_of, run_python
from tests.late import compile_library, reason_to_skip
from tests.template import ROOT

pytestmark = pytest.mark.slow

BENCHMARKS = ROOT / "benchmarks"
LIMIT_S = 170


def assert_prints(
    lines: Iterable[str], name: str, *arguments: str, limit_s: float = LIMIT_S
) -> str:
    """Run a benchmark, and return what it printed, of which lines must begin so."""
    printed = output_of(BENCHMARKS / name, "--smallest", *arguments, limit_s=limit_s)
    for line in lines:
        assert re.search(f"^{line}", printed, re.MULTILINE), (line, printed)
    return printed


def test_throughput_prints_its_table_and_one_content_hash_for_all_loaders(tmp_path):
    result_file = tmp_path / "runs.json"
    lines = [
        rf"\| \({workload}\) [^|]+\| {loader} +\| [\d,]+ +\|"
        for workload in "abcde"
        for loader in ("shmloader", "torch", "ceiling")
    ]
    one_hash = r"[0-9a-f]{32} shmloader = torch = ceiling$"
    lines += [rf"content hash \({each}\), first \d+ batches: {one_hash}" for each in "abcde"]
    assert_prints(lines, "throughput.py", f"--json={result_file}")
    assert result_file.stat().st_size > 0


SECTIONS = {
    "plans.py": (
        "## Batches of a token budget",
        r"\| packed, balanced by attention \| 0\.9\d+ \| 0\.0000 \| 1\.\d+ \| 1\.\d+ \|$",
        r"\| packed, random order \| 0\.9\d+ \| 0\.0000 \| 1\.\d+ \| 1\.\d+ \|$",
        r"\| padded, random order \| 0\.9\d+ \| 0\.\d+ \| 1\.\d+ \| 1\.\d+ \|$",
        r"\| 1,000,000 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$",
        r"\| fill: 0\.99\d+ \| ≥ 0\.99 \| reached \|$",
    ),
    "streams.py": (
        "## Streams of shards",
        r"\| state, window, bytes: \d{1,3}(,\d{3})? \| ≤ 2048 \| reached \|$",
        r"\| 10,000 shards \| go on, 2 workers \| next_s \| [\d.e-]+ \|$",
        r"\| rolling, tar, go on, s: [\d.e-]+ \| ≤ 1 \| .*\|$",
        r"\| server, exact: 1 \| ≥ 1 \| reached \|$",
    ),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_benchmark_prints_its_table_and_writes_its_section_of_the_results(name, tmp_path):
    section, *lines = SECTIONS[name]
    results = tmp_path / "RESULTS.md"
    assert_prints(lines, name, f"--record={tmp_path / 'runs.jsonl'}", f"--results={results}")
    assert section in results.read_text()


@pytest.fixture
def _late_device():
    if reason := reason_to_skip():
        pytest.skip(reason)
    compile_library()


@pytest.mark.usefixtures("_late_device")
def test_the_probe_of_an_accelerator_measures_each_of_its_parts(tmp_path):
    result_file, figure = tmp_path / "probe.json", r"[\d.,e+-]+ \|"
    lines = (
        rf"\| 2 \| {figure} {figure}$",
        rf"\| 256 \| {figure} {figure} {figure}$",
        rf"\| 1, pinned \| {figure} {figure}$",
        rf"\| [1-9]\d* registrations of 2 MiB \| {figure} {figure} {figure}$",
    )
    printed = assert_prints(lines, "probe.py", "--device=late", f"--json={result_file}")
    assert "not measured" not in printed
    found = json.loads(result_file.read_text())
    assert [row["KiB"] for row in found["bandwidth, GB/s"]] == [64, 256]


@pytest.mark.timeout(600)  # all tests of tests/cuda, and eleven runs of the benchmark
@pytest.mark.usefixtures("_late_device")
def test_make_gpu_writes_what_all_of_its_steps_find(tmp_path):
    arguments = ("--device=late", "--smallest", "--workers=1", f"--out={tmp_path}")
    printed = output_of(BENCHMARKS / "gpu.py", *arguments, limit_s=500)
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
    assert page in printed


@pytest.mark.parametrize("name", ["probe.py", "device.py", "gpu.py"])
def test_what_measures_an_accelerator_says_so_in_a_line_if_there_is_none(name):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    done = run_python(BENCHMARKS / name, limit_s=LIMIT_S)
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
    assert_prints(TABLES[name], name)


def test_verdicts_prints_what_was_found_for_each_kind_of_limit():
    kinds = ("slow collate", "start-up")
    told = r"[01] of 1 \| [a-z -]+: 1 \| [\d.,]+ → [\d.,]+ \|$"
    assert_prints([rf"\| {kind} \| {told}" for kind in kinds], "verdicts.py", "--kinds", *kinds)


@pytest.mark.timeout(600)  # torchrun starts two ranks nine times
def test_the_benchmark_of_shared_workers_prints_its_table():
    lines = (
        r"\| even: samples/s \| [\d,]+ \| [\d,]+ \|  \| [\d,]+ \| \d+\.\d+ \| ≥ 0.97 .+ \|$",
        r"\| strings: memory to the list \| -?\d+\.\d+ \|  \|  \|  \|  \| ≤ 1\.2 \| .+ \|$",
        r"\| main2: µs of CPU a batch \| \d+ \| \d+ \| \d+ \| \d+ \| .+ \| ≤ 35 \| .+ \|$",
    )
    assert_prints(lines, "host_workers.py", "--anew", limit_s=500)


def test_a_run_of_ranks_that_fails_says_last_why():
    arguments = ("--smallest", "--run", "even", "unknown", "0")
    done = run_python(BENCHMARKS / "host_workers.py", *arguments, limit_s=LIMIT_S)
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
    record = f"--record={tmp_path / 'runs.jsonl'}"
    command = (BENCHMARKS / "peers.py", "--smallest", "--rows=E", record, f"--results={results}")
    output_of(*command, limit_s=500)
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

    again = run_python(*command, limit_s=LIMIT_S)
    assert again.returncode == 0, again.stderr
    assert "round 1" not in again.stderr  # all that is asked for is recorded
    assert " runs are recorded already " in again.stderr
