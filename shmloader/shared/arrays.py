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
