"""Functions for samples that are dicts or tuples, and for fields that are no sequences."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.collate.ragged import RaggedBatch
from shmloader.collate.sequences import Collate, bad_sample, check_samples, differs
from shmloader.grammar import counted, described_data
from shmloader.memory.writer import empty


class Stack(Collate):
    """Stacks samples of one shape, as torch's ``default_collate`` does: numbers, too."""

    def collate(self, samples: Any, field: object) -> Any:
        """Return the batch."""
        check_samples(samples)
        if isinstance(samples, np.ndarray) and samples.dtype.kind in "biufc":
            samples = torch.from_numpy(samples)
        if isinstance(samples, torch.Tensor):
            return empty(samples.shape, samples.dtype).copy_(samples)
        samples = list(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            first = described_data(samples[0])
            for number, sample in enumerate(samples):
                if described_data(sample) != first:
                    raise differs(field, number, sample, samples[0]) from error
            raise bad_sample(field, 0, f"cannot be stacked: {error}") from error


class AsList(Collate):
    """Makes a list of the samples, as they are."""

    def collate(self, samples: Any, field: object) -> list[Any]:  # noqa: ARG002 - cannot fail
        """Return the batch."""
        return list(samples)


class Fields(Collate):
    """Collates each field of samples by a function of its own.

    ``Fields(input_ids=Pad(0), id=Stack())`` takes dicts, and makes a dict of these keys in this
    order; other keys of the samples are left out. ``Fields(Pad(0), Stack())`` takes tuples or
    lists, and makes a list, as torch's ``default_collate`` does.

    Args:
        by_position: The function of each item of samples that are tuples.
        by_key: The function of each key of samples that are dicts. Any function of a list will do.

    Raises:
        ValueError: If there are functions by position and by key, or none.
        TypeError: If one cannot be called.
    """

    def __init__(
        self, /, *by_position: Callable[[Any], Any], **by_key: Callable[[Any], Any]
    ) -> None:
        if bool(by_position) == bool(by_key):
            raise ValueError(
                "Fields() takes functions by key, for dicts, or by position, for tuples: "
                "Fields(input_ids=Pad(), id=Stack()) or Fields(Pad(), Stack())"
            )
        self._functions = dict[Any, Callable[[Any], Any]](enumerate(by_position)) | by_key
        self._is_by_key = bool(by_key)
        for key, function in self._functions.items():
            if not callable(function):
                raise TypeError(f"field {key!r} should have a function, but has {function!r}")

    def collate(self, samples: Any, field: object) -> Any:
        """Return the batch."""
        check_samples(samples)
        if not self._is_by_key:
            columns = self._columns_by_position(samples, field)
            return [collate_field(each, columns[key], key) for key, each in self._functions.items()]
        batch: dict[Any, Any] = {}
        for key, function in self._functions.items():
            made = collate_field(function, column_of(samples, key, field), key)
            fields = getattr(function, "fields", None)
            batch |= {key: made} if fields is None else fields(key, made)
        return batch

    def _columns_by_position(self, samples: Any, field: object) -> list[tuple[Any, ...]]:
        count = len(self._functions)
        for number, sample in enumerate(samples):
            if not isinstance(sample, tuple | list) or len(sample) != count:
                raise bad_sample(
                    field,
                    number,
                    f"is {described_data(sample)}, but should be a tuple of "
                    f"{counted(count, 'item')}",
                )
        return list(zip(*samples, strict=True))


def collate_field(function: Callable[[Any], Any], column: Any, field: object) -> Any:
    """Call a field's function, so that errors of ours name the field."""
    if isinstance(function, Collate):
        return function.collate(column, field)
    return function(list(column))


def column_of(samples: Any, key: object, field: object = None) -> Any:
    """Return the samples' items of a key.

    Raises:
        ValueError: If a sample is no dict, or has no such key; names the sample.
    """
    if isinstance(samples, RaggedBatch) and key in samples.fields:
        return samples.fields[key]
    try:
        return [sample[key] for sample in samples]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        for number, sample in enumerate(samples):
            if not isinstance(sample, Mapping):
                problem = f"is {described_data(sample)}, but should be a dict"
                raise bad_sample(field, number, problem) from error
            if key not in sample:
                raise bad_sample(
                    field, number, f"has no key {key!r}, but {list(sample)}"
                ) from error
        raise
