"""The base of all pools with slots: reads workers' answers.

Runs on the engine's thread.
"""

import pickle
import sys
from typing import Any

from shmloader.batch.failures import SampleReport
from shmloader.batch.state_slot import free_state_slot, read_state_slot
from shmloader.errors import InternalError
from shmloader.memory.arena import Arena
from shmloader.memory.limits import MemoryAdmission
from shmloader.messages import (
    BatchDone,
    BatchEmpty,
    BatchFailed,
    InStateSlot,
    SentState,
    Spilled,
    TooLong,
    Unsaved,
)
from shmloader.pools import Events
from shmloader.pools.answers import (
    Batch,
    Empty,
    Failure,
    Reader,
    UnreadableLayout,
    read_layout,
)
from shmloader.pools.slot_memory import PageLocker, SlotMemory
from shmloader.threads.uninterruptible import uninterruptible

# References to a copy of a state when nobody else keeps it: a variable, and getrefcount's argument.
_OWN_REFERENCES = 2


class SlotReader:
    """Reads answers, and what lies in slots of them; the base of pools with slots.

    See :class:`~shmloader.pools.SlotPool` for what the public methods do and raise.

    Attributes:
        memory: The slots' memory.
        dataset_epoch: The number for the dataset's ``set_epoch()`` in the present epoch; None for
            no call.

    Args:
        arena: The slots, which the pool closes.
        locker: Locks the pages of slots that are lent, if a device reads them.
        admission: Admits the first touch of memory here; None if memory is not checked.
    """

    def __init__(
        self, arena: Arena, locker: PageLocker | None, admission: MemoryAdmission | None
    ) -> None:
        self.dataset_epoch: int | None = None
        self.memory = SlotMemory(arena, locker, admission)
        self.counts = self.memory.counts
        # The reader of each worker's last layout: a worker sends a layout only if it differs.
        self._readers: dict[int, Reader | UnreadableLayout] = {}
        # The layout that was read last, as it was sent, and its reader.
        self._last_layout: tuple[bytes, Any] = (b"", None)
        # Whether a state that did not fit was reported, which is done only once.
        self._has_lost_state = False
        # Memory for copies of large states, which keeps its pages; see _copy_state.
        self._copies: list[bytearray] = []

    def forget_layout(self, worker_id: int) -> None:
        """Forget a worker's last layout: its replacement sends one with its first batch."""
        self._readers.pop(worker_id, None)
        free_state_slot(self.memory.arena, worker_id)

    def free_memory(self) -> None:
        """Free all memory except what lies under the user's views. May be called again."""
        self._readers.clear()
        self._last_layout = b"", None
        self._copies.clear()
        uninterruptible(self.memory.close)

    # Answers -----------------------------------------------------------------------------

    def take_batch(self, worker_id: int, message: BatchDone, events: Events) -> None:
        """Report a batch that lies in its slot."""
        seq, epoch, slot_id, layout, used_bytes = message[:5]
        expected, sent, saved, times, taken, state_ns = message[5:]
        report = None if sent is None else self._report(slot_id, sent)
        self.memory.count_batch(slot_id, used_bytes)
        if layout is not None:
            data = layout if isinstance(layout, bytes) else self._spilled(slot_id, layout)
            if data != self._last_layout[0]:
                self._last_layout = data, read_layout(data, self._readers.values())
            self._readers[worker_id] = self._last_layout[1]
        reader = self._readers.get(worker_id)
        if isinstance(reader, UnreadableLayout):
            events.answered(seq, epoch, worker_id, Failure(reader.error, report=report))
            return
        if not isinstance(reader, Reader):
            raise InternalError(f"worker {worker_id} sent a batch without a layout")
        answer = Batch(reader, report, times, used_bytes)
        answer.lends, answer.fingerprint = reader.lends, taken
        if expected is not None:
            answer.check = (used_bytes, expected)
        if saved is not None:
            answer.state_ns = state_ns
            answer.snapshot = self._snapshot(worker_id, slot_id, saved, events)
        events.answered(seq, epoch, worker_id, answer)

    def take_failure(self, worker_id: int, message: BatchFailed, events: Events) -> None:
        """Report an exception of the user's code."""
        slot_id = message.slot_id
        data = message.error
        if not isinstance(data, bytes):
            data = self._spilled(slot_id, data)
        self.memory.count_pages(slot_id, message.touched_bytes)
        failure = Failure(
            pickle.loads(data),
            report=self._report(slot_id, message.report),
            snapshot=self._snapshot(worker_id, slot_id, message.snapshot, events),
            fingerprint=message.fingerprint,
            is_final=message.is_final,
        )
        events.answered(message.seq, message.epoch, worker_id, failure)

    def take_empty(self, worker_id: int, message: BatchEmpty, events: Events) -> None:
        """Report a batch without good samples."""
        slot_id = message.slot_id
        empty = Empty(
            self._report(slot_id, message.report),
            snapshot=self._snapshot(worker_id, slot_id, message.snapshot, events),
        )
        events.answered(message.seq, message.epoch, worker_id, empty)

    def _report(self, slot_id: int, sent: bytes | Spilled | None) -> SampleReport | None:
        if sent is None:
            return None
        data = self._spilled(slot_id, sent) if isinstance(sent, Spilled) else sent
        report: SampleReport = pickle.loads(data)
        return report

    def _snapshot(
        self,
        worker_id: int,
        slot_id: int,
        sent: SentState,
        events: Events,
    ) -> bytes | memoryview | Unsaved | None:
        """Return the state that came with an answer, or why there is none; None if none was due."""
        if isinstance(sent, Unsaved):
            return sent
        return self.read_state(worker_id, slot_id, sent, events)

    def read_state(
        self,
        worker_id: int,
        slot_id: int,
        sent: bytes | Spilled | InStateSlot | TooLong | None,
        events: Events,
    ) -> bytes | memoryview | None:
        """Return the state of a worker's dataset, or None if none came."""
        if isinstance(sent, InStateSlot):
            return read_state_slot(self.memory.arena, worker_id, sent.nbytes, self._copy_state)
        if isinstance(sent, TooLong):
            if not self._has_lost_state:
                self._has_lost_state = True
                events.state_lost(worker_id, sent.nbytes, self.memory.arena.slot_bytes)
            return None
        return self._spilled(slot_id, sent) if isinstance(sent, Spilled) else sent

    def _copy_state(self, state: memoryview) -> memoryview:
        """Copy a large state to memory whose last state nobody keeps any more, if there is some.

        New memory of that size would get its pages anew each time, which takes longer.
        """
        nbytes = state.nbytes
        copies, self._copies = self._copies, []
        found: bytearray | None = None
        while copies:
            one = copies.pop()
            if sys.getrefcount(one) > _OWN_REFERENCES:
                self._copies.append(one)
            elif found is None and nbytes <= len(one) <= 2 * nbytes:
                found = one
        if found is None:
            found = bytearray(nbytes + nbytes // 8)
        self._copies.append(found)
        view = memoryview(found)[:nbytes]
        view[:] = state
        return view.toreadonly()

    def _spilled(self, slot_id: int, where: Spilled) -> bytes:
        """Return bytes that a worker wrote into a slot."""
        end = where.offset + where.nbytes
        return bytes(self.memory.mapped(slot_id, end).memory[where.offset : end])
