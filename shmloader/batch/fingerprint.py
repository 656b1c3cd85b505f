"""Fingerprints of batches, which show whether a resumed dataset yields the same samples as before.

An iterable dataset without a state of its own is resumed by reading, and discarding, what was
delivered before. That is exact only if the dataset yields the same samples again, which cannot be
known beforehand. So the loader's state keeps a checksum over the fingerprints of the delivered
batches, and a resumed dataset is compared with it.

A fingerprint covers up to four samples of a batch, the first and the last among them. Of each
sample it covers some 40 numbers, texts or arrays, and of each array at most a few hundred bytes. It
takes 2 to 40 µs a batch. A missing or repeated sample shifts the samples of all later batches, so a
difference remains unnoticed only if the samples are alike in all these bytes.
"""

import contextlib
import itertools
import types
import zlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch

from shmloader.interruptions import is_interruption

# A fingerprint covers at most so many samples of a batch, leaves of a sample, and containers around
# a leaf.
_SAMPLES = 4
_LEAVES = 40
_DEPTH = 16

# How much of a long container or array is covered: elements at either end of a container; bytes at
# either end of an array, and bytes spread over its length.
_END_ELEMENTS = 12
_END_BYTES = 256
_SPREAD_BYTES = 251
_WHOLE_BYTES = 2 * _END_BYTES + _SPREAD_BYTES

# Tensors of other types are converted to bytes for NumPy.
_NUMPY_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)

# Types whose repr is short and the same in every process.
_SHOWN_BY_REPR = frozenset({bool, float, complex, type(None), type(...), range, slice})
_MODULES_SHOWN_BY_REPR = frozenset({"datetime", "decimal", "fractions", "pathlib", "uuid"})


class FingerprintingCollate:
    """A fetcher's collate function that takes the fingerprint of each batch first.

    Runs on the thread that loads samples.

    Attributes:
        value: Fingerprint of the newest batch; None until its samples were read.

    Args:
        collate_fn: The collate function.
        takes_list: Whether its argument is a list of samples rather than one sample.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], *, takes_list: bool) -> None:
        self._collate_fn = collate_fn
        self._takes_list = takes_list
        self.value: int | None = None

    def reset(self) -> None:
        """Forget the last fingerprint. Called before a batch is read."""
        self.value = None

    def __call__(self, samples: Any) -> Any:
        """Take the fingerprint, and collate."""
        self.take(samples)
        return self._collate_fn(samples)

    def take(self, samples: Any) -> None:
        """Take the fingerprint only."""
        if not self._takes_list:
            self.value = fingerprint(samples)
            return
        count = len(samples)
        check = zlib.crc32(b"%d" % count)
        for at in range(count) if count <= _SAMPLES else (0, count // 3, 2 * count // 3, count - 1):
            check = fingerprint(samples[at], check)
        self.value = check


def fingerprint(sample: object, check: int = 0) -> int:
    """Return a checksum of a sample that is the same in every process.

    Numbers, texts, bytes, arrays and CPU tensors count by their values, also in containers and in
    the attributes of objects. Anything else counts by its type only.

    Args:
        sample: The sample.
        check: Checksum over what precedes the sample in its batch.
    """
    if type(sample) is torch.Tensor:
        return _of_tensor(sample, check)
    if type(sample) is int:
        return _of_int(sample, check)
    return _Walk(check).over(sample).check


class _Walk:
    """A walk over the leaves of a sample. It ends at the limit of leaves.

    Attributes:
        check: The checksum so far.
    """

    __slots__ = ("_left", "check")

    def __init__(self, check: int) -> None:
        self.check = check
        self._left = _LEAVES

    def over(self, sample: object, depth: int = 0) -> "_Walk":
        """Add a sample, or something in it, to the checksum."""
        if self._left <= 0:
            return self
        self.check = zlib.crc32(type(sample).__qualname__.encode(), self.check)
        parts = _parts_of(sample) if depth < _DEPTH else None
        if parts is None:
            self._left -= 1
            self.check = _of_leaf(sample, self.check)
            return self
        for part in parts:
            self.over(part, depth + 1)
        return self


def _parts_of(sample: object) -> Iterable[object] | None:
    """Return some elements of a container, or the attributes of an object; None for a leaf."""
    kind = type(sample)
    if kind in _LEAF_TYPES or issubclass(kind, torch.Tensor):
        return None
    parts: list[object] = []
    if issubclass(kind, list | tuple):
        count = list.__len__(sample) if isinstance(sample, list) else tuple.__len__(sample)  # type: ignore[arg-type]
        get = list.__getitem__ if issubclass(kind, list) else tuple.__getitem__
        parts += [count, *(get(sample, at) for at in _some_indices(count))]  # type: ignore[call-overload]
    elif issubclass(kind, dict):
        items = dict.items(cast("dict[object, object]", sample))
        parts += [len(items), *itertools.chain(*itertools.islice(items, _END_ELEMENTS * 2))]
    elif issubclass(kind, set | frozenset):
        # A sum, since the order of a set differs from process to process.
        some = itertools.islice(cast("Iterable[object]", sample), _LEAVES)
        parts.append(sum(fingerprint(part) for part in some) if len(sample) <= _LEAVES else 0)  # type: ignore[arg-type]
    elif issubclass(kind, np.ndarray):
        array = cast("np.ndarray[Any, Any]", sample)
        if not array.dtype.hasobject:
            return None
        parts += [array.size, *itertools.islice(array.flat, _LEAVES)]
    elif kind.__module__ in _MODULES_SHOWN_BY_REPR:
        return None
    parts += _attributes_of(sample)
    return parts if parts or issubclass(kind, list | tuple | dict) else None


def _some_indices(count: int) -> Iterable[int]:
    if count <= 2 * _END_ELEMENTS:
        return range(count)
    ends = range(_END_ELEMENTS), range(count - _END_ELEMENTS, count)
    return itertools.chain(ends[0], range(count // 3, count, count // 3 + 1), ends[1])


def _attributes_of(sample: object) -> list[object]:
    """Return an object's attributes, without running code of its class."""
    attributes: list[object] = []
    with contextlib.suppress(AttributeError):
        attributes += object.__getattribute__(sample, "__dict__").items()
    for kind in type(sample).__mro__[:-1]:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            descriptor = kind.__dict__.get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    attributes.append((name, descriptor.__get__(sample)))
    return attributes


