"""Pickles values for other processes, with the data of their tensors and arrays outside the pickle.

Tensors and arrays leave the pickle as out-of-band buffers; the body keeps the structure and refers
to the buffers in order. One way serves all that is pickled for other processes: batches, datasets
and functions, and the items of :func:`shmloader.share` (:mod:`shmloader.memory.segment`).

A batch that is pickled lies in its slot: :func:`write_batch` writes it in the worker, and a
:class:`PickledReader` builds it. Data that lies in the slot already is only referred to.

The module is long because each kind of data has a function that reduces it, and one that rebuilds.
"""

import copyreg
import io
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from shmloader.memory.arena import Slot
from shmloader.memory.flat import COPY_OUT_BYTES
from shmloader.memory.writer import SlotWriter

#: What pickling raises for an object that cannot be pickled.
PICKLE_ERRORS = (TypeError, AttributeError, pickle.PicklingError)

# Stands for the bytes of a storage in a pickle. It is writable, since for a read-only buffer pickle
# would make a read-only view of what replaces it.
_MARK = pickle.PickleBuffer(bytearray())

# The start of a storage's span is rounded down to a multiple of this many bytes: views of any dtype
# may share the storage.
_WIDEST_ITEM = 16


#: One buffer in a slot or a segment: its offset in bytes, a multiple of 64, except for pieces of an
#: array that a collate function put into the slot; its length; and which byte of a tensor's storage
#: is its first, or -1 for a plain buffer.
Span = tuple[int, int, int]


class PartialStorage(NamedTuple):
    """The bytes of a storage that pickled tensors need, and the offset of the first one in it."""

    storage: torch.UntypedStorage
    first_byte: int


class OutOfBand:
    """The buffers and storages that were taken out of a pickle.

    The pickler refers to this object, never the other way round: a cycle would hold the slot's
    memory until the garbage collector finds it.

    Attributes:
        order: For each out-of-band buffer of the pickle, in turn, the index of the storage or
            buffer that it stands for.

    Args:
        least_bytes: Smaller buffers stay in the pickle.
    """

    def __init__(self, least_bytes: int = 0) -> None:
        self._least_bytes = least_bytes
        self.order: list[int] = []
        # Buffers; and storages, each with the range of bytes that the pickle's tensors need.
        self._parts: list[Any] = []
        self._storages: dict[int, int] = {}  # indices, by their C address

    def mark(self, tensor: torch.Tensor) -> pickle.PickleBuffer:
        """Return a buffer that stands for a tensor's storage, the next one that is pickled."""
        storage = tensor.untyped_storage()
        index = self._storages.setdefault(storage._cdata, len(self._parts))
        if index == len(self._parts):
            self._parts.append((storage, storage.nbytes(), 0))
        if tensor.numel():
            _, start, end = self._parts[index]
            item, first = tensor.element_size(), tensor.storage_offset()
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = first + sum((length - 1) * stride for length, stride in steps)
            start = min(start, first * item // _WIDEST_ITEM * _WIDEST_ITEM)
            self._parts[index] = storage, start, max(end, (last + 1) * item)
        self.order.append(index)
        return _MARK

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer out of the pickle; return True if it stays there.

        As ``buffer_callback``, it is called in the order of the buffers.
        """
        if buffer is _MARK:
            return False
        if buffer.raw().nbytes < self._least_bytes:
            return True
        self.order.append(len(self._parts))
        self._parts.append(buffer)
        return False

    def write(self, put: Callable[[int, int], int]) -> tuple[Span, ...]:
        """Put each buffer somewhere, and return where they lie, in the order of their indices.

        Args:
            put: Called with the address and the length of bytes. Returns their offset.
        """
        spans = []
        for part in self._parts:
            if isinstance(part, tuple):
                storage, first, end = part
                address, nbytes = storage.data_ptr() + first, end - first
                if not end:
                    nbytes = first = 0
            else:
                raw = np.frombuffer(part.raw(), np.uint8) if part.raw().nbytes else np.empty(0)
                address, nbytes, first = raw.__array_interface__["data"][0], raw.nbytes, -1
            spans.append((put(address, nbytes) if nbytes else 0, nbytes, first))
        return tuple(spans)


#: Returns a value's reduction; NotImplemented for pickle's own.
Reduce = Callable[[Any, OutOfBand], Any]


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Standard pickle, which refers to functions and classes by name, or cloudpickle.

    Writes to ``file``. See :func:`dump` for the other arguments.
    """

    def __init__(
        self,
        file: Any,
        reduce: Reduce,
        parts: OutOfBand,
        reducers: Mapping[type, Any],
        *,
        by_value: bool,
    ) -> None:
        self._reduce, self._parts, self._by_value = reduce, parts, by_value
        base: Any = cloudpickle.Pickler.dispatch_table if by_value else copyreg.dispatch_table
        self.dispatch_table = {**base, **reducers}
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=parts.add)

    def reducer_override(self, value: Any) -> Any:
        """Return a value's reduction. Called by pickle."""
        reduced = self._reduce(value, self._parts)
        if reduced is NotImplemented and self._by_value and type(value) not in self.dispatch_table:
            return super().reducer_override(value)
        return reduced


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
    Pickler(file, reduce, parts, reducers, by_value=by_value).dump(value)
    return file.getvalue(), parts


