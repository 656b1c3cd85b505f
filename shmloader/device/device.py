"""A stage that copies batches from their slots to a device, ahead of the user.

A copy is asynchronous: it may read the slot after the call has returned. So each batch's views of
its slot are held here until the event after its copy; when they are dropped, the lease dies, and
the slot may be filled again. The user never gets a view of such a slot: if the user's code copied
the view asynchronously, the loader could not tell when that copy is done. So NumPy arrays and
objects of unknown types are copied to ordinary memory first. An object with a ``to`` of its own
then goes to the device from there.

How a tensor gets to the device:
    * A large tensor in a page-locked slot is copied from the slot.
    * All small tensors of a batch are put into one block of torch's pinned memory, which goes to
      the device in one copy. There, each of these tensors is a piece of the block's copy.
    * Any other tensor is copied to torch's pinned memory first.
"""

import collections
import contextlib
import copy
import functools
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from shmloader.device.backend import Backend, CudaDriver, Event, relax_this_thread
from shmloader.device.stage import Stage, all_tensors, is_small, map_tensors, pin_block, split_block
from shmloader.grammar import size
from shmloader.interruptions import probe
from shmloader.memory.arena import Slot

# Before a further batch is copied to the device, the stage waits for the user's work on all batches
# except the last two: the user is taking one of these, and still uses the other.
_BATCHES_IN_USE = 2

# The methods that return the plain tensors of a sparse one.
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class PageLocks:
    """The page locks of a loader's slots, which let a device read them directly.

    Used from any thread.

    Guarantees:
        * Only pages that were admitted before are locked (:mod:`shmloader.pools.slot_memory` counts
          them), so locking takes no further memory.
        * Locked pages are neither given back to the system nor unmapped. Otherwise the device would
          continue to read the old pages.
        * A slot is unlocked only when the device does not read it.
        * A lock is listed before locking, and removed from the list after unlocking. So an
          interruption leaves at most a listed slot without a lock, and unlocking is tried again.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_refused = False
        self._pid = os.getpid()
        # Locked bytes, by the slot's address.
        self._locked: dict[int, int] = {}
        # Held while a copy from a locked slot begins, and while all slots are unlocked.
        self._reading = threading.Lock()

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Page-lock a slot's first bytes.

        If the driver refuses, this warns once, and locks nothing from then on.

        Args:
            slot: The slot, which the device does not read at this moment.
            nbytes: Number of bytes from its start, all of which have pages.
        """
        if self._is_refused or self._locked.get(slot.address, 0) >= nbytes:
            return
        backend = self._backend
        why = backend.driver
        if not isinstance(why, str):
            wanted = min(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, slot.nbytes)
            with backend.ready():
                error = self._lock(why, slot.address, wanted)
            why = error and f"page-locking {size(wanted)} was refused: {error}"
        if why:
            self._is_refused = True
            warnings.warn(
                f"shmloader copies batches to {backend.device} through pinned memory: its shared "
                f"memory cannot be page-locked ({why})",
                RuntimeWarning,
                stacklevel=2,
            )

    def _lock(self, driver: CudaDriver, address: int, nbytes: int) -> str:
        """Lock the pages. Returns why that was refused, or an empty string."""
        if not driver.has_context():
            return "the thread has no context"
        if address in self._locked:
            if error := driver.unregister(address):
                return error
            del self._locked[address]
        self._locked[address] = nbytes
        error = driver.register(address, nbytes)
        if error:
            del self._locked[address]
        return error

    def unlock(self, slot: Slot) -> None:
        """Unlock a slot, which the device no longer reads."""
        # What the parent locked does not concern a forked child.
        if os.getpid() != self._pid or slot.address not in self._locked:
            return
        driver = self._backend.driver
        assert not isinstance(driver, str)
        with self._backend.ready():
            driver.unregister(slot.address)  # a lost device refuses it, and reads nothing any more
        del self._locked[slot.address]

    def end_reads(self, slots: Iterable[Slot]) -> None:
        """Wait until the device reads none of these slots, and unlock them. Raises nothing.

        No copy begins meanwhile. One that begins later finds the slot unlocked.
        """
        locked = [slot for slot in slots if slot.address in self._locked]
        if os.getpid() == self._pid and locked:
            with self._reading:
                # A call, so that an interruption comes inside of it: one between the end of a loop
                # and the release of the lock would leave the lock taken.
                self._wait_and_unlock(locked)

    def _wait_and_unlock(self, slots: Iterable[Slot]) -> None:
        self._backend.finish()
        for slot in slots:
            self.unlock(slot)

    @contextlib.contextmanager
    def reading(self, tensor: torch.Tensor) -> Iterator[bool]:
        """Keep a tensor's memory locked in the block, if it is locked.

        Yields:
            Whether the device may read the memory directly.
        """
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        with self._reading:
            # A list: another thread may lock a slot meanwhile.
            yield any(
                start <= first and last <= start + nbytes
                for start, nbytes in list(self._locked.items())
            )


