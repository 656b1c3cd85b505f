"""Reads samples of different lengths, and writes them where they belong in a batch.

Padding and packing differ only in where each sample begins in the batch. :func:`read_sequences`
looks at the samples, and what it returns writes them: a :class:`Sequences` knows their lengths, and
what one element is. Lists of ints and arrays are copied by a few lines of C (:mod:`_streaming`), in
one call that fills what is between them as well. For other samples, and without the compiled part,
what is fastest differs:

- lists of ints: made arrays first;
- arrays: one slice assignment a sample;
- tensors: slices of tensors cost more than joining them all, so they are joined first;
- :class:`Ragged`: by slices if samples are long; by one array of indices if they are short.
"""

import abc
import itertools
import math
import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shmloader.collate.ragged import Ragged
from shmloader.grammar import described_data
from shmloader.memory.compiled import copy_sequences as _copy_sequences

_Array = np.ndarray[Any, np.dtype[Any]]

# Samples of a Ragged that are shorter on average are gathered by indices.
_SHORT = 80

# What stands for the bits of dtypes that NumPy lacks, by their size in bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Collate(abc.ABC):
    """Base of the functions: they take a list of samples, or a :class:`Ragged` or RaggedBatch."""

    def __call__(self, samples: Any) -> Any:
        """Return the batch of a list of samples.

        Raises:
            ValueError: If samples cannot be collated; names the sample.
            SharedMemoryError: If the batch does not fit the shared memory of one batch.
        """
        return self.collate(samples, None)

    @abc.abstractmethod
    def collate(self, samples: Any, field: object) -> Any:
        """Return the batch of the samples, or of a field of theirs that errors name."""


def check_samples(samples: Any) -> None:
    """Check that a batch has samples."""
    if not len(samples):
        raise ValueError("a batch without samples cannot be collated")


def bad_sample(field: object, number: int, problem: str) -> ValueError:
    """Return the error about a sample of the batch. The loader adds its index in the dataset."""
    of_field = "" if field is None else f"field {field!r}: "
    error = ValueError(f"{of_field}sample {number} of the batch {problem}")
    error.shmloader_sample = number  # type: ignore[attr-defined]
    return error


def differs(field: object, number: int, sample: Any, first: Any) -> ValueError:
    """Return the error about a sample of another kind than sample 0."""
    problem = f"is {described_data(sample)}, but sample 0 is {described_data(first)}"
    return bad_sample(field, number, problem)


class Sequences(abc.ABC):
    """The samples of a batch, or of a field of it.

    Attributes:
        lengths: The samples' lengths, int64.
        dtype: The dtype of all samples.
        tail: The shape of an element: () for tokens.
    """

    lengths: _Array
    dtype: torch.dtype
    tail: tuple[int, ...] = ()

    # The samples, if they may be lists of ints or arrays whose bytes are copied as they are.
    _copied: list[Any] | None = None

    def write(
        self, out: torch.Tensor, starts: _Array, lengths: _Array, fill: float | None = None
    ) -> None:
        """Write the first ``lengths[i]`` elements of each sample to ``out[starts[i]:]``.

        ``out`` is contiguous and has one more dimension than an element. Samples are in order, and
        do not overlap. What is before, between and after them becomes ``fill``, unless it is None.
        """
        samples = self._copied
        if (
            samples is not None
            and out.dtype == self.dtype
            and copy_sequences(samples, out, starts, lengths, fill)
        ):
            return
        if fill is not None:
            out.fill_(fill)
        self._write(out, starts, lengths)

    @abc.abstractmethod
    def _write(self, out: torch.Tensor, starts: _Array, lengths: _Array) -> None:
        """Write the samples, and leave what is between them."""


def as_array(tensor: torch.Tensor) -> _Array:
    """Return an array over a tensor's memory; of its bits, if NumPy lacks the dtype."""
    try:
        return tensor.numpy()
    except TypeError:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise
        return tensor.view(_BITS[tensor.itemsize]).numpy()


def copy_sequences(
    samples: list[Any], out: torch.Tensor, starts: _Array, lengths: _Array, fill: float | None
) -> bool:
    """Do what :meth:`Sequences.write` does, for samples in one piece, of the dtype of ``out``.

    Returns False if one is not, and without the compiled part. Some may be written then.
    """
    row_bytes = out.itemsize * math.prod(out.shape[1:])
    if _copy_sequences is None or not row_bytes:
        return False
    item: Any = b""
    if fill is not None:
        item = as_array(torch.empty(1, dtype=out.dtype).fill_(fill))
    return _copy_sequences(out.data_ptr(), len(out), row_bytes, samples, starts, lengths, item)


class _Slices(Sequences):
    """Samples that are slices of one array, or arrays of their own."""

    def __init__(
        self, samples: "Sequence[_Array] | Ragged", lengths: _Array, dtype: torch.dtype, tail: Any
    ) -> None:
        self._samples, self.lengths, self.dtype, self.tail = samples, lengths, dtype, tail
        if type(samples) is list and samples[0].dtype.isnative:
            self._copied = samples

    @np.errstate(over="ignore")  # in torch, what is too large for a float is infinite
    def _write(self, out: torch.Tensor, starts: _Array, lengths: _Array) -> None:
        array, samples = as_array(out), self._samples
        if isinstance(samples, Ragged):
            total = int(lengths.sum())
            if total < _SHORT * len(lengths):
                # Element k of all is at position k, moved by as much as the sample's begin is.
                element, before = np.arange(total), lengths.cumsum() - lengths
                source = element + np.repeat(samples.starts - before, lengths)
                target = element + np.repeat(starts - before, lengths)
                array[target] = samples.values.take(source, axis=0)
                return
            values, begins = samples.values, samples.starts.tolist()
            ends = (samples.starts + lengths).tolist()
            samples = [values[begin:end] for begin, end in zip(begins, ends, strict=True)]
        elif lengths is not self.lengths:
            samples = [each[:count] for each, count in zip(samples, lengths.tolist(), strict=True)]
        ends = (starts + lengths).tolist()
        for sample, start, end in zip(samples, starts.tolist(), ends, strict=True):
            array[start:end] = sample


