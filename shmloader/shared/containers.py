"""Lists and dicts whose items lie in shared memory. Made by :func:`shmloader.share`."""

import bisect
import functools
import itertools
import numbers
import reprlib
import zlib
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, NamedTuple, NoReturn, TypeVar, overload

import numpy as np

from shmloader.memory.segment import Segment, SegmentWriter
from shmloader.shared.records import Records

_T = TypeVar("_T")
_K = TypeVar("_K")
_V = TypeVar("_V")

# Items that a repr shows at either end.
_SHOWN = 3

_MASK = (1 << 32) - 1


class SharedList(Sequence[_T]):
    """A list or tuple whose items lie in shared memory, once for all processes.

    It reads like the original, with two differences. Each access to an item builds a new object, so
    that changing that object does not change the list. The list itself cannot be changed. It equals
    a list, tuple or ``SharedList`` with equal items. A slice is a view without memory of its own.
    The list is pickled as a handle. Reading a str of 100 characters takes 0.3 µs.

    Args:
        records: The items.
        selected: Which of them are in the list; None for all.
    """

    __slots__ = ("_range", "_read", "_records")

    def __init__(self, records: Records, selected: range | None = None) -> None:
        self._records = records
        self._range = range(len(records)) if selected is None else selected
        self._read = records.__getitem__

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedList, (self._records, self._range)

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> "SharedList[_T]": ...
    def __getitem__(self, index: Any) -> Any:
        try:
            number = self._range[index]
        except IndexError:
            raise IndexError("list index out of range") from None
        except TypeError:
            raise TypeError(
                f"list indices must be integers or slices, not {type(index).__name__}"
            ) from None
        if type(number) is range:
            return SharedList(self._records, number)
        return self._read(number)

    def __iter__(self) -> Iterator[_T]:
        return map(self._read, self._range)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SharedList | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(map(_is_equal, self, other))

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __repr__(self) -> str:
        count = len(self)
        if count <= 2 * _SHOWN:
            return f"SharedList({list(self)!r})"
        shown = [reprlib.repr(item) for item in self[:_SHOWN]]
        shown += ["...", *(reprlib.repr(item) for item in self[-_SHOWN:])]
        return f"SharedList([{', '.join(shown)}], {count} items)"

    def __add__(self, other: Any) -> list[_T]:
        """Return an ordinary list of the items of both."""
        if not isinstance(other, SharedList | list | tuple):
            return NotImplemented
        return list(itertools.chain(self, other))

    def __radd__(self, other: Any) -> list[_T]:
        if not isinstance(other, SharedList | list | tuple):
            return NotImplemented
        return list(itertools.chain(other, self))

    def __setitem__(self, index: object, value: object = None) -> NoReturn:
        _refuse_change("SharedList", "list")

    __delitem__ = __setitem__


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def _refuse_change(kind: str, plain: str) -> NoReturn:
    raise TypeError(
        f"a {kind} cannot be changed, since all processes read the same copy: change "
        f"{plain}(shared) and share that, or keep what changes in a separate dict"
    )


class KeyIndex(NamedTuple):
    """Where the index of a dict's keys lies in its segment: two tables of int64.

    Attributes:
        hashes: Offset of the keys' hashes, sorted.
        numbers: Offset of the numbers of the same keys (their positions in the dict), in the same
            order.
    """

    hashes: int
    numbers: int


def stable_hash(key: object) -> int | None:
    """Return a hash of 32 bits that is the same in every process, and for equal keys.

    Returns:
        The hash; None for a key that is not a str, bytes, a number, None, or a tuple of these.
    """
    if isinstance(key, str):
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return zlib.crc32(key, 1)
    if isinstance(key, numbers.Number | np.bool_):
        # Python's hash of a number depends only on its value, except for a NaN.
        return None if key != key else hash(key) & _MASK  # noqa: PLR0124 - only a NaN does
    if isinstance(key, tuple):
        total = len(key)
        for part in map(stable_hash, key):
            if part is None:
                return None
            total = (total * 1_000_003 ^ part) & _MASK
        return total
    return 0 if key is None else None


