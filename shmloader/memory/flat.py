"""Flat batches: the layout of batches of tensors, arrays and numbers, and their reader.

Where the collate function is torch's own ``default_collate`` and a sample is a tensor, an
array, a number, or a tuple, list or dict of these, the worker does not build the batch:
:mod:`shmloader.memory.packer` stacks the fields straight into the slot and describes them by a
:class:`FlatLayout`, from which :class:`FlatReader` builds the batch in the main process. Small
fields of the same dtype and shape are stacked by one call and copied out by one copy, since with
many of them the calls cost more than the bytes.

All other batches are pickled (:mod:`shmloader.memory.codec`).
"""

import ctypes
import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.arena import ALIGNMENT, Slot, align
from shmloader.memory.lease import hold, prepare_holding

#: A field of at most this many bytes is copied out of the slot, so that a kept label does not
#: hold a slot of megabytes.
COPY_OUT_BYTES = 64 * 1024

#: Containers of a flat batch: a bare tensor, a list, a dict.
BARE, LIST, DICT = 0, 1, 2


class Group(NamedTuple):
    """Fields of one dtype and shape, one after the other in the slot.

    Attributes:
        offset: Start of the first field, in bytes from the slot's start.
        dtype: Dtype of each field.
        shape: Shape of each field, batch dimension included.
        positions: The positions of the fields in the batch.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    positions: tuple[int, ...]


class FlatLayout(NamedTuple):
    """Where the fields of a flat batch lie in its slot.

    Attributes:
        container: One of ``BARE``, ``LIST`` and ``DICT``.
        keys: The dict's keys, in order; else empty.
        groups: The fields. With several shards, those of the first shard come first, and so on.
        shards: Number of batches in a step that is a list of batches; 0 for a single batch.
    """

    container: int
    keys: tuple[object, ...]
    groups: tuple[Group, ...]
    shards: int = 0


def _field_count(layout: FlatLayout) -> int:
    return sum(len(group.positions) for group in layout.groups)


def group_tensor(slot: Slot, group: Group, rows: int, *, by_field: bool = False) -> torch.Tensor:
    """Return a tensor over a whole group in the slot. It must not leave this package.

    Args:
        slot: The slot.
        group: The group.
        rows: Number of fields in the group.
        by_field: Whether the tensor has a first dimension for the fields. Otherwise its first
            dimension runs over the samples of the first field, then those of the second, and so on.
    """
    shape = (rows, *group.shape) if by_field else (rows * group.shape[0], *group.shape[1:])
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=group.dtype, device="cpu")
    flat = torch.frombuffer(slot.memory, dtype=group.dtype, count=count, offset=group.offset)
    return flat.view(shape)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A group, with what the reader needs to build its fields.

    Attributes:
        group: The group.
        is_lendable: Whether it is a single field that is large enough to be lent.
        strides: Strides of a field, in elements.
        numpy_dtype: NumPy's dtype; None if NumPy does not have it.
        memory_type: ctypes array type for a copy of a small field; None for a large one.
    """

    group: Group
    is_lendable: bool
    strides: tuple[int, ...]
    numpy_dtype: "np.dtype | None"
    memory_type: Any


class FlatReader:
    """Builds batches of one layout from their slots. Each worker's current layout has one.

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
        prepare_holding()
        self.lends = any(piece.is_lendable for piece in self._pieces)

    def read(self, slot: Slot, lease: object | None) -> object:
        """Build the batch.

        Args:
            slot: The slot that it lies in.
            lease: Large fields become views of it; None copies them out as well.
        """
        owner, sources = slot.views
        if owner is not self:
            sources = [_make_source(slot, piece) for piece in self._pieces]
            slot.views = (self, sources)
        fields: list[Any] = [None] * self._count
        for piece, source in zip(self._pieces, sources, strict=True):
            positions = piece.group.positions
            if len(positions) > 1:
                for position, tensor in zip(positions, _take_all(piece, source), strict=True):
                    fields[position] = tensor
            elif lease is not None and piece.is_lendable:
                fields[positions[0]] = _make_view(piece, lease, piece.group.offset)
            else:
                fields[positions[0]] = _copy_out(piece, source)
        if not self._shards:
            if self._container == LIST:
                return fields
            return contain(self._container, self._keys, fields)
        length = self._count // self._shards
        return [
            contain(self._container, self._keys, fields[at : at + length])
            for at in range(0, self._count, length)
        ]


def contain(container: int, keys: tuple[object, ...], fields: list[Any]) -> object:
    """Return the batch that these fields make up."""
    if container == LIST:
        return fields
    if container == BARE:
        return fields[0]
    return dict(zip(keys, fields, strict=True))


def private_memory(nbytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Allocate aligned memory that no other process shares.

    NumPy asks the kernel for huge pages, so this takes half the time of torch's allocator.
    """
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -whole.__array_interface__["data"][0] % ALIGNMENT
    return whole[first : first + nbytes]


