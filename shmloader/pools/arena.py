"""The slots' memory in the main process: made when first needed, lent, trimmed, unmapped.

The scheduler keeps the slots' states (:mod:`shmloader.engine.slots`); this module owns the memory.
"""

import contextlib
from collections.abc import Iterable
from typing import Protocol

from shmloader.errors import SharedMemoryError
from shmloader.insight.measurements import Counts
from shmloader.memory.admission import MemoryAdmission
from shmloader.memory.lease import LeaseBook, poison
from shmloader.memory.slot import FIRST_BYTES, Slot, has_excess

# The number of batches between two searches for slots that hold too much, and the factor by which
# each search reduces the weight of what earlier batches needed.
TRIM_EVERY = 32
_RECENT_DECAY = 0.5

# A slot whose pages are locked a second time gets 1/8 more pages than its batch needs.
_GROW_AHEAD = 8


class PageLocker(Protocol):
    """Locks the pages of slots that a device reads."""

    def locked_bytes(self, slot: Slot) -> int:
        """Return how many bytes from a slot's start are locked."""

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Lock the first ``nbytes`` of a slot, unless they are locked."""

    def unlock(self, slot: Slot) -> bool:
        """Unlock a slot. Returns whether its memory may be given back and unmapped."""

    def keep(self, slot: Slot) -> None:
        """Keep a slot that cannot be unlocked."""

    def end_reads(self, slots: Iterable[Slot]) -> None:
        """Wait until no device reads these slots, and allow no further copies of them."""


class Arena:
    """Owns one engine's slots. Only the engine's thread calls it, except for ``close``.

    Attributes:
        leases: The leases of lent slots.
        batches: Batches since the last :meth:`trim`.
        is_short: Whether memory is short, so that free slots give their pages back: there may not
            be enough memory for all slots of a plain loop and for samples.
        counts: Counts how slots grow.

    Args:
        slot_bytes: The most bytes that a batch may take of a slot.
        locker: Locks the pages of lent slots, if a device reads them.
        admission: Admits the first touch of memory here; None if memory is not checked.
    """

    def __init__(
        self,
        slot_bytes: int,
        locker: PageLocker | None = None,
        admission: MemoryAdmission | None = None,
    ) -> None:
        self._locker = locker
        self.leases = LeaseBook()
        self._admission = admission
        self._slot_bytes = slot_bytes
        self._slots: dict[int, Slot] = {}
        self._touched: dict[int, int] = {}
        self._recent_bytes = 0.0
        self.batches = 0
        self.is_short = False
        self.counts = Counts()

    def __getitem__(self, slot_id: int) -> Slot:
        """Return a slot, mapped as far as it was written to. Makes the slot if there is none.

        Raises:
            SharedMemoryError: If the slot cannot be mapped.
            OSError: If there is no descriptor left for a new slot.
        """
        return self.up_to(slot_id, self._touched.get(slot_id, 0))

    def up_to(self, slot_id: int, end: int) -> Slot:
        """Return a slot that is mapped at least up to ``end``. Raises as ``arena[slot_id]``."""
        slot = self._slots.get(slot_id)
        if slot is None:
            slot = self._slots[slot_id] = Slot.create(self._slot_bytes, FIRST_BYTES)
        return slot if slot.nbytes >= end else self._map(slot_id, slot, end)

    def _map(self, slot_id: int, slot: Slot, end: int) -> Slot:
        """Map a slot up to ``end``, and unlock its pages. The slot must not be lent."""
        if self._locker is None:
            slot.reach(end, others=self._slots.values())
        elif self._locker.unlock(slot):
            # Locked pages are known by their address. Other slots are not remapped, since a device
            # may be reading them.
            slot.reach(end)
        else:
            # The old mapping must stay as it is.
            before, slot = slot, slot.remade(end)
            self._slots[slot_id] = slot
            self._locker.keep(before)
        return slot

    def note_use(self, slot_id: int, used_bytes: int) -> None:
        """Note that a batch takes ``used_bytes`` of a slot."""
        self.note_failed_use(slot_id, used_bytes)
        self._recent_bytes = max(self._recent_bytes, used_bytes)
        self.batches += 1

    def note_failed_use(self, slot_id: int, touched_bytes: int) -> None:
        """Note how much of a slot a failed batch touched. It tells nothing about other batches."""
        before = self._touched.get(slot_id, 0)
        if touched_bytes <= before:
            return
        counts = self.counts
        counts.grown += before > 0
        counts.largest_bytes = max(counts.largest_bytes, touched_bytes)
        self._count_pages(slot_id, touched_bytes)
        if self._admission is not None:
            self.is_short = self._admission.is_short(counts.slot_bytes, counts.largest_bytes)

    def _count_pages(self, slot_id: int, nbytes: int) -> None:
        counts = self.counts
        counts.slot_bytes += nbytes - self._touched.get(slot_id, 0)
        counts.most_bytes = max(counts.most_bytes, counts.slot_bytes)
        self._touched[slot_id] = nbytes

    def prepare(self, slot_id: int) -> None:
        """Give a slot's pages back if memory is short.

        Called for a free slot, or before the slot's task is sent: a worker may fill the slot much
        later.
        """
        if self.is_short and self._locker is None:
            self._give_back(slot_id, 0)

    def touched_bytes(self, slot_id: int) -> int:
        """Return how many bytes from a slot's start have pages."""
        return self._touched.get(slot_id, 0)

    def grow(self, slot_id: int, end: int) -> Slot:
        """Prepare a slot that this process is about to write to, up to ``end``, and return it.

        Raises:
            SharedMemoryError: If there is not enough memory.
        """
        slot, touched = self.up_to(slot_id, end), self.touched_bytes(slot_id)
        if end > touched and self._admission is not None:
            self._admission.grow(slot, touched, end)
        return slot

    def poison(self, slot_id: int) -> None:
        """Overwrite what was written into a slot that is free now (``SHMLOADER_DEBUG=1``)."""
        if slot_id in self._slots:
            with contextlib.suppress(SharedMemoryError):  # not mapped, so there is no view of it
                poison(self[slot_id], self.touched_bytes(slot_id))

    def trim(self, free_ids: list[int]) -> None:
        """Give back pages of free slots that hold far more than recent batches needed."""
        self.batches = 0
        keep = int(self._recent_bytes)
        self._recent_bytes *= _RECENT_DECAY
        for slot_id in free_ids:
            if has_excess(self._touched.get(slot_id, 0), keep):
                if self._locker is not None and not self._locker.unlock(self._slots[slot_id]):
                    continue
                if self._give_back(slot_id, keep):
                    self._slots[slot_id].shorten(keep)

    def _give_back(self, slot_id: int, keep: int) -> bool:
        """Give back a slot's pages after the first ``keep`` bytes. Returns whether it was done."""
        touched = self._touched.get(slot_id, 0)
        if touched <= keep:
            return True
        slot = self._slots[slot_id]
        # Pages that are not mapped, since there is no address space for them, are not given back.
        if slot.nbytes < touched or not slot.give_back(keep):
            return False
        self.counts.slot_bytes += keep - touched
        self._touched[slot_id] = keep
        return True

    def lock(self, slot_id: int) -> None:
        """Lock the pages of the batch in a slot, if a device reads it."""
        if self._locker is None:
            return
        slot, nbytes = self[slot_id], self._touched[slot_id]
        if 0 < self._locker.locked_bytes(slot) < nbytes:
            self._grow_ahead(slot_id, nbytes)
        self._locker.lock(slot, self._touched[slot_id])

    def _grow_ahead(self, slot_id: int, nbytes: int) -> None:
        """Give a slot some more pages, if there is memory for them: locking again is slow."""
        slot = self._slots[slot_id]
        end = min(nbytes + nbytes // _GROW_AHEAD, slot.nbytes)
        if self._admission is not None and end > nbytes:
            with contextlib.suppress(SharedMemoryError):
                self._admission.grow(slot, nbytes, end)
                self._count_pages(slot_id, end)

    def retire(self, slot_id: int) -> None:
        """Unmap a slot that must not be filled again. Memory under live views stays."""
        slot = self._slots.get(slot_id)
        if slot is not None:
            if self._locker is None or self._locker.unlock(slot):
                slot.close()
            else:
                self._locker.keep(slot)
        self._touched.pop(slot_id, None)
        self.counts.slot_bytes = sum(self._touched.values())
        self._slots.pop(slot_id, None)  # last: after an interruption, all of this runs again

    def close(self) -> None:
        """Unmap all slots, except for memory under live views. May be called again."""
        if self._slots and self._locker is not None:
            # Several devices may still read the lent ones.
            self._locker.end_reads(self._slots.values())
        for slot_id in list(self._slots):
            self.retire(slot_id)
