"""Stores Python objects as records in a segment, with tables of their positions and kinds.

Str and bytes are written as such. Any other object is pickled, each record by itself: unpickling a
tuple of numbers and strings takes 0.25 µs, less than any loop in Python. Tensors and large arrays
lie outside the records, and an object that is read has views of them.
"""

import pickle
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shmloader.memory.pickled import OutOfBand, batch_reducers, dump, reduce_data
from shmloader.memory.segment import (
    BULK_BYTES,
    BufferTable,
    Segment,
    SegmentWriter,
    load_with_buffers,
    write_buffers,
)
from shmloader.shared.arrays import array_over, reduce_tensor

# Bytes of records that are written at a time.
_CHUNK_BYTES = 1 << 20

# The pickle of these, or of a tuple of these, has no out-of-band buffers.
_SIMPLE = frozenset({str, bytes, int, float, bool, complex, type(None)})


# How a record is encoded. The last kind is a pickle of a body and of where its buffers lie.
_TEXT, _BYTES, _PICKLE, _OUT_OF_BAND = range(4)


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
        least_bytes: Smaller arrays are copied when they are read; any other is a view.
    """

    def __init__(
        self, writer: SegmentWriter, *, writable: bool, least_bytes: int = BULK_BYTES
    ) -> None:
        self._writer = writer
        self._least_bytes = least_bytes
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

    def _encode(self, item: Any) -> tuple[bytes, int]:
        kind = type(item)
        if kind is str:
            return item.encode("utf-8", "surrogatepass"), _TEXT
        if kind is bytes:
            return item, _BYTES
        if kind in _SIMPLE or (kind is tuple and _SIMPLE.issuperset(map(type, item))):
            return pickle.dumps(item, pickle.HIGHEST_PROTOCOL), _PICKLE
        body, out_of_band = dump(item, self._reduce, self._reducers, least_bytes=self._least_bytes)
        if not out_of_band.order:
            return body, _PICKLE
        self._flush()
        self._is_dense = False
        table = write_buffers(out_of_band, self._writer)
        self._base = self._writer.used_bytes
        record = (body, table.spans, table.order)
        return pickle.dumps(record, pickle.HIGHEST_PROTOCOL), _OUT_OF_BAND

    def _reduce(self, value: Any, out_of_band: OutOfBand) -> Any:
        """Reduce tensors and large arrays of an item, so that their data lie beside the pickle."""
        if type(value) is Segment:
            self._others[id(value)] = value
            return NotImplemented
        is_array = type(value) is np.ndarray and not value.dtype.hasobject
        if is_array and value.nbytes >= self._least_bytes:
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

    def __getitem__(self, number: int) -> Any:
        """Read a record, as a new object each time. ``number`` must not be negative."""
        data = self._segment[self._starts[number] : self._ends[number]]
        kind = self._kinds[number]
        if kind == _TEXT:
            return data.decode("utf-8", "surrogatepass")
        if kind == _PICKLE:
            return pickle.loads(data)
        if kind == _BYTES:
            return data
        body, spans, order = pickle.loads(data)
        return load_with_buffers(body, BufferTable(spans, order), self._segment)

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(self._tables.length))

    def __reversed__(self) -> Iterator[Any]:
        return map(self.__getitem__, reversed(range(self._tables.length)))
