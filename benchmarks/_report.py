"""The tables and pictures of the comparison with other loaders.

Makes Markdown from the runs that ``peers.py`` has recorded. Only ``draw`` writes files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from _record import Run, select
from _spread import with_spread_if_any

OURS = (
    "shmloader",
    "shmloader, share",
    "shmloader, seed",
    "shmloader, no workers",
    "shmloader, streams",
)
BARE = "bare work"
UNDELIVERED = "bare work, nothing delivered"
ALONE = "one process, no loader"

#: What is measured beside the loaders. Ratios are to the first.
BARES = (BARE, UNDELIVERED, ALONE)

_DELIVERED = """\
as many processes that gather by NumPy, in order, into as many shared buffers as the loader has \
slots in use, with one byte through a pipe for each batch and one back, and the same consumer. The \
second line gathers into buffers that stay in the processes' caches, and hands nothing to a \
consumer. The third is NumPy's `take` into fresh arrays, in the consumer's process. Indices are \
drawn before"""


@dataclass(frozen=True)
class Figure:
    """A column of a table.

    Attributes:
        key: Name in a run's figures.
        heading: What the table calls it, with the unit.
        spec: Format of a value.
        scale: Factor from a run's unit to the table's.
        less: Whether less is better; None if neither less nor more is.
    """

    key: str
    heading: str
    spec: str
    less: bool | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Row:
    """A workload: what it is, and its columns; the first of them is what its plot shows."""

    title: str
    figures: tuple[Figure, ...]
    has_bare: str = ""  # what the bare work is, if the row has it


_MANNER = """\
Each run is a fresh process; loaders take turns within a round, and ratios are of one round. Figures
are medians, with least and most. The consumer touches every tensor; a hash over the first batches,
in order, must be the same for all. Ratios above 1 are in favour of the loader that is named. The
first batch counts from before the loader is made; modules are imported already. Where samples are
drawn at random, all draw the same."""

_STANDING = """\
Where shmloader is measured in several ways, the way with the best median is compared with the best
other loader. The table has the ratio of the medians, and the least and the most ratio of a round.
The last column says who leads, if all rounds agree."""

_FIRST = Figure("first_s", "first batch, s", ".2f", less=True)
_MAIN = Figure("main_us", "main process, µs of CPU a batch", ",.0f", less=True)

# The figures of rows of texts.
_OF_TEXTS = (
    Figure("batches_per_s", "batches/s", ",.0f", less=False),
    Figure("cpu_s_per_gb", "CPU s/GB", ".2f", less=True),
    _MAIN,
    _FIRST,
)

