"""What the benchmarks load: five datasets, the touch of a batch and its content hash.

Owns the samples (made from a fixed seed, resident before any worker starts) and the
definition of "the same data". Used in the process that consumes and, through fork, in
the processes that load. Knows no loader.

Guarantees: two processes that ask for the same workload hold equal samples.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.utils.data import Dataset

# The types of a sample here, and of what default collate makes of samples.
Batch = torch.Tensor | dict[str, torch.Tensor] | list[torch.Tensor]

SEED = 20_240_607

# A record as a driving log or a recommender has it: 114 tensors, 3,328 bytes.
# (name, how many, dtype, shape)
RECORD_FIELDS: tuple[tuple[str, int, torch.dtype, tuple[int, ...]], ...] = (
    ("scalar", 40, torch.float32, ()),
    ("id", 16, torch.int64, ()),
    ("box", 24, torch.float32, (4,)),
    ("pose", 16, torch.float32, (16,)),
    ("flags", 12, torch.bool, (8,)),
    ("embedding", 6, torch.float32, (64,)),
)

# Far more than any run consumes; the sequential sampler never materialises it.
_BATCHES_IN_DATASET = 100_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of data and how it is batched and measured.

    Attributes:
        key: The letter it is chosen by.
        title: What a table calls it.
        batch_size: Samples in a batch.
        sample_count: Different samples held in memory. Prime, so that each batch
            starts at another sample than the one before; few, so that reading them
            is not what is measured (40 MB of large float images, and a batch of
            those takes 77 MB more in every buffer that is written).
        make_sample: Makes one sample; None where a sample is its own index.
        hash_batches: Batches that the content hash covers.
        clock_stride: Batches between two looks at the clock.
        goal_to_torch: Wanted ratio of batches/s to torch's loader.
        goal_to_ceiling: Wanted ratio of batches/s to the ceiling, or None.
    """

    key: str
    title: str
    batch_size: int
    sample_count: int
    make_sample: Callable[[torch.Generator], Batch] | None
    hash_batches: int
    clock_stride: int
    goal_to_torch: float
    goal_to_ceiling: float | None = None


