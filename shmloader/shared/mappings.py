"""A dict that lies in shared memory."""

import functools
import itertools
import math
import numbers
import reprlib
import zlib
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from shmloader.memory.segment import Segment, SegmentWriter
from shmloader.shared.records import Records

_K = TypeVar("_K")
_V = TypeVar("_V")

# Items that a repr shows.
_SHOWN = 3

_HASH_BITS = 32
_MASK = (1 << _HASH_BITS) - 1


class IndexPlace(NamedTuple):
    """Where the index of a dict's keys lies in its segment; all its tables are of int64.

    Attributes:
        bits: The first so many bits of a key's hash name its bucket.
        buckets: Offset of a table: for each bucket, which of the sorted hashes is its first one;
            and how many there are.
        hashes: Offset of the keys' hashes, in order.
        numbers: Offset of their keys' numbers, in the same order.
    """

    bits: int
    buckets: int
    hashes: int
    numbers: int


def stable_hash(key: object) -> int | None:
    """A hash of 32 bits that is the same in each process, and for keys that are equal.

    Returns:
        None for a key that is neither a text, bytes, a number or None, nor a tuple of these.
    """
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return zlib.crc32(key, 1)
    if isinstance(key, numbers.Number | np.bool_):
        # Python's hash of a number depends on nothing else, but that of a NaN.
        return _MASK if key != key else hash(key) & _MASK  # noqa: PLR0124 - only a NaN does
    if isinstance(key, tuple):
        return _hash_of_parts([stable_hash(part) for part in key])
    return 0 if key is None else None


def _is_nan(key: object) -> bool:
    return isinstance(key, float) and math.isnan(key)


def _hash_of_parts(parts: list[int | None]) -> int | None:
    total = len(parts)
    for part in parts:
        if part is None:
            return None
        total = (total * 1_000_003 ^ part) & _MASK
    return total


def write_index(hashes: list[int], writer: SegmentWriter) -> IndexPlace:
    """Write an index of keys with these hashes.

    Raises:
        SharedMemoryError: If there is no memory for it.
    """
    bits = min(_HASH_BITS, max(1, len(hashes).bit_length()))
    whole = np.array(hashes, dtype=np.int64)
    order = np.argsort(whole, kind="stable").astype(np.int64, copy=False)
    ordered = whole[order]
    edges = np.arange((1 << bits) + 1, dtype=np.int64) << (_HASH_BITS - bits)
    buckets = np.searchsorted(ordered, edges).astype(np.int64, copy=False)
    return IndexPlace(bits, writer.append(buckets), writer.append(ordered), writer.append(order))


class _Keys(KeysView[_K]):
    _mapping: "SharedDict[_K, Any]"

    def __reversed__(self) -> Iterator[_K]:
        return reversed(self._mapping._keys)


class _Values(ValuesView[_V]):
    """Read in turn. A key is never looked up: one that is a NaN would not be found."""

    _mapping: "SharedDict[Any, _V]"

    def __iter__(self) -> Iterator[_V]:
        return iter(self._mapping._values)

    def __reversed__(self) -> Iterator[_V]:
        return reversed(self._mapping._values)

    def __contains__(self, value: object) -> bool:
        return any(one is value or one == value for one in self)


class _Items(ItemsView[_K, _V]):
    """The same."""

    _mapping: "SharedDict[_K, _V]"

    def __iter__(self) -> Iterator[tuple[_K, _V]]:
        return zip(self._mapping._keys, self._mapping._values, strict=True)

    def __reversed__(self) -> Iterator[tuple[_K, _V]]:
        return zip(reversed(self._mapping._keys), reversed(self._mapping._values), strict=True)


