"""Indices: as a list or an array, permuted, and with or without their positions in the epoch.

Arrays. If the dataset is an array, :func:`array_batches` cuts torch's permutation without a list,
which would take more time than the batch: 25 ms for a million indices. It draws from the same
random number generators as torch's samplers, at the same moments.

Permutations. Up to 262,144 numbers are sorted by random keys. With more numbers, each position is
computed when it is needed: a keyed function permutes the numbers below a power of two, and is
applied again to results outside of the range (cycle walking). So with a hundred million samples, a
rank computes only the positions of its own batches. Every process computes the same order.

Positions. The random number generators of samples depend on the samples' positions in the epoch. So
a loader with a seed passes :class:`PositionedIndices` to the engine, which travel with the ticket.
"""

import hashlib
import pickle
from collections.abc import Iterator
from types import GeneratorType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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
        return _load_array, (self.dump(),)

    def dump(self) -> bytes:
        """Return the bytes for another process, which calls :func:`load_indices`."""
        return _HEADS[self.array.itemsize] + self.array.tobytes()

    def tolist(self) -> list[int]:
        """Return the indices as torch's sampler yields them."""
        indices: list[int] = self.array.tolist()
        return indices


# What an array's bytes follow in a message, by its item size. No pickle begins so, and the array
# stays aligned. A pickle would take five times as long.
_HEADS = {4: b"int32---", 8: b"int64---"}


def load_indices(data: bytes) -> Any:
    """Return indices from a dump or a pickle. Arrays cannot be written to."""
    return _load_array(data) if data.startswith(b"int") else pickle.loads(data)


def _load_array(data: bytes) -> IndexArray:
    dtype = _NARROW if data.startswith(_HEADS[4]) else np.int64
    return IndexArray(np.frombuffer(data, dtype, offset=8))


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

    Returns None unless nothing was drawn yet, and the sampler is torch's own batch sampler over its
    sequential sampler, or over its random sampler without replacement on the CPU.
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
        is_whole: Whether the ticket is a batch of the user's batch sampler, or a single index.
    """

    indices: Any
    epoch: int
    first: int
    is_whole: bool = False

    def key(self, number: int) -> tuple[int, int]:
        """Return the position in the epoch of the sample of this number in the ticket."""
        return (self.first, number) if self.is_whole else (self.first + number, 0)


def without_position(indices: object) -> object:
    """Return the indices of a ticket, with or without positions, as the sampler yielded them."""
    return as_list(indices.indices if isinstance(indices, PositionedIndices) else indices)


# Permutations -----------------------------------------------------------------------------

# Up to this length, the order is sorted and kept, which takes at most 20 ms and 2 MB. Any order is
# possible then; the network below makes only even permutations if there are few numbers.
_SORTED = 1 << 18

# Four rounds would be enough if the rounds' function were random (Luby and Rackoff, 1988). The
# number is even, so that the two halves end up in their original positions.
_ROUNDS = 6

_Words = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int64]


class Permutation:
    """The numbers from 0 to ``length - 1``, in an order that depends only on the arguments.

    Args:
        length: Count of the numbers.
        key: Numbers that determine the order, such as a seed and an epoch.
    """

    def __init__(self, length: int, *key: int) -> None:
        self.length = length
        text = ",".join(map(str, (length, *key))).encode()
        words = hashlib.blake2b(text, digest_size=8 * _ROUNDS, person=b"shmloader order").digest()
        self._keys = np.frombuffer(words, dtype="<u8").astype(np.uint64)
        self._order: _Numbers | None = None
        if length <= _SORTED:
            counter = np.arange(length, dtype=np.uint64)
            sort_keys = _scramble(_scramble(counter + self._keys[0]) + self._keys[1])
            self._order = np.argsort(sort_keys, kind="stable").astype(np.int64)

    def at(self, positions: _Numbers) -> _Numbers:
        """Return the numbers at these positions, as int64 in the same shape."""
        if self._order is not None:
            return self._order[positions]
        limit = np.uint64(self.length)
        values = self._mix(positions.astype(np.uint64).reshape(-1))
        while (outside := np.flatnonzero(values >= limit)).size:
            values[outside] = self._mix(values[outside])
        return values.astype(np.int64).reshape(positions.shape)

    def _mix(self, values: _Words) -> _Words:
        """Apply a Feistel network over two halves of the bits, which permutes the values."""
        bits = (self.length - 1).bit_length()
        low = bits // 2
        left, right = values >> np.uint64(low), values & _mask(low)
        for number, key in enumerate(self._keys):
            left_bits = low if number % 2 else bits - low
            left, right = right, left ^ (_scramble(right + key) & _mask(left_bits))
        return (left << np.uint64(low)) | right


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _scramble(values: _Words) -> _Words:
    """Apply the finaliser of MurmurHash3 for 64 bits: every result bit depends on every bit."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values
