"""Load a corpus of lines in worker processes, and watch how much memory they take.

The program makes a million lines of text, keeps them in an ordinary list, and loads them shuffled.
Then it does the same after ``shmloader.share``. Once a second it prints how much memory all
processes have together (the sum of their proportional set sizes, in which a page that several
processes share counts once). With the plain list, the memory grows from batch to batch, since each
worker gets its own copy of the pages that it reads. With the shared list, it does not grow.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch.utils.data import Dataset

import shmloader

WORDS = ("data", "loader", "batch", "worker", "page", "memory", "shared", "list", "line", "text")


class Corpus(Dataset[Tensor]):
    """Lines of text, as uint8 tensors of their bytes, cut or padded with spaces to one length."""

    def __init__(self, lines: Sequence[str], length: int = 64) -> None:
        self.lines = lines
        self.length = length

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Tensor:
        encoded = self.lines[index].encode()[: self.length].ljust(self.length)
        return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def make_lines(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(8, 30))) for _ in range(count)]


def held_mb() -> float:
    """Return the memory of this process and its workers together, in MB."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it has just ended
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1e3


def watch(name: str, dataset: Corpus, options: argparse.Namespace) -> tuple[float, int]:
    """Load all epochs. Returns by how many MB the memory grew, and the sum of all bytes."""
    loader = shmloader.DataLoader(
        dataset, options.batch_size, shuffle=True, num_workers=options.num_workers,
        multiprocessing_context=options.start_method, persistent_workers=options.num_workers > 0,
    )  # fmt: skip
    first = most = total = 0
    with loader:
        shown_s = 0.0
        for epoch in range(options.epochs):
            for number, batch in enumerate(loader, 1):
                total += int(batch.sum())
                is_last = number == len(loader)
                if is_last or time.monotonic() - shown_s >= 1:
                    shown_s = time.monotonic()
                    held = held_mb()
                    first, most = first or held, max(most, held)
                    print(f"{name}: epoch {epoch}, batch {number}/{len(loader)}: {held:,.0f} MB")
    return most - first, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1_000)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--start-method", default="fork", choices=["fork", "spawn", "forkserver"])
    options = parser.parse_args()
    if min(options.lines, options.epochs, options.batch_size, options.num_workers) < 1:
        parser.error("--lines, --epochs, --batch-size and --num-workers are numbers from 1 up")

    dataset = Corpus(make_lines(options.lines))
    print(f"{options.lines:,} lines, {sum(map(len, dataset.lines)) / 1e6:,.0f} MB of text")
    plain, expected = watch("plain list", dataset, options)

    dataset = shmloader.share(dataset)
    shared, total = watch("shared list", dataset, options)
    if total != expected:
        sys.exit("the shared lines are other lines")
    print(f"Grown by {plain:,.0f} MB with the plain list, by {shared:,.0f} MB with the shared one.")


if __name__ == "__main__":
    main()
