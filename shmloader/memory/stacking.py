"""Stacking samples into the slot: ``torch.stack(…, out=…)``, but past the caches where it pays.

A batch that is larger than the caches is not in them any more when the main process, or a GPU,
reads it. Writing it through them only costs: each line is read before it is overwritten, and
the samples are pushed out. Streaming stores halve that traffic (:mod:`_streaming`, a few lines
of C). They lose where the batch would have stayed in the cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_copy_rows: Callable[[int, list[int], int], None] | None
try:
    from shmloader.memory._streaming import copy_rows as _copy_rows
except ImportError:  # installed without a compiler
    _copy_rows = None

#: Batches from this many bytes on are streamed. Between the size of a core's own cache (2 MiB
#: on servers) and 16 MiB the two ways take turns in being faster.
STREAM_BYTES = 8 << 20

# Shorter rows are not worth the look at each tensor.
_ROW_BYTES = 16 << 10

_Tensor = torch.Tensor


def stack_into(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``torch.stack(tensors, 0, out=out)``.

    Args:
        tensors: Of any dtypes and shapes; torch's errors hold.
        out: Contiguous, of the result's shape, in memory that is not to be cached.

    Raises:
        RuntimeError: As torch.stack does.
    """
    nbytes = out.numel() * out.element_size()
    if nbytes >= STREAM_BYTES and _copy_rows is not None and _are_alike(tensors, out):
        row_bytes = nbytes // len(tensors)
        rows = list(map(_Tensor.data_ptr, tensors))
        if row_bytes >= _ROW_BYTES and 0 not in rows:
            _copy_rows(out.data_ptr(), rows, row_bytes)
            return
    torch.stack(tensors, 0, out=out)  # type: ignore[arg-type]


def stream_rows(
    first: int, indices: "np.ndarray[Any, np.dtype[np.intp]]", row_bytes: int, out: int
) -> bool:
    """Gather rows past the caches, if there are so many bytes of them that it pays.

    Args:
        first: Address of row 0; the others follow without a gap.
        indices: Which rows.
        row_bytes: Length of a row.
        out: Address of their place.

    Returns:
        Whether it was done.
    """
    if _copy_rows is None or row_bytes < _ROW_BYTES or row_bytes * len(indices) < STREAM_BYTES:
        return False
    _copy_rows(out, (indices * row_bytes + first).tolist(), row_bytes)
    return True


def _are_alike(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Whether stacking is nothing but copying bytes."""
    return (
        {type(tensor) for tensor in tensors} == {_Tensor}
        and {tensor.dtype for tensor in tensors} == {out.dtype}
        and {tensor.shape for tensor in tensors} == {out.shape[1:]}
        and all(map(_Tensor.is_contiguous, tensors))
        and all(tensor.is_cpu for tensor in tensors)
        and not any(tensor.requires_grad for tensor in tensors)
        and not any(map(_Tensor.is_conj, tensors))
        and not any(map(_Tensor.is_neg, tensors))
    )
