"""Arrays and tensors over a segment.

Unless it was shared as writable, an array is read-only. torch has no read-only tensors, and a write
to memory that is mapped read-only would end the process. So all memory is mapped copy-on-write: a
write to a tensor stays in its process.

What lies in a segment is found by its address. Reducers in multiprocessing's pickler reduce it to a
handle; plain ``pickle`` copies the data, as always.
"""

import functools
import multiprocessing.context
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from shmloader.memory.pickled import (
    PartialStorage,
    is_plain,
    rebuild_tensor,
    storage_over,
    tensor_fields,
)
from shmloader.memory.segment import Segment, address_of, find_segment

_TENSORS = (torch.Tensor, torch.nn.Parameter)


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
    segment: Segment,
    offset: int,
    dtype: "np.dtype[Any]",
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    is_writable: bool,
) -> "np.ndarray[Any, Any]":
    """Return the array at an offset of a segment, in bytes. Called by pickle."""
    enable_handles()  # it may be sent on from this process
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, segment, offset, strides)
    array.flags.writeable = is_writable
    return array


def array_over(
    memory: Any, dtype: "np.dtype[Any]", shape: tuple[int, ...], order: Any, is_writable: bool
) -> "np.ndarray[Any, Any]":
    """Return an array over a buffer of a segment. Called by pickle."""
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, memory, 0, order=order)
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
        if plain is not None and not isinstance(plain, _TensorReducer):
            ForkingPickler.register(kind, _TensorReducer(plain))


def _reduce_array(array: "np.ndarray[Any, Any]") -> Any:
    # With the protocol of multiprocessing's pickler.
    return reduce_array(array) or array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


class _TensorReducer:
    """Reduces a tensor in a segment to a handle, and any other with torch's reducer."""

    def __init__(self, plain: Callable[[Any], Any]) -> None:
        self._plain = plain
        # Looks like torch's reducer, so that it is left out for batches, as torch's is.
        functools.update_wrapper(self, plain)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return reduce_tensor(tensor) or self._plain(tensor)
