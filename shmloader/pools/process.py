"""The pool whose workers are processes of this machine, and whose batches come in slots."""

from collections.abc import Sequence, Sized
from multiprocessing.process import BaseProcess
from typing import Any

from shmloader.batch.failures import RemoteError, SampleReport
from shmloader.batch.iterable_state import Beginning, IterableCheckpoint
from shmloader.errors import InternalError
from shmloader.insight.measurements import Counts
from shmloader.memory.admission import MemoryAdmission
from shmloader.memory.lease import checksum
from shmloader.messages import (
    BatchDone,
    BatchEmpty,
    BatchFailed,
    EpochStarted,
    Spilled,
    StartEpoch,
    StatePart,
    StreamEnded,
    TooLong,
    pack,
    unpack,
)
from shmloader.pools import Events, SentTicket
from shmloader.pools.answers import (
    Batch,
    Empty,
    Failure,
    Reader,
    UnreadableLayout,
    read_layout,
)
from shmloader.pools.arena import TRIM_EVERY, Arena, PageLocker
from shmloader.pools.sender import Sender
from shmloader.pools.status_page import AtWork
from shmloader.pools.worker_channels import WorkerChannels
from shmloader.threads.uninterruptible import uninterruptible


class ProcessPool:
    """Worker processes, and the slots that their batches come in.

    See :class:`~shmloader.pools.Pool` for what the methods do and raise.

    Attributes:
        arena: The slots.

    Args:
        workers: The processes, or the channels to them; the pool owns them from now on.
        slot_bytes: The most bytes of a slot that a batch may take.
        slot_count: The most slots there may be.
        locker: Locks the pages of slots that are lent, if a device reads them.
        admission: Admits the first touch of memory here; None if memory is not checked.
    """

    has_queue = False
    is_inline = False

    def __init__(
        self,
        workers: WorkerChannels[Any],
        *,
        slot_bytes: int,
        slot_count: int,
        locker: PageLocker | None = None,
        admission: MemoryAdmission | None = None,
    ) -> None:
        self._workers = workers
        self.readings = workers.readings
        self.counts = Counts(slot_count=slot_count)
        self.arena = Arena(slot_bytes, locker, admission)
        self.arena.counts = self.counts
        self.ended_leases: Sized = self.arena.leases.dead
        self._sender = Sender(workers, self.arena)
        # A state that did not fit is reported once.
        self._has_lost_state = False

    @property
    def is_waiting(self) -> bool:
        """Whether :meth:`wait` waits, or was left by an exception while it waited."""
        return self._workers.is_waiting

    @is_waiting.setter
    def is_waiting(self, value: bool) -> None:
        self._workers.is_waiting = value

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the process that has the workers."""
        return self._workers.is_inherited

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes, by number."""
        return self._workers.processes

    # Tasks -------------------------------------------------------------------------------

    def send(self, ticket: SentTicket, epoch: int) -> Failure | None:
        """Send a ticket's task."""
        refused = self._sender.send(ticket, epoch)
        return None if refused is None else Failure(refused)

    def start_epoch(self, worker_id: int, epoch: int) -> None:
        """Tell a worker to begin a further epoch."""
        self._workers.send(worker_id, pack(StartEpoch(epoch)))

    def resume(self, worker_id: int, checkpoint: IterableCheckpoint) -> None:
        """Tell a worker where its dataset resumes."""
        self._sender.resume(worker_id, checkpoint)

    # Events ------------------------------------------------------------------------------

    def poll(self, worker_id: int | None, events: Events) -> bool:
        """Report what a worker answered, if a message is here or about to arrive."""
        assert worker_id is not None
        data = self._workers.receive(worker_id)
        if data is None:
            return False
        self._take(worker_id, data, events)
        return True

    def wait(self, timeout_s: float | None, events: Events) -> bool:
        """Wait until something happens, and report it."""
        happened = self._workers.wait(timeout_s)
        for worker_id, data in happened:
            if data is None:
                events.lost(worker_id, self._workers.death(worker_id), self.was_at(worker_id))
            else:
                self._take(worker_id, data, events)
        return bool(happened)

    def enable_wake(self) -> None:
        """Enable the three methods below."""
        self._workers.enable_wake()

    def wake(self) -> None:
        """Make the present or the next :meth:`wait` return."""
        self._workers.wake()

    def wake_soon(self) -> None:
        """Do as :meth:`wake`, but a little later where that is cheaper."""
        self._workers.wake_soon()

    def hurry(self) -> None:
        """Make a pending :meth:`wake_soon` take effect now."""
        self._workers.hurry()

    # Messages ----------------------------------------------------------------------------

    def _take(self, worker_id: int, data: bytes, events: Events) -> None:
        """Report the contents of a worker's message."""
        message = unpack(data)
        if self._sender.attached:
            self._sender.release_state(worker_id)
        if type(message) is BatchDone:
            self._take_batch(worker_id, message, events)
        elif type(message) is BatchFailed:
            self._take_failure(worker_id, message, events)
        elif type(message) is BatchEmpty:
            self._take_empty(worker_id, message, events)
        elif type(message) is StreamEnded:
            self._take_end(worker_id, message, events)
        elif type(message) is EpochStarted:
            events.epoch_entered(worker_id, message.beginning)
        elif type(message) is StatePart:
            events.state_part(worker_id, message.data)
        else:
            raise InternalError(f"a worker sent {message!r}")

    def _take_batch(self, worker_id: int, message: BatchDone, events: Events) -> None:
        seq, epoch, slot_id, layout, used_bytes, is_kept = message[:6]
        expected, sent, saved, times, taken = message[6:]
        report = None if sent is None else self._report(slot_id, sent)
        self.arena.note_use(slot_id, used_bytes)
        if layout is not None:
            data = layout if isinstance(layout, bytes) else self._spilled(slot_id, layout)
            events.layout_sent(worker_id, read_layout(data, events.last_layouts()))
        reader = events.last_layout(worker_id)
        if isinstance(reader, UnreadableLayout):
            failure = Failure(reader.error, is_kept=is_kept, report=report)
            events.answered(seq, epoch, worker_id, failure)
            return
        if not isinstance(reader, Reader):
            raise InternalError(f"worker {worker_id} sent a batch without a layout")
        answer = Batch(
            reader,
            lends=reader.lends,
            is_kept=is_kept,
            check=None if expected is None else (used_bytes, expected),
            report=report,
            snapshot=None if saved is None else self._state(worker_id, slot_id, saved, events),
            times=times,
            nbytes=used_bytes,
            fingerprint=taken,
        )
        events.answered(seq, epoch, worker_id, answer)

    def _take_failure(self, worker_id: int, message: BatchFailed, events: Events) -> None:
        slot_id = message.slot_id
        data = message.error
        if not isinstance(data, bytes):
            data = self._spilled(slot_id, data)
        self.arena.note_failed_use(slot_id, message.touched_bytes)
        failure = Failure(
            RemoteError.loads(data),
            is_kept=message.kept,
            report=self._report(slot_id, message.report),
            snapshot=self._state(worker_id, slot_id, message.snapshot, events),
            fingerprint=message.fingerprint,
            is_final=message.is_final,
        )
        events.answered(message.seq, message.epoch, worker_id, failure)

    def _take_empty(self, worker_id: int, message: BatchEmpty, events: Events) -> None:
        slot_id = message.slot_id
        empty = Empty(
            self._report(slot_id, message.report),
            is_kept=message.kept,
            snapshot=self._state(worker_id, slot_id, message.snapshot, events),
        )
        events.answered(message.seq, message.epoch, worker_id, empty)

    def _take_end(self, worker_id: int, message: StreamEnded, events: Events) -> None:
        slot_id = message.slot_id
        self.arena.note_failed_use(slot_id, message.touched_bytes)
        # Read before the slot becomes free.
        beginning = Beginning.loads(self._state(worker_id, slot_id, message.beginning, events))
        events.stream_ended(message.seq, message.epoch, worker_id, beginning, is_kept=message.kept)

    def _report(self, slot_id: int, sent: bytes | Spilled | None) -> SampleReport | None:
        if sent is None:
            return None
        data = self._spilled(slot_id, sent) if isinstance(sent, Spilled) else sent
        return SampleReport.loads(data)

    def _state(
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
        """Return the batch in memory of its own."""
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
        """Return memory of free slots that is not needed to the kernel."""
        if self.arena.is_short:
            for slot_id in free_ids:
                self.arena.prepare(slot_id)
        if self.arena.batches >= TRIM_EVERY:
            self.arena.trim(free_ids)

    def poison(self, slot_id: int) -> None:
        """Overwrite a slot that became free."""
        self.arena.poison(slot_id)

    def drop_slot(self, slot_id: int, worker_ids: list[int]) -> None:
        """Unmap a slot here and in the workers that have mapped it."""
        self._sender.drop(slot_id, worker_ids)

    # Workers -----------------------------------------------------------------------------

    def pid(self, worker_id: int) -> int:
        """Return the process id of a worker."""
        return self._workers.pid(worker_id)

    def was_at(self, worker_id: int) -> AtWork:
        """Return what a worker is doing, or was doing when it died, without its stack."""
        return self._workers.was_at(worker_id)

    def ask(self, worker_id: int) -> AtWork:
        """Return what a worker is doing, with its Python stack."""
        return self._workers.ask(worker_id)

    def kill(self, worker_id: int, seq: int) -> bool:  # noqa: ARG002 - whatever it loads by now
        """Kill a worker that takes too long for a sample."""
        self._workers.kill(worker_id)
        return True

    def replace(self, worker_id: int) -> None:
        """Start a worker in place of one that died."""
        self._workers.replace(worker_id)
        self._sender.release_state(worker_id)

    def start(self, worker_id: int) -> None:
        """Start a worker for the first time, or after it was retired."""
        self._workers.start(worker_id)
        self._sender.release_state(worker_id)

    def retire(self, worker_id: int) -> None:
        """End an idle worker."""
        self._workers.retire(worker_id)
        self._sender.release_state(worker_id)

    def end_workers(self) -> None:
        """End all workers but keep the memory."""
        self._workers.close()

    def close(self) -> None:
        """End all workers, and free all memory except what lies under the user's views."""
        try:
            self._workers.close()
        finally:
            self._sender.close()
            uninterruptible(self.arena.close)
