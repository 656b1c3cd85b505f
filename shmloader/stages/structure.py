"""Applies a function to every tensor of a batch, containers rebuilt as torch's pinning does."""

import collections.abc
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from shmloader.interruptions import is_interruption
from shmloader.probing import probe

# What holds no memory of a slot, and is the same for ever.
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor],
    batch: Any,
    other: Callable[[Any], Any] | None = None,
) -> Any:
    """A batch of the same structure whose tensors are ``function`` of those of ``batch``.

    Mappings, sequences and named tuples are looked into, and keep their type where it can be
    built, but for named tuples that move themselves (torch's packed sequence).

    Args:
        function: Of a tensor.
        batch: Any value.
        other: Of any other object, but for numbers, texts and the like; None leaves them.
    """

    def walk(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return function(part)
        if isinstance(part, _ATOMS):
            return part
        if isinstance(part, collections.abc.Mapping):
            return _map_mapping(walk, part)
        if isinstance(part, collections.abc.Sequence) and not _moves_itself(part):
            return _map_sequence(walk, part)
        return part if other is None else other(part)

    return walk(batch)


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors that :func:`map_tensors` calls its function with, in that order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, collections.abc.Mapping):
        for part in batch.values():
            yield from tensors_in(part)
    elif (
        isinstance(batch, collections.abc.Sequence)
        and not isinstance(batch, _ATOMS)
        and not _moves_itself(batch)
    ):
        for part in batch:
            yield from tensors_in(part)


def _map_mapping(walk: Callable[[Any], Any], batch: Any) -> Any:
    mapped = {key: walk(value) for key, value in batch.items()}
    try:
        if isinstance(batch, collections.abc.MutableMapping):
            clone = copy.copy(batch)  # keeps what the type has beside its items
            clone.update(mapped)
            return clone
        return type(batch)(mapped)
    except TypeError as error:
        if is_interruption(error):
            raise
        return mapped


def _moves_itself(part: Any) -> bool:
    return probe(part, "_fields") is not None and probe(part, "to") is not None


def _map_sequence(walk: Callable[[Any], Any], batch: Any) -> Any:
    mapped = [walk(part) for part in batch]
    if isinstance(batch, tuple):
        return type(batch)(*mapped) if probe(batch, "_fields") is not None else type(batch)(mapped)
    try:
        if isinstance(batch, collections.abc.MutableSequence):
            clone = copy.copy(batch)
            for place, part in enumerate(mapped):
                clone[place] = part
            return clone
        return type(batch)(mapped)
    except TypeError as error:
        if is_interruption(error):
            raise
        return mapped


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in containers and as attributes of objects, each once."""
    return list(_find(batch, {}))


# By the number of an object, which is not another one's as long as the object is kept here.
_Seen = dict[int, object]


def _find(part: Any, seen: _Seen) -> Iterator[torch.Tensor]:
    if isinstance(part, (*_ATOMS, range, type)) or id(part) in seen:
        return
    seen[id(part)] = part
    if isinstance(part, torch.Tensor):
        yield part
        return
    if isinstance(part, collections.abc.Mapping):
        yield from _find_in(part.values(), seen)
    elif isinstance(part, collections.abc.Sequence | collections.abc.Set):
        yield from _find_in(part, seen)
    yield from _find_in(probe(part, "__dict__", {}).values(), seen)
    names = [name for kind in type(part).__mro__ for name in _slot_names(kind)]
    yield from _find_in([probe(part, name) for name in names], seen)


def _slot_names(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _find_in(parts: Iterable[Any], seen: _Seen) -> Iterator[torch.Tensor]:
    for part in parts:
        yield from _find(part, seen)
