"""Stores Python objects as records in a segment, with tables of their positions and kinds.

Str, bytes, int, float, bool and None are written as such. Any other object is pickled, each record
by itself: unpickling a tuple of numbers and strings takes 0.25 µs, less than any loop in Python.
Tensors and large arrays lie outside the records, and an object that is read has views of them.
"""

import enum
import pickle
import struct
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shmloader.memory.bulk import (
    BULK_BYTES,
    BufferTable,
    load_with_buffers,
    write_buffers,
)
from shmloader.memory.pickler import OutOfBand, batch_reducers, dump, reduce_data
from shmloader.memory.segment import Segment, SegmentWriter
from shmloader.shared.arrays import array_over, reduce_tensor

# Bytes of records that are written at a time.
_CHUNK_BYTES = 1 << 20

_FLOAT = struct.Struct("<d")

# The pickle of a tuple of these has no out-of-band buffers.
_SIMPLE = frozenset({str, bytes, int, float, bool, complex, type(None)})


class Kind(enum.IntEnum):
    """How a record is encoded."""

    TEXT = 0
    BYTES = 1
    INT = 2
    FLOAT = 3
    PICKLE = 4
    #: A pickle of a body and of where its out-of-band buffers lie.
    OUT_OF_BAND = 5
    NONE = 6
    TRUE = 7
    FALSE = 8


_CONSTANTS = {Kind.NONE: None, Kind.TRUE: True, Kind.FALSE: False}

# Plain ints for the reader, since looking up an enum's member takes as long as reading a record.
_TEXT, _BYTES, _INT, _PICKLE = map(int, (Kind.TEXT, Kind.BYTES, Kind.INT, Kind.PICKLE))
_FLOAT_KIND, _OUT_OF_BAND = int(Kind.FLOAT), int(Kind.OUT_OF_BAND)


class RecordTables(NamedTuple):
    """Where the tables of records lie in their segment.

    Attributes:
        length: Number of records.
        starts: Offset of the table of each record's first byte; int64.
        ends: Offset of the table of the byte after each record; int64.
        kinds: Offset of the table of their kinds; uint8.
        others: Segments that items refer to, since parts of the items were shared before. They are
            kept alive here.
    """

    length: int
    starts: int
    ends: int
    kinds: int
    others: tuple[Segment, ...]


