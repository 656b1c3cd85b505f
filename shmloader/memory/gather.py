"""Gathers rows of arrays into batches: of data that was never in samples.

Straight into the slot in a worker process, and into new tensors in the main one. What comes out is
what torch's ``default_collate`` makes of the rows one by one. A run of indices is one copy; rows of
some size are streamed past the caches, where the batch is large.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.faults import FAULTS
from shmloader.memory.flat import FlatLayout, contain, group_tensor
from shmloader.memory.packer import PackingPlan, make_plan
from shmloader.memory.slot import Slot
from shmloader.memory.slot_writer import SlotWriter
from shmloader.memory.stacking import stream_rows

_Array = np.ndarray[Any, np.dtype[Any]]

# Places that are kept for each slot: with several batches in one, a place for each.
_MOST_PLACES = 64


class Column(NamedTuple):
    """One field of a batch, for all samples.

    Attributes:
        rows: The array, its first dimension the samples'; of any strides.
        dtype: What the batch is of.
        mapping: Which row each sample is; None: sample n is row n.
    """

    rows: torch.Tensor
    dtype: torch.dtype
    mapping: _Array | None = None


class Columns(NamedTuple):
    """A dataset that is arrays.

    Attributes:
        container: Of a batch; see :mod:`shmloader.memory.flat`.
        keys: The dict's keys, in order; else empty.
        fields: The arrays.
        length: How many samples there are.
    """

    container: int
    keys: tuple[object, ...]
    fields: tuple[Column, ...]
    length: int


class _Source(NamedTuple):
    """A column as it is gathered from.

    Attributes:
        tensor: Its rows; of a plain integer type where the true one does not matter.
        array: The same, where numpy can take rows of it without a copy of all.
        mapping: As the column's.
        row_bytes: Length of a row.
    """

    tensor: torch.Tensor
    array: _Array | None
    mapping: _Array | None
    row_bytes: int


# Stand for others of their size, which numpy or index_select may not know.
_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# What index_select knows.
_COMMON = {
    *_STAND_INS.values(),
    *(torch.int8, torch.bool, torch.complex64, torch.complex128),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def _make_source(column: Column) -> _Source:
    rows = column.rows
    rows = rows.view(_STAND_INS.get(rows.element_size(), rows.dtype))
    row_bytes = rows[:1].numel() * rows.element_size()
    array = _array_over(rows) if rows.is_contiguous() and row_bytes else None
    return _Source(rows, array, column.mapping, row_bytes)


class _Memory:
    """What numpy makes an array of."""

    __slots__ = ("__array_interface__",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": f"|V{tensor.element_size()}",
        }


def _array_over(tensor: torch.Tensor) -> _Array:
    """An array over a contiguous tensor's memory, for as long as somebody else holds that.

    After ``tensor.numpy()`` nobody could resize the tensor any more: it is the user's own.
    """
    return np.asarray(_Memory(tensor))


class RowGatherer:
    """Gathers batches of one dataset into new tensors. Any threads may, at the same time."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._sources = [_make_source(column) for column in columns.fields]

    @property
    def length(self) -> int:
        """How many samples there are."""
        return self._columns.length

    def gather(self, indices: "_Array | range") -> Any:
        """A batch.

        Args:
            indices: Of its samples, at least one, each from 0 up to the length.

        Returns:
            The batch; of a subclass, what stands for it.
        """
        run = _as_run(indices)
        fields = []
        for column, source in zip(self._columns.fields, self._sources, strict=True):
            rows = _rows_of(source, run, indices)
            if column.dtype not in _COMMON:
                shape = (len(indices), *column.rows.shape[1:])
                field = torch.empty(shape, dtype=column.dtype, device="cpu")
                _copy(source, field.view(source.tensor.dtype), rows)
            elif type(rows) is range:
                part = column.rows[rows.start : rows.stop]
                field = part.clone(memory_format=torch.contiguous_format)
            else:
                field = torch.index_select(column.rows, 0, torch.from_numpy(rows))
            fields.append(field)
        return contain(self._columns.container, self._columns.keys, fields)


