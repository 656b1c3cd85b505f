"""Fingerprints: checksums of values that are the same in every process.

A worker's stream is compared by them after it was resumed, and the ranks of a host find out by them
whether they have the same dataset.

Numbers, texts, tensors and arrays count, and the items of lists, tuples and dicts: of what is long,
both ends. A set or a long dict counts by its length, a function or class by its name, and any other
value by its type alone: what is in it may differ from run to run.
"""

import types
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shmloader.interruptions import Caught, attempt

# A fingerprint covers so many samples of a batch.
_SAMPLES = 4

# How many bytes or elements count at each end, and how many items of a list: so a batch of nested
# lists of numbers takes milliseconds.
_END = 1024
_END_ITEMS = 8

# The items of a longer dict do not count. How deep lists, tuples and dicts are followed.
_LONG_DICT = 128
_DEEPEST = 5

_NUMBERS = {int, float, complex, bool, type(None)}


def fingerprint_of(samples: Sequence[object]) -> int:
    """Return the fingerprint of a batch."""
    count = len(samples)
    if count > _SAMPLES:
        samples = [samples[at] for at in (0, count // 3, 2 * count // 3, count - 1)]
    return fingerprint((count, *samples))


def fingerprints_of(dataset: object) -> dict[str, int]:
    """Return the fingerprint of a dataset, and those of the attributes that are pickled with it."""
    found = {"dataset": fingerprint(dataset)}
    kind: Any = type(dataset)
    if kind.__reduce__ is object.__reduce__:
        state = attempt(kind.__getstate__, dataset)
        if isinstance(state, dict):
            found |= {f"dataset.{name}": fingerprint(part) for name, part in state.items()}
    return found


def fingerprint(value: object) -> int:
    """Return a checksum of 32 bits of a value."""
    text = attempt(repr, _simplified(value))  # of a number of very many digits, Python makes none
    return 0 if isinstance(text, Caught) else zlib.crc32(text.encode())


def _simplified(value: Any, depth: int = 0) -> Any:
    """Return what counts of a value, as a nested tuple of names and numbers."""
    if type(value) in _NUMBERS:
        return value
    named: Any = value if isinstance(value, type | types.FunctionType) else type(value)
    name = f"{named.__module__}.{named.__qualname__}".replace("__mp_main__", "__main__")
    found = attempt(_contents, value, depth)  # the user's objects may raise anything
    return name, None if isinstance(found, Caught) else found


def _contents(value: Any, depth: int) -> Any:
    """Return what counts of a value besides its type."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            flat: Any = value.detach().resolve_conj().resolve_neg().reshape(-1)
            ends = _ends(flat, lambda end: end.cpu().view(torch.uint8).numpy())
            return str(value.dtype), *value.shape, *ends
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        ends = _ends(value.reshape(-1), lambda end: end.tobytes())
        return str(value.dtype), *value.shape, *ends
    if isinstance(value, str | bytes | bytearray):
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return len(data), *_ends(data, bytes)
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        is_long = len(value) > 2 * _END_ITEMS
        ends = [*value[:_END_ITEMS], *value[-_END_ITEMS:]] if is_long else [*value]
        return len(value), [_simplified(item, depth + 1) for item in ends]
    if isinstance(value, dict) and depth < _DEEPEST and len(value) <= _LONG_DICT:
        # Sorted, since the keys may come from a set.
        items = [(_simplified(key), _simplified(value[key], depth + 1)) for key in value]
        return sorted(items, key=repr)
    return len(value) if isinstance(value, list | tuple | dict | set | frozenset) else None


def _ends(values: Any, to_bytes: Callable[[Any], Any]) -> list[int]:
    """Return the checksums of both ends of a sequence of bytes or elements."""
    return [zlib.crc32(to_bytes(end)) for end in (values[:_END], values[-_END:])]
