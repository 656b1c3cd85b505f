"""Pickles values with the data of their tensors and arrays outside the pickle.

One way serves all that is pickled for other processes: batches, datasets and functions, and the
items of :func:`shmloader.share`. They differ in which reductions they use beside that of
:func:`reduce_data`, and in whether small buffers stay in the pickle.
"""

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import numpy as np
import torch

from shmloader.memory.codec import (
    Span,
    rebuild_array,
    rebuild_sparse,
    rebuild_storage,
    rebuild_tensor,
    rebuild_typed_storage,
)

#: What pickling raises for an object that cannot be pickled.
PICKLE_ERRORS = (TypeError, AttributeError, pickle.PicklingError)

_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)

_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)

# Writable, since for a read-only buffer pickle would make a read-only view of what replaces it.
_EMPTY = bytearray()

# The start of a storage's span is rounded down to a multiple of this many bytes where views of
# several dtypes share the storage.
_WIDEST_ITEM = 16


class Storage:
    """The bytes of one storage that the tensors of a batch need."""

    __slots__ = ("end", "index", "itemsizes", "keep", "start")

    def __init__(self, index: int, keep: torch.UntypedStorage) -> None:
        self.index = index
        self.keep = keep  # kept alive, so that its address is not reused
        self.start: int | None = None
        self.end = 0
        self.itemsizes: set[int] = set()

    def add(self, start: Any, end: Any, itemsize: int) -> None:
        """Note that bytes ``start`` to ``end`` are needed."""
        self.start = start if self.start is None else min(self.start, start)
        self.end = max(self.end, end)
        self.itemsizes.add(itemsize)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Note that the bytes of a tensor's elements are needed."""
        if tensor.numel():
            item, first = tensor.element_size(), tensor.storage_offset()
            last = first + sum(
                (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
            )
            self.add(first * item, (last + 1) * item, item)

    def span(self) -> tuple[int, int]:
        """Return the first byte that is needed, and the number of bytes, which may be 0."""
        start = self.start or 0
        if len(self.itemsizes) > 1:
            start -= start % _WIDEST_ITEM
        return start, max(0, self.end - start)


class OutOfBand:
    """The buffers and storages that were taken out of a pickle.

    The pickler refers to this object, never the other way round: a cycle would hold the slot's
    memory until the garbage collector finds it.

    Attributes:
        storages: The storages, by their C address.
        buffers: Other buffers, each with its index.
        order: For each out-of-band buffer of the pickle, in turn, the index of the storage or
            buffer that it stands for.

    Args:
        least_bytes: Smaller buffers stay in the pickle.
    """

    def __init__(self, least_bytes: int = 0) -> None:
        self._least_bytes = least_bytes
        self.storages: dict[int, Storage] = {}
        self.buffers: list[tuple[int, pickle.PickleBuffer]] = []
        self.order: list[int] = []
        self._marks: dict[int, tuple[pickle.PickleBuffer, int]] = {}
        self._count = 0

    def storage(self, storage: torch.UntypedStorage) -> Storage:
        """Return the entry of a storage, which the first call makes."""
        key = storage._cdata
        known = self.storages.get(key)
        if known is None:
            known = self.storages[key] = Storage(self._count, storage)
            self._count += 1
        return known

    def mark(self, storage: Storage) -> pickle.PickleBuffer:
        """Return a buffer that stands for a storage in the pickle."""
        mark = pickle.PickleBuffer(_EMPTY)
        self._marks[id(mark)] = (mark, storage.index)
        return mark

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer out of the pickle; return True if it stays there.

        As ``buffer_callback``, it is called in the order of the buffers.
        """
        mark = self._marks.get(id(buffer))
        if mark is not None:
            self.order.append(mark[1])
        elif buffer.raw().nbytes < self._least_bytes:
            return True
        else:
            self.buffers.append((self._count, buffer))
            self.order.append(self._count)
            self._count += 1
        return False

    def place(self, put: Callable[[int, int], int]) -> tuple[Span, ...]:
        """Put each buffer somewhere, and return where they lie, in the order of their indices.

        Args:
            put: Called with the address and the length of bytes. Returns their offset.
        """
        spans: dict[int, Span] = {}
        for storage in self.storages.values():
            start, nbytes = storage.span()
            offset = put(storage.keep.data_ptr() + start, nbytes) if nbytes else 0
            spans[storage.index] = Span(offset, nbytes, start)
        for index, buffer in self.buffers:
            raw = buffer.raw()
            address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0] if raw else 0
            spans[index] = Span(put(address, raw.nbytes) if raw else 0, raw.nbytes, -1)
        return tuple(spans[index] for index in range(len(spans)))


#: Returns a value's reduction; NotImplemented for pickle's own.
Reduce = Callable[[Any, OutOfBand], Any]


class PlainPickler(pickle.Pickler):
    """Standard pickle, which refers to functions and classes by name.

    Args:
        file: Gets the pickle.
        reduce: Called for each object first.
        parts: Gets what lies outside the pickle.
        reducers: Reducers by type, besides those of ``copyreg``.
    """

    def __init__(
        self, file: Any, reduce: Reduce, parts: OutOfBand, reducers: Mapping[type, Any]
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=parts.take)
        self.dispatch_table = {**copyreg.dispatch_table, **reducers}
        self._reduce, self._parts = reduce, parts

    def reducer_override(self, value: Any) -> Any:
        """Return a value's reduction. Called by pickle."""
        return self._reduce(value, self._parts)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """cloudpickle, with the arguments of :class:`PlainPickler`."""

    def __init__(
        self, file: Any, reduce: Reduce, parts: OutOfBand, reducers: Mapping[type, Any]
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=parts.take)
        self._reduce, self._parts, self._reducers = reduce, parts, reducers

    def reducer_override(self, value: Any) -> Any:
        """Return a value's reduction. Called by pickle."""
        reduced = self._reduce(value, self._parts)
        if reduced is not NotImplemented:
            return reduced
        reducer = self._reducers.get(type(value))
        return super().reducer_override(value) if reducer is None else reducer(value)


def dump(
    value: object,
    reduce: Reduce,
    reducers: Mapping[type, Any],
    *,
    by_value: bool = False,
    least_bytes: int = 0,
) -> tuple[bytes, OutOfBand]:
    """Pickle a value. Returns the pickle, and what lies outside it.

    Args:
        value: The value.
        reduce: Called for each object first.
        reducers: Reducers by type, besides those of ``copyreg``.
        by_value: Whether to use cloudpickle.
        least_bytes: Smaller buffers stay in the pickle.
    """
    file, parts = io.BytesIO(), OutOfBand(least_bytes)
    (ByValuePickler if by_value else PlainPickler)(file, reduce, parts, reducers).dump(value)
    return file.getvalue(), parts


def reduce_data(value: Any, out_of_band: OutOfBand) -> Any:
    """Return the reduction of a CPU tensor, storage or array; NotImplemented for other values."""
    kind = type(value)
    if kind in _TENSOR_TYPES:
        if is_plain(value):
            return _reduce_tensor(value, out_of_band)
        if value.layout in _SPARSE and value.device.type == "cpu":
            return _reduce_sparse(value)
    elif kind is np.ndarray:
        return _reduce_array(value)
    elif kind is torch.UntypedStorage:
        if value.device.type == "cpu":
            storage = out_of_band.storage(value)
            storage.add(0, value.nbytes(), 1)
            return rebuild_storage, (out_of_band.mark(storage),)
    elif kind is torch.TypedStorage and value._untyped_storage.device.type == "cpu":
        return rebuild_typed_storage, (value._untyped_storage, value.dtype)
    return NotImplemented


def _check_leaf(tensor: torch.Tensor) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a tensor that requires_grad and is not a leaf cannot be sent to another process, "
            "since autograd does not cross processes: detach() it in the dataset or collate_fn"
        )


