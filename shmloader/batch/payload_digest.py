"""Digests of what is sent to workers, by which ranks find out whether they have the same dataset.

A digest is that of the pickle that the workers get, with four differences, so that it depends on
the contents alone:

* A set is hashed in an order that does not depend on the process (``PYTHONHASHSEED``).
* Whether two equal names are one object makes no difference. (Python makes equal names of
  attributes one object when it unpickles.)
* A function or class is its name. For a function that is not importable by its name, its code and
  the values that it captures are added.
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
from shmloader.interruptions import Caught, attempt
from shmloader.memory.pickled import OutOfBand, Pickler
from shmloader.memory.segment import BULK_BYTES, TOKEN_BYTES, Segment

_DIGEST_BYTES = 16

_EMPTY_CELL = types.CellType()


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
    return tuple((name, _digest(value)) for name, value in parts.items())


def mark_common(shared: object) -> None:
    """Mark the shared memory of an object as memory that all ranks of this host map."""
    for segment in _digested(shared).segments:
        segment.is_common = True


def _digest(value: object) -> bytes:
    return _digested(value).hasher.digest()[:_DIGEST_BYTES]


def _digested(value: object) -> "_Digester":
    """Pickle a value into a hash, as far as it can be pickled."""
    digester = _Digester()
    with spawning(Recorder()):
        outcome = attempt(digester.dump, value)
    if isinstance(outcome, Caught):
        # The rank that sends the dataset raises this, with an explanation.
        digester.write(type(outcome.error).__name__.encode())
    else:
        digester.parts.write(digester.write_memory)
    return digester


class _Digester(Pickler):
    """Pickles into a hash.

    Attributes:
        hasher: The hash.
        segments: The shared memory that was found.
        parts: What lies outside the pickle.
    """

    def __init__(self) -> None:
        self.hasher = hashlib.sha256()
        self.write = self.hasher.update
        self.segments: list[Segment] = []
        self.parts = OutOfBand(BULK_BYTES)
        self._functions: set[int] = set()
        self._names: dict[str, int] = {}
        reducers = reducers_of_multiprocessing()
        super().__init__(self, reduce_bulk, self.parts, reducers, by_value=True)

    def write_memory(self, address: int, nbytes: int) -> int:
        """Hash bytes of this process's memory."""
        self.write((ctypes.c_char * nbytes).from_address(address))
        return 0

    def persistent_id(self, value: Any) -> Any:
        """Return what is pickled instead of a value; None for the value itself."""
        kind = type(value)
        found: Any = None
        if kind is str and value.isidentifier():
            if value not in self._names:
                self.write(value.encode())
            found = self._names.setdefault(value, len(self._names))
        elif kind in (set, frozenset):
            found = "set", sorted(map(_digest, value))
        elif kind is types.FunctionType:
            found = self._function(value)
        elif kind is types.CodeType:
            found = "code", value.co_code, value.co_names, value.co_consts
        elif isinstance(value, type):
            found = "class", _name(value)
        elif isinstance(value, Segment):
            found = self._segment(value)
        elif isinstance(value, torch.Tensor):
            is_plain = value.layout is torch.strided and value.device.type == "cpu"
            found = ("shared", value.detach().clone()) if is_plain and value.is_shared() else None
        return found

    def _function(self, value: types.FunctionType) -> Any:
        here: object = sys.modules.get(value.__module__)
        for name in value.__qualname__.split("."):
            here = getattr(here, name, None)
        if here is value or id(value) in self._functions:
            return "function", _name(value)
        self._functions.add(id(value))
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL]
        defaults = value.__defaults__, value.__kwdefaults__
        return "function", _name(value), value.__code__, defaults, cells

    def _segment(self, value: Segment) -> Any:
        if value.is_common:
            self.segments.append(value)
            return "common", value.token
        known = [number for number, one in enumerate(self.segments) if one is value]
        if not known:
            self.write(memoryview(value)[TOKEN_BYTES:])
            self.segments.append(value)
        return "segment", known[0] if known else len(self.segments) - 1


def _name(value: Any) -> str:
    module = "__main__" if value.__module__ == "__mp_main__" else value.__module__
    return f"{module}.{value.__qualname__}"