class SharedDict(Mapping[_K, _V]):
    """A dict whose keys and values lie in shared memory, once for all processes.

    It reads as the dict does, order included, but that a value is built when it is asked for, a
    new object each time; and it cannot be changed. Pickled, it is a handle. Keys that are texts,
    bytes, numbers, None, or tuples of these are found by an index in the same memory. Where there
    are others, each process makes an ordinary dict of all keys when it looks one up first. A key
    that is a NaN is found by any NaN: no key is ever the very object that the dict had.

    Made by :func:`shmloader.share`.
    """

    __slots__ = ("__dict__", "_index", "_keys", "_segment", "_tables", "_values")

    def __init__(
        self, segment: Segment, keys: Records, values: Records, index: IndexPlace | None
    ) -> None:
        """Keys and values in their order; ``index`` is None if a key has no stable hash."""
        self._segment = segment
        self._keys = keys
        self._values = values
        self._index = index
        if index is not None:
            whole, count = memoryview(segment), len(keys)
            self._tables = tuple(
                whole[offset : offset + 8 * length].cast("q")
                for offset, length in (
                    (index.buckets, (1 << index.bits) + 1),
                    (index.hashes, count),
                    (index.numbers, count),
                )
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """A handle."""
        return SharedDict, (self._segment, self._keys, self._values, self._index)

    @functools.cached_property
    def _numbers(self) -> dict[Any, int]:
        """Where each key's value is, for keys that the index cannot have."""
        return {key: number for number, key in enumerate(self._keys)}

    def _find(self, key: object) -> int:
        """Which of the items has a key; -1: none."""
        if self._index is None:
            return self._numbers.get(key, -1)
        wanted = stable_hash(key)
        if wanted is None:
            hash(key)  # raises where it cannot be a key at all
            return -1
        buckets, hashes, order = self._tables
        true_hash = hash(key)
        bucket = wanted >> (_HASH_BITS - self._index.bits)
        for place in range(buckets[bucket], buckets[bucket + 1]):
            if hashes[place] == wanted:
                number: int = order[place]
                found = self._keys[number]
                # As a dict does: what is of another hash may not even be comparable.
                if hash(found) == true_hash and found == key:
                    return number
                if _is_nan(found) and _is_nan(key):
                    return number
        return -1

    def __getitem__(self, key: Any) -> _V:
        """A key's value.

        Raises:
            KeyError: If there is no such key.
            TypeError: If it cannot be one.
        """
        number = self._find(key)
        if number < 0:
            raise KeyError(key)
        value: _V = self._values[number]
        return value

    def __contains__(self, key: object) -> bool:
        """Whether there is such a key."""
        return self._find(key) >= 0

    def __len__(self) -> int:
        """How many items."""
        return len(self._keys)

    def __iter__(self) -> Iterator[_K]:
        """The keys, in the dict's order."""
        return iter(self._keys)

    def __reversed__(self) -> Iterator[_K]:
        """The keys, the last one first."""
        return reversed(self._keys)

    def keys(self) -> KeysView[_K]:
        """The keys, as a dict's."""
        return _Keys(self)

    def values(self) -> ValuesView[_V]:
        """The values, as a dict's."""
        return _Values(self)

    def items(self) -> ItemsView[_K, _V]:
        """The pairs, as a dict's."""
        return _Items(self)

    def __or__(self, other: Any) -> dict[Any, Any]:
        """An ordinary dict of both's items, as of two dicts."""
        return {**self, **other} if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> dict[Any, Any]:
        """The same, the other first."""
        return {**other, **self} if isinstance(other, Mapping) else NotImplemented

    def __eq__(self, other: object) -> bool:
        """Whether the other is a mapping with equal keys and values."""
        if not isinstance(other, Mapping):
            return NotImplemented
        if len(self) != len(other):
            return False
        missing = object()
        for key, value in zip(self._keys, self._values, strict=True):
            found = other.get(key, missing)
            if found is missing or not (found is value or found == value):
                return False
        return True

    __hash__ = None  # type: ignore[assignment]  # as a dict's

    def __repr__(self) -> str:
        """All items of a short one; of a long one the first, and how many there are."""
        pairs = itertools.islice(zip(self._keys, self._values, strict=True), 2 * _SHOWN)
        shown = [f"{key!r}: {reprlib.repr(value)}" for key, value in pairs]
        if len(self) <= 2 * _SHOWN:
            return f"SharedDict({{{', '.join(shown)}}})"
        return f"SharedDict({{{', '.join([*shown, '...'])}}}, {len(self)} items)"

    def __setitem__(self, key: object, value: object = None) -> NoReturn:
        """Refuse.

        Raises:
            TypeError: Always, with what to do instead.
        """
        raise TypeError(
            "a SharedDict cannot be changed, since all processes read the one copy: change "
            "dict(shared) and share that, or keep what changes in a dict beside it"
        )

    __delitem__ = __setitem__
