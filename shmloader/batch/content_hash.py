"""Hashes values by their contents, the same in every process.

A worker's stream is compared by them after it was resumed, and the ranks of a host find out by them
whether they have the same dataset.

A value is hashed as pickle would reduce it, and the hash of a whole is made of those of its parts.
So it makes no difference whether two equal parts are one object, or in which order a process has
the elements of a set (``PYTHONHASHSEED``). A function or class is its name; for a function that is
not importable by its name, its code and the values that it captures are added. What cannot be
reduced counts by its type only. Shared memory is its contents, except memory that ranks have in
common by ``share_on_host``: that is its token, since all ranks map the same pages.
"""

import copyreg
import hashlib
import marshal
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from shmloader.batch.payload import Recorder, reducers_of_multiprocessing, spawning
from shmloader.interruptions import Caught, attempt
from shmloader.memory.pickled import sparse_parts
from shmloader.memory.segment import TOKEN_BYTES, Segment, reduce_memory_map
from shmloader.shared.containers import reduce_array, reduce_tensor

_EMPTY_CELL = types.CellType()

# What marshal writes alike in every process, in a version that refers to no earlier object.
_NUMBERS = {type(None), bool, int, float, complex}
_TEXTS = {str, bytes}
_PLAIN = _NUMBERS | _TEXTS
_MARSHAL_VERSION = 2

# Stands for a value that is a part of itself.
_WITHIN_ITSELF = b"..."

# Texts up to this length are not hashed by themselves.
_SHORT = 256


def digests_of(dataset: object, worker_init_fn: object) -> tuple[tuple[str, bytes], ...]:
    """Return digests of a dataset and of a function for workers, each with its name.

    If the dataset is pickled as its attributes, there is a digest of each of them.
    """
    parts = {"worker_init_fn": worker_init_fn, "dataset": dataset}
    kind: Any = type(dataset)
    names = ("__reduce_ex__", "__reduce__", "__getstate__")
    is_plain = all(getattr(kind, name) is getattr(object, name) for name in names)
    has_slots = any(vars(one).get("__slots__") for one in kind.__mro__)
    if is_plain and hasattr(dataset, "__dict__") and not has_slots:
        parts["dataset"] = kind
        parts |= {f"dataset.{name}": value for name, value in vars(dataset).items()}
    with spawning(Recorder()):
        return tuple((name, ContentHash().digest(value)) for name, value in parts.items())


def mark_common(shared: object) -> None:
    """Mark the shared memory of an object as memory that all ranks of this host map."""
    found = ContentHash()
    with spawning(Recorder()):
        found.digest(shared)
    for segment in found.segments:
        segment.is_common = True


class ContentHash:
    """Hashes values that do not change meanwhile.

    Attributes:
        segments: The shared memory that was found in them.

    Args:
        end_bytes: Of data longer than twice this, only the size and so many bytes at each end
            count; of a list or tuple with more elements, so many at each end. None if all count.
    """

    def __init__(self, end_bytes: int | None = None) -> None:
        self._end = end_bytes
        self.segments: list[Segment] = []
        # Digests by id(); the values are kept alive, so that their ids are not used again.
        self._known: dict[int, tuple[object, bytes]] = {}

    def digest(self, value: Any) -> bytes:
        """Return the digest of a value."""
        known = self._known.get(id(value))
        if known is None:
            kind = type(value)
            self._known[id(value)] = value, _WITHIN_ITSELF
            outcome = attempt(self._digest, kind, value)
            digest = self._hash(kind, ()) if isinstance(outcome, Caught) else outcome
            known = self._known[id(value)] = value, digest
        return known[1]

    def _part(self, value: Any) -> Any:
        """Return a short plain value or a tuple of these, or the digest of any other value."""
        kind = type(value)
        if kind in _TEXTS:
            return value if len(value) <= _SHORT else self.digest(value)
        is_plain = kind is tuple and _PLAIN.issuperset(map(type, value))
        return value if is_plain or kind in _NUMBERS else self.digest(value)

    def _hash(self, kind: object, parts: Iterable[Any], data: Any = b"") -> bytes:
        """Hash parts, and data: bytes or an array of bytes."""
        about = [_name(kind), len(data), *map(self._part, parts)]
        hasher = hashlib.blake2b(marshal.dumps(about, _MARSHAL_VERSION), digest_size=16)
        end = self._end
        if end is None or len(data) <= 2 * end:
            hasher.update(data)
        else:
            hasher.update(data[:end])
            hasher.update(data[-end:])
        return hasher.digest()

    def _digest(self, kind: Any, value: Any) -> bytes:
        if kind in (list, tuple):
            count, end = len(value), self._end
            if end is not None and count > 2 * end:
                value = [*value[:end], *value[-end:]]
            return self._hash(kind, (count, *value))
        if kind is dict:
            return self._hash(kind, [*value, *value.values()])
        if kind in _TEXTS:
            text = value.encode("utf-8", "surrogatepass") if kind is str else value
            return self._hash(kind, (), text)
        if isinstance(value, torch.Tensor):
            return self._digest_tensor(kind, value)
        if kind is np.ndarray:
            return self._digest_array(value)
        parts = self._reduce(kind, value)
        return parts if isinstance(parts, bytes) else self._hash(kind, parts)

    def _digest_tensor(self, kind: type, value: torch.Tensor) -> bytes:
        with torch._C.DisableTorchFunctionSubclass():
            reduced = reduce_tensor(value) if self._end is None else None
            if reduced is not None:
                return self._hash(kind, reduced)
            plain, about = value.detach(), (str(value.dtype), *value.shape)
            if plain.layout is not torch.strided:
                return self._hash(kind, (*about, *sparse_parts(plain)))
            flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            return self._hash(kind, about, flat.view(torch.uint8).numpy())

    def _digest_array(self, value: "np.ndarray[Any, Any]") -> bytes:
        parts = reduce_array(value) if self._end is None else None
        if parts is None and not value.dtype.hasobject:
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return self._hash(np.ndarray, (str(value.dtype), *value.shape), data)
        return self._hash(np.ndarray, parts or (value.shape, value.tolist()))

    def _reduce(self, kind: Any, value: Any) -> Any:
        """Return the parts that any other value is made of, or its digest."""
        if kind in _REDUCERS:
            return _REDUCERS[kind](value)
        if kind is Segment:
            self.segments.append(value)
            data = value.token if value.is_common else memoryview(value)[TOKEN_BYTES:]
            return self._hash(kind, (), data)
        if isinstance(value, type | types.ModuleType):
            return (_name(value),)
        reducer = reducers_of_multiprocessing().get(kind) or copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
        if isinstance(reduced, str):
            return (reduced,)
        # After the state come iterators over the elements of a list and of a dict.
        return *reduced[:3], *([*(items or ())] for items in reduced[3:5])


def _parts_of_function(value: types.FunctionType) -> tuple[Any, ...]:
    here: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        here = getattr(here, name, None)
    if here is value:
        return (_name(value),)
    cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]
    defaults = value.__defaults__, value.__kwdefaults__
    return _name(value), value.__code__, *defaults, *cells


# How values of these types are reduced other than by pickle.
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    set: lambda value: sorted(map(ContentHash().digest, value)),
    frozenset: lambda value: sorted(map(ContentHash().digest, value)),
    types.FunctionType: _parts_of_function,
    types.CodeType: lambda value: (value.co_code, value.co_names, value.co_consts),
    np.memmap: reduce_memory_map,
}


def _name(value: Any) -> str:
    module = getattr(value, "__module__", "")
    name = getattr(value, "__qualname__", value.__name__)
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"
