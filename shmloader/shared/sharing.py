"""``share`` returns an equal object whose data lives in shared memory.

It walks through the object's containers and notes the bulk in them. It writes the bulk to one
segment and seals the segment. Then it copies whatever has bulk in it, as
``copy.deepcopy`` does, with views of the segment in place of the bulk. So a tensor that several
fields share is in memory once, and so is the storage of several tensors.

A dataset with a very long list should be shared. A forked worker shares the objects with its
parent only until it uses them: that changes their reference counts, and the kernel copies the page.
"""

import collections
import copy
import copyreg
import dataclasses
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.interruptions import probe
from shmloader.memory.limits import why_unsupported
from shmloader.memory.pickled import is_plain
from shmloader.memory.segment import SegmentWriter, find_segment
from shmloader.memory_maps import address_of
from shmloader.shared.containers import (
    SharedDict,
    SharedList,
    enable_handles,
    reduce_tensor,
    write_index,
    write_records,
)

_T = TypeVar("_T")

#: A list, tuple or dict of at least this many items is bulk. In a shorter one, bulk is looked for.
LONG = 1_000

#: The user is warned of a list, tuple or dict of at least this many items.
MANY = 1_000_000

_MISSING = object()

_LONG_KINDS = (list, tuple, dict, collections.OrderedDict)

# Types in which no bulk is looked for.
_WHOLE = (SharedList, SharedDict, np.ndarray, torch.Tensor, str, bytes, type)


def share(obj: _T, writable: bool = False) -> _T:
    """Return an equal object whose data lives in shared memory, once for all processes.

    What is shared is numpy arrays, CPU tensors, and lists, tuples and dicts of at least 1,000
    items. Such a list or tuple becomes a ``SharedList``, and such a dict a ``SharedDict``. They
    read like the original, cannot be changed, and build an item whenever it is accessed. ``obj``
    and its attributes are searched for such data. So are, at any depth, shorter lists, tuples and
    dicts, and the attributes of dataclasses and datasets (torch's, or anything with
    ``__getitem__``). Objects without such data are used unchanged, not copied. Memory maps are left
    as they are, and what was shared before is not copied again.

    The shared copy may be used in this process, in a loader's dataset, and in any process that
    multiprocessing starts with fork, spawn or forkserver. Only a handle is sent. The memory has no
    name, cannot be changed, and is freed when the last process drops it.

    Args:
        obj: The object to share. It is not changed; drop it to free its memory.
        writable: Whether arrays may be written to. Only the process that writes sees what it wrote,
            since a page is copied when it is written to. The same holds for tensors, which are
            always writable. A process that is started with a writable array gets the array as it
            was shared. When the array is pickled otherwise, in a batch or for a queue, it is sent
            with what was written to it.

    Returns:
        An object that behaves like ``obj``, or ``obj`` itself if it has nothing to share. Its
        arrays are read-only, so that writing raises ValueError, unless ``writable`` is true. Only
        those bytes of a storage are shared that the tensors in ``obj`` span.

    Raises:
        SharedMemoryError: If there is not enough memory; raised before it is touched.
        TypeError: If an item of a long list or dict cannot be pickled.
        RuntimeError: On a system without ``memfd`` (Linux has it).
    """
    bulk, contents = _find_bulk(obj)
    if not bulk:
        return obj
    if why_unsupported():
        raise RuntimeError(f"share() does not work here, since {why_unsupported()}")
    with SegmentWriter() as writer:
        # Arrays together, so that tensors of one storage still share it.
        arrays = [key for key, value in bulk.items() if type(value) not in _LONG_KINDS]
        table = write_records(
            [[bulk[key] for key in arrays]], writer, writable=writable, least_bytes=0
        )
        tables = {
            key: _write_long(value, writer, writable=writable)
            for key, value in bulk.items()
            if type(value) in _LONG_KINDS
        }
        segment = writer.finish()
    made: dict[int, Any] = dict(zip(arrays, SharedList[Any](segment, table)[0], strict=True))
    for key, (kind, *arguments) in tables.items():
        made[key] = kind(segment, *arguments)
    enable_handles()
    return _copied(obj, _changing(bulk, contents), made)


# A value in which bulk was looked for, and the objects in it, by index, key or name.
_Contents = tuple[Any, dict[Any, Any]]


