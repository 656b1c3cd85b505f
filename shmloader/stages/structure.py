"""Applies a function to every tensor of a batch, containers rebuilt as torch's pinning does."""

import collections.abc
import copy
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """A batch of the same structure whose tensors are ``function`` of those of ``batch``.

    Mappings, sequences and named tuples are looked into, and keep their type where it can be
    built; any other object stays as it is.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, str | bytes):
        return batch
    if isinstance(batch, collections.abc.Mapping):
        return _map_mapping(function, batch)
    if isinstance(batch, tuple):
        parts = [map_tensors(function, part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, collections.abc.Sequence):
        return _map_sequence(function, batch)
    return batch


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors that :func:`map_tensors` finds."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found


def _map_mapping(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    mapped = {key: map_tensors(function, value) for key, value in batch.items()}
    try:
        if isinstance(batch, collections.abc.MutableMapping):
            clone = copy.copy(batch)  # keeps what the type has beside its items
            clone.update(mapped)
            return clone
        return type(batch)(mapped)
    except TypeError:
        return mapped


def _map_sequence(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    mapped = [map_tensors(function, part) for part in batch]
    try:
        if isinstance(batch, collections.abc.MutableSequence):
            clone = copy.copy(batch)
            for place, part in enumerate(mapped):
                clone[place] = part
            return clone
        return type(batch)(mapped)
    except TypeError:
        return mapped
