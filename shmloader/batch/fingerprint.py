"""Fingerprints of batches, which show whether a resumed dataset yields the same samples as before.

An iterable dataset without a state of its own is resumed by reading, and discarding, what was
delivered before. That is exact only if the dataset yields the same samples again, which cannot be
known beforehand. So the loader's state keeps a checksum over the fingerprints of the delivered
batches, and a resumed dataset is compared with it.

A fingerprint covers up to four samples of a batch, the first and the last among them. Of each
sample it covers some 40 numbers, texts or arrays, and of each array some 200 elements. A missing or
repeated sample shifts the samples of all later batches, so a difference remains unnoticed only if
the samples are alike in all of these.
"""

import contextlib
import functools
import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from shmloader.interruptions import Suppressed

# A fingerprint covers at most so many samples of a batch, leaves of a sample, and containers around
# a leaf.
_SAMPLES = 4
_LEAVES = 40
_DEPTH = 16

# The most elements of a container, and of an array or text, that are covered.
_PARTS = 32
_ELEMENTS = 192

# Types whose repr is short and the same in every process.
_SHOWN_BY_REPR = (bool, float, complex, type(None), type(...), range, slice)
_MODULES_SHOWN_BY_REPR = frozenset({"datetime", "decimal", "fractions", "pathlib", "uuid"})


def fingerprint_of(samples: Sequence[object]) -> int:
    """Return the fingerprint of a batch."""
    count = len(samples)
    check = zlib.crc32(b"%d" % count)
    for at in range(count) if count <= _SAMPLES else (0, count // 3, 2 * count // 3, count - 1):
        check = fingerprint(samples[at], check)
    return check


def fingerprint(sample: object, check: int = 0) -> int:
    """Return a checksum of a sample that is the same in every process.

    Numbers, texts, bytes, arrays and CPU tensors count by their values, also in containers and in
    the attributes of objects. Anything else counts by its type only. No code of the sample's runs.

    Args:
        sample: The sample.
        check: Checksum over what precedes the sample in its batch.
    """
    walk = _Walk(check)
    walk.add(sample, _DEPTH)
    return walk.check


class _Walk:
    """A walk over the leaves of a sample. It ends at the limit of leaves.

    Attributes:
        check: The checksum so far.
    """

    __slots__ = ("_left", "check")

    def __init__(self, check: int) -> None:
        self.check = check
        self._left = _LEAVES

    def add(self, value: object, depth: int) -> None:
        """Add a sample, or something in it, to the checksum."""
        if self._left <= 0:
            return
        kind = type(value)
        self.check = zlib.crc32(kind.__qualname__.encode(), self.check)
        data = _data_of(value)
        parts = None if data is not None or not depth else _parts_of(value)
        if parts is None:
            self._left -= 1
            self.check = zlib.crc32(data or b"", self.check)
            return
        for part in parts:
            self.add(part, depth - 1)


def _data_of(value: Any) -> bytes | None:
    """Return bytes that tell a value from others of its type; None if it is no leaf."""
    kind = type(value)
    if kind is int:
        return b"%d,%d" % (value.bit_length(), hash(value))
    if kind in _SHOWN_BY_REPR or kind.__module__ in _MODULES_SHOWN_BY_REPR:
        return repr(value).encode("utf-8", "surrogatepass")
    if issubclass(kind, torch.Tensor):
        return _of_tensor(value)
    if issubclass(kind, np.ndarray):
        return _of_array(value.view(np.ndarray))
    if issubclass(kind, np.generic):
        value = value.tobytes()
    elif issubclass(kind, str):
        value = str.encode(value, "utf-8", "surrogatepass")
    if not issubclass(type(value), bytes | bytearray):
        return None
    return _of_array(np.frombuffer(value, np.uint8))


def _parts_of(value: Any) -> Iterable[object] | None:
    """Return some elements of a container, or the attributes of an object; None for neither."""
    kind = type(value)
    if issubclass(kind, list | tuple):
        count = list.__len__(value) if issubclass(kind, list) else tuple.__len__(value)
        get = list.__getitem__ if issubclass(kind, list) else tuple.__getitem__
        return [count, *(get(value, at) for at in _places(count, _PARTS))]
    if issubclass(kind, dict):
        items = itertools.islice(dict.items(value), _PARTS)
        return [dict.__len__(value), *itertools.chain(*items)]
    if issubclass(kind, set | frozenset):
        # A sum, since the order of a set differs from process to process.
        return [len(value), sum(map(fingerprint, value)) if len(value) <= _LEAVES else 0]
    with contextlib.suppress(AttributeError):
        return itertools.chain(*object.__getattribute__(value, "__dict__").items())
    return None


@functools.lru_cache(maxsize=256)
def _places(count: int, most: int) -> "np.ndarray[Any, np.dtype[np.intp]]":
    """Return some indices of a sequence: both ends, and others spread over its length."""
    if count <= most:
        return np.arange(count)
    third = most // 3
    # The step is odd, so that the indices have different places in rows of an even length.
    spread = np.arange(third, count - third, (count // third) | 1)
    return np.concatenate([np.arange(third), spread, np.arange(count - third, count)])


def _of_tensor(tensor: torch.Tensor) -> bytes:
    # A tensor of a subclass may have no memory, and its operations may run any code.
    with Suppressed(RuntimeError, TypeError, ValueError), torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is torch.sparse_coo:
            return _of_tensor(tensor._indices()) + _of_tensor(tensor._values())
        dtype = str(tensor.dtype).encode()
        tensor = tensor.detach().resolve_conj().resolve_neg()
        with Suppressed(TypeError):  # such as bfloat16
            return dtype + _of_array(tensor.numpy())
        return dtype + _of_array(tensor.reshape(-1).contiguous().view(torch.uint8).numpy())
    return b""


def _of_array(array: "np.ndarray[Any, Any]") -> bytes:
    head = b"%b%d," % (array.dtype.char.encode(), array.size)
    if not array.size or array.dtype.hasobject:
        return head
    if array.size > _ELEMENTS:
        array = array.flat[_places(array.size, _ELEMENTS)]
    return head + array.tobytes()
