"""``share`` returns an equivalent object whose bulk is in shared memory.

Three steps: the object's containers are walked, and the bulk in them is noted; it is written to one
segment, which is sealed; the walk is done once more, and copies each container, with views of the
segment in the place of the bulk. So a tensor that several fields share is there once, and so is
each storage of several tensors.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.memory.bulk import BufferTable, storage_at, write_buffers
from shmloader.memory.codec import PartialStorage, rebuild_tensor
from shmloader.memory.encoder import OutOfBand, is_plain
from shmloader.memory.segment import Segment, SegmentWriter
from shmloader.memory.slot import is_supported, why_unsupported
from shmloader.probing import probe
from shmloader.shared.arrays import enable_tensor_handles, open_array, reduce_tensor
from shmloader.shared.attributes import attributes_of
from shmloader.shared.mappings import SharedDict, stable_hash, write_index
from shmloader.shared.records import Records, RecordWriter
from shmloader.shared.sequences import SharedList

_T = TypeVar("_T")

#: A list, tuple or dict of at least so many items is bulk. A shorter one stays what it is, and
#: what is in it is looked at.
LONG = 1_000

# What is never taken apart.
_WHOLE = (SharedList, SharedDict, np.ndarray, torch.Tensor, str, bytes, type)


def share(obj: _T, writable: bool = False) -> _T:
    """Return an equivalent object whose bulk lies in shared memory, once for all processes.

    Bulk is: numpy arrays and CPU tensors; lists, tuples and dicts of 1,000 items and more, which
    become a ``SharedList`` or ``SharedDict``: these read as they did, cannot be changed, and build
    an item whenever it is asked for. It is looked for in the object itself, its attributes if it is
    a dataset (torch's, or anything with ``__getitem__``) or a dataclass, and in shorter lists,
    tuples and dicts, at any depth. What has no bulk in it is the very object that it was. A memory
    map stays: it is there once already. What was shared before is not copied again.

    The shared copy may be used here, be in a dataset of a loader, and be sent to any process that
    multiprocessing starts, under fork, spawn or forkserver: what crosses is a handle. The memory
    has no name, cannot be changed, and is gone with its last user.

    Args:
        obj: What to share. It stays as it is: drop it, for its memory.
        writable: Whether arrays may be written to. What a process writes is its own, as with
            tensors, which torch has no read-only kind of: pages are copied when they are written.
            A process that is started with such an array has it as it was shared; wherever else
            the array is pickled, in a batch or for a queue, it goes with what was written to it.

    Returns:
        An object that behaves as ``obj``; ``obj`` itself if there is nothing to share. Arrays in it
        are read-only, and writing raises ValueError, unless ``writable``. A tensor that is part of
        a larger storage brings the bytes that tensors of it span.

    Raises:
        SharedMemoryError: If there is no memory for it; found before it is touched.
        TypeError: If an item of a long list or dict cannot be pickled.
        RuntimeError: On a system without ``memfd`` (Linux has it).
    """
    walk = _Walk()
    walk.visit(obj)
    if not walk.has_found:
        return obj
    if not is_supported():
        raise RuntimeError(f"share() cannot be had here, since {why_unsupported()}")
    with SegmentWriter() as writer:
        build = _write(walk, writer, writable=writable)
        segment = writer.finish()
    if walk.tensors:
        enable_tensor_handles()
    shared_copy: _T = _SharedCopies(walk, build(segment)).shared_copy(obj)
    return shared_copy


class _Walk:
    """Finds the bulk. What it has found it keeps, so that no address is used twice.

    Attributes:
        changing: The ids of what has bulk in it, at any depth: all that gets a shared copy.
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
        """Whether there is any."""
        return bool(self.arrays or self.tensors or self.lists or self.dicts)

    def visit(self, root: object) -> None:
        """Look at an object and all that is in it."""
        bulk: list[int] = []
        waiting: list[tuple[Any, int]] = [(root, 0)]
        while waiting:
            value, holder = waiting.pop()
            key = id(value)
            if key not in self._seen:
                found = self._bulk_of(value)
                if found is not None:
                    found[key] = value
                    bulk.append(key)
                elif (inner := _parts_of(value, is_root=value is root)) is not None:
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
        """Where bulk of its kind is noted; None if it is none."""
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
        and not tensor.is_shared()  # its user wants writes to be seen
        and reduce_tensor(tensor) is None
    )


def _fields_of(value: Any, *, is_root: bool) -> dict[str, Any] | None:
    """Return the attributes of a dataset, a dataclass or any root that can have a shared copy."""
    kind = type(value)
    is_looked_at = (
        is_root
        or dataclasses.is_dataclass(kind)
        or isinstance(value, Dataset)
        # Of its own, not of its metaclass, as an enum's.
        or any("__getitem__" in vars(base) for base in kind.__mro__)
    )
    if not is_looked_at or isinstance(value, _WHOLE):
        return None
    if isinstance(value, torch.nn.Module) and not is_root:
        return None
    return attributes_of(value) or None


def _is_container(value: object) -> bool:
    return isinstance(value, list | tuple | dict)


