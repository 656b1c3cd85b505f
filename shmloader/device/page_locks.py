"""Page locks of slots, which let devices read the slots directly.

Guarantees:
    * Only pages that were admitted before are locked (:mod:`shmloader.pools.slot_memory` counts
      them), so locking takes no further memory.
    * Locked pages are neither given back to the system nor unmapped. Otherwise a device would
      continue to read the old pages.
    * A slot is unlocked only when no device reads it.
    * A lock is listed before locking, and removed from the list after unlocking. So an interruption
      leaves at most a listed slot without a lock, and unlocking is tried again.
"""

import contextlib
import mmap
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch

from shmloader.device.backend import Backend, CudaDriver
from shmloader.memory.arena import Slot


class PageLocks:
    """The page locks of a loader's slots, for all devices of one kind. Used from any thread.

    Args:
        backends: The devices that read the slots.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._is_refused = False
        self._pid = os.getpid()
        # Locked bytes, by the slot's address.
        self._locked: dict[int, int] = {}
        # Held while a copy from a locked slot begins, and while all slots are unlocked.
        self._reading = threading.Lock()

    def locked_bytes(self, slot: Slot) -> int:
        """Return how many bytes from a slot's start are locked."""
        return self._locked.get(slot.address, 0)

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Page-lock a slot's first bytes.

        If the driver refuses, this warns once, and locks nothing from then on.

        Args:
            slot: The slot, which no device reads at this moment.
            nbytes: Number of bytes from its start, all of which have pages.
        """
        if self._is_refused or self.locked_bytes(slot) >= nbytes:
            return
        first = self._backends[0]
        why = first.driver
        if not isinstance(why, str):
            wanted = min(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, slot.nbytes)
            with first.ready():
                error = self._lock(why, slot.address, wanted)
            why = error and f"page-locking {wanted} bytes was refused: {error}"
        if why:
            self._is_refused = True
            warnings.warn(
                f"shmloader copies batches to {first.device} by way of pinned memory, since its "
                f"shared memory cannot be page-locked ({why})",
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
        """Unlock a slot, which no device reads any more."""
        # What the parent locked does not concern a forked child.
        if os.getpid() != self._pid or slot.address not in self._locked:
            return
        driver = self._backends[0].driver
        assert not isinstance(driver, str)
        with self._backends[0].ready():
            driver.unregister(slot.address)  # a lost device refuses it, and reads nothing any more
        del self._locked[slot.address]

    def end_reads(self, slots: Iterable[Slot]) -> None:
        """Wait until no device reads these slots, and unlock them. Raises nothing.

        No copy begins meanwhile. One that begins later finds the slot unlocked.
        """
        locked = [slot for slot in slots if slot.address in self._locked]
        if os.getpid() == self._pid and locked:
            with self._reading:
                self._wait_and_unlock(locked)

    def _wait_and_unlock(self, slots: Iterable[Slot]) -> None:
        for backend in self._backends:
            backend.finish()
        for slot in slots:
            self.unlock(slot)

    @contextlib.contextmanager
    def reading(self, tensor: torch.Tensor) -> Iterator[bool]:
        """Keep a tensor's memory locked in the block, if it is locked.

        Yields:
            Whether a device may read the memory directly.
        """
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        with self._reading:
            # A list: another thread may lock a slot meanwhile.
            yield any(
                start <= first and last <= start + nbytes
                for start, nbytes in list(self._locked.items())
            )
