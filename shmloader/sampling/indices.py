"""The indices of a ticket: as a list or an array, with or without their positions in the epoch.

Arrays. torch makes a shuffled epoch as a tensor, turns it into a list and cuts that into batches.
If the dataset is an array, the list is not needed, and it takes more time than the batch: 25 ms for
a million indices. So :func:`array_batches` cuts the same permutation without a list. It draws from
the same random number generators as torch's samplers, at the same moments.

Positions. The random number generators of samples depend on the samples' positions in the epoch. So
a loader with a seed passes :class:`PositionedIndices` to the engine instead of plain indices. They
travel with the ticket and are unpacked where the samples are loaded. A ticket that is loaded again,
or by another worker, therefore draws the same random numbers.
"""

from collections.abc import Iterator
from types import GeneratorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

_Array = np.ndarray[Any, np.dtype[Any]]

_NARROW = np.dtype(np.int32)
_NARROWEST_LIMIT = 1 << 31


class IndexArray:
    """The indices of a batch, as an array.

    Attributes:
        array: The indices: one dimension, int32 or int64.
    """

    __slots__ = ("array",)

    def __init__(self, array: _Array) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the bytes, which takes a quarter of the time of pickling an array."""
        return _from_bytes, (self.array.tobytes(), self.array.dtype == _NARROW)

    def tolist(self) -> list[int]:
        """Return the indices as torch's sampler yields them."""
        indices: list[int] = self.array.tolist()
        return indices


def _from_bytes(data: bytes, is_narrow: bool) -> IndexArray:
    return IndexArray(np.frombuffer(data, _NARROW if is_narrow else np.int64))


def as_list(indices: Any) -> Any:
    """Return a list for an :class:`IndexArray` or a range, and any other indices unchanged."""
    if type(indices) is IndexArray:
        return indices.tolist()
    return list(indices) if type(indices) is range else indices


def is_drawn(items: Iterator[Any]) -> bool:
    """Whether something was drawn from a generator; False for iterators of other types.

    torch's samplers are generators. Toolkits draw from them to resume.
    """
    return isinstance(items, GeneratorType) and (items.gi_suspended or items.gi_frame is None)


def array_batches(index_sampler: Any, drawing: Iterator[Any]) -> Iterator[Any] | None:
    """Return an iterator of an epoch's index batches as ranges or :class:`IndexArray`.

    Args:
        index_sampler: The sampler that a loader draws from.
        drawing: An iterator of it.

    Returns:
        None unless the sampler is torch's own batch sampler, over torch's own sequential sampler,
        or over torch's own random sampler, without replacement and drawing on the CPU; and None if
        something was drawn already, as toolkits do to resume.
    """
    if type(index_sampler) is not BatchSampler or is_drawn(drawing):
        return None
    sampler = index_sampler.sampler
    if type(sampler) is SequentialSampler:
        return _in_order(index_sampler, sampler)
    if type(sampler) is RandomSampler and not sampler.replacement:
        if sampler.generator is not None and sampler.generator.device.type != "cpu":
            return None
        return _shuffled(index_sampler, sampler)
    return None


def _in_order(outer: BatchSampler, sampler: SequentialSampler) -> Iterator[range]:
    size, length = outer.batch_size, len(sampler)
    for start in range(0, length - size + 1 if outer.drop_last else length, size):
        yield range(start, min(start + size, length))


def _shuffled(outer: BatchSampler, sampler: RandomSampler) -> Iterator[Any]:
    length, size = len(sampler.data_source), outer.batch_size
    if sampler.num_samples != length:
        yield from outer
        return
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = _permutation(length, generator)
    full = length // size * size
    for start in range(0, full, size):
        yield IndexArray(order[start : start + size])
    if sampler.generator is not None:
        _permutation(length, generator)  # torch makes another permutation, and does not use it
    if full < length and not outer.drop_last:
        yield IndexArray(order[full:])


def _permutation(length: int, generator: torch.Generator) -> _Array:
    """Return torch's permutation, as int32 where possible: the same values in less time."""
    dtype = torch.int32 if length < _NARROWEST_LIMIT else torch.int64
    order: _Array = torch.randperm(length, generator=generator, dtype=dtype).numpy()
    return order


class PositionedIndices(NamedTuple):
    """The indices of a ticket and their position in the global order of the epoch.

    Attributes:
        indices: The indices to load.
        epoch: Number of the loader's epoch.
        first: Position of the first sample in the epoch; with ``is_whole``, the number of the batch
            among those of all ranks, since the batches before it have unknown sizes.
        is_whole: Whether the loader does not make the batches: the ticket is a batch of the user's
            batch sampler, or a single index of a loader that does not batch.
    """

    indices: Any
    epoch: int
    first: int
    is_whole: bool = False

    def key(self, number: int) -> tuple[int, int]:
        """Return the position in the epoch of one of the ticket's samples.

        Args:
            number: Number of the sample in the ticket, counted through all its batches.
        """
        return (self.first, number) if self.is_whole else (self.first + number, 0)


def without_position(indices: object) -> object:
    """Return the indices of a ticket, with or without positions, as the sampler yielded them."""
    return as_list(indices.indices if isinstance(indices, PositionedIndices) else indices)