ROWS = {
    "A": Row(
        "tiny samples, no work: one int, batch 1",
        (Figure("us_per_batch", "µs a batch", ",.1f", less=True), _MAIN, _FIRST),
    ),
    "B": Row(
        "large batches: uint8 3×224×224, batch 64 (9.6 MB) and 256 (38 MB); float32 3×224×224, "
        "batch 128 (77 MB)",
        (
            Figure("gb_per_s", "GB/s", ".2f", less=False),
            Figure("cpu_s_per_gb", "CPU s/GB", ".3f", less=True),
            Figure("faults", "page faults a batch", ",.1f", less=True),
            _MAIN,
            _FIRST,
        ),
        "as many processes that stack into buffers that are there already",
    ),
    "C": Row(
        "many tensors: a dict of 114, batch 32",
        (
            Figure("batches_per_s", "batches/s", ",.0f", less=False),
            Figure("descriptors", "descriptors", ",.0f", less=True),
            Figure("faults", "page faults a batch", ",.1f", less=True),
            _MAIN,
            _FIRST,
        ),
    ),
    "D": Row(
        "JPEG files of real photographs, decoded by Pillow, batch 32",
        (
            Figure("samples_per_s", "samples/s", ",.0f", less=False),
            Figure("cpu_s_per_gb", "CPU s/GB", ".1f", less=True),
            _MAIN,
            _FIRST,
        ),
        "as many processes that decode and do nothing else",
    ),
    "E": Row(
        "stragglers: samples of 1 ms that sleep, 1 % of them 50 ms, batch 64",
        (
            Figure("to_ideal", "epoch to the ideal", ".3f", less=True),
            Figure("wait_99_ms", "wait, 99 % ms", ",.0f", less=True),
            Figure("wait_50_ms", "wait, median ms", ".1f"),
            Figure("wait_most_ms", "longest wait, ms", ",.0f", less=True),
            _FIRST,
        ),
    ),
    "F": Row(
        "ragged: batches of 64 × 4,096 int64 tokens (2 MB), 1 in 100 ten times as long",
        (
            Figure("tokens_per_s", "million tokens/s", ",.0f", less=False, scale=1e-6),
            Figure("grown_mb", "memory at most, MB more", ",.0f", less=True),
            _MAIN,
            _FIRST,
        ),
    ),
    "G": Row(
        "a list of a million Python strings, shuffled, batch 1,000, 3 epochs, 4 workers (and one "
        "epoch with 8)",
        (
            Figure("grown_mb", "PSS of all processes, MB more", ",.0f", less=True),
            _FIRST,
            Figure("total_mb", "PSS of all processes, MB", ",.0f", less=True),
            Figure("growth", "PSS after the first epoch, % more", "+.1f", scale=100),
        ),
    ),
    "H": Row(
        "a consumer that keeps the last 50 batches of 3.1 MB",
        (
            Figure("batches_per_s", "batches/s", ",.0f", less=False),
            Figure("shared_mb", "shared memory, MB", ",.0f"),
            Figure("grown_mb", "all memory, MB more", ",.0f", less=True),
            _MAIN,
            _FIRST,
        ),
    ),
    "I": Row(
        "a training step of 20 ms, batches of 38 MB",
        (
            Figure("waited", "of the time the step waits, %", ".1f", less=True, scale=100),
            Figure("wait_50_ms", "wait, median ms", ".2f", less=True),
            Figure("wait_most_ms", "longest wait, ms", ",.1f", less=True),
            _MAIN,
            _FIRST,
        ),
    ),
    "K": Row(
        "a `TensorDataset` of a million × 32 float32 and labels, shuffled, batch 1,024",
        (
            Figure("batches_per_s", "batches/s", ",.0f", less=False),
            Figure("cpu_s_per_gb", "CPU s/GB", ".3f", less=True),
            _MAIN,
            _FIRST,
        ),
        _DELIVERED,
    ),
    "L": Row(
        "512 texts of 10–500 tokens, padded: arrays and lists of ints, by `Pad`, and in torch's "
        "loader by `pad_sequence`; dicts of these, with a mask, and by transformers' "
        "`DataCollatorWithPadding`",
        _OF_TEXTS,
        "as many processes that index the dataset and do nothing else",
    ),
    "M": Row(
        "64 texts of 16,384 tokens in all, packed by `Pack`, and in torch's loader by "
        "transformers' `DataCollatorWithFlattening`, with all that variable-length attention reads",
        _OF_TEXTS,
        "as many processes that index the dataset and do nothing else",
    ),
    "N": Row(
        "a tokenised `datasets.Dataset` (`with_format(\"torch\")`) in a file that is mapped, "
        "shuffled: 64 × 1,024 tokens and their mask; and 64 to 1,024 tokens each, by `Pad`, and in "
        "torch's loader by `pad_sequence`",
        _OF_TEXTS,
        _DELIVERED,
    ),
    "O": Row(
        "64 shards that are read from end to end, without shuffling, in batches of 64: tar shards "
        "of JPEG files (34 kB) that are not decoded, and Parquet shards whose rows are 1,024 int64 "
        "tokens. Whole epochs are measured, after one whose content is compared in any order",
        (
            Figure("samples_per_s", "samples/s", ",.0f", less=False),
            Figure("cpu_us", "µs of CPU a sample, all processes", ",.1f", less=True),
            _MAIN,
            _FIRST,
        ),
    ),
}  # fmt: skip


def cell(runs: Sequence[Run], figure: Figure) -> str:
    """Return a figure's median and, in brackets, least and most."""
    values = values_of(runs, figure)
    return with_spread_if_any(values, figure.spec) if values else ""


def values_of(runs: Sequence[Run], figure: Figure) -> list[float]:
    """Return a figure of each run that has it, in the table's unit."""
    return [
        run.figures[figure.key] * figure.scale
        for run in runs
        if run.figures is not None and run.figures.get(figure.key) is not None
    ]


def ratios(runs: Sequence[Run], case: str, one: str, other: str, figure: Figure) -> list[float]:
    """Return how many times as good ``one`` is as ``other``, for each round that has both."""
    found = {
        (run.round, run.peer): run.figures[figure.key]
        for run in runs
        if run.case == case and run.figures is not None and figure.key in run.figures
    }
    pairs = [
        (found[round_, one], found[round_, other])
        for round_ in sorted({round_ for round_, _ in found})
        if (round_, one) in found and (round_, other) in found
    ]
    if figure.less:
        pairs = [(b, a) for a, b in pairs]
    return [a / b for a, b in pairs if b]


