"""Arrays, tensors, lists and dicts that lie in a segment. Made by :func:`shmloader.share`.

Unless it was shared as writable, an array is read-only. torch has no read-only tensors, and a write
to memory that is mapped read-only would end the process. So all memory is mapped copy-on-write.
What lies in a segment is found by its address. Reducers in multiprocessing's pickler reduce it to a
handle; plain ``pickle`` copies the data, as always.

Each item of a list or dict is a record: a pickle of its own in the segment, and a table says where
each begins. Unpickling a text, or a tuple of numbers and texts, takes 0.25 µs, less than any loop
in Python. Tensors and large arrays lie outside the pickles, and an item that is read has views.
"""

import bisect
import functools
import multiprocessing.context
import numbers
import operator
import pickle
import zlib
from array import array
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from shmloader.grammar import counted
from shmloader.memory.pickled import (
    PICKLE_ERRORS,
    OutOfBand,
    PartialStorage,
    dump,
    is_plain,
    rebuild_tensor,
    reduce_data,
    reducers_of_multiprocessing,
    storage_over,
    tensor_fields,
)
from shmloader.memory.segment import (
    BULK_BYTES,
    BufferTable,
    Segment,
    SegmentWriter,
    find_segment,
    load_with_buffers,
    write_buffers,
)
from shmloader.memory_maps import address_of

_T = TypeVar("_T")
_K = TypeVar("_K")
_V = TypeVar("_V")

_TENSORS = (torch.Tensor, torch.nn.Parameter)

# Bytes of records that are written at a time.
_CHUNK_BYTES = 1 << 20

# The pickle of these, or of a tuple of these, has no out-of-band buffers.
_SIMPLE = frozenset({str, bytes, int, float, bool, complex, type(None)})


def reduce_array(array: "np.ndarray[Any, Any]") -> Any:
    """Return the reduction of an array in a segment to a handle; None for anything else.

    A writable array is pickled with its data, since what this process wrote to it is not in the
    memory that other processes see. Only a process that is started with the array gets a handle.
    """
    is_starting = multiprocessing.context.get_spawning_popen() is not None
    has_handle = array.size > 0 and (is_starting or not array.flags.writeable)
    segment = find_segment(*address_of(array)) if has_handle else None
    if segment is None:
        return None
    offset = array.__array_interface__["data"][0] - segment.address
    fields = (array.dtype, array.shape, array.strides, bool(array.flags.writeable))
    return open_array, (segment, offset, *fields)


def open_array(
    memory: Any,
    offset: int,
    dtype: "np.dtype[Any]",
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    is_writable: bool,
) -> "np.ndarray[Any, Any]":
    """Return the array at an offset of a segment, or of a buffer in it. Called by pickle."""
    if type(memory) is Segment:
        enable_handles()  # it may be sent on from this process
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, memory, offset, strides)
    array.flags.writeable = is_writable
    return array