class Destination:
    """The device that a loader's batches go to. All iterators of a loader share it.

    Attributes:
        backend: The device.
        locks: The page locks of slots.

    Args:
        device: The result of :func:`~shmloader.device.backend.parse_device`, which is not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.backend = Backend(device)
        self.locks = PageLocks(self.backend)
        self._pid = os.getpid()

    def is_of(self, device: torch.device) -> bool:
        """Whether this destination is for this device, and was made by this process."""
        return self.backend.device == device and self._pid == os.getpid()


class OnDevice(NamedTuple):
    """A batch on the device.

    Attributes:
        batch: The batch.
        tensors: One tensor of each of the batch's storages.
        event: Complete when the batch is ready.
    """

    batch: Any
    tensors: list[torch.Tensor]
    event: Event


class DeviceStage(Stage):
    """Copies each batch to a device.

    Args:
        destination: The device, and the page locks of the slots.
        ahead: Batches that may be ready and not yet taken; at least 1.
        transform: Called with each batch on the device, on the stage's thread and its stream.
    """

    name = "shmloader_device"
    kind = "device"
    ahead: int

    def __init__(
        self,
        destination: Destination,
        ahead: int,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.ahead, self._transform = ahead, transform
        self._backend, self._locks = destination.backend, destination.locks
        # Copies under way, oldest first: the event after each, and the batch's views of its slot.
        # The tensors are listed as well: a user's container may change while it is mapped.
        self._reading: collections.deque[tuple[Event, object]] = collections.deque()

    def start(self) -> None:
        """Prepare the stage's thread. Called on it."""
        torch.multiprocessing._set_thread_name(self.name[:15])
        torch.set_num_threads(1)
        # The first call is for a stream that is made while a graph is captured. It has no effect if
        # the device was not initialized yet, hence the second.
        relax_this_thread(self._backend.device.type)
        self._backend.enter()
        relax_this_thread(self._backend.device.type)

    def run(self, batch: object) -> OnDevice:
        """Start a batch's copy. Does not wait for a copy from page-locked or pinned memory."""
        self._wait_for_space()
        self._backend.enter()
        held = (batch, all_tensors(batch))
        try:
            copied = self._copy(*held)
        finally:
            # Needed even if the copy of one tensor failed: other copies may be under way.
            event = self._backend.record()
            self._reading.append((event, held))
        if self._transform is not None:
            copied = self._transform(copied)
            event = self._backend.record(self._backend.current_stream())
        return OnDevice(copied, list(self._storages(copied)), event)

    def _wait_for_space(self) -> None:
        """Wait until one more batch may be read from its slot, and put on the device."""
        reading = self._reading
        while reading and (len(reading) > self.ahead or reading[0][0].query()):
            reading[0][0].synchronize()
            reading.popleft()
        # Without this, batches pile up on the device if the training loop never waits for it.
        self._backend.wait_for_user(_BATCHES_IN_USE)

    def _copy(self, batch: object, tensors: list[torch.Tensor]) -> Any:
        small = [tensor for tensor in tensors if is_small(tensor)]
        copies: dict[int, torch.Tensor] = {}
        if small:
            pieces = split_block(self._backend.copy(pin_block(small)), small)
            copies = dict(zip(map(id, small), pieces, strict=True))
        return map_tensors(functools.partial(self._copy_one, copies), batch, self._copy_object)

    def _copy_one(self, copies: dict[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in copies:
            return copies[id(tensor)]
        if tensor.is_cpu and tensor.layout is torch.strided:
            if not _is_dense(tensor):
                tensor = tensor.contiguous()
            with self._locks.reading(tensor) as is_locked:
                if is_locked:
                    return self._backend.copy(tensor)
            tensor = tensor.pin_memory()
        return self._backend.copy(tensor)

    def _copy_object(self, value: Any) -> Any:
        """Copy an object that is neither a tensor nor a known container."""
        own = copy.deepcopy(value)
        return own.to(self._backend.device) if callable(probe(own, "to")) else own

    def _storages(self, batch: Any) -> Iterator[torch.Tensor]:
        """Yield one tensor of each storage that a batch has on the device."""
        own, seen = self._backend.device, set()
        for tensor in all_tensors(batch):
            for plain in _plain_tensors(tensor):
                if plain.device.type == own.type and plain.nbytes:
                    if plain.device != own:
                        raise ValueError(
                            f"device_transform returned a tensor on {plain.device}, but batches "
                            f"arrive on {own}. Move it there in the training loop."
                        )
                    storage = plain.untyped_storage().data_ptr()
                    if storage not in seen:
                        seen.add(storage)
                        yield plain

    def deliver(self, result: OnDevice) -> object:
        """Make the calling thread's current stream wait for the batch, and return the batch."""
        self._backend.deliver(result.event, result.tensors)
        return result.batch

    def close(self) -> None:
        """Wait for the copies under way, and release their slots. Raises nothing."""
        if self._reading:
            self._backend.finish()
            self._reading.clear()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor covers one range of memory without gaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that hold a tensor's data: its parts, or the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        return [plain for name in names for plain in _plain_tensors(getattr(tensor, name))]
    if tensor.layout is torch.strided:
        return [tensor]
    return [getattr(tensor, name)() for name in _SPARSE_PARTS.get(tensor.layout, ())]
