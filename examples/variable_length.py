"""Batch texts of different lengths with little padding, straight into shared memory.

Texts are sequences of token numbers whose lengths vary a lot. They are loaded twice: shuffled
without regard to length, and by `BucketBatchSampler`, which puts texts of similar length into a
batch. The last line compares the padding.
"""

import argparse
import sys
import time
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import shmloader
from shmloader.sampling import BucketBatchSampler

PADDING = 0


class Texts(Dataset[Tensor]):
    """Texts, as one array of all tokens and the index at which each text begins."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.begins = np.concatenate(([0], np.cumsum(lengths)))
        self.tokens = np.random.default_rng(1).integers(1, 50_000, size=self.begins[-1])

    def __len__(self) -> int:
        return len(self.begins) - 1

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.tokens[self.begins[index] : self.begins[index + 1]])


def pad(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return int64 tokens of shape (texts, longest), padded, and the length of each text."""
    lengths = torch.tensor([len(text) for text in texts])
    # In a worker, this memory is in the batch's slot.
    padded = shmloader.empty((len(texts), int(lengths.max())), dtype=torch.int64)
    padded.fill_(PADDING)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return padded, lengths


def read(loader: Iterable[tuple[Tensor, Tensor]], epochs: int) -> tuple[int, int, float]:
    """Read all batches. Returns the number of tokens, the padding, and the seconds it took."""
    tokens = padding = 0
    began = time.perf_counter()
    for _ in range(epochs):
        for padded, lengths in loader:
            found = int((padded != PADDING).sum())
            if found != int(lengths.sum()):
                sys.exit("a batch is not what its lengths say")
            tokens += found
            padding += padded.numel() - found
    return tokens, padding, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--texts", type=int, default=4_000, help="number of texts (%(default)s)")
    add("--batch-size", type=int, default=32, help="texts a batch (%(default)s)")
    add("--buckets", type=int, default=20, help="more buckets mean less padding (%(default)s)")
    add("--num-workers", type=int, default=2, help="worker processes (%(default)s)")
    add("--epochs", type=int, default=2, help="passes over the texts (%(default)s)")
    options = parser.parse_args()
    if min(options.texts, options.batch_size, options.buckets, options.epochs) < 1:
        parser.error("--texts, --batch-size, --buckets and --epochs are numbers from 1 up")

    lengths = np.random.default_rng(0).lognormal(4, 1, size=options.texts).astype(int) + 1
    texts = Texts(lengths)
    shuffled = shmloader.DataLoader(
        texts, options.batch_size, shuffle=True, seed=0,
        num_workers=options.num_workers, collate_fn=pad,
    )  # fmt: skip
    buckets = BucketBatchSampler(lengths, options.batch_size, options.buckets, shuffle=True)
    bucketed = shmloader.DataLoader(
        texts, batch_sampler=buckets, seed=0, num_workers=options.num_workers, collate_fn=pad
    )
    shares = []
    with shuffled, bucketed:
        for name, loader in (("shuffled", shuffled), ("in buckets", bucketed)):
            tokens, padding, elapsed_s = read(loader, options.epochs)
            shares.append(padding / tokens)
            print(f"{name}: {tokens:,} tokens, {padding:,} of padding, {elapsed_s:.2f} s")
    print(f"Padding: {shares[0]:.0%} of the tokens when shuffled, {shares[1]:.0%} in buckets.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
