"""Copies batches from their slots to a device, ahead of the user.

The copy is asynchronous: it reads the slot after the call has returned. So each batch's views of
its slot are held here until the event after its copy is over; when they are dropped, the lease
dies, and the slot may be filled again. The user is never handed a view of such a slot: a copy of
the user's own would be one of which nobody knows when it is done. Objects of types that we cannot
look into are copied to memory of their own first, and so are arrays.

How a tensor gets there:
    * A large tensor in a page-locked slot is copied from the slot.
    * All small tensors of a batch are put into one block of torch's pinned memory, and cross in one
      copy. On the device, each is a part of that block.
    * Any other tensor is copied to torch's pinned memory first.
"""

import collections
import copy
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from shmloader.device.backend import Backend, Event
from shmloader.device.drivers import relax_this_thread
from shmloader.device.exchange import StageBrokenError
from shmloader.device.page_locks import PageLocks
from shmloader.device.pin import is_small, parts_of, pin_together
from shmloader.device.structure import map_tensors, tensors_in, tensors_of
from shmloader.probing import probe

# When a batch is copied to the device, the user's work on all batches but these last ones is done:
# the one that the user is taking now, and the one in use.
_MOST_IN_WORK = 2


class OnDevice(NamedTuple):
    """A batch on the device.

    Attributes:
        batch: The batch.
        tensors: One tensor of each storage.
        events: When it is ready, for each device that it has tensors on.
        number: The batch's number among those of its backend.
    """

    batch: Any
    tensors: list[torch.Tensor]
    events: dict[torch.device, Event]
    number: int


class DeviceStage:
    """Copies each batch to a device, on a thread.

    Attributes:
        ahead: Batches that may be ready and not taken.
        name: Of the thread.

    Args:
        backend: The device.
        locks: The page locks of the slots.
        ahead: See above; at least 1.
        transform: Called with each batch on the device, on the thread and its stream.
    """

    name = "shmloader_device"
    kind = "device"

    def __init__(
        self,
        backend: Backend,
        locks: PageLocks,
        ahead: int,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.ahead: int | None = ahead
        self._backend = backend
        self._locks = locks
        self._transform = transform
        # What is being copied, oldest first: the batch's views of its slot, until the event. With
        # the tensors themselves, since a container of the user's may be changed while it is mapped.
        self._reading: collections.deque[tuple[Event, object]] = collections.deque()
        self._most_reading = ahead + 1

    def start(self) -> None:
        """Begin, on the thread."""
        torch.multiprocessing._set_thread_name(self.name[:15])
        torch.set_num_threads(1)
        # Once before, because the stream may be made while a graph is captured, and once after,
        # because the first call has no effect if the device was not initialized yet.
        relax_this_thread(self._backend.device.type)
        self._backend.enter()
        relax_this_thread(self._backend.device.type)

    def run(self, batch: object) -> OnDevice:
        """Start the batch's copy; returns at once where its memory is page-locked or pinned.

        Raises:
            StageBrokenError: If the device has failed for good.
        """
        try:
            return self._run(batch)
        except Exception as error:
            del batch  # a traceback keeps this frame, which must not keep the slot
            self._raise_if_lost(error)
            traceback.clear_frames(error.__traceback__)  # likewise
            raise

    def _run(self, batch: object) -> OnDevice:
        self._wait_for_turn()
        self._backend.enter()
        held = (batch, list(tensors_of(batch)))
        try:
            copied = self._copy(batch)
        finally:
            # Even where a part failed: others may be under way.
            event = self._backend.record()
            self._reading.append((event, held))
            del batch, held  # as above
        if self._transform is None:
            events = {self._backend.device: event}
            return OnDevice(copied, list(self._storages(copied)), events, self._backend.number())
        return self._made(self._transform(copied), self._backend.number())

    def _made(self, batch: Any, number: int) -> OnDevice:
        """A batch that was computed on the calling thread's current streams."""
        tensors = list(self._storages(batch))
        return OnDevice(batch, tensors, self._backend.record_all(tensors), number)

    def depart(self, value: Any, came: OnDevice | None) -> OnDevice | None:
        """Record what a pipeline's op has computed, so that it can be handed over. On any thread.

        Args:
            value: The op's result.
            came: What it was computed from, if that was on the device.

        Returns:
            The result, for :meth:`hand_over`; None if it is not on the device.

        Raises:
            StageBrokenError: If the device has failed for good.
        """
        if not any(True for _ in self._storages(value)):
            return None
        number = self._backend.number() if came is None else came.number
        try:
            return self._made(value, number)
        except Exception as error:
            self._raise_if_lost(error)
            raise

    def _wait_for_turn(self) -> None:
        """Wait until there is room for one more batch, in the slots and on the device."""
        reading = self._reading
        while reading and reading[0][0].query():
            reading.popleft()
        while len(reading) >= self._most_reading:
            reading[0][0].synchronize()
            reading.popleft()
        # Without this, batches pile up on the device if the training loop never waits for it.
        self._backend.wait_for_user(_MOST_IN_WORK)

    def _copy(self, batch: object) -> Any:
        small = []
        if self._backend.can_pin:
            small = [tensor for tensor in tensors_in(batch) if is_small(tensor)]
        together = self._copy_together(small) if small else iter(())
        there = {id(tensor) for tensor in small}

        def copy_one(tensor: torch.Tensor) -> torch.Tensor:
            return next(together) if id(tensor) in there else self._copy_alone(tensor)

        return map_tensors(copy_one, batch, self._copy_other)

    def _copy_together(self, tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Copies of small tensors, all by one; parts of one block."""
        return parts_of(self._backend.copy(pin_together(tensors)), tensors)

    def _copy_alone(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._backend.can_pin and tensor.is_cpu and tensor.layout is torch.strided:
            if not _is_dense(tensor):
                tensor = tensor.contiguous()
            with self._locks.reading(tensor) as is_locked:
                if is_locked:
                    return self._backend.copy(tensor)
            tensor = tensor.pin_memory()
        return self._backend.copy(tensor)

    def _copy_other(self, part: Any) -> Any:
        """Of what is no tensor, nor holds any that we know of."""
        own = copy.deepcopy(part)
        return self._backend.move(own) if callable(probe(own, "to")) else own

    def _storages(self, batch: Any) -> Iterator[torch.Tensor]:
        """One tensor of each storage that a batch has on devices of this kind."""
        seen = set()
        for tensor in tensors_of(batch):
            for part in _parts(tensor):
                if part.device.type == self._backend.device.type and part.nbytes:
                    storage = (part.device, part.untyped_storage().data_ptr())
                    if storage not in seen:
                        seen.add(storage)
                        yield part

    def hand_over(self, result: OnDevice) -> object:
        """Give the batch to the user, whose current stream waits for it.

        Raises:
            StageBrokenError: If the device has failed for good.
        """
        try:
            self._backend.hand_over(result.events, result.tensors, result.number)
        except Exception as error:
            self._raise_if_lost(error)
            raise
        return result.batch

    def _raise_if_lost(self, error: Exception) -> None:
        if self._backend.check():
            return
        traceback.clear_frames(error.__traceback__)  # they may hold the slot
        raise StageBrokenError(
            f"{self._backend.device} takes no more batches, since it reports an error that lasts: "
            f"{error}"
        ) from error

    def close(self) -> None:
        """Wait for the copies under way, and let go of their slots. Raises nothing."""
        if self._reading:
            self._backend.check()
            self._reading.clear()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one piece of memory without gaps, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's memory: itself, unless it is made of others."""
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        return [part for name in names for part in _parts(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor] if tensor.layout is torch.strided else []