def _reduce_tensor(
    tensor: torch.Tensor, out_of_band: OutOfBand
) -> tuple[Callable[..., object], Any]:
    _check_leaf(tensor)
    storage = out_of_band.storage(tensor.untyped_storage())
    storage.add_tensor(tensor)
    return rebuild_tensor, (out_of_band.mark(storage), *tensor_fields(tensor))


def tensor_fields(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the arguments of :func:`rebuild_tensor` after the storage."""
    return (
        tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
        tensor.requires_grad, type(tensor) is torch.nn.Parameter,
    )  # fmt: skip


def _reduce_sparse(tensor: torch.Tensor) -> tuple[Callable[..., object], Any]:
    """Reduce to dense tensors: torch's own unpickling keeps sparse tensors in a list forever."""
    _check_leaf(tensor)
    grad, tensor = tensor.requires_grad, tensor.detach()
    is_coalesced = None
    if tensor.layout is torch.sparse_coo:
        is_coalesced = tensor.is_coalesced()
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return rebuild_sparse, (parts, tuple(tensor.shape), tensor.layout, is_coalesced, grad)


def _reduce_array(array: "np.ndarray[Any, Any]") -> Any:
    """Return the reduction of an array, such that the user gets what torch's loader yields.

    torch's loader pickles in-band, with an older protocol: arrays become writable, of native byte
    order, and C-ordered unless they are Fortran-contiguous. NotImplemented if pickle does the same
    by itself.
    """
    kind, flags = array.dtype, array.flags
    if kind.hasobject or not array.size:
        return array.__reduce__()
    is_native = kind.isnative or kind.names is not None
    if is_native and flags.writeable and (flags.c_contiguous or flags.f_contiguous):
        return NotImplemented
    order: Any = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    copy = np.array(array, dtype=kind if is_native else kind.newbyteorder("="), order=order)
    return rebuild_array, (copy,)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a dtype, a shape and strides over CPU memory."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def batch_reducers() -> dict[type, Any]:
    """Return multiprocessing's reducers without torch's, which send a descriptor per storage."""
    return {
        kind: reducer
        for kind, reducer in ForkingPickler._extra_reducers.items()  # type: ignore[attr-defined]
        if not reducer.__module__.startswith("torch.")
    }
