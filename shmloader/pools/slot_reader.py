"""The base of all pools with slots: reads workers' answers, lends batches and frees memory.

Runs on the engine's thread.
"""

from collections.abc import Sequence, Sized

from shmloader.batch.failures import SampleReport
from shmloader.batch.remote_error import RemoteError
from shmloader.errors import InternalError
from shmloader.insight.measurements import Counts
from shmloader.memory.admission import MemoryAdmission
from shmloader.memory.lease import checksum
from shmloader.messages import BatchDone, BatchEmpty, BatchFailed, Spilled, TooLong, Unsaved
from shmloader.pools import Events
from shmloader.pools.answers import (
    Batch,
    Empty,
    Failure,
    Reader,
    UnreadableLayout,
    read_layout,
)
from shmloader.pools.arena import TRIM_EVERY, Arena, PageLocker


class SlotReader:
    """Reads answers from slots, and lends the batches; the base of pools with slots.

    See :class:`~shmloader.pools.SlotPool` for what the public methods do and raise.

    Attributes:
        arena: The slots.
        dataset_epoch: The number for the dataset's ``set_epoch()`` in the present epoch; None for
            no call.

    Args:
        slot_bytes: The most bytes of a slot that a batch may take.
        slot_count: The most slots there may be.
        locker: Locks the pages of slots that are lent, if a device reads them.
        admission: Admits the first touch of memory here; None if memory is not checked.
    """

    has_queue = False

    def __init__(
        self,
        *,
        slot_bytes: int,
        slot_count: int,
        locker: PageLocker | None,
        admission: MemoryAdmission | None,
    ) -> None:
        self.dataset_epoch: int | None = None
        self.counts = Counts(slot_count=slot_count)
        self.arena = Arena(slot_bytes, locker, admission)
        self.arena.counts = self.counts
        self.ended_leases: Sized = self.arena.leases.dead
        # The layout that was read last, as it was sent, and its reader.
        self._last_layout: tuple[bytes, Reader | UnreadableLayout | None] = (b"", None)
        # Whether a state that did not fit was reported, which is done only once.
        self._has_lost_state = False

    # Answers -----------------------------------------------------------------------------

    def take_batch(self, worker_id: int, message: BatchDone, events: Events) -> None:
        """Report a batch that lies in its slot."""
        seq, epoch, slot_id, layout, used_bytes, is_kept = message[:6]
        expected, sent, saved, times, taken, state_ns = message[6:]
        report = None if sent is None else self._report(slot_id, sent)
        self.arena.note_use(slot_id, used_bytes)
        if layout is not None:
            data = layout if isinstance(layout, bytes) else self._spilled(slot_id, layout)
            if data != self._last_layout[0]:
                self._last_layout = data, read_layout(data, events.last_layouts())
            events.layout_sent(worker_id, self._last_layout[1])
        reader = events.last_layout(worker_id)
        if isinstance(reader, UnreadableLayout):
            failure = Failure(reader.error, is_kept=is_kept, report=report)
            events.answered(seq, epoch, worker_id, failure)
            return
        if not isinstance(reader, Reader):
            raise InternalError(f"worker {worker_id} sent a batch without a layout")
        answer = Batch(reader, report, times, used_bytes)
        answer.lends, answer.is_kept, answer.fingerprint = reader.lends, is_kept, taken
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
        self.arena.note_failed_use(slot_id, message.touched_bytes)
        failure = Failure(
            RemoteError.loads(data),
            is_kept=message.kept,
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
            is_kept=message.kept,
            snapshot=self._snapshot(worker_id, slot_id, message.snapshot, events),
        )
        events.answered(message.seq, message.epoch, worker_id, empty)

    def _report(self, slot_id: int, sent: bytes | Spilled | None) -> SampleReport | None:
        if sent is None:
            return None
        data = self._spilled(slot_id, sent) if isinstance(sent, Spilled) else sent
        return SampleReport.loads(data)

    def _snapshot(
        self,
        worker_id: int,
        slot_id: int,
        sent: bytes | Spilled | TooLong | Unsaved | None,
        events: Events,
    ) -> bytes | Unsaved | None:
        """Return the state that came with an answer, or why there is none; None if none was due."""
        if isinstance(sent, Unsaved):
            return sent
        return self.read_state(worker_id, slot_id, sent, events)

    def read_state(
        self,
        worker_id: int,
        slot_id: int,
        sent: bytes | Spilled | TooLong | None,
        events: Events,
    ) -> bytes | None:
        """Return the state of a worker's dataset, or None if none came."""
        if isinstance(sent, TooLong):
            if not self._has_lost_state:
                self._has_lost_state = True
                events.state_lost(worker_id, sent.nbytes, self.arena[slot_id].most_bytes)
            return None
        return self._spilled(slot_id, sent) if isinstance(sent, Spilled) else sent

    def _spilled(self, slot_id: int, where: Spilled) -> bytes:
        """Return bytes that a worker wrote into a slot."""
        end = where.offset + where.nbytes
        return self.arena.up_to(slot_id, end).mapping[where.offset : end]

    # Batches -----------------------------------------------------------------------------

    def find_change(self, slot_id: int, answer: Batch) -> str:
        """Describe how a batch changed since its worker wrote it, or return an empty string."""
        if answer.check is None:
            return ""
        nbytes, expected = answer.check
        found = checksum(self.arena[slot_id], nbytes)
        return "" if found == expected else f"{nbytes} bytes: {expected:08x}, now {found:08x}"

    def lock(self, slot_id: int) -> None:
        """Map a slot, and lock its pages if a device reads them."""
        self.arena.up_to(slot_id, self.arena.touched_bytes(slot_id))
        self.arena.lock(slot_id)

    def lend(self, slot_id: int, answer: Batch) -> object:
        """Return the batch as views of its slot."""
        slot = self.arena[slot_id]
        lease = self.arena.leases.open(slot_id, slot, is_clean=not answer.is_kept)
        return answer.content.read(slot, lease)

    def copy_out(self, slot_id: int, answer: Batch) -> object:
        """Return the batch in private memory, without views of its slot."""
        return answer.content.read(self.arena[slot_id], None)

    def take_returns(self) -> Sequence[tuple[int, bool]]:
        """Return the slots whose views are gone, each with whether it may be filled again."""
        return self.arena.leases.collect()

    @property
    def wants_tidying(self) -> bool:
        """Whether memory is short, or it is time to trim the slots."""
        arena = self.arena
        return arena.is_short or arena.batches >= TRIM_EVERY

    def tidy(self, free_ids: list[int]) -> None:
        """Give unneeded memory of free slots back to the kernel."""
        if self.arena.is_short:
            for slot_id in free_ids:
                self.arena.prepare(slot_id)
        if self.arena.batches >= TRIM_EVERY:
            self.arena.trim(free_ids)

    def poison(self, slot_id: int) -> None:
        """Overwrite a slot that became free."""
        self.arena.poison(slot_id)
