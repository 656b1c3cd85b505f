"""Rows of an array, gathered into a batch.

The compiled part goes over each row once: it converts numbers while it copies them to the slot, and
fetches the next rows meanwhile. Without it, torch and NumPy gather.
"""

import math
from array import array
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.compiled import gather_fields as _gather_fields
from shmloader.memory.writer import ROW_BYTES, STREAM_BYTES

_Array = np.ndarray[Any, np.dtype[Any]]

#: The dtypes of which torch.index_select gathers rows.
GATHERED_DTYPES = frozenset({
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
})  # fmt: skip

# The letters of dtypes that the compiled part may convert, as in module struct.
_LETTERS = {
    torch.int8: "b", torch.int16: "h", torch.int32: "i", torch.int64: "q",
    torch.uint8: "B", torch.uint16: "H", torch.uint32: "I",
    torch.float32: "f", torch.float64: "d",
}  # fmt: skip

#: For rows that indices name: there is nothing to find.
DIRECT = (0,) * 6

# Larger batches outside of slots are left to torch, which gathers them on several threads.
_ALONE_BYTES = 1 << 20


class RowSource:
    """The rows of an array, of which batches are gathered. Threads may share it.

    Args:
        tensor: The rows, on the CPU. Strides are arbitrary, and rows may overlap.
        dtype: The dtype that batches get; None for that of the rows.

    Attributes:
        tensor: The rows.
        dtype: The dtype that batches get.
        shape: The shape of a row.
    """

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self.tensor, self.dtype = tensor, dtype or tensor.dtype
        self.shape = tuple(tensor.shape[1:])
        self._given = dtype
        # Shows whether the tensor still has the memory and the strides that it has now.
        self._memory = tensor.detach()
        # Numbers for the compiled part: bytes between rows, a row's elements, and kinds of these.
        self._rows: tuple[int, int, int, int] | None = None
        count, step = math.prod(self.shape), tensor.stride(0) * tensor.itemsize
        if tensor.requires_grad or not tensor[:1].is_contiguous():
            return
        if self.dtype is tensor.dtype:
            self._rows = step, count * tensor.itemsize, ord("B"), ord("B")
        elif tensor.dtype in _LETTERS and self.dtype in _LETTERS:
            self._rows = step, count, ord(_LETTERS[tensor.dtype]), ord(_LETTERS[self.dtype])

    def present(self) -> "RowSource":
        """Return this, or the source of what the user's tensor has become since."""
        tensor, memory = self.tensor, self._memory
        is_same = tensor.dtype is memory.dtype and tensor.is_set_to(memory)
        if is_same and not tensor.requires_grad:
            return self
        changed = RowSource(tensor, self._given)
        changed._rows = None  # it may have fewer rows, which only torch would notice
        return changed

    def write(self, at: Any, address: int) -> bool:
        """Copy the rows of these indices to an address, past the caches if they are large.

        Returns False, and does nothing, if the compiled part cannot do that.
        """
        entry = None if isinstance(at, slice) or not len(at) else self.entry(address, len(at))
        if _gather_fields is None or entry is None:
            return False
        return _gather_fields(0, array("q", entry), len(at), np.ascontiguousarray(at))

    def entry(
        self, offset: int, number: int, finder: tuple[int, ...] = DIRECT
    ) -> tuple[int, ...] | None:
        """Return an entry in the compiled part's table of fields; None if it cannot copy them.

        Args:
            offset: Where the copies of the rows lie, in bytes.
            number: How many rows a batch has.
            finder: See :class:`RowsAt`.
        """
        if self._rows is None:
            return None
        is_same, nbytes = self.dtype is self.tensor.dtype, self._rows[1]
        streams = is_same and nbytes >= ROW_BYTES and number * nbytes >= STREAM_BYTES
        return offset, self.tensor.data_ptr(), *self._rows, streams, *finder

    def copy(self, at: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of these indices, or of a slice, in ``out``, or else in a new tensor.

        ``out`` is contiguous.
        """
        source, is_slice = self.tensor, isinstance(at, slice)
        converts = self.dtype is not source.dtype
        if is_slice and not converts:
            rows = source[at]
            if out is None:
                return rows.clone(memory_format=torch.contiguous_format)
            return out.copy_(rows)
        made = out
        if made is None and self._rows is not None and not is_slice:
            made = torch.empty((len(at), *self.shape), dtype=self.dtype, device="cpu")
            if not converts and made.nbytes > _ALONE_BYTES:
                made = None
        if made is not None and self.write(at, made.data_ptr()):
            return made
        if converts or source.dtype not in GATHERED_DTYPES:
            return self._convert(at, out)
        # torch warns about a read-only array, such as indices that came in a message.
        index = torch.from_numpy(at if at.flags.writeable else at.copy())
        return torch.index_select(source, 0, index, out=out)

    def _convert(self, at: Any, out: torch.Tensor | None) -> torch.Tensor:
        """Return the rows by NumPy, which has all dtypes, and writes to slots in less time."""
        rows = self.tensor.numpy()[at]
        if out is None:
            out = torch.empty(rows.shape, dtype=self.dtype, device="cpu")
        if out.itemsize < rows.itemsize:
            with np.errstate(over="ignore"):  # in torch, what is too large for a float is infinite
                out.numpy()[...] = rows
        else:
            out.numpy()[...] = rows
        return out


class RowsAt(NamedTuple):
    """The rows of a batch, where they lie in memory.

    Attributes:
        source: All rows.
        at: Which ones the batch has: an array of int32 or int64, or a slice.
        finder: How they were found from the batch's indices: the last numbers of an entry in the
            table of fields of the compiled part.
    """

    source: RowSource
    at: Any
    finder: tuple[int, ...] = DIRECT


class RepeatedGather:
    """Gathers batches like one that was gathered before, all fields by one call.

    Attributes:
        count: Number of rows of each batch.

    Args:
        found: The fields of the batch before.
        offsets: Where each field lies in the batch, in bytes.
        keep: What has the memory that ``found`` names only by addresses.
    """

    def __init__(self, found: list[RowsAt], offsets: list[int], keep: object) -> None:
        self.count, self._keep = len(found[0].at), keep
        self._sources = [one.source for one in found]
        entries = [
            one.source.entry(offset, self.count, one.finder)
            for one, offset in zip(found, offsets, strict=True)
        ]
        self._table = None if None in entries else np.array(entries, np.int64)
        self._data = [source.tensor.data_ptr() for source in self._sources]

    def write(self, at: _Array, address: int) -> bool:
        """Gather the rows of as many indices to an address.

        Returns False if that cannot be done; what is written then is undefined.
        """
        if self._table is None or _gather_fields is None:
            return False
        for source, data in zip(self._sources, self._data, strict=True):
            if source.tensor.data_ptr() != data or source.present() is not source:
                return False
        return _gather_fields(address, self._table, self.count, at)
