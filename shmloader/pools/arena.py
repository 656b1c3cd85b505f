"""The slots' memory in the main process: made when first needed, lent, trimmed, unmapped.

States and counts are the scheduler's (:mod:`shmloader.engine.slots`); this is their body.
"""

import contextlib
from collections.abc import Iterable
from typing import Protocol

from shmloader.errors import SharedMemoryError
from shmloader.insight.measurements import Counts
from shmloader.memory.admission import MemoryAdmission
from shmloader.memory.lease import LeaseBook, poison
from shmloader.memory.slot import FIRST_BYTES, Slot, has_excess

# Slots that hold too much are looked for once in so many batches. At each look, the need of the
# batches before counts for this share of what it did.
TRIM_EVERY = 32
_RECENT_DECAY = 0.5

# A slot that is locked a second time gets 1/8 more pages than its batch needs.
_GROW_AHEAD = 8


class PageLocker(Protocol):
    """Locks a slot's pages, for a device that reads them by itself."""

    def locked_bytes(self, slot: Slot) -> int:
        """Bytes from a slot's start that are locked."""

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Lock the first ``nbytes``, if that is not done."""

    def unlock(self, slot: Slot) -> bool:
        """Unlock a slot. Returns whether its memory may be given back and unmapped."""

    def keep(self, slot: Slot) -> None:
        """Keep a slot that cannot be unlocked."""

    def end_reads(self, slots: Iterable[Slot]) -> None:
        """Wait until no device reads these slots, and let no further copy read them."""


class Arena:
    """Owner of one engine's slots. Only the engine's thread calls it, but for ``close``.

    Args:
        slot_bytes: All that a batch may take of a slot.
        locker: Locks the pages of slots that are read, if a device reads them.
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
        #: Batches since the last :meth:`trim`.
        self.batches = 0
        #: Whether slots give their pages back when they are free: there may not be enough memory
        #: for all that a plain loop needs, and for samples.
        self.is_short = False
        #: Where it counts how slots grow.
        self.counts = Counts()

    def __getitem__(self, slot_id: int) -> Slot:
        """The slot of this number, made now if it is new; mapped as far as it was written to.

        Raises:
            SharedMemoryError: If it cannot be mapped.
            OSError: If there is no descriptor left for a new one.
        """
        return self.up_to(slot_id, self._touched.get(slot_id, 0))

    def up_to(self, slot_id: int, end: int) -> Slot:
        """The same, mapped at least up to ``end``."""
        slot = self._slots.get(slot_id)
        if slot is None:
            slot = self._slots[slot_id] = Slot.create(self._slot_bytes, FIRST_BYTES)
        return slot if slot.nbytes >= end else self._map(slot_id, slot, end)

    def _map(self, slot_id: int, slot: Slot, end: int) -> Slot:
        """Map a slot that nobody reads up to ``end``; its pages are unlocked."""
        if self._locker is None:
            slot.reach(end, others=self._slots.values())
        elif self._locker.unlock(slot):
            # What is locked is known by its address. Others stay, a device may be reading them.
            slot.reach(end)
        else:
            # The old mapping has to stay as it is.
            before, slot = slot, slot.remade(end)
            self._slots[slot_id] = slot
            self._locker.keep(before)
        return slot

    def note_use(self, slot_id: int, used_bytes: int) -> None:
        """A batch has taken so many bytes of a slot."""
        if used_bytes > self._touched.get(slot_id, 0):
            self._grow_to(slot_id, used_bytes)
        self._recent_bytes = max(self._recent_bytes, used_bytes)
        self.batches += 1

    def note_failed_use(self, slot_id: int, touched_bytes: int) -> None:
        """A batch that failed has taken so many bytes of a slot, which says nothing of others."""
        if touched_bytes > self._touched.get(slot_id, 0):
            self._grow_to(slot_id, touched_bytes)

    def _grow_to(self, slot_id: int, nbytes: int) -> None:
        counts = self.counts
        counts.grown += self._touched.get(slot_id, 0) > 0
        counts.largest_bytes = max(counts.largest_bytes, nbytes)
        self._count_pages(slot_id, nbytes)
        if self._admission is not None:
            self.is_short = self._admission.is_short(counts.slot_bytes, counts.largest_bytes)

    def _count_pages(self, slot_id: int, nbytes: int) -> None:
        counts = self.counts
        counts.slot_bytes += nbytes - self._touched.get(slot_id, 0)
        counts.most_bytes = max(counts.most_bytes, counts.slot_bytes)
        self._touched[slot_id] = nbytes

    def prepare(self, slot_id: int) -> None:
        """A slot is free, or about to be sent to a worker, which may fill it much later."""
        if self.is_short and self._locker is None:
            self._give_back(slot_id, 0)

    def touched_bytes(self, slot_id: int) -> int:
        """Bytes from a slot's start that have pages."""
        return self._touched.get(slot_id, 0)

    def grow(self, slot_id: int, end: int) -> None:
        """Before this process writes up to ``end`` itself.

        Raises:
            SharedMemoryError: If there is no memory for it.
        """
        slot, touched = self.up_to(slot_id, end), self.touched_bytes(slot_id)
        if end > touched and self._admission is not None:
            self._admission.grow(slot, touched, end)

    def poison(self, slot_id: int) -> None:
        """Overwrite what was written into a slot that is free now (``SHMLOADER_DEBUG=1``)."""
        if slot_id in self._slots:
            with contextlib.suppress(SharedMemoryError):  # it cannot be mapped, so nobody sees it
                poison(self[slot_id], self.touched_bytes(slot_id))

    def trim(self, free_ids: list[int]) -> None:
        """Give back what free slots hold far above what recent batches needed."""
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
        """Give a slot's pages back but for its first bytes; whether that was done."""
        touched = self._touched.get(slot_id, 0)
        if touched <= keep:
            return True
        slot = self._slots[slot_id]
        # What is not mapped, for want of address space, is not given back.
        if slot.nbytes < touched or not slot.give_back(keep):
            return False
        self.counts.slot_bytes += keep - touched
        self._touched[slot_id] = keep
        return True

    def lock(self, slot_id: int) -> None:
        """Lock the pages of what lies in a slot, if a device is to read it."""
        if self._locker is None:
            return
        slot, nbytes = self[slot_id], self._touched[slot_id]
        if 0 < self._locker.locked_bytes(slot) < nbytes:
            self._grow_ahead(slot_id, nbytes)
        self._locker.lock(slot, self._touched[slot_id])

    def _grow_ahead(self, slot_id: int, nbytes: int) -> None:
        """Get a slot some more pages, if memory is left, since locking it again is slow."""
        slot = self._slots[slot_id]
        end = min(nbytes + nbytes // _GROW_AHEAD, slot.nbytes)
        if self._admission is not None and end > nbytes:
            with contextlib.suppress(SharedMemoryError):
                self._admission.grow(slot, nbytes, end)
                self._count_pages(slot_id, end)

    def retire(self, slot_id: int) -> None:
        """Let go of a slot that must not be filled again; its memory lives while it is seen."""
        slot = self._slots.get(slot_id)
        if slot is not None:
            if self._locker is None or self._locker.unlock(slot):
                slot.close()
            else:
                self._locker.keep(slot)
        self._touched.pop(slot_id, None)
        self.counts.slot_bytes = sum(self._touched.values())
        self._slots.pop(slot_id, None)  # last, since after an interruption all is done again

    def close(self) -> None:
        """Unmap all slots, but for what lives under the user's views. May be called again."""
        if self._slots and self._locker is not None:
            # Those that are lent may be read yet, by several devices.
            self._locker.end_reads(self._slots.values())
        for slot_id in list(self._slots):
            self.retire(slot_id)
