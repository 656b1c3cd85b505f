"""Places any picklable batch in its slot: the worker's half of the general way.

What lies in the slot already is only named, everything else is copied in.
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

# Writable: for a read-only buffer pickle would want a memoryview of what we put in its place.
_EMPTY = bytearray()

# Start of a storage's span is rounded down to this where views of several dtypes share it.
_WIDEST_ITEM = 16


class _Storage:
    """What is known of one storage while a batch is encoded."""

    __slots__ = ("end", "index", "itemsizes", "keep", "start")

    def __init__(self, index: int, keep: torch.UntypedStorage) -> None:
        self.index = index
        self.keep = keep  # its address must not be used again meanwhile
        self.start: int | None = None
        self.end = 0
        self.itemsizes: set[int] = set()

    def add(self, start: Any, end: Any, itemsize: int) -> None:
        """Note that bytes ``start`` to ``end`` are needed."""
        self.start = start if self.start is None else min(self.start, start)
        self.end = max(self.end, end)
        self.itemsizes.add(itemsize)

    def span(self) -> tuple[int, int]:
        """First byte that is needed, and how many from there on; maybe none."""
        start = self.start or 0
        if len(self.itemsizes) > 1:
            start -= start % _WIDEST_ITEM
        return start, max(0, self.end - start)


class Parts:
    """What was taken out of a pickle's stream.

    The pickler refers to it, never the other way round: a cycle would hold the slot's memory
    until the garbage collector finds it.
    """

    def __init__(self) -> None:
        self.storages: dict[int, _Storage] = {}
        self.buffers: list[tuple[int, pickle.PickleBuffer]] = []
        self.order: list[int] = []
        self._marks: dict[int, tuple[pickle.PickleBuffer, int]] = {}
        self._count = 0

    def storage(self, storage: torch.UntypedStorage) -> _Storage:
        """The one entry of a storage."""
        key = storage._cdata
        known = self.storages.get(key)
        if known is None:
            known = self.storages[key] = _Storage(self._count, storage)
            self._count += 1
        return known

    def mark(self, storage: _Storage) -> pickle.PickleBuffer:
        """A buffer that stands for a storage in the stream."""
        mark = pickle.PickleBuffer(_EMPTY)
        self._marks[id(mark)] = (mark, storage.index)
        return mark

    def is_mark(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stands for a storage."""
        return id(buffer) in self._marks

    def out_of_band(self, buffer: pickle.PickleBuffer) -> None:
        """Pickle's callback for each buffer, in the order of the stream."""
        mark = self._marks.get(id(buffer))
        if mark is not None:
            self.order.append(mark[1])
        else:
            self.buffers.append((self._count, buffer))
            self.order.append(self._count)
            self._count += 1


def reduce_data(value: Any, parts: Parts) -> Any:
    """The reduction of a CPU tensor, storage or array; NotImplemented for the rest."""
    kind = type(value)
    if kind in _TENSOR_TYPES:
        if is_plain(value):
            return _reduce_tensor(value, parts)
        if value.layout in _SPARSE and value.device.type == "cpu":
            return _reduce_sparse(value)
    elif kind is np.ndarray:
        return _reduce_array(value)
    elif kind is torch.UntypedStorage:
        if value.device.type == "cpu":
            storage = parts.storage(value)
            storage.add(0, value.nbytes(), 1)
            return rebuild_storage, (parts.mark(storage),)
    elif kind is torch.TypedStorage and value._untyped_storage.device.type == "cpu":
        return rebuild_typed_storage, (value._untyped_storage, value.dtype)
    return NotImplemented


def _check_leaf(tensor: torch.Tensor) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a tensor that requires_grad and is not a leaf cannot leave its process, since "
            "autograd does not cross processes: detach() it in the dataset or collate_fn"
        )


def _reduce_tensor(tensor: torch.Tensor, parts: Parts) -> tuple[Callable[..., object], Any]:
    _check_leaf(tensor)
    storage = parts.storage(tensor.untyped_storage())
    item = tensor.element_size()
    shape, stride = tuple(tensor.shape), tensor.stride()
    first = tensor.storage_offset()
    if tensor.numel():
        last = first + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        storage.add(first * item, (last + 1) * item, item)
    return rebuild_tensor, (
        parts.mark(storage), tensor.dtype, shape, stride, first,
        tensor.requires_grad, type(tensor) is torch.nn.Parameter,
    )  # fmt: skip