def in_short(values: Sequence[float]) -> str:
    """Return median, least and most of ratios."""
    return with_spread_if_any(values, ".2f") if values else ""


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. The first row is its heading."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def table(
    runs: Sequence[Run], case: str, peers: Sequence[str], reasons: Mapping[tuple[str, str], str]
) -> list[str]:
    """Return a case's table: each peer's figures, or why there are none.

    Args:
        runs: All runs.
        case: The case.
        peers: Peers that get a line.
        reasons: Why a peer was not run on a case, by case and peer.

    Returns:
        Lines of Markdown.
    """
    row = ROWS[case[0]]
    best = row.figures[0]
    heading = ["loader", *(figure.heading for figure in row.figures)]
    heading += [f"{best.heading}: to shmloader", *(["to the bare work"] if row.has_bare else [])]
    lines = [heading]
    for peer in peers:
        chosen = select(runs, case, peer)
        if not any(run.figures for run in chosen):
            why = reasons.get((case, peer)) or _wrong(chosen) or "not run"
            lines.append([peer, why, *[""] * (len(heading) - 2)])
            continue
        cells = [cell(chosen, figure) for figure in row.figures]
        cells.append(in_short(ratios(runs, case, peer, "shmloader", best)))
        if row.has_bare:
            cells.append(in_short(ratios(runs, case, peer, BARE, best)))
        failed = [run for run in chosen if run.error]
        name = f"{peer} ({len(failed)} of {len(chosen)} runs failed)" if failed else peer
        lines.append([name, *cells])
    return markdown(lines)


def _wrong(runs: Sequence[Run]) -> str:
    errors = list(dict.fromkeys(run.error for run in runs if run.error))
    return "; ".join(f"**{error}**" for error in errors).replace("|", "\\|")


class Standing(NamedTuple):
    """How shmloader compares with the best other loader in a figure.

    Attributes:
        figure: The figure.
        own: The one of ``OURS`` that has the best median.
        other: The other loader that has the best median.
        ratio: How many times as good ours is, by the medians.
        rounds: The same ratio in each round.
    """

    figure: Figure
    own: str
    other: str
    ratio: float
    rounds: list[float]

    @property
    def verdict(self) -> str:
        """Whether we lead or lose, if all rounds agree."""
        found = [self.ratio, *self.rounds]
        if any(map(math.isnan, found)):
            return ""
        if min(found) >= 1:
            return "we lead"
        return "**we lose**" if max(found) < 1 else "rounds differ"


def standing(runs: Sequence[Run], case: str, peers: Sequence[str]) -> list[Standing]:
    """Compare the best of ours with the best other loader, for each figure."""
    found = []
    for figure in ROWS[case[0]].figures:
        if figure.less is None:
            continue
        medians = {
            peer: statistics.median(values)
            for peer in peers
            if peer not in BARES and (values := values_of(select(runs, case, peer), figure))
        }
        ours = {peer: value for peer, value in medians.items() if peer in OURS}
        others = {peer: value for peer, value in medians.items() if peer not in OURS}
        if not ours or not others:
            continue
        choose = min if figure.less else max
        own = choose(ours, key=ours.__getitem__)
        other = choose(others, key=others.__getitem__)
        better, worse = ours[own], others[other]
        if figure.less:
            better, worse = worse, better
        ratio = better / worse if worse > 0 else float("nan")
        found.append(Standing(figure, own, other, ratio, ratios(runs, case, own, other, figure)))
    return found


