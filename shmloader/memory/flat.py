"""Flat batches: batches of tensors, arrays and numbers that need no pickle.

Where the collate function is torch's own ``default_collate`` and a sample is a tensor, an array, a
number, or a tuple, list or dict of these, the worker does not build the batch: :class:`FlatPacker`
stacks the fields straight into the slot and describes them by a :class:`FlatLayout`, from which
:class:`FlatReader` builds the batch in the main process. Where samples turn out to be irregular,
:meth:`FlatPacker.pack` returns None. The batch is then collated by torch, whose errors are the ones
that the user sees, and pickled (:mod:`shmloader.memory.pickled`), as all other batches are.
"""

import math
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.arena import Slot, align
from shmloader.memory.writer import STREAM_BYTES, SlotWriter, stack_into

#: A field of at most this many bytes is copied out of the slot, so that a kept label does not
#: hold a slot of megabytes.
COPY_OUT_BYTES = 64 * 1024

#: Containers of a flat batch: a bare tensor, a list, a dict.
BARE, LIST, DICT = 0, 1, 2

_Tensor = torch.Tensor

# The dtype of a field, and its shape in a sample.
_Kind = tuple[torch.dtype, tuple[int, ...]]

# Two keys of these types are equal only if they are the same; 1, True and 1.0 are equal.
_KEY_TYPES = frozenset({str, int})

# The kinds of array that numpy makes of a list of Python numbers where torch makes a tensor of the
# same dtype, by the type of the first number.
_NUMBER_KINDS = {int: "ib", bool: "ib", float: "f"}

# The dtypes of tensors without dimensions whose numbers go through Python's without loss.
_SCALARS = frozenset({torch.float32, torch.float64, torch.int64, torch.bool})
_DTYPE, _REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")

# Errors that mean that samples are not flat, or not alike.
_IRREGULAR = (RuntimeError, TypeError, ValueError, KeyError, OverflowError)


class Field(NamedTuple):
    """A tensor in a slot.

    Attributes:
        offset: Its start, in bytes from the slot's start.
        dtype: Its dtype.
        shape: Its shape, batch dimension included. It is contiguous.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class FlatLayout(NamedTuple):
    """Where the fields of a flat batch lie in its slot.

    Attributes:
        container: One of ``BARE``, ``LIST`` and ``DICT``.
        keys: The dict's keys, in order; else empty.
        fields: The fields.
    """

    container: int
    keys: tuple[object, ...]
    fields: tuple[Field, ...]

    def contain(self, fields: list[Any]) -> object:
        """Return the batch that these fields make up."""
        if self.container == LIST:
            return fields
        return fields[0] if self.container == BARE else dict(zip(self.keys, fields, strict=True))


# All small fields of one kind as one field, and their positions. They lie side by side and are
# written at once: a call of torch takes as long as thirty samples.
_Joint = tuple[Field, list[int]]


class FlatPacker:
    """Stacks samples into the slot of the current task. A worker has one for each loader."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        # What identifies the last batch's layout, the layout, its end, and what is written at once.
        self._last: tuple[Any, FlatLayout, int, list[_Joint]] | None = None

    def pack(self, samples: object) -> FlatLayout | None:
        """Append a batch to what the slot holds, if it can be packed.

        Returns:
            The layout; the same object for as long as batches are alike. None if the samples are
            not flat, or not alike; the slot then holds what it held before.

        Raises:
            SharedMemoryError: If the batch does not fit the slot.
        """
        if type(samples) is not list or not samples:
            return None
        start = self._writer.used_bytes
        kinds: list[_Kind] = []
        sources: list[Any] = []
        try:
            container, keys, columns = _split(samples)
            for column in columns:
                kind, source = _read_column(column)
                kinds.append(kind)
                sources.append(source)
            layout = self.reserve(container, keys, len(samples), kinds)
            _write(sources, self._writer.slot, self._last[3])  # type: ignore[index] # set by now
        except _IRREGULAR:
            self._writer.rewind(start)
            return None
        return layout

    def reserve(
        self, container: int, keys: tuple[object, ...], batch: int, kinds: list[_Kind]
    ) -> FlatLayout:
        """Lay fields of ``batch`` samples, of these kinds, out after what the slot holds.

        Raises:
            SharedMemoryError: If they do not fit the slot.
        """
        start = self._writer.used_bytes
        identity = (start, container, keys, batch, kinds)
        if self._last is None or self._last[0] != identity:
            end, fields, joints = start, {}, []
            together: dict[Any, list[int]] = {}
            for position, (dtype, shape) in enumerate(kinds):
                is_small = batch * math.prod(shape) * dtype.itemsize <= COPY_OUT_BYTES
                together.setdefault((dtype, shape) if is_small else position, []).append(position)
            for positions in together.values():
                dtype, shape = kinds[positions[0]]
                joints.append((Field(end, dtype, (len(positions) * batch, *shape)), positions))
                for position in positions:
                    fields[position] = Field(end, dtype, (batch, *shape))
                    end += batch * math.prod(shape) * dtype.itemsize
                end = align(end)
            in_order = tuple(fields[position] for position in range(len(kinds)))
            self._last = identity, FlatLayout(container, keys, in_order), end, joints
        self._writer.allocate(self._last[2] - start)
        return self._last[1]


