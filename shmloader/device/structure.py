"""Applies a function to all tensors of a batch, and rebuilds containers as torch's pinning does."""

import copy
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
    Set,
)
from typing import Any

import numpy as np
import torch

from shmloader.interruptions import probe
from shmloader.shared.sharing import attributes_of

# Immutable values, which hold no memory of a slot.
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# Types that hold memory of a slot.
_MEMORY = (torch.Tensor, np.ndarray)


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
    return _Mapper(function, other).walk(batch)


class _Mapper:
    """One call of :func:`map_tensors`; inner functions would be a reference cycle."""

    def __init__(
        self, function: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any] | None
    ) -> None:
        self._function, self._other = function, other
        # Each value and its result, by id() of the value. The tuple keeps the value alive.
        self._mapped: dict[int, tuple[Any, Any]] = {}

    def walk(self, value: Any) -> Any:
        if isinstance(value, _ATOMS):
            return value
        if id(value) not in self._mapped:
            mapped = self._map(value)
            self._mapped.setdefault(id(value), (value, mapped))
        return self._mapped[id(value)][1]

    def _map(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._function(value)
        if isinstance(value, Mapping):
            return self._rebuild(value, {key: self.walk(item) for key, item in value.items()})
        if isinstance(value, Sequence):
            is_named = probe(value, "_fields") is not None
            if not is_named or probe(value, "to") is None:
                mapped = [self.walk(item) for item in value]
                if isinstance(value, tuple):
                    return type(value)(*mapped) if is_named else type(value)(mapped)
                return self._rebuild(value, mapped)
        return value if self._other is None else self._other(value)

    def _rebuild(self, container: Any, mapped: dict[Any, Any] | list[Any]) -> Any:
        """Return a container like the given one with the mapped items, or these themselves."""
        try:
            if not isinstance(container, MutableMapping | MutableSequence):
                return type(container)(mapped)
            clone: Any = copy.copy(container)
            if isinstance(mapped, dict):
                clone.update(mapped)
            else:
                for index, value in enumerate(mapped):
                    clone[index] = value
        except TypeError:
            return mapped
        self._mapped[id(container)] = (container, clone)  # attributes may refer to it
        for name, value in attributes_of(clone).items() if self._other is not None else ():
            # Where the container's copy has an object of its own, that holds the items.
            if value is probe(container, name) and any(True for _ in _find(value, {}, _MEMORY)):
                object.__setattr__(clone, name, self.walk(value))
        return clone


def all_tensors(batch: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch, in containers and in attributes of objects, each once."""
    return list(_find(batch, {}, (torch.Tensor,)))


def _find(value: Any, seen: dict[int, object], kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yield each object of some types.

    Args:
        value: The object to search.
        seen: The objects that were searched, which it keeps alive, by id().
        kinds: The types.
    """
    if isinstance(value, (*_ATOMS, range, type)) or id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, kinds):
        yield value
        return
    inner = [*attributes_of(value).values()]
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, Sequence | Set):
        inner += value
    for part in inner:
        yield from _find(part, seen, kinds)
