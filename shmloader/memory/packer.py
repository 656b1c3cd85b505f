"""Stacks samples into the slot: the worker's half of the short way.

A batch that turns out to be irregular goes the general way after all: :meth:`FlatPacker.pack`
then returns None, and torch's own collate finds the words for what is wrong with it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.faults import FAULTS
from shmloader.memory.flat import (
    BARE,
    COPY_OUT_BYTES,
    DICT,
    LIST,
    FlatLayout,
    Group,
    group_tensor,
)
from shmloader.memory.slot import Slot, align
from shmloader.memory.slot_writer import SlotWriter
from shmloader.memory.stacking import stack_into

# Keys that are equal only if they are the same: not so 1, True and 1.0.
_KEY_TYPES = frozenset({str, int})

# Plans that are kept, of each packer, and so their places in each slot.
_MOST_PLANS = 64

_ONLY_TENSORS = {torch.Tensor}

# What numpy makes of a list of scalars of a dtype.
_SCALAR_KINDS = {
    torch.float64: "f",
    torch.float32: "f",
    torch.int64: "i",
    torch.int32: "i",
    torch.int16: "i",
    torch.int8: "i",
    torch.uint8: "i",
    torch.bool: "b",
}

# What torch makes of Python's numbers, where numpy makes this of them.
_TORCH_DTYPES = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.bool_): torch.bool,
}

# A field: its dtype, and its shape in a sample; None for numbers.
_Spec = tuple[torch.dtype, tuple[int, ...] | None]


def _convert_ints(column: Sequence[object]) -> "np.ndarray[Any, Any]":
    # numpy agrees with torch.tensor where it finds int64 or bool, and is four times as fast.
    array = np.array(column)
    return array if array.dtype.kind in "ib" else torch.tensor(column).numpy()


def _convert_floats(column: Sequence[object]) -> "np.ndarray[Any, Any]":
    array = np.array(column)
    if array.dtype == np.float64:
        return array
    return torch.tensor(column, dtype=torch.float64).numpy()


_CONVERTERS: dict[type, Callable[[Sequence[object]], "np.ndarray[Any, Any]"]] = {
    int: _convert_ints,
    bool: _convert_ints,
    float: _convert_floats,
}


class _Target(NamedTuple):
    """A group's place in a slot, as torch and as numpy see it. Never leaves this module."""

    tensor: torch.Tensor
    array: "np.ndarray[Any, Any] | None"
    kind: str | None


def _make_target(slot: Slot, group: Group) -> _Target:
    tensor = group_tensor(slot, group, len(group.positions))
    kind = _SCALAR_KINDS.get(tensor.dtype) if tensor.ndim == 1 else None
    return _Target(tensor, tensor.numpy() if kind else None, kind)


def _fill_group(group: Group, target: _Target, sources: list[Any]) -> bool:
    """Write the fields of a group; False if they are not what the first sample promised."""
    tensor, array, kind = target
    is_single = len(group.positions) == 1
    if is_single:
        source = sources[group.positions[0]]
    else:
        source = list(chain.from_iterable(map(sources.__getitem__, group.positions)))
    if type(source) is np.ndarray:
        assert array is not None
        array[:] = source
        return True
    if set(map(type, source)) != _ONLY_TENSORS:
        return False  # among its fellows a subclass decides of what type the batch is
    if array is not None:
        # torch.stack makes a view of each scalar first: by way of Python's numbers it takes three
        # quarters of the time. A sample that is no scalar comes out as a list: an error.
        numbers = np.array(list(map(torch.Tensor.tolist, source)))
        if numbers.dtype.kind != kind or (kind == "f" and any(t.requires_grad for t in source)):
            return False
        array[:] = numbers
    elif is_single and tensor.numel():
        stack_into(source, tensor)
    else:
        # Many and small: torch is faster without an output, even with a copy of the whole.
        stacked = torch.stack(source, 0)
        if stacked.dtype != tensor.dtype or stacked.requires_grad:
            return False
        tensor.copy_(stacked)
    return True


class _NotFlatError(Exception):
    """These samples take the general way."""


@dataclass(slots=True)
class PackingPlan:
    """How batches of one kind are packed; made once, used while the kind stays the same."""

    signature: tuple[object, ...]
    layout: FlatLayout
    end: int


