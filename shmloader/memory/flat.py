"""The short way for what most datasets give: samples of tensors, arrays and numbers.

Where the collate function is torch's own ``default_collate`` and a sample is a tensor, an
array, a number, or a tuple, list or dict of these, the batch need not be built at all in the
worker: :mod:`shmloader.memory.packer` stacks the fields straight into the slot and describes
them by a :class:`FlatLayout`; :class:`FlatReader` builds the batch from it in the main process.
Fields of like dtype and shape are stacked by one call and copied out by one copy, since with
many small fields the calls cost more than the bytes.

Everything else goes the general way (:mod:`shmloader.memory.codec`).
"""

import ctypes
import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.lease import hold
from shmloader.memory.slot import ALIGNMENT, Slot, align

#: A field of at most this many bytes is copied out of the slot, so that a kept label does not
#: hold a slot of megabytes.
COPY_OUT_BYTES = 64 * 1024

#: Containers of a flat batch.
BARE, LIST, DICT = 0, 1, 2


class Group(NamedTuple):
    """Fields of one dtype and shape, one after the other in the slot.

    Attributes:
        offset: Where the first begins, in bytes from the slot's start.
        dtype: Of each field.
        shape: Of each field, batch dimension included.
        positions: Which fields of the batch they are.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    positions: tuple[int, ...]


class FlatLayout(NamedTuple):
    """Where the fields of a flat batch lie in its slot.

    Attributes:
        container: 0 for a bare tensor, 1 for a list, 2 for a dict.
        keys: The dict's keys, in order; else empty.
        groups: The fields; of all batches, one batch after the other, where there are several.
        shards: How many batches there are, as a list; 0: the one, by itself.
    """

    container: int
    keys: tuple[object, ...]
    groups: tuple[Group, ...]
    shards: int = 0


def _field_count(layout: FlatLayout) -> int:
    return sum(len(group.positions) for group in layout.groups)


def group_tensor(slot: Slot, group: Group, rows: int, *, by_field: bool = False) -> torch.Tensor:
    """A tensor over a whole group in the slot, which must not leave this package.

    Its rows are the samples of one field after the other; with ``by_field``, it has a first
    dimension for the fields.
    """
    shape = (rows, *group.shape) if by_field else (rows * group.shape[0], *group.shape[1:])
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=group.dtype, device="cpu")
    flat = torch.frombuffer(slot.mapping, dtype=group.dtype, count=count, offset=group.offset)
    return flat.view(shape)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One group as the reader needs it.

    Attributes:
        group: The group.
        is_lendable: Whether it is one field that is large enough to be lent.
        strides: Of a field, in elements.
        numpy_dtype: NumPy's name for the dtype; None if it has none.
        memory_type: The ctypes array type of memory for a copy of a small field; None for a
            large one.
    """

    group: Group
    is_lendable: bool
    strides: tuple[int, ...]
    numpy_dtype: "np.dtype | None"
    memory_type: Any


class FlatReader:
    """Builds batches of one layout from their slots. One for each worker's present layout.

    Attributes:
        layout: The layout.
        lends: Whether the batch has a field that is large enough to be lent.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self.layout = layout
        self._container = layout.container
        self._keys = layout.keys
        self._pieces = [_make_piece(group) for group in layout.groups]
        self._count = _field_count(layout)
        self._shards = layout.shards
        self.lends = any(piece.is_lendable for piece in self._pieces)

    def read(self, slot: Slot, lease: object | None) -> object:
        """Build the batch.

        Args:
            slot: The slot that it lies in.
            lease: Large fields are made views of it; None copies them out as well.
        """
        owner, sources = slot.views
        if owner is not self:
            sources = [_make_source(slot, piece) for piece in self._pieces]
            slot.views = (self, sources)
        if self._container == BARE and not self._shards:
            return _take(self._pieces[0], sources[0], lease)
        fields: list[Any] = [None] * self._count
        for piece, source in zip(self._pieces, sources, strict=True):
            positions = piece.group.positions
            if len(positions) == 1:
                fields[positions[0]] = _take(piece, source, lease)
            else:
                for position, tensor in zip(positions, _take_all(piece, source), strict=True):
                    fields[position] = tensor
        if not self._shards:
            return self._contain(fields)
        length = self._count // self._shards
        return [self._contain(fields[at : at + length]) for at in range(0, self._count, length)]

    def _contain(self, fields: list[Any]) -> object:
        return contain(self._container, self._keys, fields)


def contain(container: int, keys: tuple[object, ...], fields: list[Any]) -> object:
    """A batch of these fields: one of them, the list, or a dict."""
    if container == LIST:
        return fields
    if container == BARE:
        return fields[0]
    return dict(zip(keys, fields, strict=True))


def private_memory(nbytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Aligned memory of this process's own, and no more of it than that.

    NumPy has the kernel give large memory in huge pages, which costs half the time of torch's.
    """
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -whole.__array_interface__["data"][0] % ALIGNMENT
    return whole[first : first + nbytes]


def _make_source(slot: Slot, piece: _Piece) -> Any:
    """A field of a group by itself; with several, a first dimension for them.

    An array where NumPy has the dtype, since it copies small ones in less time; else a tensor.
    """
    group = piece.group
    source = group_tensor(slot, group, len(group.positions), by_field=True)
    if len(group.positions) == 1:
        source = source[0]
    # NumPy's strides are other than torch's where there are no elements.
    return source if piece.numpy_dtype is None or source.numel() == 0 else source.numpy()