def _write(sources: list[Any], slot: Slot, joints: list[_Joint]) -> None:
    """Write all columns to their fields.

    Raises:
        Exception: One of ``_IRREGULAR`` if the values of a column are of different kinds.
    """
    for field, positions in joints:
        columns: list[Any] = [*map(sources.__getitem__, positions)]
        kinds = {*map(type, map(itemgetter(0), columns))}
        if _Tensor not in kinds:
            array = np.ndarray(field.shape, columns[0][0].dtype, slot.memory, field.offset)
            if array.ndim == 1:  # of numbers
                array.reshape(len(columns), -1)[:] = columns
            else:
                arrays = [*chain.from_iterable(columns)]
                np.concatenate(arrays, out=array.reshape(-1, *field.shape[2:]))
        else:
            if len(kinds) > 1:
                columns = [map(torch.as_tensor, column) for column in columns]
            values = columns[0] if len(columns) == 1 else [*chain.from_iterable(columns)]
            _write_tensors(values, field_tensor(slot, field))


def _write_tensors(values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Stack tensors of one shape.

    Raises:
        Exception: One of ``_IRREGULAR`` if torch would make something else of them.
    """
    if out.ndim == 1 and out.dtype in _SCALARS:
        are_alike = {*map(type, values)} == {_Tensor} and {*map(_DTYPE, values)} == {out.dtype}
        if are_alike and not any(map(_REQUIRES_GRAD, values)):
            # Takes three quarters of the time of torch.stack, which makes a view of each.
            out.numpy()[:] = [*map(_Tensor.tolist, values)]
            return
    if out.nbytes <= COPY_OUT_BYTES:  # faster without out=, even with another copy
        stacked = torch.stack(values)  # type: ignore[arg-type]
        is_plain = type(stacked) is _Tensor and not stacked.requires_grad
        if is_plain and stacked.dtype == out.dtype and stacked.shape == out.shape:
            out.copy_(stacked)
            return
    if {*map(type, values)} != {_Tensor}:
        raise ValueError  # a subclass would determine the type of the batch
    stack_into(values, out)


def _split(samples: list[Any]) -> tuple[int, tuple[object, ...], list[Any]]:
    """Turn samples into container, keys and columns, one column for each field.

    Raises:
        KeyError, ValueError: If they are of another kind, or not alike.
    """
    kind = type(samples[0])
    if kind is not dict and kind is not tuple and kind is not list:
        return BARE, (), [samples]
    if {*map(type, samples)} != {kind} or not samples[0]:
        raise ValueError
    if kind is not dict:
        return LIST, (), list(zip(*samples, strict=True))
    keys = tuple(samples[0])
    if not _KEY_TYPES.issuperset(map(type, keys)):
        raise ValueError
    rows: Any = map(dict.values, samples)
    if any(tuple(sample) != keys for sample in samples):  # in another order, or with more keys
        rows = [[sample[key] for key in keys] for sample in samples]
    return DICT, keys, list(zip(*rows, strict=True))


def _are_alike(arrays: Sequence[Any]) -> bool:
    """Whether small arrays have one dtype and shape, so that NumPy may write them one by one."""
    first = arrays[0]
    if first.dtype.kind not in "iuf" or not first.ndim or len(arrays) * first.nbytes > STREAM_BYTES:
        return False
    dtype, shape = first.dtype, first.shape
    return dtype.isnative and all(
        type(each) is np.ndarray
        and each.dtype == dtype
        and each.shape == shape
        and each.flags.c_contiguous
        and each.flags.writeable
        for each in arrays
    )


def _read_column(column: Sequence[Any]) -> tuple[_Kind, Any]:
    """Return a field's kind and its values: tensors, arrays, or one array of numbers.

    Raises:
        Exception: One of ``_IRREGULAR`` if these samples cannot be packed.
    """
    first = column[0]
    kind = type(first)
    if kind is np.ndarray and _are_alike(column):
        return (torch.from_numpy(first).dtype, first.shape), column
    if kind is np.ndarray and first.dtype.kind in "biufc":
        column = list(map(torch.as_tensor, column))
        first = column[0]
    if type(first) is _Tensor:
        is_plain = first.layout is torch.strided and first.is_cpu and not first.is_nested
        is_odd = first.requires_grad or first.is_quantized or first._is_zerotensor()
        if not is_plain or is_odd:
            raise ValueError
        return (first.dtype, first.shape), column
    if kind in _NUMBER_KINDS:
        numbers = np.array(column)  # four times as fast as torch.tensor
        if numbers.ndim == 1 and numbers.dtype.kind in _NUMBER_KINDS[kind]:
            return (torch.from_numpy(numbers).dtype, ()), numbers
    raise ValueError


def field_tensor(slot: Slot, field: Field) -> torch.Tensor:
    """Return a tensor over a field in the slot. It must not leave this package."""
    _, dtype, shape = field
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(slot.memory, dtype=dtype, count=count, offset=field.offset)
    return flat.view(shape)


class FlatReader:
    """Builds batches of one layout from their slots. Each worker's current layout has one.

    Attributes:
        layout: The layout.
        lends: Whether the batch has a field that is large enough to be lent.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self.layout = layout
        self._fields = [_reading_of(field) for field in layout.fields]
        calls: dict[int, Any] = {LIST: list, BARE: itemgetter(0)}  # without a frame of Python's
        self._contain = calls.get(layout.container, layout.contain)
        self.lends = any(is_large for is_large, *_ in self._fields)

    def read(self, slot: Slot, lease: Any) -> object:
        """Build the batch: large fields become views of the lease, or are copied without one."""
        reader, views = slot.views
        if reader is not self:
            views = [(*one, np.ndarray(*one[1:3], slot.memory, one[3])) for one in self._fields]
            slot.views = self, views
        fields = []
        for is_large, shape, dtype, offset, exact, view in views:
            # NumPy makes and copies arrays in a third of the time that torch takes for tensors, on
            # one thread: torch's threads would spin on cores that the workers need. For large
            # arrays it asks the kernel for huge pages.
            if is_large and lease is not None:
                array = np.ndarray(shape, dtype, lease, offset)
            else:
                array = view.copy()
            tensor = torch.from_numpy(array)
            # Sharing the tensor (``share_memory_()``, a queue of torch.multiprocessing) replaces
            # its storage's pointer. Arrays and DLPack capsules made before still point to the old
            # memory, and keep the storage alive: so the storage keeps the memory alive.
            storage: Any = tensor.untyped_storage()
            storage._shmloader_memory = array
            if exact is not None:
                tensor = torch.empty(0, dtype=exact[0], device="cpu").set_(storage, 0, *exact[1:])
            fields.append(tensor)
        return self._contain(fields)


def _reading_of(field: Field) -> tuple[bool, Any, Any, int, tuple[Any, ...] | None]:
    """Return whether a field is lent, and what makes an array over it.

    The last item is its dtype, shape and strides in torch, if those of the array differ.
    """
    offset, dtype, shape = field
    nbytes = math.prod(shape) * dtype.itemsize
    exact = None if nbytes else (dtype, shape, torch.empty(shape, device="meta").stride())
    try:
        kind: Any = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        return nbytes > COPY_OUT_BYTES, shape, kind, offset, exact
    except TypeError:  # such as bfloat16: as bytes
        exact = dtype, shape, torch.empty(shape, device="meta").stride()
        return nbytes > COPY_OUT_BYTES, (nbytes,), np.uint8, offset, exact