class FlatPacker:
    """Stacks samples into the slot of the task in work. One in each worker."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        # By where in the slot the batch begins: with several in a slot, a plan for each.
        self._plans: dict[int, PackingPlan] = {}

    def pack(self, samples: object) -> FlatLayout | None:
        """Pack a batch behind what the slot holds already, or leave it to the general way.

        Args:
            samples: What the dataset gave for the batch's indices.

        Returns:
            The layout, the very same object for as long as batches are alike; None if these
            samples are not flat, or not alike. The slot then holds what it held before.

        Raises:
            SharedMemoryError: If the batch does not fit the slot.
        """
        if type(samples) is not list or not samples:
            return None
        try:
            container, keys, columns = _split(samples)
            read = [_read_column(column) for column in columns]
        except _NotFlatError:
            return None
        fields = [spec for spec, _ in read]
        sources = [source for _, source in read]
        signature = (container, keys, len(samples), fields)
        start = self._writer.used_bytes
        plan = self._plans.get(start)
        if plan is None or plan.signature != signature:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            plan = make_plan(container, keys, len(samples), fields, start)
            self._plans[start] = plan
        self._writer.allocate(plan.end - start)
        if not self._fill(plan, start, sources):
            self._writer.rewind(start)
            return None
        return plan.layout

    def _fill(self, plan: PackingPlan, start: int, sources: list[Any]) -> bool:
        slot = self._writer.slot
        try:
            owner, known = slot.views
            if owner is not self or len(known) > _MOST_PLANS:
                known = {}
                slot.views = (self, known)
            made_for, targets = known.get(start, (None, []))
            if made_for is not plan:
                targets = [_make_target(slot, group) for group in plan.layout.groups]
                known[start] = (plan, targets)
            for group, target in zip(plan.layout.groups, targets, strict=True):
                if not _fill_group(group, target, sources):
                    return False
                if FAULTS is not None:
                    FAULTS.reach("worker.write")
        except (RuntimeError, TypeError, ValueError):
            return False
        return True


def _split(samples: list[Any]) -> tuple[int, tuple[object, ...], Sequence[Sequence[Any]]]:
    """Turn samples into container, keys and columns, one column for each field.

    Raises:
        _NotFlatError: If they are of another kind, or not alike.
    """
    first = samples[0]
    kind = type(first)
    if kind is dict:
        keys = tuple(first)
        if not _KEY_TYPES.issuperset(map(type, keys)):
            raise _NotFlatError
        rows = [_row(sample, keys) for sample in samples]
        columns = list(zip(*rows, strict=True))
        container = DICT
    elif kind is tuple or kind is list:
        keys = ()
        if any(type(sample) is not kind or len(sample) != len(first) for sample in samples):
            raise _NotFlatError
        columns = list(zip(*samples, strict=True))
        container = LIST
    else:
        return BARE, (), (samples,)
    if not columns:
        raise _NotFlatError
    return container, keys, columns


def _row(sample: object, keys: tuple[object, ...]) -> Iterable[Any]:
    """A dict's values in the order of ``keys``; other keys of its own are left out."""
    if type(sample) is not dict:
        raise _NotFlatError
    if tuple(sample) == keys:
        return sample.values()
    try:
        return [sample[key] for key in keys]
    except KeyError:
        raise _NotFlatError from None


def _read_column(column: Sequence[Any]) -> tuple[_Spec, Any]:
    """What a field is, and its values: the samples' tensors, or one tensor of their numbers."""
    first = column[0]
    kind = type(first)
    if kind is torch.Tensor:
        if (
            first.layout is not torch.strided
            or not first.is_cpu
            or first.is_nested
            or first.requires_grad
            or first.is_quantized
            or first._is_zerotensor()
        ):
            raise _NotFlatError
        return (first.dtype, first.shape), column
    convert = _CONVERTERS.get(kind)
    try:
        if convert is not None:
            numbers = convert(column)
            return (_TORCH_DTYPES[numbers.dtype], None), numbers
        if kind is np.ndarray and first.dtype.kind in "biufc":
            tensors = [torch.as_tensor(array) for array in column]
            return (tensors[0].dtype, tensors[0].shape), tensors
    except Exception:  # noqa: BLE001 - torch's collate will say what is wrong with it
        raise _NotFlatError from None
    raise _NotFlatError


def make_plan(
    container: int, keys: tuple[object, ...], batch: int, fields: list[_Spec], start: int
) -> PackingPlan:
    """Give each field its place from ``start`` on: small ones of a kind side by side."""
    alike: dict[Any, list[int]] = {}
    for position, spec in enumerate(fields):
        dtype, shape = spec
        small = shape is not None and (batch * math.prod(shape) * dtype.itemsize <= COPY_OUT_BYTES)
        alike.setdefault(spec if small else (position, spec), []).append(position)
    groups = []
    end = start
    for positions in alike.values():
        dtype, shape = fields[positions[0]]
        full = (batch, *(shape or ()))
        groups.append(Group(end, dtype, full, tuple(positions)))
        end = align(end + len(positions) * math.prod(full) * dtype.itemsize)
    layout = FlatLayout(container, keys, tuple(groups))
    return PackingPlan((container, keys, batch, fields), layout, end)