def _reduce_sparse(tensor: torch.Tensor) -> tuple[Callable[..., object], Any]:
    """As its dense parts. torch's own unpickling keeps each sparse tensor in a list for ever."""
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
    """Out of band only what then looks as torch's loader gives it.

    That pickles in-band, by an older protocol: arrays become writable, of native byte order,
    and in C order unless they are contiguous in Fortran's.
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
    """Whether a tensor is dtype, shape and strides over memory of the CPU, and nothing else."""
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
    """multiprocessing's reducers, without torch's: these share a descriptor for each storage."""
    extra = {
        kind: reducer
        for kind, reducer in ForkingPickler._extra_reducers.items()  # type: ignore[attr-defined]
        if not reducer.__module__.startswith("torch.")
    }
    return {**copyreg.dispatch_table, **extra}


class _StandardPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, parts: Parts) -> None:
        super().__init__(file, protocol=5, buffer_callback=parts.out_of_band)
        self._parts = parts
        self.dispatch_table = batch_dispatch_table()

    def reducer_override(self, value: object) -> Any:
        return reduce_data(value, self._parts)


class _ClosurePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def __init__(self, file: io.BytesIO, parts: Parts) -> None:
        super().__init__(file, protocol=5, buffer_callback=parts.out_of_band)
        self._parts = parts

    def reducer_override(self, value: object) -> Any:
        reduced = reduce_data(value, self._parts)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def encode(batch: object, writer: SlotWriter, *, by_value: bool, spill_bytes: int) -> PickledLayout:
    """Place a batch in the slot of the task in work, and say where each part lies.

    Runs in the worker, once a task. What collate already put into the slot is not copied again.

    Args:
        batch: Any picklable value.
        writer: After collate has used it.
        by_value: Whether cloudpickle may help where pickle cannot name a class or function.
        spill_bytes: A body longer than this goes into the slot, too.

    Raises:
        TypeError: If part of the batch cannot be pickled; names that part.
        SharedMemoryError: If it does not fit the slot.
    """
    try:
        body, parts = _dump(_StandardPickler, batch)
    except Exception as error:
        if not by_value:
            raise _explain(batch, error) from error
        try:
            body, parts = _dump(_ClosurePickler, batch)
        except Exception as second:
            raise _explain(batch, second) from second
    spans: dict[int, Span] = {}
    named: list[tuple[int, int]] = []
    for storage in parts.storages.values():
        spans[storage.index] = _place_storage(storage, writer, named)
    for index, buffer in parts.buffers:
        spans[index] = _place_buffer(buffer, writer, named)
    return PickledLayout(
        body if len(body) <= spill_bytes else writer.put(body),
        tuple(spans[index] for index in range(len(spans))),
        tuple(parts.order),
    )


def _dump(
    pickler: "type[_StandardPickler | _ClosurePickler]", value: object
) -> tuple[bytes, Parts]:
    file, parts = io.BytesIO(), Parts()
    pickler(file, parts).dump(value)
    return file.getvalue(), parts


def _place_storage(storage: _Storage, writer: SlotWriter, named: list[tuple[int, int]]) -> Span:
    start, nbytes = storage.span()
    if nbytes == 0:
        return Span(0, 0, start)
    return Span(_place(storage.keep.data_ptr() + start, nbytes, writer, named), nbytes, start)


def _place_buffer(
    buffer: pickle.PickleBuffer, writer: SlotWriter, named: list[tuple[int, int]]
) -> Span:
    raw = buffer.raw()
    if raw.nbytes == 0:
        return Span(0, 0, -1)
    address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
    return Span(_place(address, raw.nbytes, writer, named), raw.nbytes, -1)


def _place(address: int, nbytes: int, writer: SlotWriter, named: list[tuple[int, int]]) -> int:
    """Offset of these bytes: where they lie, or where they are copied to.

    What lies in the slot is named once. Another part that shares its bytes by other means than
    a storage of torch's (an array and its tensor) is copied, as it is by torch's loader.
    """
    offset = writer.offset_of(address, nbytes)
    if offset is None or any(offset < end and start < offset + nbytes for start, end in named):
        return writer.put_memory(address, nbytes)
    named.append((offset, offset + nbytes))
    return offset


def _explain(batch: object, error: Exception) -> Exception:
    """The error for a batch that cannot be pickled, naming the part."""
    if isinstance(error, MemoryError):
        return error
    path, part = _find_unpicklable(batch)
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    return TypeError(
        f"a batch cannot be sent from its worker: {path} is a {kind} and cannot be pickled "
        f"({type(error).__name__}: {error}). Return something picklable from the dataset or "
        "collate_fn."
    )


def _find_unpicklable(batch: object) -> tuple[str, object]:
    """Walk down to the innermost part that fails by itself."""
    path, part = "batch", batch
    for _ in range(20):  # deep enough for any batch; ends a structure that holds itself
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
