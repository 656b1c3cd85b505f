"""Digests of what is sent to workers, by which ranks find out whether they have the same dataset.

A digest is that of the pickle that the workers get, with four differences, so that it depends on
the contents alone:

* A set is hashed in an order that does not depend on the process (``PYTHONHASHSEED``).
* Whether two equal names are one object makes no difference. (Python makes equal names of
  attributes one object when it unpickles.)
* A function or class is its name. For a function that is not importable by its name, its bytecode
  and the values that it captures are added.
* Shared memory is its contents, except memory that ranks have in common by ``share_on_host``. That
  is its token, since all ranks map the same pages.
"""

import ctypes
import hashlib
import sys
import types
from typing import Any

import torch

from shmloader.batch.payload import (
    Recorder,
    reduce_bulk,
    reducers_of_multiprocessing,
    spawning,
)
from shmloader.interruptions import is_interruption
from shmloader.memory.pickled import OutOfBand, Pickler
from shmloader.memory.segment import BULK_BYTES, TOKEN_BYTES, Segment, write_buffers

_PLAIN = frozenset({int, float, bool, type(None), bytes, tuple, list, dict})
_DIGEST_BYTES = 16


def digests_of(dataset: object, worker_init_fn: object) -> tuple[tuple[str, bytes], ...]:
    """Return digests of a dataset and of a function for workers, each with its name.

    If the dataset is pickled as its attributes, there is a digest of each of them.
    """
    parts = {"worker_init_fn": worker_init_fn, "dataset": dataset}
    kind: Any = type(dataset)
    is_plain = all(
        getattr(kind, name) is getattr(object, name)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    )
    if is_plain and hasattr(dataset, "__dict__") and not hasattr(kind, "__slots__"):
        parts["dataset"] = kind
        parts |= {f"dataset.{name}": value for name, value in vars(dataset).items()}
    return tuple((name, _digest(value)) for name, value in parts.items())


def mark_common(shared: object) -> None:
    """Note of the shared memory of an object that all ranks of this host map the same pages."""
    pickler = _Digester()
    pickler.try_dump(shared)
    for segment in pickler.segments:
        segment.is_common = True


def _digest(value: object) -> bytes:
    pickler = _Digester()
    pickler.try_dump(value)
    return pickler.hasher.digest()[:_DIGEST_BYTES]


class _Digester(Pickler):
    """Pickles into a hash.

    Attributes:
        hasher: The hash.
        segments: The shared memory that was found.
    """

    def __init__(self) -> None:
        self.hasher = hashlib.sha256()
        self.segments: list[Segment] = []
        self.write = self.hasher.update
        self._functions: set[int] = set()
        self._names: dict[str, int] = {}
        parts = OutOfBand(BULK_BYTES)
        reducers = reducers_of_multiprocessing()
        super().__init__(self, reduce_bulk, parts, reducers, by_value=True)

    def try_dump(self, value: object) -> None:
        """Pickle a value. What cannot be pickled is hashed as far as it can be."""
        try:
            with spawning(Recorder()):
                self.dump(value)
            write_buffers(self._parts, self)
        except Exception as error:
            if is_interruption(error):
                raise
            # The rank that sends the dataset raises this, with an explanation.
            self.write(type(error).__name__.encode())

    def append(self, raw: Any) -> int:
        """Hash a buffer."""
        self.write(raw)
        return 0

    def append_memory(self, address: int, nbytes: int) -> int:
        """Hash bytes of this process's memory."""
        self.write((ctypes.c_char * nbytes).from_address(address))
        return 0

    def persistent_id(self, value: Any) -> Any:
        """Return what is pickled instead of a value; None for the value itself."""
        found: Any = None
        kind = type(value)
        if kind is str:
            found = self._names.get(value)
            if found is None and value.isidentifier():
                self.write(value.encode())
                found = self._names[value] = len(self._names)
        elif kind in _PLAIN:
            pass
        elif kind in (set, frozenset):
            has_text = all(map(_is_told_by_repr, value))
            found = "set", sorted(map(repr, value)) if has_text else sorted(map(_digest, value))
        elif kind is types.FunctionType:
            found = self._function(value)
        elif isinstance(value, type):
            found = "class", _name(value)
        elif isinstance(value, Segment):
            found = self._segment(value)
        elif _is_in_shared_memory(value):
            found = "shared tensor", value.detach().clone()
        return found

    def _function(self, value: types.FunctionType) -> Any:
        if _is_importable(value) or id(value) in self._functions:
            return "function", _name(value)
        self._functions.add(id(value))
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]
        defaults = value.__defaults__, value.__kwdefaults__
        return "function", _name(value), value.__code__.co_code, defaults, cells

    def _segment(self, value: Segment) -> Any:
        if value.is_common:
            self.segments.append(value)
            return "common", value.token
        if not any(value is one for one in self.segments):
            self.write(memoryview(value)[TOKEN_BYTES:])
            self.segments.append(value)
        return "segment", next(n for n, one in enumerate(self.segments) if one is value)


def _is_told_by_repr(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_told_by_repr, value))
    return type(value) in (str, bytes, int, float, bool, type(None))


def _is_in_shared_memory(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.is_shared()
    )


_EMPTY_CELL = types.CellType()


def _name(value: Any) -> str:
    module = "__main__" if value.__module__ == "__mp_main__" else value.__module__
    return f"{module}.{value.__qualname__}"


def _is_importable(value: types.FunctionType) -> bool:
    found: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value