def _make_source(slot: Slot, piece: _Piece) -> Any:
    """Return the data of a group in the slot; several fields get a first dimension.

    An array if NumPy has the dtype, since NumPy copies small data faster; otherwise a tensor.
    """
    group = piece.group
    source = group_tensor(slot, group, len(group.positions), by_field=True)
    if len(group.positions) == 1:
        source = source[0]
    # NumPy's strides differ from torch's where there are no elements.
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
    except TypeError:  # such as bfloat16
        numpy_dtype = None
    return _Piece(
        group,
        len(group.positions) == 1 and row_bytes > COPY_OUT_BYTES,
        tuple(strides),
        numpy_dtype,
        None if row_bytes > COPY_OUT_BYTES else _memory_type(row_bytes + ALIGNMENT),
    )


def _memory_type(nbytes: int) -> Any:
    """Return a ctypes array type of at least ``nbytes``, rounded up to one of few sizes."""
    step = 1 << max(6, nbytes.bit_length() - 3)
    return _array_type(-(-nbytes // step) * step)


@functools.cache
def _array_type(nbytes: int) -> Any:
    """Return an array type; cached, since ctypes takes long to make a type."""
    return ctypes.c_char * nbytes


def _copy_out(piece: _Piece, source: Any) -> torch.Tensor:
    """Return a copy of a field in private, aligned memory."""
    if not piece.is_lendable and type(source) is np.ndarray:
        # The usual case, such as labels. This takes half the time of the code below.
        memory = piece.memory_type()
        first = -ctypes.addressof(memory) % ALIGNMENT
        copied = np.ndarray(source.shape, source.dtype, memory, first)
        copied[...] = source
        tensor = torch.from_numpy(copied)
        tensor.untyped_storage()._shmloader_memory = memory  # type: ignore[attr-defined]
        return tensor
    tensor = torch.as_tensor(source)
    if tensor.numel() == 0:
        return tensor.clone()
    # NumPy copies on one thread; torch's threads would spin on cores that the workers need.
    home = private_memory(tensor.nbytes)
    np.copyto(home, tensor.view(-1).view(torch.uint8).numpy())
    return _make_view(piece, home, 0)


def _make_view(piece: _Piece, home: Any, offset: int) -> torch.Tensor:
    """Return a tensor over a field's memory that, as with torch, is no view of another tensor."""
    group = piece.group
    if piece.numpy_dtype is not None:
        # Takes a third of the time of the torch functions below.
        array = np.ndarray(group.shape, piece.numpy_dtype, home, offset)
        tensor = torch.from_numpy(array)
    else:
        count = math.prod(group.shape)
        flat = torch.frombuffer(home, dtype=group.dtype, count=count, offset=offset)
        tensor = torch.empty(0, dtype=group.dtype, device="cpu")
        tensor.set_(flat.untyped_storage(), 0, group.shape, piece.strides)
    tensor.untyped_storage()._shmloader_memory = home  # type: ignore[attr-defined]
    return tensor


def _take_all(piece: _Piece, source: Any) -> list[torch.Tensor]:
    """Copy all fields of a group out with one copy; each gets a storage of its own."""
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
    """Joins the layouts of a step's batches, all in one slot, into a single layout."""

    def __init__(self) -> None:
        self._step: list[FlatLayout] = []
        self._joined: FlatLayout | None = None

    def joined(self, step: list[Any], slot: Slot) -> "FlatLayout | list[Any]":
        """Return the layout of a step.

        Args:
            step: The shards: batches, or the layouts of those that were packed.
            slot: The slot that these lie in.

        Returns:
            The joined layout; the same object as in the last call if the shards' layouts are the
            same objects. If not all shards are packed, or they are not alike, a list of the
            batches, of which those that were packed are copied out of the slot.
        """
        joined = self._joined
        if (
            joined is None
            or len(step) != len(self._step)
            or any(map(operator.is_not, step, self._step))
        ):
            self._step = step
            joined = self._joined = _join(step)
        if joined is not None:
            return joined
        self._step = []  # its batches may hold the slot
        return [
            FlatReader(shard).read(slot, None) if type(shard) is FlatLayout else shard
            for shard in step
        ]


def _join(step: list[Any]) -> FlatLayout | None:
    """Return one layout for several; None if they are not alike."""
    if not step or not all(type(shard) is FlatLayout for shard in step):
        return None
    first = step[0]
    kind = (first.container, first.keys, _field_count(first))
    groups = []
    for number, layout in enumerate(step):
        if (layout.container, layout.keys, _field_count(layout)) != kind:
            return None
        for group in layout.groups:
            positions = tuple(position + number * kind[2] for position in group.positions)
            groups.append(group._replace(positions=positions))
    return FlatLayout(first.container, first.keys, tuple(groups), len(step))
