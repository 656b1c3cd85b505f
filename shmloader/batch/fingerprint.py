"""Fingerprints of batches: how a resumed stream finds that it reads other samples than before.

A stream without a state of its own is resumed by reading, and discarding, what was delivered
before. That is exact only if the dataset gives the same samples again, which cannot be known
beforehand. So each delivered batch leaves a fingerprint, the loader's state keeps a checksum over
them, and the resumed stream compares.

A fingerprint covers up to four samples of a batch, the first and the last among them, and of each
some 40 numbers, texts or arrays, of which at most a few hundred bytes are read. It costs 2 to 40 µs
a batch. A sample that is lost, or comes twice, moves the samples of every batch after it; so other
samples go unseen only where they look alike at all the places that are looked at.
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

# Samples of a batch, leaves of a sample, and containers around a leaf.
_SAMPLES = 4
_LEAVES = 40
_DEPTH = 16

# Elements at either end of a long container, and bytes of a long array: at either end, and spread
# over what is between.
_END_ELEMENTS = 12
_END_BYTES = 256
_SPREAD_BYTES = 251
_WHOLE_BYTES = 2 * _END_BYTES + _SPREAD_BYTES

# Of the others, NumPy is shown the bytes.
_NUMPY_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)

# Their texts are the same in every process, and short.
_SHOWN_BY_REPR = frozenset({bool, float, complex, type(None), type(...), range, slice})
_MODULES_SHOWN_BY_REPR = frozenset({"datetime", "decimal", "fractions", "pathlib", "uuid"})


class FingerprintingCollate:
    """A fetcher's collate function that takes the fingerprint of each batch first.

    Runs on the thread that loads.

    Attributes:
        value: Of the batch in work, or the last one; None until its samples were read.

    Args:
        collate_fn: The function.
        takes_list: Whether its argument is a list of samples, rather than one sample.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], *, takes_list: bool) -> None:
        self._collate_fn = collate_fn
        self._takes_list = takes_list
        self.value: int | None = None

    def reset(self) -> None:
        """A batch is about to be read."""
        self.value = None

    def __call__(self, samples: Any) -> Any:
        """Collate."""
        self.take(samples)
        return self._collate_fn(samples)

    def take(self, samples: Any) -> None:
        """Take the fingerprint alone."""
        if not self._takes_list:
            self.value = fingerprint(samples)
            return
        count = len(samples)
        check = zlib.crc32(b"%d" % count)
        for at in range(count) if count <= _SAMPLES else (0, count // 3, 2 * count // 3, count - 1):
            check = fingerprint(samples[at], check)
        self.value = check


def chained(check: int, value: int) -> int:
    """The checksum over a sequence of fingerprints that this one follows."""
    return zlib.crc32(value.to_bytes(4, "little"), check)


def fingerprint(sample: object, check: int = 0) -> int:
    """A checksum of a sample, the same in every process.

    Numbers, texts, bytes, arrays and CPU tensors count by their values, in containers and in the
    attributes of objects as well; what else there is counts by its type alone.

    Args:
        sample: The sample.
        check: Checksum of what came before.
    """
    if type(sample) is torch.Tensor:
        return _of_tensor(sample, check)
    if type(sample) is int:
        return _of_int(sample, check)
    return _Walk(check).over(sample).check


class _Walk:
    """A walk over a sample's parts, as long as leaves may be looked at.

    Attributes:
        check: The checksum so far.
    """

    __slots__ = ("_left", "check")

    def __init__(self, check: int) -> None:
        self.check = check
        self._left = _LEAVES

    def over(self, sample: object, depth: int = 0) -> "_Walk":
        """Take in a sample, or a part of it."""
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
    """Some parts of a container or an object; None of anything else."""
    kind = type(sample)
    if kind in _LEAF_TYPES or issubclass(kind, torch.Tensor):
        return None
    parts: list[object] = []
    if issubclass(kind, list | tuple):
        count = list.__len__(sample) if isinstance(sample, list) else tuple.__len__(sample)  # type: ignore[arg-type]
        get = list.__getitem__ if issubclass(kind, list) else tuple.__getitem__
        parts += [count, *(get(sample, at) for at in _some_places(count))]  # type: ignore[call-overload]
    elif issubclass(kind, dict):
        items = dict.items(cast("dict[object, object]", sample))
        parts += [len(items), *itertools.chain(*itertools.islice(items, _END_ELEMENTS * 2))]
    elif issubclass(kind, set | frozenset):
        # In whatever order they come: it differs from process to process.
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


def _some_places(count: int) -> Iterable[int]:
    if count <= 2 * _END_ELEMENTS:
        return range(count)
    ends = range(_END_ELEMENTS), range(count - _END_ELEMENTS, count)
    return itertools.chain(ends[0], range(count // 3, count, count // 3 + 1), ends[1])


def _attributes_of(sample: object) -> list[object]:
    """The attributes of an object, without any code of its own."""
    found: list[object] = []
    with contextlib.suppress(AttributeError):
        found += object.__getattribute__(sample, "__dict__").items()
    for kind in type(sample).__mro__[:-1]:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            descriptor = kind.__dict__.get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    found.append((name, descriptor.__get__(sample)))
    return found


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
    if bits < 64:  # noqa: PLR2004 - what struct takes
        return zlib.crc32(b"i%d" % number, check)
    return zlib.crc32(number.to_bytes(bits // 8 + 1, "little", signed=True)[:_WHOLE_BYTES], check)


def _of_tensor(tensor: torch.Tensor, check: int) -> int:
    if type(tensor) is torch.Tensor:
        return _of_plain_tensor(tensor, check)
    # A tensor of another class may have no memory at all, and any code in its operations.
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
        # In the order of its memory, an image with its channels moved to the front is contiguous.
        array = array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array[tuple(map(_some_of, array.shape))])
    if array.nbytes <= _WHOLE_BYTES:
        return zlib.crc32(array.tobytes(), check)
    return _of_bytes(array.reshape(-1).view(np.uint8), check)


def _some_of(length: int) -> slice:
    """A few indices along a dimension, the first among them."""
    return slice(None, None, length // 4 + 1)


def _of_bytes(data: "np.ndarray[Any, Any]", check: int) -> int:
    """Of contiguous bytes."""
    size = len(data)
    if size <= _WHOLE_BYTES:
        return zlib.crc32(data.data, check)
    # An odd distance, so that the bytes are not all of one place in their elements.
    spread = data[:: (size // _SPREAD_BYTES) | 1].copy()
    for part in (data[:_END_BYTES], data[-_END_BYTES:], spread):
        check = zlib.crc32(part.data, check)
    return check
