"""``share`` returns an equivalent object whose bulk lies in shared memory.

It walks through the object's containers and notes the bulk in them. It writes the bulk to one
segment and seals the segment. Then it walks through the containers again and copies each, with
views of the segment in place of the bulk. So a tensor that several fields share is in memory once,
and so is the storage of several tensors.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.memory.pickled import OutOfBand, Span, is_plain, rebuild_tensor, tensor_fields
from shmloader.memory.segment import Segment, SegmentWriter, open_buffer, write_buffers
from shmloader.memory.system_support import is_supported, why_unsupported
from shmloader.probing import probe
from shmloader.shared.arrays import enable_tensor_handles, open_array, reduce_tensor
from shmloader.shared.containers import SharedDict, SharedList, write_index
from shmloader.shared.counting import attributes_of
from shmloader.shared.records import Records, RecordTables, RecordWriter

_T = TypeVar("_T")

#: A list, tuple or dict of at least this many items is bulk. In a shorter one, bulk is looked for.
LONG = 1_000

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
    if not walk.has_found:
        return obj
    if not is_supported():
        raise RuntimeError(f"share() does not work here, since {why_unsupported()}")
    with SegmentWriter() as writer:
        build = _write(walk, writer, writable=writable)
        segment = writer.finish()
    if walk.tensors:
        enable_tensor_handles()
    shared_copy: _T = _SharedCopies(walk, build(segment)).shared_copy(obj)
    return shared_copy


class _Walk:
    """Finds the bulk in an object. Keeps the objects that it notes alive, so that ids stay unique.

    Attributes:
        changing: The ids of objects that have bulk in them, at any depth; these get a shared copy.
        arrays, tensors, lists, dicts: The bulk of each kind, by id.
    """

    def __init__(self) -> None:
        self.changing: set[int] = set()
        self._seen: dict[int, Any] = {}
        self._holders: dict[int, list[int]] = collections.defaultdict(list)
        self.arrays: dict[int, Any] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.lists: dict[int, Any] = {}
        self.dicts: dict[int, Any] = {}

    @property
    def has_found(self) -> bool:
        """Whether there is any bulk."""
        return bool(self.arrays or self.tensors or self.lists or self.dicts)

    def visit(self, root: object) -> None:
        """Look for bulk in an object and all that is in it."""
        bulk: list[int] = []
        waiting: list[tuple[Any, int]] = [(root, 0)]
        while waiting:
            value, holder = waiting.pop()
            key = id(value)
            if key not in self._seen:
                same_kind = self._bulk_of(value)
                if same_kind is not None:
                    same_kind[key] = value
                    bulk.append(key)
                elif (inner := _contents(value, is_root=value is root)) is not None:
                    waiting += [(one, key) for one in inner]
                else:
                    continue
                self._seen[key] = value
            self._holders[key].append(holder)
        while bulk:
            for holder in self._holders[bulk.pop()]:
                if holder and holder not in self.changing:
                    self.changing.add(holder)
                    bulk.append(holder)

    def _bulk_of(self, value: Any) -> dict[int, Any] | None:
        """Return the dict in which bulk of this kind is noted; None if the value is not bulk."""
        kind = type(value)
        if kind is np.ndarray:
            return self.arrays if value.size and not value.dtype.hasobject else None
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self.tensors if _may_share(value) else None
        if kind is list or kind is tuple:
            return self.lists if len(value) >= LONG else None
        if kind is dict or kind is collections.OrderedDict:
            return self.dicts if len(value) >= LONG else None
        return None


def _may_share(tensor: torch.Tensor) -> bool:
    return (
        is_plain(tensor)
        and tensor.is_leaf
        and tensor.numel() > 0
        and not tensor.is_shared()  # writes to it must stay visible to all processes
        and reduce_tensor(tensor) is None
    )


def _fields_of(value: Any, *, is_root: bool) -> dict[str, Any] | None:
    """Return the attributes of a dataset, a dataclass or the root, if they can be replaced."""
    kind = type(value)
    is_looked_at = (
        is_root
        or dataclasses.is_dataclass(kind)
        or isinstance(value, Dataset)
        # ``__getitem__`` of its class, not of a metaclass, as an enum has.
        or any("__getitem__" in vars(base) for base in kind.__mro__)
    )
    if not is_looked_at or isinstance(value, _WHOLE):
        return None
    if isinstance(value, torch.nn.Module) and not is_root:
        return None
    return attributes_of(value) or None


def _is_container(value: object) -> bool:
    return isinstance(value, list | tuple | dict)


def _contents(value: Any, *, is_root: bool) -> Iterable[Any] | None:
    """Return the objects in a value that may have bulk; None if the value is used unchanged."""
    if _is_container(value):
        return list(value.values()) if isinstance(value, dict) else list(value)
    fields = _fields_of(value, is_root=is_root)
    return None if fields is None else list(fields.values())


def _write(
    walk: _Walk, writer: SegmentWriter, *, writable: bool
) -> Callable[[Segment], dict[int, Any]]:
    """Write all bulk. Return a function that opens it and returns the shared copies.

    The function's result has the shared copies by the ids of the objects that they replace.
    """
    out_of_band = OutOfBand()
    storages = {}
    for key, tensor in walk.tensors.items():
        storage = storages[key] = out_of_band.storage(tensor.untyped_storage())
        storage.add_tensor(tensor)
    table = write_buffers(out_of_band, writer)
    arrays = {key: _write_array(array, writer) for key, array in walk.arrays.items()}
    lists = {
        key: _write_items(items, writer, "item", writable=writable)
        for key, items in walk.lists.items()
    }
    dicts = {}
    for key, items in walk.dicts.items():
        keys = _write_items(items, writer, "key", writable=writable)
        values = _write_items(items.values(), writer, "value", writable=writable)
        dicts[key] = keys, values, write_index(items, writer)

    def build(segment: Segment) -> dict[int, Any]:
        opened: list[Any] = [open_buffer(Span(*span), segment) for span in table.spans]
        copies: dict[int, Any] = {
            key: open_array(segment, *where, is_writable=writable) for key, where in arrays.items()
        }
        for key, tensor in walk.tensors.items():
            copies[key] = rebuild_tensor(opened[storages[key].index], *tensor_fields(tensor))
        for key, tables in lists.items():
            copies[key] = SharedList(Records(segment, tables))
        for key, (keys, values, index) in dicts.items():
            copies[key] = SharedDict(
                segment, Records(segment, keys), Records(segment, values), index
            )
        return copies

    return build


def _write_array(array: Any, writer: SegmentWriter) -> tuple[int, Any, Any, Any]:
    """Write an array; return offset, dtype, shape and strides of its shared copy."""
    strides = np.empty_like(array, order="K", subok=False).strides
    dense = array if array.strides == strides else array.copy(order="K")
    address = dense.__array_interface__["data"][0]
    return writer.append_memory(address, dense.nbytes), array.dtype, array.shape, strides


def _write_items(
    items: Iterable[Any], writer: SegmentWriter, word: str, *, writable: bool
) -> RecordTables:
    records = RecordWriter(writer, writable=writable)
    for number, item in enumerate(items):
        try:
            records.add(item)
        except MemoryError:
            raise
        except Exception as error:
            raise TypeError(
                f"{word} {number} of a long list or dict cannot be shared: it is a "
                f"{type(item).__module__}.{type(item).__qualname__} and cannot be pickled "
                f"({type(error).__name__}: {error})"
            ) from error
    return records.finish()


class _SharedCopies:
    """Copies objects that have bulk in them, with the shared copies in place of the bulk."""

    def __init__(self, walk: _Walk, made: dict[int, Any]) -> None:
        self._walk = walk
        self._made = made

    def shared_copy(self, value: Any) -> Any:
        """Return an object's shared copy, always the same one; the object if it has no bulk."""
        key = id(value)
        if key in self._made:
            return self._made[key]
        if key not in self._walk.changing:
            return value
        if isinstance(value, tuple):
            inner = [self.shared_copy(one) for one in value]
            # The tuple may contain itself, inside a list, and then has been made meanwhile.
            return self._made.setdefault(key, _tuple_like(value, inner))
        made = self._made[key] = _copy_of(value)
        if made is value:
            return value
        if isinstance(value, list):
            for number, one in enumerate(value):
                list.__setitem__(made, number, self.shared_copy(one))
        elif isinstance(value, dict):
            for name, one in value.items():
                dict.__setitem__(made, name, self.shared_copy(one))
        else:
            for name, one in attributes_of(value).items():
                object.__setattr__(made, name, self.shared_copy(one))
        return made


def _tuple_like(value: Any, inner: list[Any]) -> Any:
    """Return a tuple of the same class with the items ``inner``."""
    try:
        made = tuple.__new__(type(value), inner)
    except TypeError:  # a structseq, such as os.stat_result
        return type(value)(inner)
    if probe(value, "__dict__") is not None:
        made.__dict__.update(value.__dict__)
    return made


def _copy_of(value: Any) -> Any:
    """Return a copy of a container, or an empty object of the same class for any other value.

    Returns the value itself if neither is possible.
    """
    try:
        return copy.copy(value) if _is_container(value) else object.__new__(type(value))
    except Exception:  # noqa: BLE001 - a base class in C, or a dict that refuses to be copied
        return value
