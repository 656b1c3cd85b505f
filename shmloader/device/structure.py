"""Applies a function to all tensors of a batch, and rebuilds containers as torch's pinning does."""

import collections.abc
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from shmloader.probing import probe

# Immutable values, which hold no memory of a slot.
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor],
    batch: Any,
    other: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a batch of the same structure, with ``function`` applied to each tensor.

    Mappings, sequences and named tuples are walked. They keep their type if it can be built. Named
    tuples with a ``to`` of their own, such as torch's packed sequence, are not walked. A mutable
    mapping or sequence is copied together with its attributes, as torch does.

    Args:
        function: Applied to each tensor.
        batch: Any value.
        other: Applied to all other objects except immutable values. If it is given, a copied
            container's attributes are mapped, too, if they hold tensors or arrays. The result then
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
        # Containers that were copied together with their attributes.
        self._copies: list[Any] = []
        # Each mapped value and its result, keyed by id() of either. The tuple keeps both alive.
        self._mapped: dict[int, tuple[Any, Any]] = {}
        self._is_in_attribute = False

    def walk(self, value: Any) -> Any:
        if isinstance(value, _ATOMS):
            return value
        if self._is_in_attribute and id(value) in self._mapped:
            return self._mapped[id(value)][1]
        mapped = self._map(value)
        if self._other is not None:
            self._mapped[id(value)] = (value, mapped)
            self._mapped[id(mapped)] = (mapped, mapped)
        return mapped

    def _map(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._function(value)
        if isinstance(value, collections.abc.Mapping):
            return self._rebuild(value, {key: self.walk(item) for key, item in value.items()})
        if isinstance(value, collections.abc.Sequence) and not _moves_itself(value):
            return self._map_sequence(value)
        return value if self._other is None else self._other(value)

    def map_attributes(self) -> None:
        """Map the attributes of copied containers.

        Called after all items were mapped. An attribute that is an item as well becomes the same
        result as the item.
        """
        self._is_in_attribute = True
        for mapped in self._copies:  # the list grows during the loop
            for name, value in _attributes(mapped):
                if any(True for _ in _find(value, {}, (torch.Tensor, np.ndarray))):
                    object.__setattr__(mapped, name, self.walk(value))

    def _map_sequence(self, batch: Any) -> Any:
        mapped = [self.walk(value) for value in batch]
        if isinstance(batch, tuple):
            is_named = probe(batch, "_fields") is not None
            return type(batch)(*mapped) if is_named else type(batch)(mapped)
        return self._rebuild(batch, mapped)

    def _rebuild(self, batch: Any, mapped: dict[Any, Any] | list[Any]) -> Any:
        """Return a container like ``batch`` with the items ``mapped``, or ``mapped`` itself."""
        try:
            if not isinstance(
                batch, collections.abc.MutableMapping | collections.abc.MutableSequence
            ):
                return type(batch)(mapped)
            clone: Any = copy.copy(batch)
            if isinstance(mapped, dict):
                clone.update(mapped)
            else:
                for index, value in enumerate(mapped):
                    clone[index] = value
        except TypeError:
            return mapped
        self._copies.append(clone)
        return clone


def _moves_itself(value: Any) -> bool:
    return probe(value, "_fields") is not None and probe(value, "to") is not None


def all_tensors(batch: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch, in containers and in attributes of objects, each once."""
    return list(_find(batch, {}))


# Keyed by id(); the value keeps the object alive.
_Seen = dict[int, object]


def _find(value: Any, seen: _Seen, kinds: tuple[type, ...] = (torch.Tensor,)) -> Iterator[Any]:
    if isinstance(value, (*_ATOMS, range, type)) or id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, kinds):
        yield value
        return
    if isinstance(value, collections.abc.Mapping):
        yield from _find_in(value.values(), seen, kinds)
    elif isinstance(value, collections.abc.Sequence | collections.abc.Set):
        yield from _find_in(value, seen, kinds)
    yield from _find_in([value for _, value in _attributes(value)], seen, kinds)


def _find_in(values: Iterable[Any], seen: _Seen, kinds: tuple[type, ...]) -> Iterator[Any]:
    for value in values:
        yield from _find(value, seen, kinds)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of an object's own attributes."""
    names = [name for kind in type(value).__mro__ for name in _slot_names(kind)]
    slots = [(name, probe(value, name)) for name in names]
    return [*probe(value, "__dict__", {}).items(), *slots]


def _slot_names(kind: type) -> list[str]:
    names = kind.__dict__.get("__slots__", ())
    names = [names] if isinstance(names, str) else names
    return [name for name in names if name not in {"__dict__", "__weakref__"}]
