"""Samples that are cut at the budget of a :class:`~shmloader.sampling.TokenBatches`."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.sampling.packing import Numbers


class Piece(NamedTuple):
    """A part of a sample.

    Attributes:
        sample: Index of the sample.
        start, stop: Its tokens from ``start`` to before ``stop``.
    """

    sample: int
    start: int
    stop: int


@dataclass(eq=False, repr=False)
class CutDataset(Dataset[Any]):
    """A dataset whose long samples are cut. ``TokenBatches.pieces_of()`` makes it.

    Sample i of the first ``len(dataset)`` ones is the beginning of sample i of the dataset. The
    further pieces of long samples follow, in order of sample and offset. A piece is loaded by
    loading its whole sample. Pieces are loaded by one call if the dataset has ``__getitems__``.

    Of a sample, every sequence that is as long as the sample's length is cut: tensors and arrays
    along their first dimension, and lists. Other fields stay as they are. Dicts, tuples and lists
    of fields are looked into.

    Args:
        dataset: A map-style dataset.
        long: Indices of the samples to cut, ascending.
        lengths: Their lengths.
        limit: Length of all pieces of a sample but the last.
        owners, starts: Of each further piece: its sample, and its first token.
    """

    dataset: Any
    long: Numbers
    lengths: Numbers
    limit: int
    owners: Numbers
    starts: Numbers

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.dataset) + len(self.owners)

    def __getitem__(self, number: int) -> Any:
        """Load a piece.

        Raises:
            IndexError: If there is no piece of that number.
            ValueError: If no part of the sample is as long as its length says.
        """
        index, start = self._find(number)
        return self._cut(self.dataset[index], index, start)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Load several pieces; see :meth:`__getitem__`."""
        found = [self._find(number) for number in numbers]
        load = getattr(self.dataset, "__getitems__", None)
        indices = [index for index, _ in found]
        samples = load(indices) if load else [self.dataset[index] for index in indices]
        return [self._cut(sample, *where) for sample, where in zip(samples, found, strict=True)]

    def _find(self, number: int) -> tuple[int, int]:
        """Return the sample of a piece, and its first token."""
        if not 0 <= number < len(self):
            raise IndexError(f"piece {number} of {len(self)}")
        later = int(number) - len(self.dataset)
        if later < 0:
            return int(number), 0
        return int(self.owners[later]), int(self.starts[later])

    def _cut(self, sample: Any, index: int, start: int) -> Any:
        """Return the piece of a sample that begins at a token."""
        position = int(np.searchsorted(self.long, index))
        if position == len(self.long) or self.long[position] != index:
            return sample
        length = int(self.lengths[position])
        cut = cut_sequences(sample, length, slice(start, min(start + self.limit, length)))
        if cut is sample:
            raise ValueError(
                f"sample {index} should have a sequence of {length} tokens, as the lengths of "
                f"TokenBatches say, but its tensors, arrays and lists have: {_sizes(sample)}"
            )
        return cut


def cut_sequences(value: Any, length: int, part: slice) -> Any:
    """Return a value with its sequences of this length cut; the same object if it has none."""
    is_sequence = isinstance(value, list) or (
        isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0
    )
    if is_sequence and len(value) == length:
        return value[part]
    if isinstance(value, Mapping):
        fields = [cut_sequences(field, length, part) for field in value.values()]
        is_same = all(map(operator.is_, fields, value.values()))
        return value if is_same else dict(zip(value, fields, strict=True))
    if isinstance(value, list | tuple):
        fields = [cut_sequences(field, length, part) for field in value]
        if not all(map(operator.is_, fields, value)):
            kind = type(value)
            return kind(*fields) if hasattr(kind, "_fields") else kind(fields)
    return value


def _sizes(sample: Any) -> str:
    """Return the lengths of a sample's fields, for a message."""
    fields = sample if isinstance(sample, Mapping) else {"the sample": sample}
    sized = [f"{key}: {len(value)}" for key, value in fields.items() if np.ndim(value)]
    return ", ".join(sized) or type(sample).__name__