def open_tensor(segment: Segment, start: int, nbytes: int, fields: tuple[Any, ...]) -> torch.Tensor:
    """Return the tensor whose storage is these bytes of a segment. Called by pickle."""
    enable_handles()  # it may be sent on from this process
    return rebuild_tensor(PartialStorage(storage_over(segment, start, nbytes), 0), *fields)


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """Return the reduction of a tensor in a segment to a handle; None for anything else."""
    if type(tensor) not in _TENSORS or not is_plain(tensor):
        return None
    if tensor.requires_grad and not tensor.is_leaf:
        return None
    storage = tensor.untyped_storage()
    segment = find_segment(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    if segment is None:
        return None
    start = storage.data_ptr() - segment.address
    return open_tensor, (segment, start, storage.nbytes(), tensor_fields(tensor))


def enable_handles() -> None:
    """Make multiprocessing in this process pickle what lies in segments as handles."""
    registered: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    registered[np.ndarray] = _reduce_array
    for kind in _TENSORS:
        plain = registered.get(kind)
        if plain is not None and not hasattr(plain, "__wrapped__"):
            ForkingPickler.register(kind, _with_handles(plain))


def _reduce_array(array: "np.ndarray[Any, Any]") -> Any:
    # With the protocol of multiprocessing's pickler.
    return reduce_array(array) or array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _with_handles(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a reducer that reduces tensors in segments to handles, and others as torch's does."""

    # It looks like torch's reducer, so that it is left out for batches, as torch's is.
    @functools.wraps(plain)
    def reduce(tensor: torch.Tensor) -> Any:
        return reduce_tensor(tensor) or plain(tensor)

    return reduce


class RecordTable(NamedTuple):
    """Where the records of a list lie in their segment.

    Attributes:
        length: Number of records.
        starts: Offset of the table of each record's first byte; int64.
        others: Segments that items refer to, since parts of the items were shared before.
    """

    length: int
    starts: int
    others: tuple[Segment, ...] = ()


class _Parts(NamedTuple):
    """What is pickled for an item with out-of-band buffers, and where they lie."""

    body: bytes
    table: BufferTable


def write_records(
    items: Iterable[Any],
    writer: SegmentWriter,
    *,
    writable: bool,
    least_bytes: int = BULK_BYTES,
    word: str = "item",
) -> RecordTable:
    """Write a record for each item.

    Args:
        items: The items.
        writer: Writer of the segment.
        writable: Whether arrays in the records are writable when they are read.
        least_bytes: Smaller arrays are copied when they are read; any other is a view.
        word: What an error calls an item.

    Raises:
        TypeError: If an item cannot be pickled.
        SharedMemoryError: If there is not enough memory.
    """
    chunk, starts, others = bytearray(), array("q"), {}
    reducers = reducers_of_multiprocessing(with_torch=False)

    def flush() -> None:
        writer.append(chunk, is_aligned=False)
        chunk.clear()

    def reduce(value: Any, out_of_band: OutOfBand) -> Any:
        if type(value) is Segment:
            others[id(value)] = value
            return NotImplemented
        is_array = type(value) is np.ndarray and not value.dtype.hasobject
        if is_array and value.nbytes >= least_bytes:
            if (handle := reduce_array(value)) is not None:
                return handle
            is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
            order: Any = "F" if is_fortran else "C"
            data = np.asarray(value, order=order)
            buffer = pickle.PickleBuffer(data.ravel(order="K").view(np.uint8).data)
            return open_array, (buffer, 0, data.dtype, data.shape, data.strides, writable)
        if type(value).__module__.partition(".")[0] == "torch":
            return reduce_tensor(value) or reduce_data(value, out_of_band)
        return NotImplemented

    def encode(item: Any) -> bytes:
        kind = type(item)
        if kind not in _SIMPLE and not (kind is tuple and _SIMPLE.issuperset(map(type, item))):
            body, out_of_band = dump(item, reduce, reducers, least_bytes=least_bytes)
            if not out_of_band.order:
                return body
            flush()
            item = _Parts(body, write_buffers(out_of_band, writer))
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)

    for number, item in enumerate(items):
        try:
            data = encode(item)
        except PICKLE_ERRORS as error:
            raise TypeError(
                f"{word} {number} of a long list or dict cannot be pickled: {error}"
            ) from error
        starts.append(writer.used_bytes + len(chunk))
        chunk += data
        if len(chunk) >= _CHUNK_BYTES:
            flush()
    flush()
    length = len(starts)
    starts.append(writer.used_bytes)  # so that the table is never empty
    return RecordTable(length, writer.append(starts), tuple(others.values()))


class SharedList(Sequence[_T]):
    """A list or tuple whose items lie in shared memory, once for all processes.

    It reads like the original, with two differences. Each access to an item builds a new object, so
    that changing that object does not change the list. The list itself cannot be changed. It equals
    a list, tuple or ``SharedList`` with equal items. A slice is a view without memory of its own.
    The list is pickled as a handle. Reading a str of 100 characters takes about 0.5 µs.

    Args:
        segment: The segment that the items lie in.
        table: Where they lie.
        selected: Which of them are in the list; None for all.
    """

    def __init__(self, segment: Segment, table: RecordTable, selected: range | None = None) -> None:
        self._segment, self._table = segment, table
        self._range = range(table.length) if selected is None else selected
        self._data = memoryview(segment)
        self._starts = self._data[table.starts : table.starts + 8 * table.length].cast("q")

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedList, (self._segment, self._table, self._range)

    def _read(self, number: int) -> Any:
        item = pickle.loads(self._data[self._starts[number] :])  # which ends by itself
        return load_with_buffers(*item, self._segment) if type(item) is _Parts else item

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> Any:
        number = self._range[index]
        if type(number) is range:
            return SharedList(self._segment, self._table, number)
        return self._read(number)

    def __iter__(self) -> Iterator[_T]:
        return map(self._read, self._range)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SharedList | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __repr__(self) -> str:
        return f"<SharedList of {counted(len(self), 'item')}>"


#: Where the index of a dict's keys lies in its segment: the offsets of two tables of int64. The
#: first has the keys' codes, sorted, and the second the positions of the same keys in the dict.
KeyIndex = tuple[int, int]


def code_of(key: Any) -> int | None:
    """Return a number that is the same in every process, and for equal keys.

    It is None for a key that is not a str, bytes, an integer, None, or a tuple of these.
    """
    if isinstance(key, numbers.Integral):
        key = int(key)  # True, or one of numpy's
    return zlib.crc32(ascii(key).encode()) if _is_plain(key) else None


def _is_plain(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_plain, key))
    return type(key) in (str, int, bytes, type(None))