class RecordWriter:
    """Appends records to a segment.

    Args:
        writer: Writer of the segment, which must not be used otherwise until :meth:`finish`.
        writable: Whether arrays in the records are writable when they are read.
    """

    def __init__(self, writer: SegmentWriter, *, writable: bool) -> None:
        self._writer = writer
        self._writable = writable
        self._chunk = bytearray()
        self._base = writer.used_bytes
        self._starts = array("q")
        self._ends = array("q")
        self._kinds = bytearray()
        self._is_dense = True
        self._others: dict[int, Segment] = {}
        self._reducers = batch_reducers()

    def add(self, item: object) -> None:
        """Write a record.

        Raises:
            Exception: What pickling it raises.
            SharedMemoryError: If there is not enough memory.
        """
        data, kind = self._encode(item)
        start = self._base + len(self._chunk)
        self._chunk += data
        self._starts.append(start)
        self._ends.append(start + len(data))
        self._kinds.append(kind)
        if len(self._chunk) >= _CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._writer.append(self._chunk, is_aligned=False)
        self._chunk.clear()
        self._base = self._writer.used_bytes

    def _encode(self, item: Any) -> tuple[bytes, Kind]:  # noqa: PLR0911 - one for each kind
        kind = type(item)
        if kind is str:
            return item.encode("utf-8", "surrogatepass"), Kind.TEXT
        if kind is bytes:
            return item, Kind.BYTES
        if item is None or item is True or item is False:
            constant = {None: Kind.NONE, True: Kind.TRUE, False: Kind.FALSE}
            return b"", constant[item]
        if kind is int:
            nbytes = (item.bit_length() + 8) // 8
            return item.to_bytes(nbytes, "little", signed=True), Kind.INT
        if kind is float:
            return _FLOAT.pack(item), Kind.FLOAT
        if kind is tuple and _SIMPLE.issuperset(map(type, item)):
            return pickle.dumps(item, pickle.HIGHEST_PROTOCOL), Kind.PICKLE
        body, out_of_band = dump(item, self._reduce, self._reducers, least_bytes=BULK_BYTES)
        if not out_of_band.order:
            return body, Kind.PICKLE
        self._flush()
        self._is_dense = False
        table = write_buffers(out_of_band, self._writer)
        self._base = self._writer.used_bytes
        record = (body, table.spans, table.order)
        return pickle.dumps(record, pickle.HIGHEST_PROTOCOL), Kind.OUT_OF_BAND

    def _reduce(self, value: Any, out_of_band: OutOfBand) -> Any:
        """Reduce tensors and large arrays of an item, so that their data lie beside the pickle."""
        if type(value) is Segment:
            self._others[id(value)] = value
            return NotImplemented
        if type(value) is np.ndarray and value.nbytes >= BULK_BYTES and not value.dtype.hasobject:
            is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
            order: Any = "F" if is_fortran else "C"
            data = np.asarray(value, order=order).ravel(order="K").view(np.uint8)
            fields = (value.dtype, value.shape, order, self._writable)
            return array_over, (pickle.PickleBuffer(data.data), *fields)
        if type(value).__module__ == "torch" or type(value).__module__.startswith("torch."):
            return reduce_tensor(value) or reduce_data(value, out_of_band)
        return NotImplemented

    def finish(self) -> RecordTables:
        """Write the tables, and return where they lie."""
        self._flush()
        writer, count = self._writer, len(self._starts)
        if self._is_dense:
            # Each record ends where the next begins, so one table serves for both.
            self._starts.append(self._ends[-1] if count else self._base)
            starts = writer.append(self._starts)
            ends = starts + self._starts.itemsize
        else:
            starts, ends = writer.append(self._starts), writer.append(self._ends)
        kinds = writer.append(self._kinds)
        return RecordTables(count, starts, ends, kinds, tuple(self._others.values()))


class Records:
    """Reads the records of a segment. Pickled as a handle."""

    __slots__ = ("_ends", "_kinds", "_segment", "_starts", "_tables")

    def __init__(self, segment: Segment, tables: RecordTables) -> None:
        whole = memoryview(segment)
        table_bytes = 8 * tables.length
        self._segment = segment
        self._tables = tables
        self._starts = whole[tables.starts : tables.starts + table_bytes].cast("q")
        self._ends = whole[tables.ends : tables.ends + table_bytes].cast("q")
        self._kinds = whole[tables.kinds : tables.kinds + tables.length]

    def __reduce__(self) -> tuple[Any, ...]:
        return Records, (self._segment, self._tables)

    def __len__(self) -> int:
        return self._tables.length

    @property
    def is_simple(self) -> bool:
        """Whether no record is pickled, so that reading one runs no other code."""
        kinds = bytes(self._kinds)
        return _PICKLE not in kinds and _OUT_OF_BAND not in kinds

    def __getitem__(self, number: int) -> Any:  # noqa: PLR0911 - one for each kind, the fast first
        """Read a record, as a new object each time. ``number`` must not be negative."""
        data = self._segment[self._starts[number] : self._ends[number]]
        kind = self._kinds[number]
        if kind == _TEXT:
            return data.decode("utf-8", "surrogatepass")
        if kind == _PICKLE:
            return pickle.loads(data)
        if kind == _BYTES:
            return data
        if kind == _INT:
            return int.from_bytes(data, "little", signed=True)
        if kind == _FLOAT_KIND:
            return _FLOAT.unpack(data)[0]
        if kind == _OUT_OF_BAND:
            body, spans, order = pickle.loads(data)
            return load_with_buffers(body, BufferTable(spans, order), self._segment)
        return _CONSTANTS[Kind(kind)]

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(self._tables.length))

    def __reversed__(self) -> Iterator[Any]:
        return map(self.__getitem__, reversed(range(self._tables.length)))
