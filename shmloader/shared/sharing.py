"""``share`` returns an equivalent object whose bulk lies in shared memory.

It walks through the object's containers and notes the bulk in them. It writes the bulk to one
segment and seals the segment. Then it walks through the containers again and copies each, with
views of the segment in place of the bulk. So a tensor that several fields share is in memory once,
and so is the storage of several tensors.
"""

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.memory.limits import is_supported, why_unsupported
from shmloader.memory.pickled import PICKLE_ERRORS, is_plain
from shmloader.memory.segment import Segment, SegmentWriter
from shmloader.shared.arrays import enable_tensor_handles, reduce_tensor
from shmloader.shared.containers import SharedDict, SharedList, write_index
from shmloader.shared.counting import attributes_of
from shmloader.shared.records import RecordTable, RecordWriter

_T = TypeVar("_T")

#: A list, tuple or dict of at least this many items is bulk. In a shorter one, bulk is looked for.
LONG = 1_000

_LONG_KINDS = (list, tuple, dict, collections.OrderedDict)

# Types in which no bulk is looked for.
_WHOLE = (SharedList, SharedDict, np.ndarray, torch.Tensor, str, bytes, type)


def share(obj: _T, writable: bool = False) -> _T:
    """Return an equivalent object whose bulk lies in shared memory, once for all processes.

    Bulk is numpy arrays, CPU tensors, and lists, tuples and dicts of at least 1,000 items. Such a
    list or tuple becomes a ``SharedList``, and such a dict a ``SharedDict``. They read like the
    original, cannot be changed, and build an item whenever it is accessed. Bulk is looked for in
    ``obj`` and its attributes. At any depth, it is also looked for in shorter lists, tuples and
    dicts, and in the attributes of datasets (torch's, or anything with ``__getitem__``) and
    dataclasses. Objects without bulk are used unchanged, not copied. Memory maps are left as they
    are, and what was shared before is not copied again.

    The shared copy may be used in this process, in a loader's dataset, and in any process that
    multiprocessing starts with fork, spawn or forkserver; only a handle is sent. The memory has no
    name, cannot be changed, and is freed when no process uses it any more.

    Args:
        obj: The object to share. It is not changed; drop it to free its memory.
        writable: Whether arrays may be written to. Only the process that writes sees what it wrote,
            since a page is copied when it is written to. The same holds for tensors, which are
            always writable. A process that is started with a writable array gets the array as it
            was shared. When the array is pickled otherwise, in a batch or for a queue, it is sent
            with what was written to it.

    Returns:
        An object that behaves like ``obj``, or ``obj`` itself if it has no bulk. Its arrays are
        read-only, so that writing raises ValueError, unless ``writable`` is true. Only those bytes
        of a storage are shared that the tensors in ``obj`` span.

    Raises:
        SharedMemoryError: If there is not enough memory; raised before it is touched.
        TypeError: If an item of a long list or dict cannot be pickled.
        RuntimeError: On a system without ``memfd`` (Linux has it).
    """
    walk = _Walk()
    walk.visit(obj)
    if not walk.bulk:
        return obj
    if not is_supported():
        raise RuntimeError(f"share() does not work here, since {why_unsupported()}")
    with SegmentWriter() as writer:
        build = _write(list(walk.bulk.values()), writer, writable=writable)
        segment = writer.finish()
    copies = dict(zip(walk.bulk, build(segment), strict=True))
    if any(isinstance(value, torch.Tensor) for value in walk.bulk.values()):
        enable_tensor_handles()
    shared_copy: _T = _SharedCopies(walk.changing, copies).shared_copy(obj)
    return shared_copy


class _Walk:
    """Finds the bulk in an object. Keeps the objects that it notes alive, so that ids stay unique.

    Attributes:
        changing: The ids of objects that have bulk in them, at any depth; these get a shared copy.
        bulk: The bulk, by id.
    """

    def __init__(self) -> None:
        self.changing: set[int] = set()
        self.bulk: dict[int, Any] = {}

    def visit(self, root: object) -> None:
        """Look for bulk in an object and all that is in it."""
        seen: dict[int, Any] = {}
        holders: dict[int, list[int]] = collections.defaultdict(list)
        waiting: list[tuple[Any, int]] = [(root, 0)]
        while waiting:
            value, holder = waiting.pop()
            key = id(value)
            if key not in seen:
                if _is_bulk(value):
                    self.bulk[key] = value
                elif (inner := _contents(value, is_root=value is root)) is not None:
                    waiting += [(one, key) for one in inner.values()]
                else:
                    continue
                seen[key] = value
            holders[key].append(holder)
        changed = list(self.bulk)
        while changed:
            for holder in holders[changed.pop()]:
                if holder and holder not in self.changing:
                    self.changing.add(holder)
                    changed.append(holder)