class _Tensors(Sequences):
    """Samples that are tensors."""

    def __init__(self, samples: list[torch.Tensor], lengths: _Array, tail: Any) -> None:
        self._samples, self.lengths = samples, lengths
        self.dtype, self.tail = samples[0].dtype, tail

    def _write(self, out: torch.Tensor, starts: _Array, lengths: _Array) -> None:
        ends = self.lengths.cumsum()
        begins = ends - self.lengths
        if np.array_equal(lengths, self.lengths) and np.array_equal(starts, begins):
            torch.cat(self._samples, out=out[: int(ends[-1])])
            return
        joined = as_array(torch.cat(self._samples))
        slices = Ragged(joined, begins, lengths)
        _Slices(slices, lengths, self.dtype, self.tail).write(out, starts, lengths)


class _IntLists(Sequences):
    """Samples that are lists of ints."""

    dtype = torch.int64

    def __init__(self, samples: list[Any], lengths: _Array, field: object) -> None:
        self._samples, self.lengths, self._field = samples, lengths, field
        self._copied = samples

    def _write(self, out: torch.Tensor, starts: _Array, lengths: _Array) -> None:
        arrays: list[_Array] = []
        try:
            arrays.extend(np.asarray(array("q", sample)) for sample in self._samples)
        except (TypeError, OverflowError) as error:
            problem = "begins with an int, but not all its items are ints of 64 bits"
            raise bad_sample(self._field, len(arrays), problem) from error
        _Slices(arrays, self.lengths, self.dtype, ()).write(out, starts, lengths)


def read_sequences(samples: Any, field: object) -> Sequences:
    """Return the reader of samples: lists of ints, arrays or tensors, or a :class:`Ragged`.

    Raises:
        ValueError: If there are no samples, or one is none of these or requires a gradient. If
            they differ in dtype, or in the shape of an element. Names the sample.
    """
    check_samples(samples)
    if isinstance(samples, Ragged):
        dtype = _dtype_of(samples.dtype, field)
        return _Slices(samples, samples.lengths, dtype, samples.values.shape[1:])
    samples = list(samples)
    kinds = {*map(type, samples)}
    if kinds <= {list, tuple} and {type(sample[0]) for sample in samples if sample} <= {int}:
        return _IntLists(samples, _int64(map(len, samples), len(samples)), field)
    if all(issubclass(kind, np.ndarray) for kind in kinds):
        tail = _tail_of(samples, field)
        lengths = _int64(map(len, samples), len(samples))
        return _Slices(samples, lengths, _dtype_of(samples[0].dtype, field), tail)
    if not all(issubclass(kind, torch.Tensor) for kind in kinds):
        samples = [_to_tensor(sample, number, field) for number, sample in enumerate(samples)]
    for number in itertools.compress(itertools.count(), map(_requires_grad, samples)):
        raise bad_sample(
            field, number, "requires a gradient, which a batch in shared memory cannot carry: "
            "detach() it in the dataset",
        )  # fmt: skip
    tail = _tail_of(samples, field)
    return _Tensors(samples, _int64((each.shape[0] for each in samples), len(samples)), tail)


def _int64(numbers: Iterable[int], count: int) -> _Array:
    return np.fromiter(numbers, np.int64, count)


def _dtype_of(dtype: np.dtype[Any], field: object) -> torch.dtype:
    """Return torch's dtype of NumPy's."""
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise bad_sample(field, 0, f"has the dtype {dtype}, which torch lacks") from None


def _to_tensor(sample: Any, number: int, field: object) -> torch.Tensor:
    try:
        if isinstance(sample, Mapping | str):
            raise TypeError
        return torch.as_tensor(sample)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = described_data(sample)
        remedy = " (shmloader.collate.Fields has a function for each key)"
        raise bad_sample(
            field, number, f"is {kind}, but should be a tensor, an array or a list of ints"
            f"{remedy if isinstance(sample, Mapping) else ''}",
        ) from error  # fmt: skip


def _tail_of(samples: list[Any], field: object) -> tuple[int, ...]:
    """Return the shape of an element of arrays or tensors, which differ in their lengths only."""
    first = samples[0]
    if {*map(_ndim, samples)} != {1} or {*map(_dtype, samples)} != {first.dtype}:
        kind = first.dtype, first.shape[1:]
        for number, sample in enumerate(samples):
            if not sample.ndim:
                raise bad_sample(field, number, "is a number, but should have a length")
            if (sample.dtype, sample.shape[1:]) != kind:
                raise differs(field, number, sample, first)
    return tuple(first.shape[1:])


_ndim, _dtype = operator.attrgetter("ndim"), operator.attrgetter("dtype")
_requires_grad = operator.attrgetter("requires_grad")