def load(body: Any, buffers: Sequence[Any], order: Sequence[int]) -> Any:
    """Unpickle a body, with the buffers that lie outside it. The user's objects may raise."""
    # torch keeps each sparse tensor that is unpickled until its next torch.load(), to check it.
    kept: list[object] = getattr(torch._utils, "_sparse_tensors_to_validate", [])
    before = len(kept)
    try:
        return pickle.loads(body, buffers=[buffers[index] for index in order])
    finally:
        del kept[before:]


def reducers_of_multiprocessing(*, with_torch: bool) -> dict[type, Any]:
    """Return multiprocessing's reducers. Those of torch's send a descriptor for each storage."""
    return {
        kind: reducer
        for kind, reducer in ForkingPickler._extra_reducers.items()  # type: ignore[attr-defined]
        if kind is not np.ndarray and (with_torch or not reducer.__module__.startswith("torch."))
    }


def reduce_data(value: Any, parts: OutOfBand) -> Any:
    """Return the reduction of a CPU tensor, storage or array; NotImplemented for other values."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _reduce_tensor(value, parts)
    if kind is np.ndarray:
        return _reduce_array(value)
    if kind is torch.UntypedStorage and value.device.type == "cpu":
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value)
        return operator.attrgetter("storage"), (parts.mark(whole),)
    return NotImplemented


def _reduce_tensor(tensor: torch.Tensor, parts: OutOfBand) -> Any:
    if not is_plain(tensor) and (tensor.layout is torch.strided or not tensor.is_cpu):
        return NotImplemented
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a tensor that requires grad and is not a leaf cannot be sent to another process. "
            "detach() it in the dataset or collate_fn: autograd does not cross processes."
        )
    if tensor.layout is not torch.strided:
        return tensor.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # of its plain tensors
    return rebuild_tensor, (parts.mark(tensor), *tensor_fields(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a dtype, a shape and strides over CPU memory."""
    is_odd = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    is_cpu = tensor.layout is torch.strided and tensor.is_cpu
    return is_cpu and not is_odd and not tensor._is_zerotensor()


def tensor_fields(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the arguments of :func:`rebuild_tensor` after the storage."""
    return (
        tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
        tensor.requires_grad, type(tensor) is torch.nn.Parameter,
    )  # fmt: skip


def _reduce_array(array: "np.ndarray[Any, Any]") -> Any:
    """Return the reduction of an array; NotImplemented if pickle's own gives what torch yields.

    torch's loader pickles in-band, with an older protocol: arrays become writable, of native byte
    order, and C-ordered unless they are Fortran-contiguous.
    """
    kind, flags = array.dtype, array.flags
    if kind.hasobject or not array.size:
        return array.__reduce__()
    is_native = kind.isnative or kind.names is not None
    if is_native and flags.writeable and (flags.c_contiguous or flags.f_contiguous):
        return NotImplemented
    order: Any = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    copy = np.array(array, dtype=kind if is_native else kind.newbyteorder("="), order=order)
    return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def rebuild_tensor(
    partial: PartialStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    storage_offset: int,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """Make a tensor over a partial storage. Called by pickle in the receiving process."""
    is_empty = 0 in shape or partial.storage.nbytes() == 0
    offset = 0 if is_empty else storage_offset - partial.first_byte // dtype.itemsize
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(partial.storage, offset, shape, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def storage_over(memory: Any, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage over bytes of a buffer, which it keeps alive."""
    if nbytes == 0:
        return torch.UntypedStorage(0)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)
    storage = flat.untyped_storage()
    storage._shmloader_memory = memory  # type: ignore[attr-defined]  # as in FlatReader.read()
    return storage


