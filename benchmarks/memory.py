"""What memory do worker processes take for a list of a million texts?

A dataset of Python strings of 40 to 200 characters is loaded in random order for some epochs, by
torch's loader, by ours with the plain list, and by ours with ``shmloader.share``, under fork and
under spawn. Each run is a fresh process, and the kinds take turns. At equal steps of each epoch the
proportional set sizes (PSS) of the main process and all workers are added up. A page that n
processes share counts 1/n in each of them, so the sum is what all of them take. Interpreters and
torch take memory, too. The same run with hardly any texts shows how much; the column "of data" is
without it.

The total is the most that was seen; growth is from the end of the first epoch to that of the last.
(At an epoch's beginning torch's sampler has two lists of all indices for a moment.) A checksum of
all texts, in their order, shows that all loaders gave the same.

Exit code: 0; 2 if a run failed; 3 if the loaders' texts differ. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from _fresh import in_turn, run_anew
from _machine import describe_machine
from _usage import pss_bytes

import shmloader

_RUN_LIMIT_S = 1_800.0
_BATCH_SIZE = 1_000
_LOOKS = 8  # in each epoch
_FEW = 4 * _BATCH_SIZE
KINDS = [
    f"{loader}, {method}" for method in ("fork", "spawn") for loader in ("torch", "plain", "share")
]


class Texts(torch.utils.data.Dataset):
    """A dataset of texts in a list, or in another sequence."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]


def make_texts(count: int) -> list[str]:
    """Make texts of 40 to 200 characters, the same in every process."""
    draw = random.Random(1)
    letters = "".join(draw.choices(string.ascii_letters + " ", k=100_000))
    starts = (draw.randrange(len(letters) - 200) for _ in range(count))
    return [letters[start : start + draw.randint(40, 200)] for start in starts]


def run(kind: str, count: int, epochs: int, workers: int) -> dict[str, Any]:
    """Load some epochs, and measure memory meanwhile."""
    name, _, method = kind.partition(", ")
    before = pss_bytes()
    dataset = Texts(make_texts(count))
    once = pss_bytes() - before
    if name == "share":
        dataset = shmloader.share(dataset)
    module: Any = torch.utils.data if name == "torch" else shmloader
    torch.manual_seed(0)
    loader = module.DataLoader(
        dataset, _BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=True,
        multiprocessing_context=method,
    )  # fmt: skip
    began_s = time.perf_counter()
    found = watch((iter(loader) for _ in range(epochs)), len(loader), began_s)
    return {"once": once, **found}


def watch(
    epochs: Iterable[Iterator[Sequence[str]]], batch_count: int, began_s: float
) -> dict[str, Any]:
    """Take epochs of so many batches of texts, and measure memory meanwhile."""
    looks: list[tuple[float, int]] = []
    first_s, content = 0.0, 0
    stride = max(1, batch_count // _LOOKS)
    for batches in epochs:
        for number, batch in enumerate(batches, 1):
            first_s = first_s or time.perf_counter() - began_s
            content = zlib.crc32("\n".join(batch).encode(), content)
            if number % stride == 0:
                looks.append((time.perf_counter() - began_s, pss_bytes()))
    return {
        "first_s": first_s,
        "elapsed_s": time.perf_counter() - began_s,
        "looks": looks,
        "content": content,
    }


def _growth(found: dict[str, Any], epochs: int) -> float:
    """Return the growth from the end of the first epoch to that of the last, as a fraction."""
    looks = [nbytes for _, nbytes in found["looks"]]
    return looks[-1] / looks[len(looks) // epochs - 1] - 1


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _print_table(figures: dict[str, list[dict[str, Any]]], epochs: int) -> None:
    once = _median([run["once"] for run in figures["plain, fork"]])
    print(f"the texts in one list: {once / 1e6:,.0f} MB\n")
    print(
        "| loader | total PSS, MB | of data, MB | to the list | growth | first batch, s | all, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind, runs in figures.items():
        total = _median([max(nbytes for _, nbytes in run["looks"]) for run in runs])
        data = _median([max(nbytes for _, nbytes in run["looks"]) - run["empty"] for run in runs])
        growth = _median([_growth(run, epochs) for run in runs])
        first_s, elapsed_s = (
            _median([run[key] for run in runs]) for key in ("first_s", "elapsed_s")
        )
        print(
            f"| {kind} | {total / 1e6:,.0f} | {data / 1e6:,.0f} | {data / once:.2f} "
            f"| {growth:+.1%} | {first_s:.2f} | {elapsed_s:.1f} |"
        )


def _draw(figures: dict[str, list[dict[str, Any]]], path: str) -> None:
    """Draw the memory of the first run of each kind over time."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - only for a plot
    except ImportError:
        sys.exit("a plot needs matplotlib: pip install matplotlib")
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of a backend

    figure, panes = plt.subplots(1, 2, sharey=True, figsize=(9, 3.6), layout="constrained")
    for pane, method in zip(panes, ("fork", "spawn"), strict=True):
        for kind, runs in figures.items():
            name, _, own = kind.partition(", ")
            if own == method:
                times, sizes = zip(*runs[0]["looks"], strict=True)
                pane.plot(times, [nbytes / 1e6 for nbytes in sizes], marker=".", label=name)
        pane.set(title=method, xlabel="seconds", ylim=(0, None))
        if pane.lines:
            pane.legend()
    panes[0].set_ylabel("PSS of all processes, MB")
    figure.savefig(path, dpi=120)


def main() -> int:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plot", metavar="FILE", help="draw memory over time")
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--run", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.texts, options.epochs, options.workers = 8 * _BATCH_SIZE, 2, 1
    if options.run:
        found = run(options.run, options.texts, options.epochs, options.workers)
        print(json.dumps(found))
        return 0
    print(describe_machine())
    print(f"{options.texts:,} texts, {options.epochs} epochs, {options.workers} workers, "
          f"{options.rounds} rounds\n")  # fmt: skip
    kinds = ["plain, fork", "share, fork"] if options.smallest else KINDS
    figures: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for round_ in range(options.rounds):
        for kind in in_turn(kinds, round_):
            arguments = [f"--run={kind}", f"--workers={options.workers}"]
            empty: Any = run_anew(
                __file__, [*arguments, f"--texts={_FEW}", "--epochs=1"], _RUN_LIMIT_S
            )
            more = [f"--texts={options.texts}", f"--epochs={options.epochs}"]
            found: Any = run_anew(__file__, [*arguments, *more], _RUN_LIMIT_S)
            found["empty"] = max(nbytes for _, nbytes in empty["looks"])
            figures[kind].append(found)
            print(f"round {round_ + 1} {kind}: first batch after {found['first_s']:.2f} s, "
                  f"{found['looks'][-1][1] / 1e6:,.0f} MB", file=sys.stderr)  # fmt: skip
    _print_table(figures, options.epochs)
    if options.plot:
        _draw(figures, options.plot)
    contents = {found["content"] for runs in figures.values() for found in runs}
    print(f"\ncontent: {'the same for all loaders' if len(contents) == 1 else contents}")
    return 0 if len(contents) == 1 else 3


if __name__ == "__main__":
    sys.exit(main())