def _parts_of(value: Any, *, is_root: bool) -> Iterable[Any] | None:
    """What is to be looked at in a value; None if it stays what it is."""
    if _is_container(value):
        return list(value.values()) if isinstance(value, dict) else list(value)
    fields = _fields_of(value, is_root=is_root)
    return None if fields is None else list(fields.values())


def _write(
    walk: _Walk, writer: SegmentWriter, *, writable: bool
) -> Callable[[Segment], dict[int, Any]]:
    """Write all bulk; gives what then opens it: each piece's shared copy, by the piece's id."""
    parts = OutOfBand()
    storages = {}
    for key, tensor in walk.tensors.items():
        storage = storages[key] = parts.storage(tensor.untyped_storage())
        item, first = tensor.element_size(), tensor.storage_offset()
        last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        storage.add(first * item, (last + 1) * item, item)
    table = write_buffers(parts, writer)
    arrays = {key: _write_array(array, writer) for key, array in walk.arrays.items()}
    lists = {
        key: _write_items(items, writer, "item", writable=writable)
        for key, items in walk.lists.items()
    }
    dicts = {}
    for key, items in walk.dicts.items():
        keys = _write_items(items, writer, "key", writable=writable)
        values = _write_items(items.values(), writer, "value", writable=writable)
        hashes = [stable_hash(one) for one in items]
        known = [one for one in hashes if one is not None]
        dicts[key] = keys, values, write_index(known, writer) if len(known) == len(hashes) else None

    def build(segment: Segment) -> dict[int, Any]:
        opened = _open_storages(table, segment)
        copies: dict[int, Any] = {
            key: open_array(segment, *place, is_writable=writable) for key, place in arrays.items()
        }
        for key, tensor in walk.tensors.items():
            copies[key] = rebuild_tensor(
                opened[storages[key].index], tensor.dtype, tuple(tensor.shape), tensor.stride(),
                int(tensor.storage_offset()), tensor.requires_grad,
                type(tensor) is torch.nn.Parameter,
            )  # fmt: skip
        for key, place in lists.items():
            copies[key] = SharedList(Records(segment, place))
        for key, (keys, values, index) in dicts.items():
            copies[key] = SharedDict(
                segment, Records(segment, keys), Records(segment, values), index
            )
        return copies

    return build


def _open_storages(table: BufferTable, segment: Segment) -> list[PartialStorage]:
    return [
        PartialStorage(storage_at(segment, offset, nbytes), first_byte)
        for offset, nbytes, first_byte in table.spans
    ]


def _write_array(array: Any, writer: SegmentWriter) -> tuple[int, Any, Any, Any]:
    """Write an array; offset, dtype, shape and strides of its shared copy, which has its order."""
    strides = np.empty_like(array, order="K", subok=False).strides
    dense = array if array.strides == strides else array.copy(order="K")
    address = dense.__array_interface__["data"][0]
    return writer.append_memory(address, dense.nbytes), array.dtype, array.shape, strides


def _write_items(items: Iterable[Any], writer: SegmentWriter, word: str, *, writable: bool) -> Any:
    records = RecordWriter(writer, writable=writable)
    for number, item in enumerate(items):
        try:
            records.add(item)
        except MemoryError:
            raise
        except Exception as error:
            raise TypeError(
                f"{word} {number} of a long list or dict cannot be shared: it is a "
                f"{type(item).__module__}.{type(item).__qualname__}, and cannot be pickled "
                f"({type(error).__name__}: {error})"
            ) from error
    return records.finish()


class _SharedCopies:
    """Copies what has bulk in it, with what lies in a segment in the place of the bulk."""

    def __init__(self, walk: _Walk, made: dict[int, Any]) -> None:
        self._walk = walk
        self._made = made

    def shared_copy(self, value: Any) -> Any:
        """Return an object's shared copy, always the same one; or the object, if it has no bulk."""
        key = id(value)
        if key in self._made:
            return self._made[key]
        if key not in self._walk.changing:
            return value
        if isinstance(value, tuple):
            inner = [self.shared_copy(one) for one in value]
            # It may hold itself, by way of a list.
            return self._made.setdefault(key, _tuple_like(value, inner))
        made = self._made[key] = _copy_of(value)
        if made is value:
            return value
        if isinstance(value, list):
            for place, one in enumerate(value):
                list.__setitem__(made, place, self.shared_copy(one))
        elif isinstance(value, dict):
            for name, one in value.items():
                dict.__setitem__(made, name, self.shared_copy(one))
        else:
            for name, one in attributes_of(value).items():
                object.__setattr__(made, name, self.shared_copy(one))
        return made


def _tuple_like(value: Any, inner: list[Any]) -> Any:
    """A tuple of the same class, with other items."""
    try:
        made = tuple.__new__(type(value), inner)
    except TypeError:  # a structseq: a class written in C that tells names from places
        return type(value)(inner)
    if probe(value, "__dict__") is not None:
        made.__dict__.update(value.__dict__)
    return made


def _copy_of(value: Any) -> Any:
    """A new object of the same class, a container with its items; itself, if there can be none."""
    try:
        return copy.copy(value) if _is_container(value) else object.__new__(type(value))
    except Exception:  # noqa: BLE001 - a class written in C below it, or a dict that refuses
        return value