class SlotGatherer(RowGatherer):
    """Gathers into the slot of the task in work. One in each worker process."""

    def __init__(self, columns: Columns, writer: SlotWriter) -> None:
        super().__init__(columns)
        self._writer = writer
        self._specs = [(column.dtype, tuple(column.rows.shape[1:])) for column in columns.fields]
        # By batch size, and where in the slot the batch begins.
        self._plans: dict[tuple[int, int], PackingPlan] = {}

    def gather(self, indices: "_Array | range") -> FlatLayout:
        """Put a batch behind what the slot holds already.

        Args:
            indices: Of its samples, at least one, each from 0 up to the length.

        Returns:
            Its layout, the very same object for as long as batches are alike.

        Raises:
            SharedMemoryError: If the batch does not fit the slot.
        """
        start, batch = self._writer.used_bytes, len(indices)
        plan = self._plans.get((start, batch))
        if plan is None:
            if len(self._plans) > _MOST_PLACES:
                self._plans.clear()
            columns = self._columns
            plan = make_plan(columns.container, columns.keys, batch, list(self._specs), start)
            self._plans[start, batch] = plan
        self._writer.allocate(plan.end - start)
        run = _as_run(indices)
        if run is None:
            indices = np.asarray(indices, dtype=np.intp)
        for source, target in zip(self._sources, self._targets(start, plan), strict=True):
            _copy(source, target, _rows_of(source, run, indices))
            if FAULTS is not None:
                FAULTS.reach("worker.write")
        return plan.layout

    def _targets(self, start: int, plan: PackingPlan) -> list[torch.Tensor]:
        """Each field's place in the slot of the task in work."""
        slot = self._writer.slot
        owner, known = slot.views
        if owner is not self or len(known) > _MOST_PLACES:
            known = {}
            slot.views = (self, known)
        targets: list[torch.Tensor]
        made_for, targets = known.get(start, (None, []))
        if made_for is not plan:
            targets = _make_targets(slot, plan, self._sources)
            known[start] = (plan, targets)
        return targets


def _make_targets(slot: Slot, plan: PackingPlan, sources: list[_Source]) -> list[torch.Tensor]:
    targets: list[Any] = [None] * len(sources)
    for group in plan.layout.groups:
        fields = group_tensor(slot, group, len(group.positions), by_field=True)
        for position, field in zip(group.positions, fields, strict=True):
            targets[position] = field.view(sources[position].tensor.dtype)
    return targets


def _as_run(indices: "_Array | range") -> range | None:
    """The indices as a range, if each is one more than that before it."""
    if type(indices) is range:
        return indices
    first, count = int(indices[0]), len(indices)
    if int(indices[-1]) - first != count - 1:
        return None
    is_run = bool((np.diff(indices) == 1).all())
    return range(first, first + count) if is_run else None


def _rows_of(source: _Source, run: range | None, indices: Any) -> "_Array | range":
    """Which rows of a column these samples are; a range, if each is one more than that before."""
    if source.mapping is None:
        return indices if run is None else run
    mapped = source.mapping[indices if run is None else slice(run.start, run.stop)]
    run = _as_run(mapped)
    return mapped if run is None else run


def _copy(source: _Source, target: torch.Tensor, rows: "_Array | range") -> None:
    """Copy rows to their place."""
    if type(rows) is range:
        target.copy_(source.tensor[rows.start : rows.stop])
        return
    rows = np.asarray(rows, dtype=np.intp)
    if source.array is None:
        torch.index_select(source.tensor, 0, torch.from_numpy(rows), out=target)
    elif not stream_rows(source.tensor.data_ptr(), rows, source.row_bytes, target.data_ptr()):
        # Clipping is the fast way; the indices are known to be right.
        np.take(source.array, rows, 0, _array_over(target), "clip")
