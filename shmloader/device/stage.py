"""A stage processes each batch between the engine and the user; and the stage that pins batches.

The user gets a page-locked copy, which a GPU reads faster, and not a view of a page-locked slot:
torch's allocator knows when the GPU has read the allocator's own memory, but not when it has read
other memory. torch decides what each value in a batch becomes, and which objects pin themselves,
with one exception: all small tensors in lists, tuples and dicts share one page-locked block,
because each allocation is expensive.

For copies to a device, :func:`map_tensors` rebuilds containers as torch's pinning does.
"""

import copy
import traceback
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
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

from shmloader.device.backend import relax_this_thread
from shmloader.interruptions import probe
from shmloader.memory.arena import align
from shmloader.memory.flat import COPY_OUT_BYTES
from shmloader.memory.pickled import is_plain
from shmloader.shared.sharing import attributes_of

# Immutable values, which hold no memory of a slot.
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# Types that hold memory of a slot.
_MEMORY = (torch.Tensor, np.ndarray)


class Stage:
    """Processes each batch, on a thread of its own.

    Attributes:
        ahead: Batches that may be ready and not yet taken; None for as many as there are tickets.
        name: The thread's name.
        kind: The stage's name in the statistics; one of
            :data:`~shmloader.insight.stats.PARTS`.
    """

    ahead: int | None
    name: str
    kind: str

    def start(self) -> None:
        """Prepare the stage's thread. Called on it."""

    def run(self, batch: Any) -> Any:
        """Process a batch. Called on the stage's thread."""
        raise NotImplementedError

    def deliver(self, result: Any) -> Any:
        """Make the user's batch of what :meth:`run` returned. Called on the user's thread."""
        return result

    def close(self) -> None:
        """Wait for work under way, and drop all batches. Called when no :meth:`run` is running."""


def clear_frames(error: BaseException | None) -> None:
    """Drop what the frames of an exception's traceback hold, such as views of a slot."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def pin_batch(batch: object, device: str | None) -> object:
    """Copy a batch into page-locked memory.

    Args:
        batch: The batch, as the engine returned it.
        device: The type of the accelerator, such as "cuda"; None leaves it to torch.

    Returns:
        A batch of the same structure.
    """
    small: list[torch.Tensor] = []
    _map_plain(batch, lambda each: small.extend(filter(is_small, [each])), type)
    if not small:
        return pin_memory(batch, device)
    pinned = split_block(pin_block(small), small)
    return _map_plain(
        batch,
        lambda each: next(pinned) if is_small(each) else each.pin_memory(),
        lambda value: pin_memory(value, device),
    )


def _map_plain(
    value: Any, function: Callable[[torch.Tensor], Any], other: Callable[[Any], Any]
) -> Any:
    """Apply a function to the tensors in Python's own containers, and ``other`` to what else is."""
    kind = type(value)
    if kind is torch.Tensor:
        return function(value)
    if kind is dict:
        return {key: _map_plain(item, function, other) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind([_map_plain(item, function, other) for item in value])
    return other(value)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor shares a block with others of its batch."""
    return (
        type(tensor) is torch.Tensor
        and is_plain(tensor)
        and tensor.is_contiguous()
        and 0 < tensor.nbytes <= COPY_OUT_BYTES
        and not tensor.requires_grad
    )


def pin_block(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy small tensors into one block of page-locked memory. Returns the block."""
    nbytes = sum(align(tensor.nbytes) for tensor in tensors)
    block = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    for piece, tensor in zip(split_block(block, tensors), tensors, strict=True):
        piece.copy_(tensor)
    return block


def split_block(block: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that :func:`pin_block` put into a block, as pieces of the block."""
    views: dict[torch.dtype, torch.Tensor] = {}
    start = 0
    for tensor in tensors:
        view = views.get(tensor.dtype)
        if view is None:
            view = views[tensor.dtype] = block.view(tensor.dtype)
        # Only one call for each tensor: with a hundred tensors, a second call costs 0.1 ms in all.
        piece = view.as_strided(tensor.shape, tensor.stride(), start // tensor.itemsize)
        # `.data`, so that autograd does not see a view of the block: one piece may be changed in
        # place while another one is kept for the backward pass.
        yield piece.data
        start += align(tensor.nbytes)


class PinStage(Stage):
    """Pins each batch.

    Args:
        device: The type of the accelerator, such as "cuda"; None leaves it to torch.
        index: The accelerator's index. As with torch, it becomes the thread's current device.
    """

    ahead = None  # no limit, as with torch
    name = "pt_data_pin"  # torch's name for such a thread
    kind = "pin"

    def __init__(self, device: str | None, index: int) -> None:
        self._device = device
        self._index = index

    def start(self) -> None:
        """Prepare the stage's thread. Called on it."""
        torch.set_num_threads(1)  # else a copy would take all cores
        torch.multiprocessing._set_thread_name(self.name)
        torch.accelerator.set_device_index(self._index)
        # Pinned memory is allocated here even while the user's thread captures a graph.
        relax_this_thread(self._device or "cuda")

    def run(self, batch: object) -> object:
        """Return a copy of the batch in page-locked memory, which does not hold the slot.

        Raises:
            Exception: As from torch's pin thread: an exception of the same type, with the traceback
                in its text.
        """
        try:
            return pin_batch(batch, self._device)
        except Exception:  # noqa: BLE001 - whatever an object's own pin_memory raises
            error = ExceptionWrapper(where=f"in pin memory thread for device {self._index}")
        error.reraise()
        raise AssertionError("reraise() returned")


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
    """Yield each object of some types; ``seen`` keeps the searched ones alive, by id()."""
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
