"""The short way for what most datasets give: samples of tensors, arrays and numbers.

Where the collate function is torch's own ``default_collate`` and a sample is a tensor, an
array, a number, or a tuple, list or dict of these, the batch need not be built at all in the
worker: :mod:`shmloader.memory.packer` stacks the fields straight into the slot and describes
them by a :class:`FlatLayout`; :class:`FlatReader` builds the batch from it in the main process.
Fields of like dtype and shape are stacked by one call and copied out by one copy, since with
many small fields the calls cost more than the bytes.

Everything else goes the general way (:mod:`shmloader.memory.codec`).
"""

import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.slot import ALIGNMENT, Slot, align

#: A field of at most this many bytes is copied out of the slot, so that a kept label does not
#: hold a slot of megabytes.
COPY_OUT_BYTES = 64 * 1024

# torch computes on several threads from so many elements on (at::internal::GRAIN_SIZE). They spin
# when they are done, on cores that the workers need.
_PARALLEL_ELEMENTS = 32_768

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
    """One group as the reader needs it."""

    group: Group
    is_lendable: bool
    strides: tuple[int, ...]
    numpy_dtype: "np.dtype | None"


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
            sources = [_make_source(slot, piece.group) for piece in self._pieces]
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


def _make_source(slot: Slot, group: Group) -> torch.Tensor:
    """A field of a group by itself; with several, a dimension for them."""
    source = group_tensor(slot, group, len(group.positions), by_field=True)
    return source[0] if len(group.positions) == 1 else source


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
    )


def _take(piece: _Piece, source: torch.Tensor, lease: Any) -> torch.Tensor:
    group = piece.group
    home, offset = lease, group.offset
    if lease is None or not piece.is_lendable:
        if source.numel() < _PARALLEL_ELEMENTS:
            return source.clone()
        home, offset = private_memory(source.numel() * group.dtype.itemsize), 0
        np.copyto(home, source.view(-1).view(torch.uint8).numpy())
    if piece.numpy_dtype is not None:
        # A third of what the torch functions below take. Neither is a view of another tensor,
        # as torch's loader has it.
        array = np.ndarray(group.shape, piece.numpy_dtype, home, offset)
        return torch.from_numpy(array)
    count = math.prod(group.shape)
    flat = torch.frombuffer(home, dtype=group.dtype, count=count, offset=offset)
    whole = torch.empty(0, dtype=group.dtype, device="cpu")
    return whole.set_(flat.untyped_storage(), 0, group.shape, piece.strides)


def _take_all(piece: _Piece, source: torch.Tensor) -> list[torch.Tensor]:
    """Copy all fields of a group out by one copy; each gets a storage of its own."""
    if piece.numpy_dtype is None or source.numel() == 0:
        return [row.clone() for row in source]
    rows = source.shape[0]
    row_bytes = math.prod(piece.group.shape) * piece.group.dtype.itemsize
    padded = align(row_bytes)
    block = torch.empty(rows * padded, dtype=torch.uint8, device="cpu").numpy()
    item = piece.group.dtype.itemsize
    strides = (padded, *(stride * item for stride in piece.strides))
    copied = np.ndarray((rows, *piece.group.shape), piece.numpy_dtype, block, strides=strides)
    np.copyto(copied, source.numpy())
    return list(map(torch.from_numpy, copied))


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