class Nothing:
    """Samples that take no time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def _uint8_image(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (3, 224, 224), dtype=torch.uint8, generator=generator)


def _float_image(generator: torch.Generator) -> torch.Tensor:
    return torch.rand((3, 224, 224), generator=generator)


def _small_image(generator: torch.Generator) -> torch.Tensor:
    return torch.rand((3, 32, 32), generator=generator)


def _record(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        f"{name}_{number:02d}": torch.randint(
            0, 2 if dtype is torch.bool else 1000, shape, generator=generator
        ).to(dtype)
        for name, count, dtype, shape in RECORD_FIELDS
        for number in range(count)
    }


WORKLOADS: dict[str, Workload] = {
    work.key: work
    for work in (
        Workload("a", "uint8 3×224×224, batch 256", 256, 67, _uint8_image, 6, 1, 10, 0.9),
        Workload("b", "float32 3×224×224, batch 128", 128, 67, _float_image, 4, 1, 10, 0.9),
        Workload("c", "float32 3×32×32, batch 256", 256, 257, _small_image, 32, 4, 10),
        Workload("d", "dict of 114 small tensors, batch 32", 32, 37, _record, 64, 4, 40),
        Workload("e", "one int, batch 1", 1, 1, None, 512, 16, 20),
    )
}

_SMALLEST = {"a": (8, 11), "b": (4, 5), "c": (16, 17), "d": (4, 5), "e": (1, 1)}


def smallest(work: Workload) -> Workload:
    """Shrink a workload so that CI only learns whether it runs and agrees."""
    batch_size, sample_count = _SMALLEST[work.key]
    return replace(
        work,
        title=work.title.split(", batch")[0] + f", batch {batch_size}",
        batch_size=batch_size,
        sample_count=sample_count,
        hash_batches=5,
    )


class Samples(Dataset[object]):
    """A map-style dataset that hands out resident samples again and again.

    Costs an index and a remainder per sample, so what is measured is the loader.
    """

    def __init__(self, work: Workload) -> None:
        self.length = work.batch_size * _BATCHES_IN_DATASET
        self.samples: list[Batch] = []
        if work.make_sample is not None:
            generator = torch.Generator().manual_seed(SEED)
            self.samples = [work.make_sample(generator) for _ in range(work.sample_count)]

    def __len__(self) -> int:
        """Return a length that no run reaches."""
        return self.length

    def first(self, length: int) -> Samples:
        """Return a dataset that ends sooner and shares these samples."""
        shorter = copy.copy(self)
        shorter.length = length
        return shorter

    def __getitem__(self, index: int) -> Batch | int:
        """Return the resident sample, or the index itself where there are none."""
        samples = self.samples
        return samples[index % len(samples)] if samples else index


def stacker(work: Workload, dataset: Samples) -> Callable[[int], Batch]:
    """Return what the ceiling does for one batch: stack into a buffer that stays.

    The lists of samples are ready, so the dataset, the sampler and collate cost
    nothing here. Each call of the result overwrites what the last call returned.
    For the workload of ints it is ``torch.tensor([index])``, as in default collate.

    Args:
        work: Says how many samples make a batch.
        dataset: Holds the samples.

    Returns:
        Function from the batch's number in the order to the batch.
    """
    size, count = work.batch_size, len(dataset.samples)
    if not count:
        return lambda batch: torch.tensor([batch])

    # The samples repeated in a row: every batch is one slice, wherever it starts.
    in_a_row = dataset.samples * (size // count + 2)
    first = in_a_row[0]
    if isinstance(first, torch.Tensor):
        column = cast("list[torch.Tensor]", in_a_row)
        buffer = torch.empty((size, *first.shape), dtype=first.dtype)

        def stack_tensor(batch: int) -> torch.Tensor:
            start = batch * size % count
            return torch.stack(column[start : start + size], out=buffer)

        return stack_tensor

    columns = {
        key: [record[key] for record in cast("list[dict[str, torch.Tensor]]", in_a_row)]
        for key in first
    }
    buffers = {
        key: torch.empty((size, *leaf.shape), dtype=leaf.dtype) for key, leaf in first.items()
    }

    def stack_record(batch: int) -> dict[str, torch.Tensor]:
        start = batch * size % count
        for key, column in columns.items():
            torch.stack(column[start : start + size], out=buffers[key])
        return buffers

    return stack_record


def touch(batch: Batch) -> None:
    """Read one element of every tensor in the batch, as cheaply as Python can."""
    if isinstance(batch, dict):
        for leaf in batch.values():
            if type(leaf) is not int:
                leaf.numpy().item(0)
    elif isinstance(batch, list):
        for leaf in batch:
            leaf.numpy().item(0)
    else:
        batch.numpy().item(0)


def leaves(batch: Batch) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a batch with its key, in the batch's own order."""
    if isinstance(batch, dict):
        yield from (item for item in batch.items() if type(item[1]) is not int)
    elif isinstance(batch, list):
        for number, leaf in enumerate(batch):
            yield str(number), leaf
    else:
        yield "", batch


def byte_count(batch: Batch) -> int:
    """Count the bytes of a batch's tensors."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(batch))


class ContentHash:
    """Digest of batches: container types, keys, dtypes, shapes and every byte."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, batch: Batch) -> None:
        """Take the next batch in order."""
        self._digest.update(type(batch).__qualname__.encode())
        for key, leaf in leaves(batch):
            self._digest.update(f"|{key}|{leaf.dtype}|{tuple(leaf.shape)}|".encode())
            self._digest.update(leaf.contiguous().numpy().reshape(-1).data)

    def hexdigest(self) -> str:
        """Return the digest of everything added so far."""
        return self._digest.hexdigest()