_LEAF_TYPES = frozenset({*_SHOWN_BY_REPR, int, str, bytes, bytearray, type, type(len), type(_Walk)})


def _of_leaf(sample: object, check: int) -> int:
    kind = type(sample)
    if kind in _SHOWN_BY_REPR or kind.__module__ in _MODULES_SHOWN_BY_REPR:
        return zlib.crc32(repr(sample).encode("utf-8", "surrogatepass"), check)
    if kind is int:
        return _of_int(cast("int", sample), check)
    if issubclass(kind, torch.Tensor):
        return _of_tensor(cast("torch.Tensor", sample), check)
    if issubclass(kind, np.ndarray):
        return _of_array(cast("np.ndarray[Any, Any]", sample).view(np.ndarray), check)
    if issubclass(kind, np.generic):
        data = cast("np.generic", sample).tobytes()
    elif issubclass(kind, str):
        data = str.encode(cast("str", sample), "utf-8", "surrogatepass")
    elif issubclass(kind, bytes | bytearray):
        data = cast("bytes", sample)
    else:
        return check
    check = zlib.crc32(b"%d" % len(data), check)
    return _of_bytes(np.frombuffer(data, np.uint8), check)


def _of_int(number: int, check: int) -> int:
    bits = number.bit_length()
    if bits < 64:  # noqa: PLR2004 - the size of a machine word
        return zlib.crc32(b"i%d" % number, check)
    return zlib.crc32(number.to_bytes(bits // 8 + 1, "little", signed=True)[:_WHOLE_BYTES], check)


def _of_tensor(tensor: torch.Tensor, check: int) -> int:
    if type(tensor) is torch.Tensor:
        return _of_plain_tensor(tensor, check)
    # A tensor of a subclass may have no memory, and its operations may run any code.
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return _of_plain_tensor(tensor, check)
    except Exception as error:
        if is_interruption(error):
            raise
        return check


def _of_plain_tensor(tensor: torch.Tensor, check: int) -> int:
    if tensor.layout is torch.sparse_coo:
        return _of_plain_tensor(tensor._values(), _of_plain_tensor(tensor._indices(), check))
    if (
        tensor.layout is not torch.strided
        or not tensor.is_cpu
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return zlib.crc32(str(tensor.dtype).encode(), check)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype not in _NUMPY_DTYPES:
        check = zlib.crc32(str(tensor.dtype).encode(), check)
        tensor = tensor.reshape(-1).contiguous().view(torch.uint8)
    return _of_array(tensor.numpy(), check)


def _of_array(array: "np.ndarray[Any, Any]", check: int) -> int:
    check = zlib.crc32(b"%b%d" % (array.dtype.char.encode(), array.size), check)
    if not array.nbytes or array.dtype.hasobject:
        return check
    if not array.flags.c_contiguous:
        # With its axes in memory order, an image whose channels were moved is contiguous.
        array = array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array[tuple(map(_some_of, array.shape))])
    if array.nbytes <= _WHOLE_BYTES:
        return zlib.crc32(array.tobytes(), check)
    return _of_bytes(array.reshape(-1).view(np.uint8), check)


def _some_of(length: int) -> slice:
    """Return a slice of a few indices along a dimension, the first among them."""
    return slice(None, None, length // 4 + 1)


def _of_bytes(data: "np.ndarray[Any, Any]", check: int) -> int:
    size = len(data)
    if size <= _WHOLE_BYTES:
        return zlib.crc32(data.data, check)
    # The step is odd, so that the bytes have different offsets in their elements.
    spread = data[:: (size // _SPREAD_BYTES) | 1].copy()
    for part in (data[:_END_BYTES], data[-_END_BYTES:], spread):
        check = zlib.crc32(part.data, check)
    return check
