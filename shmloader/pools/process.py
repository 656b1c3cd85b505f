"""The pool whose workers are processes of this machine, and whose batches come in slots."""

import pickle
from multiprocessing.process import BaseProcess
from typing import Any

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.failures import RemoteError
from shmloader.errors import InternalError, SharedMemoryError
from shmloader.faults import FAULTS
from shmloader.interruptions import is_interruption
from shmloader.memory.arena import Arena
from shmloader.memory.limits import MemoryAdmission
from shmloader.messages import (
    DONE,
    DONE_HEAD,
    INLINE_BYTES,
    NO_EPOCH,
    PART_BYTES,
    RECEIVE_BYTES,
    TASK,
    TASK_HEAD,
    BatchDone,
    BatchEmpty,
    BatchFailed,
    BeginningPart,
    CheckpointPart,
    EpochStarted,
    Leave,
    Left,
    ResumeStream,
    Spilled,
    StartEpoch,
    StreamEnded,
    Task,
    pack,
    unpack,
)
from shmloader.pools import Events, SentTicket
from shmloader.pools.answers import Batch, Failure, Reader
from shmloader.pools.slot_memory import PageLocker
from shmloader.pools.slot_reader import SlotReader
from shmloader.pools.status_page import AtWork
from shmloader.pools.waker import LOOKS, let_others_run
from shmloader.pools.worker_channels import WorkerChannels


class ProcessPool(SlotReader):
    """Worker processes, and the slots that their batches come in.

    See :class:`~shmloader.pools.Pool` for what the methods do and raise.

    Args:
        workers: The worker processes, or the channels to workers that ranks share. The pool owns
            this object from now on.
        arena: The slots, which the workers have as well. The pool closes it.
        locker: Locks the pages of slots that are lent, if a device reads them.
        admission: Admits the first touch of memory here; None if memory is not checked.
    """

    def __init__(
        self,
        workers: WorkerChannels[Any],
        arena: Arena,
        locker: PageLocker | None = None,
        admission: MemoryAdmission | None = None,
    ) -> None:
        super().__init__(arena, locker, admission)
        self._workers = workers
        self.readings = workers.readings
        self.has_queue = workers.queue is not None
        # The worker count that was reported last.
        self._told_count: int | None = None

    @property
    def waiter(self) -> WorkerChannels[Any]:
        """The workers' channels, which wait."""
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
        if hung or not isinstance(body, bytes):
            data = pack(Task(ticket.seq, epoch, slot_id, body, touched_bytes, told, bool(hung)))
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
        data = checkpoint.dumps()
        sent = 0
        while len(data) - sent > PART_BYTES:
            self._workers.send(worker_id, pack(CheckpointPart(data[sent : sent + PART_BYTES])))
            sent += PART_BYTES
        self._workers.send(worker_id, pack(ResumeStream(data[sent:])))

    # Events ------------------------------------------------------------------------------

    def poll(self, worker_id: int, events: Events) -> bool:
        """Report what was answered, if a message is here or about to arrive."""
        if worker_id < 0:
            happened = self._report_all(self._workers.look(), events)
            return self._tell_count(events) or happened
        receive = self._workers.channels[worker_id].channel.recv
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
            self._take(worker_id, data, events)
        return bool(data)

    def _take(self, worker_id: int, data: bytes, events: Events) -> None:
        """Report the contents of a worker's message."""
        reader = self._readers.get(worker_id)
        if data[0] != DONE or not isinstance(reader, Reader):
            self._take_unusual(worker_id, data, events)
            return
        _, seq, epoch, slot_id, used_bytes, *times = DONE_HEAD.unpack(data)
        memory = self.memory
        if used_bytes > memory.slots[slot_id].touched_bytes:
            memory.count_pages(slot_id, used_bytes)
        memory.recent_bytes = max(memory.recent_bytes, used_bytes)
        memory.batches += 1
        answer = Batch(reader, None, times, used_bytes)
        answer.lends = reader.lends
        events.answered(seq, epoch, worker_id, answer)

    def wait(self, timeout_s: float | None, events: Events) -> bool:
        """Wait until something happens, and report it."""
        happened = self._report_all(self._workers.wait(timeout_s), events)
        return self._tell_count(events) or happened

    def _report_all(self, happened: list[tuple[int, bytes | None]], events: Events) -> bool:
        """Report messages, and then deaths. Returns whether there are any."""
        dead = []
        for worker_id, data in happened:
            if data is None:
                dead.append(worker_id)
            else:
                self._take(worker_id, data, events)
        for worker_id in dead:
            recalled, held = self.recall(), set[int]()
            if self.has_queue:
                held = self._workers.held()
                self._report_all([*self._workers.receive_all()], events)
            death, was_at = self._workers.death(worker_id), self.was_at(worker_id)
            events.lost(worker_id, death, was_at, recalled, held)
        return bool(happened)

    def _tell_count(self, events: Events) -> bool:
        """Report how many workers the ranks of the host want, if that has changed."""
        count = self._workers.wanted_count
        if count is None or count == self._told_count:
            return False
        self._told_count = count
        events.workers_wanted(count)
        return True

    def enable_wake(self) -> None:
        """Enable :meth:`wake`."""
        self._workers.enable_wake()

    def wake(self) -> None:
        """Make the present or the next :meth:`wait` return."""
        self._workers.wake()

    # Messages ----------------------------------------------------------------------------

    def _take_unusual(self, worker_id: int, data: bytes, events: Events) -> None:
        """Report the contents of a message that is not a batch with a known layout."""
        message = unpack(data)
        if type(message) is BatchDone:
            self.take_batch(worker_id, message, events)
        elif type(message) is BatchFailed:
            self.take_failure(worker_id, message, events)
        elif type(message) is BatchEmpty:
            self.take_empty(worker_id, message, events)
        elif type(message) is StreamEnded:
            self._take_end(worker_id, message, events)
        elif type(message) is EpochStarted:
            events.epoch_entered(worker_id, message.beginning)
        elif type(message) is BeginningPart:
            events.beginning_part(worker_id, message.data)
        elif type(message) is Left:
            events.left(worker_id)
        else:
            raise InternalError(f"a worker sent {message!r}")

    def _take_end(self, worker_id: int, message: StreamEnded, events: Events) -> None:
        slot_id = message.slot_id
        self.memory.count_pages(slot_id, message.touched_bytes)
        # Read before the slot becomes free.
        beginning = self.read_state(worker_id, slot_id, message.beginning, events)
        events.stream_ended(message.seq, message.epoch, Checkpoint.loads(beginning))

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
        self.forget_layout(worker_id)
        self._workers.replace(worker_id)

    def start(self, worker_id: int) -> None:
        """Start a worker for the first time, or after it was retired."""
        self.forget_layout(worker_id)
        self._workers.start(worker_id)

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
            self.free_memory()
