"""The pool whose workers are processes of this machine, and whose batches come in slots."""

import pickle
from multiprocessing.process import BaseProcess
from typing import Any

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.failures import RemoteError
from shmloader.errors import InternalError, SharedMemoryError
from shmloader.faults import FAULTS
from shmloader.interruptions import is_interruption, uninterruptible
from shmloader.memory.arena import Arena
from shmloader.memory.limits import MemoryAdmission
from shmloader.messages import (
    DONE,
    DONE_HEAD,
    INLINE_BYTES,
    NO_EPOCH,
    RECEIVE_BYTES,
    STATE_HEAD,
    TASK,
    TASK_HEAD,
    BatchDone,
    BatchFailed,
    EpochStarted,
    InSlot,
    Leave,
    Left,
    ResumeStream,
    Spilled,
    StartEpoch,
    StreamEnded,
    Task,
    join,
    pack,
    pieces,
    unpack,
)
from shmloader.pools import Events, SentTicket
from shmloader.pools.answers import Answer, Batch, Empty, Failure, Reader, read_layout
from shmloader.pools.slot_memory import PageLocker, SlotMemory
from shmloader.pools.status_page import AtWork
from shmloader.pools.waker import LOOKS, let_others_run
from shmloader.pools.worker_processes import WorkerProcesses


