"""Copies batches from their slots to a device, ahead of the user.

The copy is asynchronous: it reads the slot after the call has returned. So each batch's views of
its slot are held here until the event after its copy is done; when they are dropped, the lease
dies, and the slot may be filled again. The user is never handed a view of such a slot: a copy of
the user's own would be one of which nobody knows when it is done. Objects of types that we cannot
look into are copied to memory of their own first, and so are arrays.
"""

import collections
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from shmloader.memory.slot import Slot
from shmloader.stages.structure import map_tensors, tensors_of


class Event(Protocol):
    """Comes after what was put on a stream before it."""

    def query(self) -> bool:
        """Whether all that has been done."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Backend(Protocol):
    """A kind of device."""

    def start(self) -> None:
        """Make the device this thread's own."""

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Page-lock a slot's first ``nbytes``, if that is not done or refused. Nobody copies it."""

    def unlock(self, slot: Slot) -> None:
        """Undo it, once no copy reads the slot."""

    def stream(self) -> AbstractContextManager[Any]:
        """What is done inside is done on our stream."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device; asynchronous where its memory is page-locked."""

    def move(self, batch: Any) -> Any:
        """Copy an object that has a ``to`` of its own to the device, by that."""

    def record(self) -> Event:
        """An event on our stream."""

    def await_here(self, event: Event) -> None:
        """Let the calling thread's current stream wait for an event."""

    def use_here(self, tensor: torch.Tensor) -> None:
        """Note that the calling thread's current stream uses a tensor of our stream."""

    def synchronize(self) -> None:
        """Wait for all copies."""


class _Copied(NamedTuple):
    batch: Any
    tensors: list[torch.Tensor]
    event: Event


class DeviceStage:
    """Copies each batch to a device, on a thread.

    Attributes:
        ahead: Batches that may be ready and not taken.
        name: Of the thread.

    Args:
        backend: The device.
        ahead: See above; at least 1.
        transform: Called with each batch on the device, on the thread and its stream.
    """

    name = "shmloader_device"
    kind = "device"

    def __init__(
        self, backend: Backend, ahead: int, transform: Callable[[Any], Any] | None = None
    ) -> None:
        self.ahead: int | None = ahead
        self._backend = backend
        self._transform = transform
        # What is being copied, oldest first: the batch's views of its slot, until the event.
        self._reading: collections.deque[tuple[Event, object]] = collections.deque()
        self._most_reading = ahead + 1

    def start(self) -> None:
        """Begin, on the thread."""
        torch.multiprocessing._set_thread_name(self.name[:15])
        torch.set_num_threads(1)
        self._backend.start()

    def run(self, batch: object) -> _Copied:
        """Start the batch's copy; returns at once where its memory is page-locked."""
        reading = self._reading
        while reading and reading[0][0].query():
            reading.popleft()
        while len(reading) >= self._most_reading:
            reading[0][0].synchronize()
            reading.popleft()
        with self._backend.stream():
            try:
                copied = map_tensors(self._backend.copy, batch, self._copy_other)
            finally:
                # Even where a part failed: others may be under way.
                event = self._backend.record()
                reading.append((event, batch))
                del batch  # an exception's traceback holds this frame, and must not hold the slot
            if self._transform is not None:
                copied = self._transform(copied)
                event = self._backend.record()
        return _Copied(copied, tensors_of(copied), event)

    def _copy_other(self, part: Any) -> Any:
        """Of what is no tensor, nor holds any that we know of."""
        own = copy.deepcopy(part)
        return self._backend.move(own) if callable(getattr(own, "to", None)) else own

    def hand_over(self, result: _Copied) -> object:
        """Give the batch to the user, whose current stream waits for it."""
        self._backend.await_here(result.event)
        for tensor in result.tensors:
            self._backend.use_here(tensor)
        return result.batch

    def close(self) -> None:
        """Wait for the copies under way, and let go of their slots."""
        if self._reading:
            self._backend.synchronize()
            self._reading.clear()
