"""Index batches that stay arrays: what torch's own samplers give, without a list of Python's ints.

A shuffled epoch of torch's is a permutation that is made as a tensor, turned into a list, and cut.
Where the dataset is an array nobody needs the list, and it costs more than the batch: 25 ms for a
million indices. Here the same permutation is cut as it is.

Guarantees: random streams are used as torch's samplers use them, at the same moments.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

_Array = np.ndarray[Any, np.dtype[Any]]

_NARROW = np.dtype(np.int32)
_NARROWEST_LIMIT = 1 << 31


class IndexArray:
    """The indices of a batch.

    Attributes:
        array: They; one dimension, int32 or int64.
    """

    __slots__ = ("array",)

    def __init__(self, array: _Array) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        """By its bytes: a quarter of what pickling an array takes."""
        return _from_bytes, (self.array.tobytes(), self.array.dtype == _NARROW)

    def tolist(self) -> list[int]:
        """As torch's sampler would have given them."""
        indices: list[int] = self.array.tolist()
        return indices


def _from_bytes(data: bytes, is_narrow: bool) -> IndexArray:
    return IndexArray(np.frombuffer(data, _NARROW if is_narrow else np.int64))


def as_list(indices: Any) -> Any:
    """What a sampler of torch's would have given in the place of these."""
    if type(indices) is IndexArray:
        return indices.tolist()
    return list(indices) if type(indices) is range else indices


def array_batches(index_sampler: Any) -> Iterator[Any] | None:
    """The index batches of an epoch, as ranges or :class:`IndexArray`.

    Args:
        index_sampler: What a loader draws.

    Returns:
        None unless it is torch's own batch sampler, with torch's own order or shuffle in it, that
        is drawn on the CPU.
    """
    if type(index_sampler) is not BatchSampler:
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
        _permutation(length, generator)  # torch makes another one, and takes nothing of it
    if full < length and not outer.drop_last:
        yield IndexArray(order[full:])


def _permutation(length: int, generator: torch.Generator) -> _Array:
    """torch's, of a narrow type where that will do: the same values, made in less time."""
    dtype = torch.int32 if length < _NARROWEST_LIMIT else torch.int64
    order: _Array = torch.randperm(length, generator=generator, dtype=dtype).numpy()
    return order
