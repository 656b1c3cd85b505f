"""The slots' memory in the main process: made when first needed, lent, trimmed, unmapped.

States and counts are the scheduler's (:mod:`shmloader.engine.slots`); this is their body.
"""

from typing import Protocol

from shmloader.memory.debug import poison
from shmloader.memory.lease import LeaseBook
from shmloader.memory.room import Room
from shmloader.memory.slot import Slot
from shmloader.stats.record import Counts

# A slot gives memory back when it holds this much more than recent batches needed.
_TRIM_FACTOR = 2
_TRIM_BYTES = 16 << 20
# Looked at once in so many batches, and a batch's need is forgotten at this rate.
_TRIM_EVERY = 32
_RECENT_DECAY = 0.5


class PageLocker(Protocol):
    """Locks a slot's pages, for a device that reads them by itself."""

    def lock(self, slot: Slot, nbytes: int) -> None:
        """Lock the first ``nbytes``, if that is not done."""

    def unlock(self, slot: Slot) -> None:
        """Undo it, once nothing reads the slot."""


class Arena:
    """Owner of one engine's slots. Only the engine's thread calls it, but for ``close``.

    Args:
        slot_bytes: Length of each slot: all that a batch may take.
        locker: Locks the pages of slots that are read, if a device reads them.
        room: Asked before this process touches memory of a slot; None: nobody is asked.
    """

    def __init__(
        self, slot_bytes: int, locker: PageLocker | None = None, room: Room | None = None
    ) -> None:
        self._locker = locker
        self.leases = LeaseBook()
        self._room = room
        self._slot_bytes = slot_bytes
        self._slots: dict[int, Slot] = {}
        self._touched: dict[int, int] = {}
        self._recent_bytes = 0.0
        self._batches = 0
        #: Where it counts how slots grow.
        self.counts = Counts()

    def __getitem__(self, slot_id: int) -> Slot:
        """The slot of this number, made now if it is new."""
        slot = self._slots.get(slot_id)
        if slot is None:
            slot = self._slots[slot_id] = Slot.create(self._slot_bytes)
            # Where address space is limited, the others need not try for more.
            self._slot_bytes = slot.nbytes
        return slot

    def note_use(self, slot_id: int, used_bytes: int) -> None:
        """A batch has taken so many bytes of a slot."""
        if used_bytes > self._touched.get(slot_id, 0):
            self._grow_to(slot_id, used_bytes)
        self._recent_bytes = max(self._recent_bytes, used_bytes)
        self._batches += 1

    def note_failed_use(self, slot_id: int, touched_bytes: int) -> None:
        """A batch that failed has taken so many bytes of a slot, which says nothing of others."""
        if touched_bytes > self._touched.get(slot_id, 0):
            self._grow_to(slot_id, touched_bytes)

    def _grow_to(self, slot_id: int, nbytes: int) -> None:
        counts, before = self.counts, self._touched.get(slot_id, 0)
        self._touched[slot_id] = nbytes
        counts.grown += before > 0
        counts.slot_bytes += nbytes - before
        counts.most_bytes = max(counts.most_bytes, counts.slot_bytes)
        counts.largest_bytes = max(counts.largest_bytes, nbytes)

    def touched_bytes(self, slot_id: int) -> int:
        """Bytes from a slot's start that have pages."""
        return self._touched.get(slot_id, 0)

    def grow(self, slot_id: int, end: int) -> None:
        """Before this process writes up to ``end`` itself.

        Raises:
            SharedMemoryError: If there is no memory for it.
        """
        touched = self.touched_bytes(slot_id)
        if end > touched and self._room is not None:
            self._room.grow(self[slot_id], touched, end)

    def poison(self, slot_id: int) -> None:
        """Overwrite what was written into a slot that is free now (``SHMLOADER_DEBUG=1``)."""
        slot = self._slots.get(slot_id)
        if slot is not None:
            poison(slot, self.touched_bytes(slot_id))

    @property
    def wants_trim(self) -> bool:
        """Whether it is time to look for slots that hold too much."""
        return self._batches >= _TRIM_EVERY

    def trim(self, free_ids: list[int]) -> None:
        """Give back what free slots hold far above what recent batches needed."""
        self._batches = 0
        keep = int(self._recent_bytes)
        self._recent_bytes *= _RECENT_DECAY
        for slot_id in free_ids:
            if self._touched.get(slot_id, 0) > _TRIM_FACTOR * keep + _TRIM_BYTES:
                if self._locker is not None:
                    self._locker.unlock(self._slots[slot_id])
                self._slots[slot_id].give_back(keep)
                self.counts.slot_bytes += keep - self._touched[slot_id]
                self._touched[slot_id] = keep

    def lock(self, slot_id: int) -> None:
        """Lock the pages of what lies in a slot, if a device is to read it."""
        if self._locker is not None:
            self._locker.lock(self._slots[slot_id], self._touched[slot_id])

    def retire(self, slot_id: int) -> None:
        """Let go of a slot that must not be filled again; its memory lives while it is seen."""
        self.counts.slot_bytes -= self._touched.pop(slot_id, 0)
        slot = self._slots.pop(slot_id, None)
        if slot is not None:
            if self._locker is not None:
                self._locker.unlock(slot)
            slot.close()

    def close(self) -> None:
        """Unmap all slots, but for what lives under the user's views. May be called again."""
        for slot_id in list(self._slots):
            self.retire(slot_id)
