"""The benchmark of clusters runs; how fast anything is stays untested."""

import re
import subprocess
import sys

import pytest

from tests.process.support import ROOT

pytestmark = pytest.mark.timeout(600)  # 14 clusters

FIGURE = r"-?[\d.,]+ \(-?[\d.,]+–-?[\d.,]+\)"


def test_the_benchmark_of_clusters_replaces_its_section_of_the_results(tmp_path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text(
        "# Results\n\n<!-- begin cluster.py -->\nold\n<!-- end cluster.py -->\nrest\n"
    )
    command = ["--smallest", f"--record={tmp_path / 'runs.jsonl'}", f"--results={results}"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cluster.py"), *command],
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = results.read_text()
    assert page.startswith(
        "# Results\n\n<!-- begin cluster.py -->\n## On clusters of Dask and Ray\n"
    )
    assert page.endswith("<!-- end cluster.py -->\nrest\n")
    assert "old" not in page
    for row in (
        rf"JPEG files of [^|]+, to our own processes \| {FIGURE} samples/s \| {FIGURE} \|",
        rf"(3|38) MB on Ray, to Ray Data[^|]* \| {FIGURE} GB/s \| {FIGURE} \| {FIGURE} \|",
        rf"samples that wait, (16|64) a batch, on (Dask|Ray): share of the ideal \| {FIGURE} \|",
        rf"main process beyond submit, [^|]+ \| {FIGURE} \| submit alone: {FIGURE} \|",
    ):
        assert len(re.findall(rf"^\| {row}", page, re.MULTILINE)) >= 2, page