class PickledLayout(NamedTuple):
    """Where a pickled batch lies.

    Attributes:
        body: The pickle, or its (offset, nbytes) if it lies in the slot as well.
        spans: The buffers.
        order: For each out-of-band buffer of the body, in turn, the index of its span.
    """

    body: "bytes | tuple[int, int]"
    spans: tuple[Span, ...]
    order: tuple[int, ...]


def pickle_batch(batch: object) -> tuple[bytes, OutOfBand]:
    """Pickle a batch. Returns the pickle, and what lies outside it. May raise anything.

    cloudpickle is tried where pickle cannot import a class or function.
    """
    reducers = reducers_of_multiprocessing(with_torch=False)
    try:
        return dump(batch, reduce_data, reducers)
    except PICKLE_ERRORS:
        return dump(batch, reduce_data, reducers, by_value=True)


def write_batch(
    pickled: tuple[bytes, OutOfBand], writer: SlotWriter, *, spill_bytes: int
) -> PickledLayout:
    """Write a pickled batch to the slot of the current task, and return where each buffer lies.

    Runs in the worker, once per task. What collate already put into the slot is not copied again.

    Args:
        pickled: What :func:`pickle_batch` returned.
        writer: Writer of the task's slot, after collate has used it.
        spill_bytes: A body longer than this goes into the slot as well.

    Raises:
        SharedMemoryError: If the batch does not fit the slot.
    """
    body, parts = pickled
    used: list[tuple[int, int]] = []

    def put(address: int, nbytes: int) -> int:
        # Bytes in the slot are used for one span only. Another buffer that shares them, but not a
        # torch storage (an array and its tensor), is copied, as with torch's loader.
        offset = writer.offset_of(address, nbytes)
        if offset is None or any(offset < end and at < offset + nbytes for at, end in used):
            return writer.put(address, nbytes)
        used.append((offset, offset + nbytes))
        return offset

    spans = parts.write(put)
    nbytes = len(body)
    sent = body if nbytes <= spill_bytes else (writer.put(body, nbytes), nbytes)
    return PickledLayout(sent, spans, tuple(parts.order))


class PickledReader:
    """Builds the batches of one pickled layout in the main process.

    Attributes:
        layout: The layout.
        lends: Whether the batch has a buffer that is large enough to be lent.
    """

    def __init__(self, layout: PickledLayout) -> None:
        self.layout = layout
        self.lends = any(nbytes > COPY_OUT_BYTES for _, nbytes, _ in layout.spans)

    def read(self, slot: Slot, lease: object | None) -> object:
        """Build the batch: large buffers become views of the lease, or are copied without one.

        Raises:
            Exception: Whatever the user's objects raise when they are unpickled.
        """
        body: Any = self.layout.body
        if not isinstance(body, bytes):
            body = slot.memory[body[0] : body[0] + body[1]]
        _, spans, order = self.layout
        return load(body, [_open_span(span, slot, lease) for span in spans], order)


def _open_span(span: Span, slot: Slot, lease: Any) -> object:
    offset, nbytes, first_byte = span
    if lease is None or nbytes <= COPY_OUT_BYTES:
        lease, offset = np.ndarray(nbytes, np.uint8, slot.memory, offset).copy(), 0
    return open_span(lease, offset, nbytes, first_byte)


def open_span(home: Any, offset: int, nbytes: int, first_byte: int) -> object:
    """Return bytes of a buffer as pickle needs them: as a part of a storage, or as a memoryview."""
    if first_byte < 0:
        return memoryview(home).cast("B")[offset : offset + nbytes]
    return PartialStorage(storage_over(home, offset, nbytes), first_byte)
