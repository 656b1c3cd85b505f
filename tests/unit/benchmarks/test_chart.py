"""The chart of the README shows what RESULTS.md says, and a row that we lose."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


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
