"""The slots' memory in the main process: counted, lent, trimmed, and given back.

The scheduler keeps the slots' states (:mod:`shmloader.engine.records`). The arena has the mappings
(:mod:`shmloader.memory.arena`). This module knows how much of each slot has pages.
"""

import collections
import os
from typing import Any

from shmloader.insight.measurements import Counts
from shmloader.memory.arena import Arena, Lease, Slot, has_excess
from shmloader.memory.limits import MemoryAdmission

# The number of batches between two searches for slots that hold too much, and the factor by which
# each search reduces the weight of what earlier batches needed.
TRIM_EVERY = 32
_RECENT_DECAY = 0.5


class SlotMemory:
    """Owns an engine's arena in the main process. Only the engine's thread calls it.

    Any thread may call ``close``.

    Attributes:
        arena: The arena.
        slots: The slots, by number.
        locks_pages: Whether the pages of lent slots are locked, since a device reads them.
        ended: Leases that have died, each with the number of its slot. They die on any thread.
        batches: Batches since the last :meth:`trim`.
        recent_bytes: What recent batches needed of a slot at most; earlier ones count for less.
        is_short: Whether free slots give their pages back, since there may not be enough memory for
            all slots of a plain loop and for samples.
        counts: Counts how slots grow.

    Args:
        arena: The arena.
        locker: The :class:`~shmloader.device.device.PageLocks` of the device that reads slots;
            None if none does.
        admission: Checks that there is memory; None for no check.
    """

    recent_bytes = 0.0
    batches = 0
    is_short = False

    def __init__(
        self, arena: Arena, locker: Any = None, admission: MemoryAdmission | None = None
    ) -> None:
        self.arena, self.slots = arena, arena.slots
        self.locks_pages = arena.is_read_by_device = locker is not None
        self.ended: collections.deque[Lease] = collections.deque()
        self._locker, self._admission = locker, admission
        self._owner_pid = os.getpid()
        self.counts = Counts(slot_count=len(arena.slots))

    def mapped(self, slot_id: int, end: int = 0) -> Slot:
        """Return a slot that is mapped as far as it was written to, and at least up to ``end``."""
        slot = self.slots[slot_id]
        end = max(end, slot.touched_bytes)
        if slot.nbytes < end:
            if self._locker is not None:
                self._locker.unlock(slot)
            self.arena.reach(slot, end)
        return slot

    def count_batch(self, slot_id: int, used_bytes: int) -> None:
        """Count a batch that takes ``used_bytes`` of a slot."""
        if used_bytes > self.slots[slot_id].touched_bytes:
            self.count_pages(slot_id, used_bytes)
        self.recent_bytes = max(self.recent_bytes, used_bytes)
        self.batches += 1

    def count_pages(self, slot_id: int, touched_bytes: int) -> None:
        """Count the pages of a slot that was written to, perhaps for a batch that has failed."""
        slot = self.slots[slot_id]
        before = slot.touched_bytes
        if touched_bytes <= before:
            return
        counts = self.counts
        counts.largest_bytes = max(counts.largest_bytes, touched_bytes)
        counts.slot_bytes += touched_bytes - before
        counts.most_bytes = max(counts.most_bytes, counts.slot_bytes)
        slot.touched_bytes = touched_bytes
        if self._admission is not None:
            self.is_short = self._admission.is_short(counts.slot_bytes, counts.largest_bytes)

    def prepare(self, slot_id: int) -> None:
        """Give a slot's pages back if memory is short, before its task is sent."""
        if self.is_short and self._locker is None:
            self._give_back(self.slots[slot_id], 0)

    def grow(self, slot_id: int, end: int) -> Slot:
        """Prepare a slot that this process is about to write to, up to ``end``, and return it."""
        slot = self.mapped(slot_id, end)
        before = slot.touched_bytes
        if end > before and self._admission is not None:
            self._admission.grow(self.arena, slot, end)
            slot.touched_bytes = before  # until it is counted
        return slot

    def tidy(self, free_ids: list[int]) -> None:
        """Give unneeded memory of free slots back to the kernel."""
        if self.is_short:
            for slot_id in free_ids:
                self.prepare(slot_id)
        if self.batches >= TRIM_EVERY:
            self.trim(free_ids)

    def trim(self, free_ids: list[int]) -> None:
        """Give back pages of free slots that hold far more than recent batches needed."""
        self.batches = 0
        keep = int(self.recent_bytes)
        self.recent_bytes *= _RECENT_DECAY
        for slot_id in free_ids:
            slot = self.slots[slot_id]
            if has_excess(slot.touched_bytes, keep) and slot.kept is None:
                if self._locker is not None:
                    self._locker.unlock(slot)
                if self._give_back(slot, keep) and has_excess(slot.nbytes, keep):
                    slot.unmap()

    def _give_back(self, slot: Slot, keep: int) -> bool:
        """Give back a slot's pages after the first ``keep`` bytes. Returns whether it was done."""
        before = slot.touched_bytes
        is_done = before <= keep or self.arena.give_back(slot, keep)
        self.counts.slot_bytes += slot.touched_bytes - before
        return is_done

    def lock(self, slot_id: int) -> Slot:
        """Return a slot that is mapped, its batch's pages locked if a device reads them."""
        slot = self.mapped(slot_id)
        if self._locker is not None:
            self._locker.lock(slot, slot.touched_bytes)
        return slot

    def close(self) -> None:
        """Free all slots, except for memory under live views. May be called again."""
        slots = self.slots
        if self._locker is not None:
            self._locker.end_reads(slots)  # a device may still read the lent ones
        if os.getpid() == self._owner_pid:
            # One lent slot keeps the file, which must not keep the pages of all the others.
            for slot in slots:
                if slot.kept is None and not (slot.nbytes and slot.is_lent):
                    self.arena.give_back(slot, 0)
        self.counts.slot_bytes = sum(slot.touched_bytes for slot in slots)
        self.arena.close()
