"""Stores Python objects as records in a segment, with a table of where they begin.

Each record is a pickle of its own: unpickling a text, or a tuple of numbers and texts, takes
0.25 µs, less than any loop in Python. Tensors and large arrays lie outside the pickles, and an
object that is read has views of them.
"""

import pickle
from array import array
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


class RecordTable(NamedTuple):
    """Where the records of a list lie in their segment.

    Attributes:
        length: Number of records.
        starts: Offset of the table of each record's first byte; int64.
        others: Segments that items refer to, since parts of the items were shared before. They are
            kept alive here.
    """

    length: int
    starts: int
    others: tuple[Segment, ...] = ()


class _Parts(NamedTuple):
    """What is pickled for an item with out-of-band buffers.

    Attributes:
        body: The item's pickle.
        table: Where its buffers lie.
    """

    body: bytes
    table: BufferTable


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
        self._writer, self._writable, self._least_bytes = writer, writable, least_bytes
        self._chunk = bytearray()
        self._starts = array("q")
        self._others: dict[int, Segment] = {}
        self._reducers = batch_reducers()

    def add(self, item: object) -> None:
        """Write a record.

        Raises:
            Exception: What pickling it raises.
            SharedMemoryError: If there is not enough memory.
        """
        data = self._encode(item)
        self._starts.append(self._writer.used_bytes + len(self._chunk))
        self._chunk += data
        if len(self._chunk) >= _CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._writer.append(self._chunk, is_aligned=False)
        self._chunk.clear()

    def _encode(self, item: Any) -> bytes:
        kind = type(item)
        if kind not in _SIMPLE and not (kind is tuple and _SIMPLE.issuperset(map(type, item))):
            least = self._least_bytes
            body, out_of_band = dump(item, self._reduce, self._reducers, least_bytes=least)
            if not out_of_band.order:
                return body
            self._flush()
            item = _Parts(body, write_buffers(out_of_band, self._writer))
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)

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
        if type(value).__module__.partition(".")[0] == "torch":
            return reduce_tensor(value) or reduce_data(value, out_of_band)
        return NotImplemented

    def finish(self) -> RecordTable:
        """Write the table, and return where the records lie."""
        self._flush()
        length = len(self._starts)
        self._starts.append(self._writer.used_bytes)  # so that the table is never empty
        starts = self._writer.append(self._starts)
        return RecordTable(length, starts, tuple(self._others.values()))


def read_record(data: memoryview, segment: Segment) -> Any:
    """Return the object whose record begins here, as a new object."""
    item = pickle.loads(data)  # which ends by itself
    return load_with_buffers(*item, segment) if type(item) is _Parts else item