def _is_bulk(value: Any) -> bool:
    kind = type(value)
    if kind is np.ndarray:
        return bool(value.nbytes and not value.dtype.hasobject)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return (
            is_plain(value)
            and value.is_leaf
            and value.numel() > 0
            and not value.is_shared()  # writes to it must stay visible to all processes
            and reduce_tensor(value) is None
        )
    return kind in _LONG_KINDS and len(value) >= LONG


def _contents(value: Any, *, is_root: bool) -> dict[Any, Any] | None:
    """Return the objects in a value that may have bulk; None if the value is used unchanged.

    They are the items of a list, tuple or dict, or the attributes of a dataset, a dataclass or the
    root, by index, key or name.
    """
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return dict(value)
    kind = type(value)
    is_looked_at = (
        is_root
        or dataclasses.is_dataclass(kind)
        or isinstance(value, Dataset)
        # ``__getitem__`` of its class, not of a metaclass, as an enum has.
        or any("__getitem__" in vars(base) for base in kind.__mro__)
    )
    is_module = isinstance(value, torch.nn.Module) and not is_root
    if not is_looked_at or is_module or isinstance(value, _WHOLE):
        return None
    return attributes_of(value) or None


def _write(
    bulk: list[Any], writer: SegmentWriter, *, writable: bool
) -> Callable[[Segment], list[Any]]:
    """Write all bulk. Return a function that opens it and returns the shared copies, in order."""
    # Arrays together, so that tensors of one storage still share it.
    arrays = RecordWriter(writer, writable=writable, least_bytes=0)
    arrays.add([value for value in bulk if type(value) not in _LONG_KINDS])
    array_table = arrays.finish()
    makers: list[Callable[[Segment], Any] | None] = []
    for items in bulk:
        if type(items) not in _LONG_KINDS:
            makers.append(None)
        elif isinstance(items, dict):
            tables = [
                _write_items(column, writer, word, writable=writable)
                for word, column in (("key", items), ("value", items.values()))
            ]
            index = write_index(items, writer)
            makers.append(
                functools.partial(SharedDict, keys=tables[0], values=tables[1], index=index)
            )
        else:
            table = _write_items(items, writer, "item", writable=writable)
            makers.append(functools.partial(SharedList, table=table))

    def build(segment: Segment) -> list[Any]:
        opened = iter(SharedList[Any](segment, array_table)[0])
        return [next(opened) if make is None else make(segment) for make in makers]

    return build


def _write_items(
    items: Iterable[Any], writer: SegmentWriter, word: str, *, writable: bool
) -> RecordTable:
    records = RecordWriter(writer, writable=writable)
    for number, item in enumerate(items):
        try:
            records.add(item)
        except PICKLE_ERRORS as error:
            raise TypeError(
                f"{word} {number} of a long list or dict cannot be pickled: {error}"
            ) from error
    return records.finish()


class _SharedCopies:
    """Copies objects that have bulk in them, with the shared copies in place of the bulk."""

    def __init__(self, changing: set[int], made: dict[int, Any]) -> None:
        self._changing, self._made = changing, made

    def shared_copy(self, value: Any) -> Any:
        """Return an object's shared copy, always the same one; the object if it has no bulk."""
        key = id(value)
        if key in self._made:
            return self._made[key]
        if key not in self._changing:
            return value
        if isinstance(value, tuple):
            inner = [self.shared_copy(one) for one in value]
            # The tuple may contain itself, inside a list, and then has been made meanwhile.
            try:
                same = tuple.__new__(type(value), inner)
            except TypeError:  # a structseq, as torch's functions return
                same = type(value)(inner)
            return self._made.setdefault(key, same)
        is_container = isinstance(value, list | dict)
        try:
            made = copy.copy(value) if is_container else object.__new__(type(value))
        except TypeError:  # a base class in C
            made = value
        self._made[key] = made
        contents = {} if made is value else _contents(value, is_root=True) or {}
        for name, one in contents.items():
            if isinstance(value, list):
                list.__setitem__(made, name, self.shared_copy(one))
            elif isinstance(value, dict):
                dict.__setitem__(made, name, self.shared_copy(one))
            else:
                object.__setattr__(made, name, self.shared_copy(one))
        return made