def _make_piece(group: Group) -> _Piece:
    row_bytes = math.prod(group.shape) * group.dtype.itemsize
    strides: list[int] = []
    step = 1
    for length in reversed(group.shape):
        strides.insert(0, step)
        step *= max(length, 1)
    try:
        numpy_dtype = torch.empty(0, dtype=group.dtype, device="cpu").numpy().dtype
    except TypeError:  # bfloat16 and its like
        numpy_dtype = None
    return _Piece(
        group,
        len(group.positions) == 1 and row_bytes > COPY_OUT_BYTES,
        tuple(strides),
        numpy_dtype,
        None if row_bytes > COPY_OUT_BYTES else _memory_type(row_bytes + ALIGNMENT),
    )


def _memory_type(nbytes: int) -> Any:
    """A ctypes array type of at least so many bytes, and hardly more."""
    step = 1 << max(6, nbytes.bit_length() - 3)
    return _array_type(-(-nbytes // step) * step)


@functools.cache
def _array_type(nbytes: int) -> Any:
    """One for each of some hundred sizes: ctypes takes long to make a type."""
    return ctypes.c_char * nbytes


def _take(piece: _Piece, source: Any, lease: Any) -> torch.Tensor:
    """A field as the user gets it: a view of the lease, or a copy."""
    if lease is not None and piece.is_lendable:
        return _make_view(piece, lease, piece.group.offset)
    return _copy_out(piece, source)


def _copy_out(piece: _Piece, source: Any) -> torch.Tensor:
    """A copy of a field in aligned memory of its own."""
    if not piece.is_lendable and type(source) is np.ndarray:
        # Most fields are labels and their like: half of the time that the general way takes.
        memory = piece.memory_type()
        first = -ctypes.addressof(memory) % ALIGNMENT
        copied = np.ndarray(source.shape, source.dtype, memory, first)
        copied[...] = source
        tensor = torch.from_numpy(copied)
        hold(tensor.untyped_storage(), memory)
        return tensor
    tensor = torch.as_tensor(source)
    if tensor.numel() == 0:
        return tensor.clone()
    # NumPy copies on one thread; torch's threads would spin on cores that the workers need.
    home = private_memory(tensor.nbytes)
    np.copyto(home, tensor.view(-1).view(torch.uint8).numpy())
    return _make_view(piece, home, 0)


def _make_view(piece: _Piece, home: Any, offset: int) -> torch.Tensor:
    """A tensor over a field's memory, which is not a view of another tensor, as with torch."""
    group = piece.group
    if piece.numpy_dtype is not None:
        # A third of what the torch functions below take.
        array = np.ndarray(group.shape, piece.numpy_dtype, home, offset)
        tensor = torch.from_numpy(array)
    else:
        count = math.prod(group.shape)
        flat = torch.frombuffer(home, dtype=group.dtype, count=count, offset=offset)
        tensor = torch.empty(0, dtype=group.dtype, device="cpu")
        tensor.set_(flat.untyped_storage(), 0, group.shape, piece.strides)
    hold(tensor.untyped_storage(), home)
    return tensor


def _take_all(piece: _Piece, source: Any) -> list[torch.Tensor]:
    """Copy all fields of a group out by one copy; each gets a storage of its own."""
    if type(source) is torch.Tensor:
        return [_copy_out(piece, row) for row in source]
    rows = source.shape[0]
    row_bytes = math.prod(piece.group.shape) * piece.group.dtype.itemsize
    padded = align(row_bytes)
    block = torch.empty(rows * padded, dtype=torch.uint8, device="cpu").numpy()
    item = piece.group.dtype.itemsize
    strides = (padded, *(stride * item for stride in piece.strides))
    copied = np.ndarray((rows, *piece.group.shape), piece.numpy_dtype, block, strides=strides)
    np.copyto(copied, source)
    tensors = list(map(torch.from_numpy, copied))
    for tensor in tensors:
        hold(tensor.untyped_storage(), block)
    return tensors


class ShardLayouts:
    """Makes one layout of those of a step's batches, which lie in one slot."""

    def __init__(self) -> None:
        self._parts: list[FlatLayout] = []
        self._whole: FlatLayout | None = None

    def joined(self, step: list[Any], slot: Slot) -> "FlatLayout | list[Any]":
        """The layout of a step, the very same object for as long as its parts are.

        Args:
            step: The batches, or the layouts of those that were packed.
            slot: Where these lie.

        Returns:
            The batches, if they are not all packed, or not alike; copied out of the slot.
        """
        whole = self._whole
        if (
            whole is None
            or len(step) != len(self._parts)
            or any(map(operator.is_not, step, self._parts))
        ):
            self._parts = step
            whole = self._whole = _join(step)
        if whole is not None:
            return whole
        self._parts = []  # they may hold the slot
        return [
            FlatReader(part).read(slot, None) if type(part) is FlatLayout else part for part in step
        ]


def _join(step: list[Any]) -> FlatLayout | None:
    """One layout for several; None if they are not alike."""
    if not step or not all(type(part) is FlatLayout for part in step):
        return None
    first = step[0]
    count = _field_count(first)
    groups = []
    for number, layout in enumerate(step):
        if (layout.container, layout.keys, _field_count(layout)) != (
            first.container,
            first.keys,
            count,
        ):
            return None
        for group in layout.groups:
            positions = tuple(position + number * count for position in group.positions)
            groups.append(group._replace(positions=positions))
    return FlatLayout(first.container, first.keys, tuple(groups), len(step))
