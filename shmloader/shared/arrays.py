"""Arrays and tensors over a segment.

An array is a :class:`SharedArray`. Unless it was shared as writable, it is read-only. torch has no
read-only tensors, and a write to memory that is mapped read-only would end the process. So all
memory is mapped copy-on-write: a write to a tensor stays in its process.

Both are pickled as handles. An array or a view of it has its own ``__reduce_ex__``. For tensors
that lie in a segment, a reducer replaces torch's in multiprocessing's pickler; plain ``pickle``
copies a tensor's data, as always.
"""

import functools
import multiprocessing.context
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


class SharedArray(np.ndarray):
    """An array over shared memory. Results computed from it are ordinary arrays.

    A view is a ``SharedArray`` as well, and also pickled as a handle. A copy is ordinary memory.
    """

    # Below ndarray's, so that an operation on both kinds gives an ordinary array.
    __array_priority__ = -100.0

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **options: Any
    ) -> Any:
        """Compute on ordinary arrays over the same memory."""
        if method == "at" and not inputs[0].flags.writeable:  # which NumPy does not check
            raise ValueError("array is read-only")
        if out:
            options["out"] = tuple(map(_ordinary, out))
        if "where" in options:
            options["where"] = _ordinary(options["where"])
        result = getattr(ufunc, method)(*map(_ordinary, inputs), **options)
        return out[0] if len(out) == 1 else result

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        ordinary = _ordinary(array)
        return ordinary[()] if return_scalar else ordinary

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a handle, or the data if the array is a copy.

        A writable array is pickled with its data, too, since what this process wrote to it is not
        in the memory that other processes see. Only a process that is started with the array gets a
        handle.
        """
        is_starting = multiprocessing.context.get_spawning_popen() is not None
        has_handle = self.size > 0 and (is_starting or not self.flags.writeable)
        segment = find_segment(*address_of(self)) if has_handle else None
        if segment is None:
            return np.array(self, copy=True, subok=False).__reduce_ex__(protocol)
        offset = self.__array_interface__["data"][0] - segment.address
        return open_array, (
            segment, offset, self.dtype, self.shape, self.strides, bool(self.flags.writeable),
        )  # fmt: skip


def _ordinary(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, SharedArray) else value


# torch's default_convert recognizes an array by these, and makes a tensor of it unless it holds
# strings.
SharedArray.__module__, SharedArray.__name__ = np.ndarray.__module__, np.ndarray.__name__


def open_array(
    segment: Segment,
    offset: int,
    dtype: "np.dtype[Any]",
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    is_writable: bool,
) -> SharedArray:
    """Return the array at an offset of a segment, in bytes. Also called by pickle."""
    array = SharedArray(shape, dtype, segment, offset, strides)
    array.flags.writeable = is_writable
    return array


def array_over(
    memory: Any, dtype: "np.dtype[Any]", shape: tuple[int, ...], order: Any, is_writable: bool
) -> SharedArray:
    """Return an array over a buffer of a segment. Called by pickle."""
    array = SharedArray(shape, dtype, memory, 0, order=order)
    array.flags.writeable = is_writable
    return array


def open_tensor(segment: Segment, start: int, nbytes: int, fields: tuple[Any, ...]) -> torch.Tensor:
    """Return the tensor whose storage is these bytes of a segment. Called by pickle."""
    enable_tensor_handles()  # it may be sent on from this process
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


def enable_tensor_handles() -> None:
    """Make multiprocessing in this process pickle tensors in segments as handles."""
    registered: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    for kind in _TENSORS:
        plain = registered.get(kind)
        if plain is not None and not isinstance(plain, _TensorReducer):
            ForkingPickler.register(kind, _TensorReducer(plain))


class _TensorReducer:
    """Reduces a tensor in a segment to a handle, and any other with torch's reducer."""

    def __init__(self, plain: Callable[[Any], Any]) -> None:
        self._plain = plain
        # Looks like torch's reducer, so that it is left out for batches, as torch's is.
        functools.update_wrapper(self, plain)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return reduce_tensor(tensor) or self._plain(tensor)