def _find_bulk(root: object) -> tuple[dict[int, Any], dict[int, _Contents]]:
    """Return the bulk in an object, and the contents of each object that was looked at, by id.

    These keep the objects alive, so that ids stay unique.
    """
    bulk: dict[int, Any] = {}
    contents: dict[int, _Contents] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        key = id(value)
        if key in bulk or key in contents:
            continue
        if _is_bulk(value):
            bulk[key] = value
        elif inner := _contents(value, is_root=value is root):
            contents[key] = value, inner
            waiting += inner.values()
    return bulk, contents


def _changing(bulk: dict[int, Any], contents: dict[int, _Contents]) -> dict[int, _Contents]:
    """Return the objects that have bulk in them, at any depth. These get a shared copy."""
    changing: dict[int, _Contents] = {}
    changed = set(bulk)
    while changed:
        changed = {
            key
            for key, (_, inner) in contents.items()
            if key not in changing and not changed.isdisjoint(map(id, inner.values()))
        }
        changing.update((key, contents[key]) for key in changed)
    return changing


def _is_bulk(value: Any) -> bool:
    kind = type(value)
    if kind is np.ndarray:
        is_plain_data = value.nbytes and not value.dtype.hasobject
        return bool(is_plain_data and find_segment(*address_of(value)) is None)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return (
            is_plain(value)
            and value.is_leaf
            and value.numel() > 0
            and not value.is_shared()  # writes to it must stay visible to all processes
            and reduce_tensor(value) is None
        )
    return kind in _LONG_KINDS and len(value) >= LONG


def _contents(value: Any, *, is_root: bool) -> dict[Any, Any]:
    """Return the objects in a value that may have bulk; none if the value is used unchanged.

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
    is_whole = not is_looked_at or is_module or isinstance(value, _WHOLE)
    return {} if is_whole else attributes_of(value)


def _copied(obj: _T, changing: dict[int, _Contents], made: dict[int, Any]) -> _T:
    """Copy an object and those in it that have bulk, with what was made in place of the bulk."""
    # Whatever has no bulk is used unchanged, and so is each key of a dict.
    memo = {id(one): one for _, inner in changing.values() for one in (*inner, *inner.values())}
    memo = {key: one for key, one in memo.items() if key not in changing} | made
    objects = []
    for key, (value, inner) in changing.items():
        if not isinstance(value, list | tuple | dict):
            # Not by deepcopy, which would call a dataset's __getstate__.
            try:
                memo[key] = object.__new__(type(value))
                objects.append((memo[key], inner))
            except TypeError:  # a base class in C
                memo[key] = value
    for empty, inner in objects:
        for name, one in inner.items():
            object.__setattr__(empty, name, copy.deepcopy(one, memo))
    return copy.deepcopy(obj, memo)


def _write_long(items: Any, writer: SegmentWriter, *, writable: bool) -> tuple[Any, ...]:
    """Write a list, tuple or dict. Return its class, and the arguments after the segment."""
    if not isinstance(items, dict):
        return SharedList, write_records(items, writer, writable=writable)
    keys = write_records(items, writer, writable=writable, word="key")
    values = write_records(items.values(), writer, writable=writable, word="value")
    return SharedDict, keys, values, write_index(items, writer)


def attributes_of(value: object) -> dict[str, Any]:
    """Return an object's attributes by name, including those in slots; {} for a builtin."""
    # The names that pickle uses: from all base classes, with private ones mangled.
    slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    filled = ((name, probe(value, name, _MISSING)) for name in slots)
    attributes = {name: attribute for name, attribute in filled if attribute is not _MISSING}
    fields = probe(value, "__dict__")
    return {**attributes, **fields} if isinstance(fields, dict) else attributes


def describe_long(dataset: object) -> str | None:
    """Return a warning if a dataset or an attribute of it is a very long list, tuple or dict."""
    for value in (dataset, *attributes_of(dataset).values()):
        if type(value) in _LONG_KINDS and len(value) >= MANY:
            return (
                f"the dataset has a {type(value).__name__} of {len(value):,} items. Each worker "
                "process may copy them, unless dataset = shmloader.share(dataset) keeps them in "
                "memory only once."
            )
    return None