def write_index(keys: Iterable[object], writer: SegmentWriter) -> KeyIndex | None:
    """Write an index of keys; None if one of them has no stable hash.

    Raises:
        SharedMemoryError: If there is not enough memory.
    """
    hashes = [stable_hash(key) for key in keys]
    if None in hashes:
        return None
    whole = np.array(hashes, dtype=np.int64)
    order = np.argsort(whole, kind="stable").astype(np.int64, copy=False)
    return KeyIndex(writer.append(whole[order]), writer.append(order))


class _Values(ValuesView[_V]):
    _mapping: "SharedDict[Any, _V]"

    def __iter__(self) -> Iterator[_V]:
        return iter(self._mapping._values)  # without a look-up of each key


class _Items(ItemsView[_K, _V]):
    _mapping: "SharedDict[_K, _V]"

    def __iter__(self) -> Iterator[tuple[_K, _V]]:
        return zip(self._mapping._keys, self._mapping._values, strict=True)


class SharedDict(Mapping[_K, _V]):
    """A dict whose keys and values lie in shared memory, once for all processes.

    It reads like the original, in the same order, with two differences. Each access to a value
    builds a new object, and the dict cannot be changed. It is pickled as a handle. Keys that are
    str, bytes, numbers, None, or tuples of these are found by an index in the same memory. If there
    are other keys, each process makes an ordinary dict of all keys at its first look-up. A key that
    is a NaN is not found, since the original object no longer exists.

    Args:
        segment: The segment that keys and values lie in.
        keys: The keys, in order.
        values: The values, in the same order.
        index: Index of the keys; None if a key has no stable hash.
    """

    __slots__ = ("__dict__", "_index", "_keys", "_segment", "_tables", "_values")

    def __init__(
        self, segment: Segment, keys: Records, values: Records, index: KeyIndex | None
    ) -> None:
        self._segment = segment
        self._keys = keys
        self._values = values
        self._index = index
        if index is not None:
            whole, nbytes = memoryview(segment), 8 * len(keys)
            self._tables = tuple(whole[at : at + nbytes].cast("q") for at in index)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedDict, (self._segment, self._keys, self._values, self._index)

    @functools.cached_property
    def _numbers(self) -> dict[Any, int]:
        """The number of each key's item, where there is no index."""
        return {key: number for number, key in enumerate(self._keys)}

    def _find(self, key: object) -> int:
        """Return the number of a key's item; -1 if there is none."""
        if self._index is None:
            return self._numbers.get(key, -1)
        wanted = stable_hash(key)
        if wanted is None:
            hash(key)  # raises TypeError if it cannot be a key
            return -1
        hashes, order = self._tables
        true_hash = hash(key)
        for position in range(bisect.bisect_left(hashes, wanted), len(hashes)):
            if hashes[position] != wanted:
                break
            number: int = order[position]
            candidate = self._keys[number]
            # As a dict does: keys of different hashes may not even be comparable.
            if hash(candidate) == true_hash and candidate == key:
                return number
        return -1

    def __getitem__(self, key: Any) -> _V:
        number = self._find(key)
        if number < 0:
            raise KeyError(key)
        value: _V = self._values[number]
        return value

    def __contains__(self, key: object) -> bool:
        return self._find(key) >= 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[_K]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[_K]:
        return reversed(self._keys)

    def values(self) -> ValuesView[_V]:
        """Return a view of the values, like a dict's."""
        return _Values(self)

    def items(self) -> ItemsView[_K, _V]:
        """Return a view of the (key, value) pairs, like a dict's."""
        return _Items(self)

    def __or__(self, other: Any) -> dict[Any, Any]:
        """Return an ordinary dict of the items of both."""
        return {**self, **other} if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> dict[Any, Any]:
        return {**other, **self} if isinstance(other, Mapping) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(key in other and _is_equal(other[key], value) for key, value in self.items())

    __hash__ = None  # type: ignore[assignment]  # as a dict's

    def __repr__(self) -> str:
        pairs = itertools.islice(zip(self._keys, self._values, strict=True), 2 * _SHOWN)
        shown = [f"{key!r}: {reprlib.repr(value)}" for key, value in pairs]
        if len(self) <= 2 * _SHOWN:
            return f"SharedDict({{{', '.join(shown)}}})"
        return f"SharedDict({{{', '.join([*shown, '...'])}}}, {len(self)} items)"

    def __setitem__(self, key: object, value: object = None) -> NoReturn:
        _refuse_change("SharedDict", "dict")

    __delitem__ = __setitem__