class ProcessPool:
    """Worker processes, and the slots that their batches come in.

    See :class:`~shmloader.pools.SlotPool` for what the methods do and raise.

    Attributes:
        memory: The slots' memory.
        dataset_epoch: The number for the dataset's ``set_epoch()`` in the present epoch; None for
            no call.

    Args:
        workers: The worker processes, or the channels to workers that ranks share. The pool owns
            this object from now on.
        arena: The slots, which the workers have as well. The pool closes it.
        locker: Locks the pages of slots that are lent, if a device reads them.
        admission: Admits the first touch of memory here; None if memory is not checked.
    """

    def __init__(
        self,
        workers: WorkerProcesses,
        arena: Arena,
        locker: PageLocker | None = None,
        admission: MemoryAdmission | None = None,
    ) -> None:
        self.dataset_epoch: int | None = None
        self.memory = SlotMemory(arena, locker, admission)
        self.counts = self.memory.counts
        # The reader of each worker's last layout, or why there is none: a worker sends a layout
        # only if it differs from its last one.
        self._readers: dict[int, Reader | RemoteError] = {}
        # The pieces that have come of a worker's long message.
        self._pieces: dict[int, bytearray] = {}
        self._workers = workers
        self.readings = workers.readings
        self.has_queue = workers.queue is not None

    @property
    def waiter(self) -> WorkerProcesses:
        """The workers, which it waits for."""
        return self._workers

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the process that has the workers."""
        return self._workers.is_inherited

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes by number; empty if this process has not started them."""
        return self._workers.processes

    # Tasks -------------------------------------------------------------------------------

    def send(self, ticket: SentTicket, epoch: int) -> Failure | None:
        """Send a ticket's task."""
        slot_id, hung = ticket.slot_id, ticket.hung
        if self.memory.is_short:
            self.memory.prepare(slot_id)
        try:
            content = (ticket.indices, hung) if hung else ticket.indices
            data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
            body = data if len(data) <= INLINE_BYTES // 2 else self._spill(ticket, data)
        except Exception as error:
            if is_interruption(error):
                raise
            # Pickling the user's keys may raise anything.
            where = "while sending indices to a DataLoader worker process"
            return Failure(RemoteError.caught(where))
        touched_bytes = self.memory.slots[slot_id].touched_bytes
        told = self.dataset_epoch
        if hung or isinstance(body, Spilled):
            data = pack(Task(ticket.seq, epoch, slot_id, touched_bytes, told, body, bool(hung)))
        else:
            told = NO_EPOCH if told is None else told
            data = TASK_HEAD.pack(TASK, ticket.seq, epoch, slot_id, touched_bytes, told) + body
        if self.has_queue:
            self._workers.put(data)
        else:
            self._workers.send(ticket.worker_id, data)
        if FAULTS is not None:
            FAULTS.reach("main.dispatch")
        return None

    def _spill(self, ticket: SentTicket, body: bytes) -> Spilled:
        """Put a long index list into the ticket's slot."""
        memory, nbytes = self.memory, len(body)
        most_bytes = memory.arena.slot_bytes
        if nbytes > most_bytes:
            raise SharedMemoryError(
                f"the indices of batch {ticket.seq} take {nbytes} bytes, and a slot may have "
                f"{most_bytes}: {memory.arena.describe_limit(nbytes)}; or lower batch_size."
            )
        memory.grow(ticket.slot_id, nbytes).memory[:nbytes] = body
        memory.count_pages(ticket.slot_id, nbytes)
        return Spilled(0, nbytes)

    def recall(self) -> list[int]:
        """Take back the tasks that no worker has received."""
        queue = self._workers.queue
        return [] if queue is None else queue.recall()

    def start_epoch(self, worker_id: int, epoch: int) -> bool:
        """Tell a worker to begin a further epoch."""
        self._workers.send(worker_id, pack(StartEpoch(epoch, self.dataset_epoch)))
        return False

    def resume(self, worker_id: int, checkpoint: Checkpoint) -> None:
        """Tell a worker where its dataset resumes."""
        for piece in pieces(pack(ResumeStream(checkpoint.dumps()))):
            self._workers.send(worker_id, piece)

    # Events ------------------------------------------------------------------------------

    def poll(self, worker_id: int, events: Events) -> bool:
        """Report what was answered, if a message is here or about to arrive."""
        if worker_id < 0:
            return self._report_all(self._workers.look(), events)
        receive = self._workers.handles[worker_id].channel.recv
        for _ in range(LOOKS):
            try:
                data = receive(RECEIVE_BYTES)
                break
            except BlockingIOError:
                let_others_run()
            except ConnectionError:
                return False  # the worker has died, as its pidfd will show
        else:
            return False
        if data:
            self._receive(worker_id, data, events)
        return bool(data)

    def _receive(self, worker_id: int, data: bytes, events: Events) -> None:
        """Report the contents of a worker's message."""
        if data[0] != DONE:
            self._receive_unusual(worker_id, data, events)
            return
        _, seq, epoch, slot_id, used_bytes, *times = DONE_HEAD.unpack(data)
        reader = self._readers[worker_id]
        memory = self.memory
        if used_bytes > memory.slots[slot_id].touched_bytes:
            memory.count_pages(slot_id, used_bytes)
        memory.recent_bytes = max(memory.recent_bytes, used_bytes)
        memory.batches += 1
        answer: Answer
        if isinstance(reader, RemoteError):
            answer = Failure(reader)
        else:
            answer = Batch(reader, None, times, used_bytes)
            answer.lends = reader.lends
        events.answered(seq, epoch, worker_id, answer)

    def wait(self, timeout_s: float | None, events: Events) -> bool:
        """Wait until something happens, and report it."""
        return self._report_all(self._workers.wait(timeout_s), events)

    def _report_all(self, happened: list[tuple[int, bytes | None]], events: Events) -> bool:
        """Report messages, and then deaths. Returns whether there are any."""
        dead = []
        for worker_id, data in happened:
            if data is None:
                dead.append(worker_id)
            else:
                self._receive(worker_id, data, events)
        for worker_id in dead:
            recalled, held = self.recall(), set[int]()
            if self.has_queue:
                held = self._workers.held()
                self._report_all([*self._workers.receive_all()], events)
            death, was_at = self._workers.death(worker_id), self.was_at(worker_id)
            events.lost(worker_id, death, was_at, recalled, held)
        return bool(happened)

    def enable_wake(self) -> None:
        """Enable :meth:`wake`."""
        self._workers.enable_wake()

    def wake(self) -> None:
        """Make the present or the next :meth:`wait` return."""
        self._workers.wake()

    def _receive_unusual(self, worker_id: int, data: bytes, events: Events) -> None:
        """Report the contents of a message that is not a batch with a known layout."""
        whole = join(self._pieces.setdefault(worker_id, bytearray()), data)
        if whole is None:
            return
        message = unpack(whole)
        if isinstance(message, InSlot):
            message = unpack(self._copy_out(message))
        if isinstance(message, BatchDone):
            events.answered(message.seq, message.epoch, worker_id, self._read(worker_id, message))
        elif isinstance(message, BatchFailed):
            self.memory.count_pages(message.slot_id, message.touched_bytes)
            error, report, snapshot, fingerprint, is_final = message[4:]
            snapshot = self._copy_out(snapshot)
            answer: Answer = Empty(report, snapshot)
            if error is not None:
                answer = Failure(error, report, snapshot, fingerprint, is_final)
            events.answered(message.seq, message.epoch, worker_id, answer)
        elif isinstance(message, StreamEnded):
            beginning = Checkpoint.loads(message.beginning)
            events.stream_ended(message.seq, message.epoch, beginning)
        elif isinstance(message, EpochStarted):
            events.epoch_entered(worker_id, message.beginning)
        elif isinstance(message, Left):
            events.left(worker_id)
        else:
            raise InternalError(f"a worker sent {message!r}")

    def _read(self, worker_id: int, message: BatchDone) -> Batch | Failure:
        """Return the answer with a batch."""
        self.memory.count_batch(message.slot_id, message.used_bytes)
        if message.layout is not None:
            self._readers[worker_id] = read_layout(message.layout, self._readers.values())
        reader = self._readers[worker_id]
        if isinstance(reader, RemoteError):
            return Failure(reader, message.report)
        answer = Batch(reader, message.report, message.times, message.used_bytes)
        answer.lends, answer.fingerprint = reader.lends, message.fingerprint
        answer.snapshot = self._copy_out(message.snapshot)
        answer.state_ns = message.state_ns
        if message.checksum is not None:
            answer.check = (message.used_bytes, message.checksum)
        return answer

    def _copy_out(self, value: Any) -> Any:
        """Return a copy of the bytes that lie in a slot; or the value, unless it says where."""
        if not isinstance(value, InSlot):
            return value
        slot_id, (offset, nbytes) = value
        memory, end = self.memory, offset + nbytes
        memory.count_pages(slot_id, end)
        slot = memory.mapped(slot_id, end)
        copy = bytes(slot.memory[offset:end])
        if slot_id < memory.arena.batch_slot_count:
            memory.recent_bytes = max(memory.recent_bytes, end)
        elif memory.is_short:
            memory.prepare(slot_id)  # the worker finds a head of 0, too
        else:
            STATE_HEAD.pack_into(slot.memory, 0, end)
        return copy

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

    def start(self, worker_id: int) -> None:
        """Start a worker for the first time, after it was retired, or in place of a dead one."""
        # The new worker sends its layout with its first batch.
        self._readers.pop(worker_id, None)
        self._pieces.pop(worker_id, None)
        self._workers.start(worker_id)

    replace = start

    def leave(self, worker_id: int) -> None:
        """Have a worker receive no more tasks from the queue."""
        self._workers.send(worker_id, pack(Leave()))

    def retire(self, worker_id: int) -> None:
        """End an idle worker."""
        self._workers.retire(worker_id)

    def end_workers(self) -> None:
        """End all workers but keep the memory."""
        self._workers.close()

    def close(self) -> None:
        """End all workers, and free all memory except what lies under the user's views."""
        try:
            self._workers.close()
        finally:
            self._readers.clear()
            uninterruptible(self.memory.close)
