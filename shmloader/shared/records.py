"""Python objects as records in a segment: a blob, a table of where each begins, one of kinds.

Texts, bytes, numbers, None, True and False are written as such. What else there is, is pickled,
each record by itself: a tuple of numbers and texts takes C's unpickler 0.25 µs, less than any loop
in Python. Arrays of some size, and tensors, lie beside the records, and a record that is read has
views of them.
"""

import enum
import functools
import io
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
    stays_in_band,
    write_buffers,
)
from shmloader.memory.encoder import OutOfBand, batch_dispatch_table, reduce_data
from shmloader.memory.segment import Segment, SegmentWriter
from shmloader.shared.arrays import array_over, reduce_tensor

# Records are written so many bytes at a time.
_CHUNK_BYTES = 1 << 20

_FLOAT = struct.Struct("<d")

# Of these, a pickle holds nothing that ought to lie beside it.
_SIMPLE = frozenset({str, bytes, int, float, bool, complex, type(None)})


class Kind(enum.IntEnum):
    """How a record is written."""

    TEXT = 0
    BYTES = 1
    INT = 2
    FLOAT = 3
    PICKLE = 4
    #: A pickle of a body, and of where the parts lie.
    PARTS = 5
    NONE = 6
    TRUE = 7
    FALSE = 8


_CONSTANTS = {Kind.NONE: None, Kind.TRUE: True, Kind.FALSE: False}

# Plain numbers for the reader: an enum's attributes take it as long as all the rest.
_TEXT, _BYTES, _INT, _PICKLE = map(int, (Kind.TEXT, Kind.BYTES, Kind.INT, Kind.PICKLE))
_FLOAT_KIND, _PARTS = int(Kind.FLOAT), int(Kind.PARTS)


class RecordsPlace(NamedTuple):
    """Where records lie in their segment.

    Attributes:
        length: How many.
        starts: Offset of the table of their first bytes; int64.
        ends: Offset of the table of the bytes after their last ones; int64.
        kinds: Offset of the table of their kinds; uint8.
        others: Segments that items have handles of: what was shared already. They last as long.
    """

    length: int
    starts: int
    ends: int
    kinds: int
    others: tuple[Segment, ...]


class _ItemPickler(pickle.Pickler):
    """Standard pickle, but tensors and arrays of some size leave the stream.

    Attributes:
        others: The segments that it comes upon, by their ids.
    """

    def __init__(self, file: io.BytesIO, parts: OutOfBand, *, writable: bool) -> None:
        stays = functools.partial(stays_in_band, out_of_band=parts)
        super().__init__(file, protocol=5, buffer_callback=stays)
        self.dispatch_table = batch_dispatch_table()
        self._parts = parts
        self._writable = writable
        self.others: dict[int, Segment] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Segment:
            self.others[id(value)] = value
            return NotImplemented
        if type(value) is np.ndarray and value.nbytes >= BULK_BYTES and not value.dtype.hasobject:
            is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
            order: Any = "F" if is_fortran else "C"
            data = np.asarray(value, order=order).ravel(order="K").view(np.uint8)
            fields = (value.dtype, value.shape, order, self._writable)
            return array_over, (pickle.PickleBuffer(data.data), *fields)
        if type(value).__module__ == "torch" or type(value).__module__.startswith("torch."):
            return reduce_tensor_of(value) or reduce_data(value, self._parts)
        return NotImplemented


def reduce_tensor_of(value: Any) -> Any:
    """A handle of a tensor that lies in a segment already; None of anything else."""
    return reduce_tensor(value) if hasattr(value, "untyped_storage") else None


class RecordWriter:
    """Writes records behind what a segment holds already.

    Args:
        writer: Of the segment; nobody else uses it until :meth:`finish`.
        writable: Whether arrays in the records may be written to, where they are read.
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

    def add(self, item: object) -> None:
        """Write one more.

        Raises:
            Exception: What pickling it raises.
            SharedMemoryError: If there is no memory for it.
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
        file, parts = io.BytesIO(), OutOfBand()
        pickler = _ItemPickler(file, parts, writable=self._writable)
        pickler.dump(item)
        self._others |= pickler.others
        if not parts.order:
            return file.getvalue(), Kind.PICKLE
        self._flush()
        self._is_dense = False
        table = write_buffers(parts, self._writer)
        self._base = self._writer.used_bytes
        body = (file.getvalue(), table.spans, table.order)
        return pickle.dumps(body, pickle.HIGHEST_PROTOCOL), Kind.PARTS

    def finish(self) -> RecordsPlace:
        """Write the tables."""
        self._flush()
        writer, count = self._writer, len(self._starts)
        if self._is_dense:
            # Each ends where the next begins: one table serves for both.
            self._starts.append(self._ends[-1] if count else self._base)
            starts = writer.append(self._starts)
            ends = starts + self._starts.itemsize
        else:
            starts, ends = writer.append(self._starts), writer.append(self._ends)
        kinds = writer.append(self._kinds)
        return RecordsPlace(count, starts, ends, kinds, tuple(self._others.values()))


class Records:
    """Records of a segment, to be read. Pickled as a handle."""

    __slots__ = ("_ends", "_kinds", "_place", "_segment", "_starts")

    def __init__(self, segment: Segment, place: RecordsPlace) -> None:
        whole = memoryview(segment)
        table_bytes = 8 * place.length
        self._segment = segment
        self._place = place
        self._starts = whole[place.starts : place.starts + table_bytes].cast("q")
        self._ends = whole[place.ends : place.ends + table_bytes].cast("q")
        self._kinds = whole[place.kinds : place.kinds + place.length]

    def __reduce__(self) -> tuple[Any, ...]:
        """A handle."""
        return Records, (self._segment, self._place)

    def __len__(self) -> int:
        """How many."""
        return self._place.length

    def __getitem__(self, number: int) -> Any:  # noqa: PLR0911 - one for each kind, the fast first
        """Read one, a new object each time. ``number`` is from 0 up to the count."""
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
        if kind == _PARTS:
            body, spans, order = pickle.loads(data)
            return load_with_buffers(body, BufferTable(spans, order), self._segment)
        return _CONSTANTS[Kind(kind)]

    def __iter__(self) -> Iterator[Any]:
        """All of them, in turn."""
        return map(self.__getitem__, range(self._place.length))

    def __reversed__(self) -> Iterator[Any]:
        """The same, the last one first."""
        return map(self.__getitem__, reversed(range(self._place.length)))
