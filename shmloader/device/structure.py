"""Applies a function to every tensor of a batch, containers rebuilt as torch's pinning does."""

import collections.abc
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
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
    built, but for named tuples that move themselves (torch's packed sequence). A mapping or
    sequence that can be changed is copied with what it has beside its items, as torch does.

    Args:
        function: Of a tensor.
        batch: Any value.
        other: Of any other object, but for numbers, texts and the like. With it, what such a copy
            has beside its items is mapped as well, as far as it holds tensors or arrays: the result
            shares no memory with the batch. None leaves other objects and attributes as they are.
    """
    mapper = _Mapper(function, other)
    mapped = mapper.walk(batch)
    if other is not None:
        mapper.map_attributes()
    return mapped


class _Mapper:
    """One call of :func:`map_tensors`."""

    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        other: Callable[[Any], Any] | None,
    ) -> None:
        self._function = function
        self._other = other
        # Copies whose attributes are those of what they were copied from.
        self._copies: list[Any] = []
        # By the number of what was mapped, and of what came of it: the two, which keeps them alive.
        self._mapped: dict[int, tuple[Any, Any]] = {}
        self._is_in_attribute = False

    def walk(self, part: Any) -> Any:
        if isinstance(part, _ATOMS):
            return part
        if self._is_in_attribute and id(part) in self._mapped:
            return self._mapped[id(part)][1]
        mapped = self._map(part)
        if self._other is not None:
            self._mapped[id(part)] = (part, mapped)
            self._mapped[id(mapped)] = (mapped, mapped)
        return mapped

    def _map(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return self._function(part)
        if isinstance(part, collections.abc.Mapping):
            return self._map_mapping(part)
        if isinstance(part, collections.abc.Sequence) and not _moves_itself(part):
            return self._map_sequence(part)
        return part if self._other is None else self._other(part)

    def map_attributes(self) -> None:
        """Map what the copies have beside their items.

        Afterwards, since an attribute may be an item, too: then it becomes what that became.
        """
        self._is_in_attribute = True
        for mapped in self._copies:  # which grows meanwhile
            for name, value in _attributes(mapped):
                if any(True for _ in _find(value, {}, (torch.Tensor, np.ndarray))):
                    object.__setattr__(mapped, name, self.walk(value))

    def _map_mapping(self, batch: Any) -> Any:
        mapped = {key: self.walk(value) for key, value in batch.items()}
        try:
            if isinstance(batch, collections.abc.MutableMapping):
                clone = copy.copy(batch)
                clone.update(mapped)
                self._copies.append(clone)
                return clone
            return type(batch)(mapped)
        except TypeError as error:
            if is_interruption(error):
                raise
            return mapped

    def _map_sequence(self, batch: Any) -> Any:
        mapped = [self.walk(part) for part in batch]
        if isinstance(batch, tuple):
            is_named = probe(batch, "_fields") is not None
            return type(batch)(*mapped) if is_named else type(batch)(mapped)
        try:
            if isinstance(batch, collections.abc.MutableSequence):
                clone = copy.copy(batch)
                for place, part in enumerate(mapped):
                    clone[place] = part
                self._copies.append(clone)
                return clone
            return type(batch)(mapped)
        except TypeError as error:
            if is_interruption(error):
                raise
            return mapped


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


def _moves_itself(part: Any) -> bool:
    return probe(part, "_fields") is not None and probe(part, "to") is not None


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in containers and as attributes of objects, each once."""
    return list(_find(batch, {}))


# By the number of an object, which is not another one's as long as the object is kept here.
_Seen = dict[int, object]


def _find(part: Any, seen: _Seen, kinds: tuple[type, ...] = (torch.Tensor,)) -> Iterator[Any]:
    if isinstance(part, (*_ATOMS, range, type)) or id(part) in seen:
        return
    seen[id(part)] = part
    if isinstance(part, kinds):
        yield part
        return
    if isinstance(part, collections.abc.Mapping):
        yield from _find_in(part.values(), seen, kinds)
    elif isinstance(part, collections.abc.Sequence | collections.abc.Set):
        yield from _find_in(part, seen, kinds)
    yield from _find_in([value for _, value in _attributes(part)], seen, kinds)


def _find_in(parts: Iterable[Any], seen: _Seen, kinds: tuple[type, ...]) -> Iterator[Any]:
    for part in parts:
        yield from _find(part, seen, kinds)


def _attributes(part: Any) -> list[tuple[str, Any]]:
    """The names and values of an object's own attributes."""
    names = [name for kind in type(part).__mro__ for name in _slot_names(kind)]
    slots = [(name, probe(part, name)) for name in names]
    return [*probe(part, "__dict__", {}).items(), *slots]


def _slot_names(kind: type) -> list[str]:
    names = kind.__dict__.get("__slots__", ())
    names = [names] if isinstance(names, str) else names
    return [name for name in names if name not in {"__dict__", "__weakref__"}]