def contents(runs: Sequence[Run], case: str) -> dict[str, list[str]]:
    """Return the peers by the content hash of their batches."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.case == case and run.figures is not None and "content" in run.figures:
            names = found.setdefault(run.figures["content"], [])
            if run.peer not in names:
                names.append(run.peer)
    return found


def report(
    runs: Sequence[Run],
    cases: Mapping[str, Sequence[str]],
    machine: Mapping[str, str],
    reasons: Mapping[tuple[str, str], str],
    notes: Mapping[str, str],
    pictures: Mapping[str, str],
) -> str:
    """Return the whole page.

    Args:
        runs: All runs.
        cases: The peers to be measured on each case.
        machine: What the runs were made on, in the order to print it.
        reasons: Why a peer was not run on a case, by case and peer.
        notes: How each peer is used.
        pictures: Path of each row's plot.

    Returns:
        Markdown.
    """
    lines = ["# Side by side with other loaders", ""]
    lines += ["Made by `make bench-peers` (`benchmarks/peers.py`); not to be edited.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [
        "",
        _MANNER,
        "",
        "## Where we stand",
        "",
        _STANDING,
        "",
        *_summary(runs, cases),
        "",
        "## How each is used",
        "",
        *(f"- **{name}**: {note}" for name, note in notes.items()),
        "",
    ]
    for letter, row in ROWS.items():
        own = [case for case in cases if case.startswith(letter)]
        if not own:
            continue
        lines += [f"## {letter}: {row.title}", ""]
        if row.has_bare:
            lines += [f"The bare work is {row.has_bare}.", ""]
        for case in own:
            if case != letter:
                lines += [f"### {case}", ""]
            lines += [*table(runs, case, cases[case], reasons), "", _verdict(runs, case), ""]
        if letter in pictures:
            lines += [f"![{row.title}]({pictures[letter]})", ""]
    others = [
        run.figures["others_cores"]
        for run in runs
        if run.figures is not None and "others_cores" in run.figures
    ]
    if others:
        lines += [f"Cores that other processes used meanwhile: {in_short(others)}."]
    return "\n".join(lines).rstrip() + "\n"


def _summary(runs: Sequence[Run], cases: Mapping[str, Sequence[str]]) -> list[str]:
    lines = [["workload", "figure", "of ours", "best other loader", "ours to it", "rounds", ""]]
    for case, peers in cases.items():
        for found in standing(runs, case, peers):
            ratio = "" if math.isnan(found.ratio) else f"{found.ratio:.2f}"
            spread = f"{min(found.rounds):.2f}–{max(found.rounds):.2f}" if found.rounds else ""
            cells = [case, found.figure.heading, found.own, found.other, ratio, spread]
            lines.append([*cells, found.verdict])
    return markdown(lines)


def _verdict(runs: Sequence[Run], case: str) -> str:
    found = contents(runs, case)
    if not found:
        return "No content was seen."
    told = "; ".join(f"`{digest}` {', '.join(names)}" for digest, names in found.items())
    return f"Content{'' if len(found) == 1 else ' DIFFERS'}: {told}."


# ---------------------------------------------------------------- pictures


def draw(letter: str, runs: Sequence[Run], cases: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draw a row: two panes for each case, which show its first two figures.

    Bars are medians, points are runs. Row E has one more pane with the waits, and row G one with
    memory over time.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = letter  # the same picture of the same runs
    from matplotlib import pyplot as plt

    row = ROWS[letter]
    own = {case: peers for case, peers in cases.items() if case.startswith(letter)}
    extra = {"E": _draw_waits, "G": _draw_memory}.get(letter)
    heights = [0.7 + 0.25 * len(peers) for peers in own.values()]
    heights += [3.0] * (extra is not None)
    figure = plt.figure(figsize=(10, sum(heights) + 0.6), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for line, (case, peers) in enumerate(own.items()):
        for column, shown in enumerate(row.figures[:2]):
            pane = figure.add_subplot(grid[line, column])
            _draw_bars(pane, case, peers, runs, shown)
    if extra is not None:
        extra(figure.add_subplot(grid[-1, :]), next(iter(own)), own, runs)
    figure.suptitle(f"{letter}: {row.title}", fontsize=9, wrap=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw_bars(
    pane: Any, case: str, peers: Sequence[str], runs: Sequence[Run], figure: Figure
) -> None:
    for place, peer in enumerate(peers):
        values = values_of(select(runs, case, peer), figure)
        colour = "tab:blue" if peer in OURS else "tab:gray" if peer in BARES else "tab:orange"
        if values:
            pane.barh(place, statistics.median(values), color=colour, alpha=0.6)
            pane.plot(values, [place] * len(values), "k.", markersize=3)
        else:
            pane.text(0, place, " none", va="center", fontsize=8)
    pane.set_yticks(range(len(peers)), peers, fontsize=8)
    pane.invert_yaxis()
    better = {True: ", less is better", False: ", more is better"}.get(figure.less, "")
    pane.set_xlabel(f"{figure.heading}{better}", fontsize=8)
    pane.set_title(case, fontsize=8, loc="left")


def _draw_waits(
    pane: Any, case: str, cases: Mapping[str, Sequence[str]], runs: Sequence[Run]
) -> None:
    for peer in cases[case]:
        chosen = [run.figures for run in select(runs, case, peer) if run.figures]
        waits = sorted(wait for figures in chosen for wait in figures["waits_ms"])
        if waits:
            shares = [100 * (number + 1) / len(waits) for number in range(len(waits))]
            pane.plot(waits, shares, label=peer, linewidth=1)
    pane.set_xscale("log")
    pane.set(xlabel="wait in next(), ms, all runs", ylabel="% of batches that waited no longer")
    if pane.lines:
        pane.legend(fontsize=7)


def _draw_memory(
    pane: Any, case: str, cases: Mapping[str, Sequence[str]], runs: Sequence[Run]
) -> None:
    for peer in cases[case]:
        chosen = [run.figures for run in select(runs, case, peer) if run.figures]
        if chosen:
            times, sizes = zip(*chosen[0]["looks"], strict=True)
            pane.plot(times, [nbytes / 1e6 for nbytes in sizes], marker=".", label=peer)
    pane.set(xlabel=f"seconds ({case}, first run)", ylabel="PSS, MB", ylim=(0, None))
    if pane.lines:
        pane.legend(fontsize=7)