def write_index(keys: Iterable[object], writer: SegmentWriter) -> KeyIndex | None:
    """Write an index of keys; None if one of them has no code."""
    codes = list(map(code_of, keys))
    if None in codes or not codes:
        return None
    whole = np.array(codes, dtype=np.int64)
    order = np.argsort(whole, kind="stable").astype(np.int64, copy=False)
    return writer.append(whole[order]), writer.append(order)


class _Items(ItemsView[_K, _V]):
    _mapping: "SharedDict[_K, _V]"

    def __iter__(self) -> Iterator[tuple[_K, _V]]:
        return zip(self._mapping._keys, self._mapping._values, strict=True)  # without look-ups


class SharedDict(Mapping[_K, _V]):
    """A dict whose keys and values lie in shared memory, once for all processes.

    It reads like the original, in the same order, with two differences. Each access to a value
    builds a new object, and the dict cannot be changed. It is pickled as a handle. Keys that are
    str, bytes, integers, None, or tuples of these are found by an index in the same memory. If
    there are other keys, or another key is looked up, the process makes an ordinary dict of all
    keys. A key that is a NaN is not found, since the original object no longer exists.

    Args:
        segment: The segment that keys and values lie in.
        keys: Where the keys lie, in order.
        values: Where the values lie, in the same order.
        index: Index of the keys; None if a key has no code.
    """

    def __init__(
        self, segment: Segment, keys: RecordTable, values: RecordTable, index: KeyIndex | None
    ) -> None:
        self._arguments = segment, keys, values, index
        self._keys: SharedList[_K] = SharedList(segment, keys)
        self._values: SharedList[_V] = SharedList(segment, values)
        whole, nbytes = memoryview(segment), 8 * keys.length
        self._tables = [whole[at : at + nbytes].cast("q") for at in index or ()]

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedDict, self._arguments

    @functools.cached_property
    def _numbers(self) -> dict[Any, int]:
        """The number of each key's item, where the index does not serve."""
        return {key: number for number, key in enumerate(self._keys)}

    def _find(self, key: Any) -> int:
        """Return the number of a key's item; -1 if there is none."""
        code = code_of(key) if self._tables else None
        if code is None:
            return self._numbers.get(key, -1)
        codes, order = self._tables
        for position in range(bisect.bisect_left(codes, code), len(codes)):
            if codes[position] != code:
                break
            number: int = order[position]
            if self._keys[number] == key:
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

    def values(self) -> Any:
        """Return the values, in order."""
        return self._values

    def items(self) -> ItemsView[_K, _V]:
        """Return a view of the (key, value) pairs, like a dict's."""
        return _Items(self)

    def __repr__(self) -> str:
        return f"<SharedDict of {counted(len(self), 'item')}>"
