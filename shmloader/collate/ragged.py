"""Samples of different lengths that are slices of one array, such as a list column of Arrow.

A dataset that has its samples in one array need not make an object of each. It returns a
:class:`RaggedBatch` from ``__getitems__``, and the functions of this package write each of its
fields into the batch at once. To all other code it is a sequence of ordinary samples.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

_Array = np.ndarray[Any, np.dtype[Any]]


class Ragged(Sequence[Any]):
    """One field of a batch: sample i is ``values[starts[i] : starts[i] + lengths[i]]``.

    Attributes:
        values: An array of shape (tokens, …), of which samples are slices along the first
            dimension. It may be a whole column or memory map: only the samples' slices are read.
        starts: Where each sample begins in ``values``: int64, one dimension.
        lengths: How long each sample is: int64, one dimension.
        dtype: Dtype of the samples; values are converted where it is another one than theirs.

    Args:
        values: The array.
        starts: Each sample's begin; any integers.
        lengths: Each sample's length; as many integers.
        dtype: Dtype of the samples; None for that of ``values``.
        as_item: Makes the ordinary sample of an array, such as ``np.ndarray.tolist`` or
            ``torch.from_numpy``; None for the array itself.

    Raises:
        ValueError: If there are not as many starts as lengths, or values have no dimension.
        IndexError: If a sample does not lie inside ``values``; names it.
    """

    __slots__ = ("_as_item", "dtype", "lengths", "starts", "values")

    def __init__(
        self,
        values: _Array,
        starts: Any,
        lengths: Any,
        dtype: Any = None,
        as_item: Callable[[_Array], Any] | None = None,
    ) -> None:
        self.values: _Array = np.asarray(values)  # slices of a memory map cost more
        self._as_item = as_item
        self.starts: _Array = np.asarray(starts, dtype=np.int64)
        self.lengths: _Array = np.asarray(lengths, dtype=np.int64)
        self.dtype: np.dtype[Any] = self.values.dtype if dtype is None else np.dtype(dtype)
        if self.starts.ndim != 1 or self.starts.shape != self.lengths.shape or not self.values.ndim:
            raise ValueError(
                f"Ragged needs values of at least one dimension, and as many starts as lengths, "
                f"but their shapes are {list(self.values.shape)}, {list(self.starts.shape)} and "
                f"{list(self.lengths.shape)}"
            )
        last = len(self.values) - self.lengths  # their sum with starts might overflow
        outside = (self.starts < 0) | (self.lengths < 0) | (self.starts > last)
        if outside.any():
            at = int(outside.argmax())
            raise IndexError(
                f"sample {at} begins at {self.starts[at]} and has the length {self.lengths[at]}, "
                f"but there are {len(self.values)} values"
            )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.starts)

    def array(self, number: int) -> _Array:
        """Return a sample as an array: a view of ``values``, unless they are converted."""
        start = self.starts[number]
        array = self.values[start : start + self.lengths[number]]
        if array.dtype == self.dtype:
            return array
        with np.errstate(over="ignore"):  # in torch, what is too large for a float is infinite
            return array.astype(self.dtype)

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> "Ragged": ...
    def __getitem__(self, number: int | slice) -> Any:
        """Return a sample as ordinary code sees it, or the field of a slice of the samples."""
        if isinstance(number, slice):
            starts, lengths = self.starts[number], self.lengths[number]
            return Ragged(self.values, starts, lengths, self.dtype, self._as_item)
        array = self.array(number)
        return array if self._as_item is None else self._as_item(array)


#: A field of a :class:`RaggedBatch`: item i of it is that of sample i.
Column = Ragged | Sequence[Any] | _Array | Any


class RaggedBatch(Sequence[dict[str, Any]]):
    """A batch of dict samples, by fields. Item i is the dict of the fields' items i.

    ``collate.Fields`` and ``collate.Pack`` take its fields as they are. Any other function sees a
    sequence of dicts.

    Attributes:
        fields: The fields by key, each with an item for each sample. A :class:`Ragged` is for
            samples of different lengths. An array or a CPU tensor, whose first dimension is the
            samples, is for samples of one shape. Any other sequence will do, such as a list of
            texts.

    Args:
        fields: The fields.

    Raises:
        ValueError: If there are no fields, or they differ in their number of samples.
    """

    __slots__ = ("fields",)

    def __init__(self, fields: Mapping[str, Column]) -> None:
        self.fields = dict(fields)
        counts = {key: len(field) for key, field in self.fields.items()}
        if len({*counts.values()}) != 1:
            raise ValueError(
                f"RaggedBatch needs fields with one number of samples, but they have {counts}"
            )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(next(iter(self.fields.values())))

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice) -> "RaggedBatch": ...
    def __getitem__(self, number: int | slice) -> Any:
        """Return a sample, or the batch of a slice of the samples."""
        items = {key: field[number] for key, field in self.fields.items()}
        return RaggedBatch(items) if isinstance(number, slice) else items

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples."""
        for items in zip(*self.fields.values(), strict=True):
            yield dict(zip(self.fields, items, strict=True))
