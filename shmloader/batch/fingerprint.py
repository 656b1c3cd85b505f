"""Fingerprints of batches, which show whether a resumed dataset yields the same samples as before.

An iterable dataset without a state of its own is resumed by reading, and discarding, what was
delivered before. That is exact only if the dataset yields the same samples again, which cannot be
known beforehand. So the loader's state keeps a checksum over the fingerprints of the delivered
batches, and a resumed dataset is compared with it.

A fingerprint is a checksum of a pickle of up to four samples of a batch, the first and the last
among them, and of both ends of their tensors and arrays. A missing or repeated sample shifts the
samples of all later batches, so a difference remains unnoticed only if the samples are alike in all
of these.
"""

import ctypes
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from shmloader.interruptions import Suppressed
from shmloader.memory.pickled import OutOfBand, Pickler, reduce_data

# A fingerprint covers at most so many samples of a batch, bytes of the pickle, and bytes at each
# end of an array, a long text, or any other part that is written to the pickle at once.
_SAMPLES = 4
_PICKLE_BYTES = 1 << 18
_END_BYTES = 4096


def fingerprint_of(samples: Sequence[object]) -> int:
    """Return the fingerprint of a batch."""
    count = len(samples)
    if count > _SAMPLES:
        samples = [samples[at] for at in (0, count // 3, 2 * count // 3, count - 1)]
    return fingerprint((count, *samples))


def fingerprint(value: object) -> int:
    """Return a checksum of a value that is the same in every process.

    A value that cannot be pickled, or that refers to itself, counts by its type only.
    """
    check, parts = _Checksum(type(value).__qualname__), OutOfBand()
    with Suppressed(Exception):  # pickling may raise anything
        _Pickler(check, parts).dump(value)
        parts.write(lambda address, nbytes: check.write(_bytes_at(address, nbytes)))
    return check.value


class _Checksum:
    """A file that keeps a checksum of what is written to it, until that is too long."""

    def __init__(self, text: str) -> None:
        self.value = zlib.crc32(text.encode())
        self._left = _PICKLE_BYTES

    def write(self, data: Any) -> int:
        """Add data, of which only the size and both ends count."""
        view = memoryview(data).cast("B")
        for part in (b"%d," % view.nbytes, view[:_END_BYTES], view[_END_BYTES:][-_END_BYTES:]):
            self.value = zlib.crc32(part, self.value)
        if type(data) is bytes:  # of the pickle
            self._left -= view.nbytes
            if self._left < 0:
                raise OverflowError
        return view.nbytes


def _bytes_at(address: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)


class _Pickler(Pickler):
    def __init__(self, file: _Checksum, parts: OutOfBand) -> None:
        super().__init__(file, _reduce, parts, {}, by_value=False)
        # Two values that are one object in one process may be two equal ones in another.
        self.fast = True

    def persistent_id(self, value: Any) -> Any:
        """Return a set's elements in an order that all processes have."""
        return sorted(map(repr, value)) if type(value) in (set, frozenset) else None


def _reduce(value: Any, parts: OutOfBand) -> Any:
    """Reduce a tensor such that its pickle has no address, as torch's pickle may have."""
    if type(value) is torch.Tensor:
        reduced = reduce_data(value.detach() if value.requires_grad else value, parts)
        if reduced is not NotImplemented:
            return reduced
    elif not isinstance(value, torch.Tensor):
        return reduce_data(value, parts)
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.detach().as_subclass(torch.Tensor)
        if plain.layout is torch.strided:
            plain = plain.resolve_conj().resolve_neg()
        reduced = reduce_data(plain, parts)
    return str, (str(type(value)) if reduced is NotImplemented else (str(type(value)), *reduced),)
