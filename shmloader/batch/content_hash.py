"""Digests of values that are the same in every process: checksums of what pickle makes of them.

A worker's stream is compared by them after it was resumed, and the ranks of a host find out by them
whether they have the same dataset.

Pickle writes an object that recurs once, and the elements of a set in the order of this process. So
its memo is off, and the digests of a set's elements are sorted. A function or class is its name;
for a function that is not importable by its name, its code and the values that it captures are
added. Shared memory is its contents, except memory that ranks have in common by ``share_on_host``:
that is its token, since all ranks map the same pages. What cannot be pickled counts by its type
only.
"""

import copyreg
import hashlib
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmloader.batch.payload import Recorder, spawning
from shmloader.interruptions import Caught, attempt
from shmloader.memory.pickled import reducers_of_multiprocessing, sparse_parts
from shmloader.memory.segment import Segment
from shmloader.memory_maps import reduce_memory_map
from shmloader.shared.containers import reduce_array, reduce_tensor

_EMPTY_CELL = types.CellType()

_NUMBERS = {int, float, bool, complex, type(None)}

# Of a long list or tuple, this many times fewer elements count than bytes of a text.
_SHORTENED = 64

# A value of more parts than this is pickled with the memo: it may be part of itself, or what recurs
# in it may recur without end.
_MOST_PARTS = 1_000_000


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
        return tuple((name, digest_of(value)) for name, value in parts.items())


def digest_of(value: object, end_bytes: int | None = None) -> bytes:
    """Return the digest of a value, of 16 bytes.

    Args:
        value: Any value.
        end_bytes: Of data longer than twice this, only the size and so many bytes at each end
            count. Of a list or tuple, a 64th as many elements count. None if all count.
    """
    for has_memo in (False, True):
        hasher = hashlib.blake2b(digest_size=16)
        pickler = _Pickler(hasher, end_bytes, has_memo=has_memo)
        if not isinstance(attempt(pickler.dump, value), Caught):
            return hasher.digest()
    return hashlib.blake2b(_name(type(value)).encode(), digest_size=16).digest()


class _Pickler(pickle.Pickler):
    """Pickles a value into a hash."""

    def __init__(self, hasher: Any, end: int | None, *, has_memo: bool) -> None:
        super().__init__(types.SimpleNamespace(write=hasher.update), 4)
        self.fast, self._end, self._parts_left = not has_memo, end, _MOST_PARTS
        if end is None:  # memory that processes share is not in samples
            reducers = reducers_of_multiprocessing(with_torch=True)
            self.dispatch_table = copyreg.dispatch_table | reducers

    def persistent_id(self, value: Any) -> Any:
        """Return what is pickled in place of a part; None for the part itself."""
        kind = type(value)
        if kind in _NUMBERS:
            return None
        self._parts_left -= self.fast
        if self._parts_left < 0:
            raise RecursionError
        if kind in _PARTS:
            return _PARTS[kind](self, value)
        if isinstance(value, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                return self._parts_of_tensor(value)
        return _name(value) if isinstance(value, type | types.ModuleType) else None

    def cut(self, items: Any, shortened: int = 1) -> Any:
        """Return what counts of a long list, tuple or text; None if all of it does."""
        if self._end is None or len(items) <= 2 * self._end // shortened:
            return None
        end = self._end // shortened
        return len(items), items[:end], items[-end:]

    def _digests(self, data: Any) -> tuple[Any, ...]:
        """Return digests of what counts of data: bytes, or an array of bytes."""
        size, *parts = self.cut(data) or (len(data), data)
        return size, *(hashlib.blake2b(part).digest() for part in parts)

    def _parts_of_tensor(self, value: torch.Tensor) -> tuple[Any, ...]:
        reduced: Any = reduce_tensor(value) if self._end is None else None
        if reduced is not None:
            return tuple(reduced)
        plain, about = value.detach(), (type(value), str(value.dtype), *value.shape)
        if plain.layout is not torch.strided:
            return *about, *sparse_parts(plain)
        flat = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return *about, *self._digests(flat.view(torch.uint8).numpy())

    def parts_of_array(self, value: "np.ndarray[Any, Any]") -> tuple[Any, ...]:
        """Return what is pickled in place of an array."""
        reduced: Any = reduce_array(value) if self._end is None else None
        if reduced is not None or value.dtype.hasobject:
            return tuple(reduced or (value.shape, value.tolist()))
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return str(value.dtype), *value.shape, *self._digests(flat)


def _parts_of_function(value: types.FunctionType) -> tuple[Any, ...] | str:
    here: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        here = getattr(here, name, None)
    if here is value:
        return _name(value)
    cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]
    return _name(value), value.__code__, value.__defaults__, value.__kwdefaults__, *cells


# What is pickled in place of values of these types.
_PARTS: dict[type, Callable[[_Pickler, Any], Any]] = {
    **dict.fromkeys((str, bytes, bytearray), _Pickler.cut),
    **dict.fromkeys((list, tuple), lambda pickler, value: pickler.cut(value, _SHORTENED)),
    **dict.fromkeys((set, frozenset), lambda _, value: sorted(map(digest_of, value))),
    np.ndarray: _Pickler.parts_of_array,
    np.memmap: lambda _, value: reduce_memory_map(value),
    Segment: lambda _, value: value.digest,
    types.FunctionType: lambda _, value: _parts_of_function(value),
    types.CodeType: lambda _, value: (value.co_code, value.co_names, value.co_consts),
}


def _name(value: Any) -> str:
    module = getattr(value, "__module__", "")
    name = getattr(value, "__qualname__", value.__name__)
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"
