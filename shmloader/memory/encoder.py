"""Places any picklable batch in its slot: the worker's half of :mod:`shmloader.memory.codec`.

Data that lies in the slot already is only referred to. All other data is copied into it.
"""

import copyreg
import io
import pickle
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import numpy as np
import torch

from shmloader.grammar import with_article
from shmloader.memory.codec import (
    PickledLayout,
    Span,
    rebuild_array,
    rebuild_compressed,
    rebuild_coo,
    rebuild_storage,
    rebuild_tensor,
    rebuild_typed_storage,
)
from shmloader.memory.slot_writer import SlotWriter
from shmloader.probing import probe

_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)

_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)

# Writable, since for a read-only buffer pickle would make a read-only view of what replaces it.
_EMPTY = bytearray()

# The start of a storage's span is rounded down to a multiple of this many bytes where views of
# several dtypes share the storage.
_WIDEST_ITEM = 16


class _Storage:
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
    """

    def __init__(self) -> None:
        self.storages: dict[int, _Storage] = {}
        self.buffers: list[tuple[int, pickle.PickleBuffer]] = []
        self.order: list[int] = []
        self._marks: dict[int, tuple[pickle.PickleBuffer, int]] = {}
        self._count = 0

    def storage(self, storage: torch.UntypedStorage) -> _Storage:
        """Return the entry of a storage, which the first call makes."""
        key = storage._cdata
        known = self.storages.get(key)
        if known is None:
            known = self.storages[key] = _Storage(self._count, storage)
            self._count += 1
        return known

    def mark(self, storage: _Storage) -> pickle.PickleBuffer:
        """Return a buffer that stands for a storage in the pickle."""
        mark = pickle.PickleBuffer(_EMPTY)
        self._marks[id(mark)] = (mark, storage.index)
        return mark

    def is_mark(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stands for a storage."""
        return id(buffer) in self._marks

    def take(self, buffer: pickle.PickleBuffer) -> None:
        """Take a buffer out of the pickle. As ``buffer_callback``, it is called in order."""
        mark = self._marks.get(id(buffer))
        if mark is not None:
            self.order.append(mark[1])
        else:
            self.buffers.append((self._count, buffer))
            self.order.append(self._count)
            self._count += 1


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
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        is_coalesced = tensor.is_coalesced()
        return rebuild_coo, (tensor._indices(), tensor._values(), shape, is_coalesced, grad)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        outer, inner = tensor.crow_indices(), tensor.col_indices()
    else:
        outer, inner = tensor.ccol_indices(), tensor.row_indices()
    return rebuild_compressed, (outer, inner, tensor.values(), shape, tensor.layout, grad)


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


def batch_dispatch_table() -> dict[type, Any]:
    """Return multiprocessing's reducers without torch's, which send a descriptor per storage."""
    extra = {
        kind: reducer
        for kind, reducer in ForkingPickler._extra_reducers.items()  # type: ignore[attr-defined]
        if not reducer.__module__.startswith("torch.")
    }
    return {**copyreg.dispatch_table, **extra}


class _StandardPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, out_of_band: OutOfBand) -> None:
        super().__init__(file, protocol=5, buffer_callback=out_of_band.take)
        self._out_of_band = out_of_band
        self.dispatch_table = batch_dispatch_table()

    def reducer_override(self, value: object) -> Any:
        return reduce_data(value, self._out_of_band)


class _ClosurePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def __init__(self, file: io.BytesIO, out_of_band: OutOfBand) -> None:
        super().__init__(file, protocol=5, buffer_callback=out_of_band.take)
        self._out_of_band = out_of_band

    def reducer_override(self, value: object) -> Any:
        reduced = reduce_data(value, self._out_of_band)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def encode(batch: object, writer: SlotWriter, *, by_value: bool, spill_bytes: int) -> PickledLayout:
    """Place a batch in the slot of the current task, and return where each buffer lies.

    Runs in the worker, once per task. What collate already put into the slot is not copied again.

    Args:
        batch: Any picklable value.
        writer: Writer of the task's slot, after collate has used it.
        by_value: Whether to fall back to cloudpickle, for classes and functions that pickle cannot
            import.
        spill_bytes: A body longer than this goes into the slot as well.

    Raises:
        TypeError: If part of the batch cannot be pickled; names that part.
        SharedMemoryError: If the batch does not fit the slot.
    """
    try:
        body, out_of_band = _dump(_StandardPickler, batch)
    except Exception as error:
        if not by_value:
            raise _explain(batch, error) from error
        try:
            body, out_of_band = _dump(_ClosurePickler, batch)
        except Exception as second:
            raise _explain(batch, second) from second
    spans: dict[int, Span] = {}
    taken: list[tuple[int, int]] = []
    for storage in out_of_band.storages.values():
        spans[storage.index] = _place_storage(storage, writer, taken)
    for index, buffer in out_of_band.buffers:
        spans[index] = _place_buffer(buffer, writer, taken)
    return PickledLayout(
        body if len(body) <= spill_bytes else writer.put(body),
        tuple(spans[index] for index in range(len(spans))),
        tuple(out_of_band.order),
    )


def _dump(
    pickler: "type[_StandardPickler | _ClosurePickler]", value: object
) -> tuple[bytes, OutOfBand]:
    file, out_of_band = io.BytesIO(), OutOfBand()
    pickler(file, out_of_band).dump(value)
    return file.getvalue(), out_of_band


def _place_storage(storage: _Storage, writer: SlotWriter, taken: list[tuple[int, int]]) -> Span:
    start, nbytes = storage.span()
    if nbytes == 0:
        return Span(0, 0, start)
    return Span(_place(storage.keep.data_ptr() + start, nbytes, writer, taken), nbytes, start)


def _place_buffer(
    buffer: pickle.PickleBuffer, writer: SlotWriter, taken: list[tuple[int, int]]
) -> Span:
    raw = buffer.raw()
    if raw.nbytes == 0:
        return Span(0, 0, -1)
    address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
    return Span(_place(address, raw.nbytes, writer, taken), raw.nbytes, -1)


def _place(address: int, nbytes: int, writer: SlotWriter, taken: list[tuple[int, int]]) -> int:
    """Return the offset of these bytes in the slot, after copying them there if need be.

    Bytes in the slot are used for one span only; ``taken`` lists them. Another buffer that shares
    them, but not a torch storage (an array and its tensor), is copied, as with torch's loader.
    """
    offset = writer.offset_of(address, nbytes)
    if offset is None or any(offset < end and start < offset + nbytes for start, end in taken):
        return writer.put_memory(address, nbytes)
    taken.append((offset, offset + nbytes))
    return offset


def _explain(batch: object, error: Exception) -> Exception:
    """Return the error for a batch that cannot be pickled; it names the part."""
    if isinstance(error, MemoryError):
        return error
    path, part = _find_unpicklable(batch)
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    return TypeError(
        f"a batch cannot be sent from its worker: {path} is {with_article(kind)} and cannot be "
        f"pickled ({type(error).__name__}: {error}). Return something picklable from the dataset "
        "or collate_fn."
    )


def _find_unpicklable(batch: object) -> tuple[str, object]:
    """Return the path and the value of the innermost part that cannot be pickled by itself."""
    path, part = "batch", batch
    for _ in range(20):  # deep enough for any batch; stops in a structure that contains itself
        for name, child in _children(part):
            try:
                _dump(_StandardPickler, child)
            except Exception:  # noqa: BLE001 - this is the search
                path, part = path + name, child
                break
        else:
            break
    return path, part


def _children(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    return [(f".{name}", child) for name, child in probe(value, "__dict__", {}).items()]
