"""Arrays and tensors over a segment: what is read-only, what is copied on write, how they cross.

An array is a :class:`SharedArray`, read-only unless it was shared as writable: writing raises,
with a hint. torch has no read-only tensors, and a write to memory that is mapped read-only would
end the process, so all memory is mapped copy-on-write: a write to a tensor stays in its process.

Both are pickled as handles, by multiprocessing or otherwise: an array by its own ``__reduce_ex__``,
whole or in part; a tensor by a reducer for multiprocessing's pickler, which takes the place of
torch's for tensors that lie in a segment. (By plain ``pickle``, a tensor is its data, as ever.)
"""

import functools
import multiprocessing.context
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from shmloader.memory.bulk import address_of, storage_at
from shmloader.memory.codec import PartialStorage, rebuild_tensor
from shmloader.memory.encoder import is_plain
from shmloader.memory.segment import Segment, find_segment

_HINT = (
    "it lies in memory that shmloader.share() has made for all processes. Change a copy "
    "(array.copy()), or share(..., writable=True): then each process has what it writes to itself"
)

_TENSORS = (torch.Tensor, torch.nn.Parameter)

# Methods that write, but for those that are operators or ufuncs.
_WRITERS = ("fill", "itemset", "partition", "put", "setfield", "sort")


class SharedArray(np.ndarray):
    """An array over shared memory; what is computed of it is an ordinary array.

    A view of it is one, too, and like it pickled as a handle. A copy is ordinary memory.
    """

    # Below ndarray's, so that what both go into is an ordinary array.
    __array_priority__ = -100.0

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write, where that is allowed.

        Raises:
            ValueError: If the array is read-only.
        """
        if not self.flags.writeable:
            raise ValueError(f"assignment destination is read-only: {_HINT}")
        super().__setitem__(key, value)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **options: Any
    ) -> Any:
        """Compute on ordinary arrays over the same memory.

        Raises:
            ValueError: If the result was to be written to a read-only array.
        """
        if any(isinstance(one, SharedArray) and not one.flags.writeable for one in out):
            raise ValueError(f"output array is read-only: {_HINT}")
        if method == "at" and isinstance(inputs[0], SharedArray) and not inputs[0].flags.writeable:
            raise ValueError(f"array is read-only: {_HINT}")
        if out:
            options["out"] = tuple(map(_ordinary, out))
        if "where" in options:
            options["where"] = _ordinary(options["where"])
        result = getattr(ufunc, method)(*map(_ordinary, inputs), **options)
        return out[0] if len(out) == 1 and result is options["out"][0] else result

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """What numpy's functions give, as an ordinary array."""
        ordinary = _ordinary(array)
        return ordinary[()] if return_scalar else ordinary

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a handle; the data, if it is a copy.

        The data, too, of an array that may be written to, but for a process that is started with
        it: what this process wrote is not in the memory that the others see.
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


def _refusing(name: str) -> Callable[..., Any]:
    plain = getattr(np.ndarray, name, None)

    def write(self: SharedArray, *args: Any, **options: Any) -> Any:
        if not self.flags.writeable:
            raise ValueError(f"assignment destination is read-only: {_HINT}")
        assert plain is not None
        return plain(self, *args, **options)

    write.__name__, write.__doc__ = name, getattr(plain, "__doc__", None)
    return write


# torch's default_convert tells an array by these, and makes a tensor of it, or none of texts.
SharedArray.__module__, SharedArray.__name__ = np.ndarray.__module__, np.ndarray.__name__

for _name in _WRITERS:
    if hasattr(np.ndarray, _name):
        setattr(SharedArray, _name, _refusing(_name))


def open_array(
    segment: Segment,
    offset: int,
    dtype: "np.dtype[Any]",
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    is_writable: bool,
) -> SharedArray:
    """The array at an offset of a segment, in bytes. Called by pickle, too."""
    array = SharedArray(shape, dtype, segment, offset, strides)
    array.flags.writeable = is_writable
    return array


def array_over(
    memory: Any, dtype: "np.dtype[Any]", shape: tuple[int, ...], order: Any, is_writable: bool
) -> SharedArray:
    """The array that fills a piece of a segment's memory. Called by pickle."""
    array = SharedArray(shape, dtype, memory, 0, order=order)
    array.flags.writeable = is_writable
    return array


def open_tensor(segment: Segment, start: int, nbytes: int, fields: tuple[Any, ...]) -> torch.Tensor:
    """The tensor whose storage is these bytes of a segment. Called by pickle."""
    enable_tensor_handles()  # it may go on from here
    return rebuild_tensor(PartialStorage(storage_at(segment, start, nbytes), 0), *fields)


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """Pickle a handle of a tensor that lies in a segment; None of any other, or of a subclass."""
    if type(tensor) not in _TENSORS or not is_plain(tensor):
        return None
    if tensor.requires_grad and not tensor.is_leaf:
        return None
    storage = tensor.untyped_storage()
    segment = find_segment(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    if segment is None:
        return None
    fields = (
        tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
        tensor.requires_grad, type(tensor) is torch.nn.Parameter,
    )  # fmt: skip
    start = storage.data_ptr() - segment.address
    return open_tensor, (segment, start, storage.nbytes(), fields)


def enable_tensor_handles() -> None:
    """Have multiprocessing pickle tensors in segments as handles, in this process."""
    registered: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    for kind in _TENSORS:
        plain = registered.get(kind)
        if plain is not None and not isinstance(plain, _TensorReducer):
            ForkingPickler.register(kind, _TensorReducer(plain))


class _TensorReducer:
    """Ours for a tensor in a segment, torch's for any other."""

    def __init__(self, plain: Callable[[Any], Any]) -> None:
        self._plain = plain
        # Passes for torch's wherever these are left out, as they are for batches.
        functools.update_wrapper(self, plain)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return reduce_tensor(tensor) or self._plain(tensor)
