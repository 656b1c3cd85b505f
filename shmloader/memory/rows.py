"""Rows of an array, gathered into a batch."""

from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.writer import STREAM_BYTES, copy_rows

#: The dtypes of which torch.index_select gathers rows.
GATHERED_DTYPES = frozenset({
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
})  # fmt: skip


class RowsAt(NamedTuple):
    """Rows of a batch, where they lie in memory.

    Attributes:
        source: The rows, on the CPU. Strides are arbitrary, and rows may overlap.
        at: Which ones the batch has: an array of indices, or a slice.
        dtype: The dtype that they get.
    """

    source: torch.Tensor
    at: Any
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return tuple(self.source.shape[1:])

    def copy(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows in ``out``, or else in a new tensor. ``out`` is contiguous."""
        source, at, dtype = self
        if dtype is not source.dtype:
            return self._convert(out)
        if isinstance(at, slice):
            rows = source[at]
            if out is None:
                return rows.clone(memory_format=torch.contiguous_format)
            return out.copy_(rows)
        if out is not None and out.nbytes >= STREAM_BYTES and source[0].is_contiguous():
            # In 64 bits, since addresses are computed.
            step = source.stride(0) * source.itemsize
            if copy_rows((at.astype(np.int64) * step + source.data_ptr()).tolist(), out):
                return out
        if source.dtype not in GATHERED_DTYPES:
            return self._convert(out)
        # torch warns about a read-only array, such as indices that came in a message.
        index = torch.from_numpy(at if at.flags.writeable else at.copy())
        return torch.index_select(source, 0, index, out=out)

    def _convert(self, out: torch.Tensor | None) -> torch.Tensor:
        """Return the rows by NumPy, which has all dtypes, and writes to slots in less time."""
        rows = self.source.numpy()[self.at]
        if out is None:
            out = torch.empty(rows.shape, dtype=self.dtype, device="cpu")
        if out.itemsize < rows.itemsize:
            with np.errstate(over="ignore"):  # in torch, what is too large for a float is infinite
                out.numpy()[...] = rows
        else:
            out.numpy()[...] = rows
        return out
