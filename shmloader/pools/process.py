"""The pool whose workers are processes of this machine, and whose batches come in slots."""

import pickle
import select
from typing import Any

from shmloader import messages
from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.failures import RemoteError
from shmloader.errors import InternalError, SharedMemoryError
from shmloader.faults import FAULTS
from shmloader.grammar import size
from shmloader.interruptions import is_interruption, uninterruptible
from shmloader.memory.limits import MemoryAdmission
from shmloader.messages import DONE, HUNG, NO_EPOCH, SPILLED, TASK
from shmloader.pools.answers import Answer, read_layout
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.slot_memory import SlotMemory
from shmloader.pools.worker_processes import WorkerProcesses
from shmloader.sampling.indices import IndexArray

_GRACE_S = 1.0

# A pickle of indices that is longer than this lies in the slot.
_LONG_BYTES = messages.INLINE_BYTES // 2

_pack_head = messages.TASK_HEAD.pack
_unpack_head, _HEAD_BYTES = messages.DONE_HEAD.unpack_from, messages.DONE_HEAD.size


class ProcessPool(WorkerProcesses):
    """Worker processes, and the slots that their batches come in.

    See :class:`~shmloader.pools.Pool` for what the methods do and raise, and
    :class:`WorkerProcesses` for further arguments. ``dataset_epoch`` is the number for the
    dataset's ``set_epoch()`` in the present epoch; None for no call.

    Args:
        tasks: How tasks are served. The pool owns the slots and the queue.
        locker: Locks the pages of slots that are lent, if a device reads them.
    """

    def __init__(
        self,
        starter: Any,
        tasks: TaskConfig,
        count: int,
        locker: Any = None,
        *,
        may_replace: bool = True,
        grace_s: float = _GRACE_S,
    ) -> None:
        self.dataset_epoch: int | None = None
        admission = None if tasks.memory is None else MemoryAdmission(tasks.memory)
        self.memory = SlotMemory(tasks.arena, locker, admission)
        self.counts = self.memory.counts
        super().__init__(starter, tasks.queue, count, may_replace=may_replace, grace_s=grace_s)

    def send(self, ticket: Any, epoch: int) -> Answer | None:
        """Send a ticket's task."""
        slot_id, memory, bits = ticket.slot_id, self.memory, TASK
        if memory.is_short:
            memory.prepare(slot_id)
        try:
            content: Any = ticket.indices
            if ticket.hung:
                content, bits = (content, ticket.hung), TASK | HUNG
            is_array = type(content) is IndexArray
            data = content.dump() if is_array else pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
            if len(data) > _LONG_BYTES:
                data, bits = self._spill(ticket, data), bits | SPILLED
        except Exception as error:
            if is_interruption(error):
                raise
            # Pickling the user's keys may raise anything.
            where = "while sending indices to a DataLoader worker process"
            return Answer(error=RemoteError.caught(where))
        touched_bytes = memory.slots[slot_id].touched_bytes
        told = NO_EPOCH if self.dataset_epoch is None else self.dataset_epoch
        data = _pack_head(bits, ticket.seq, epoch, slot_id, touched_bytes, told) + data
        if self.queue is None:
            worker = self.handles[ticket.worker_id]
            if not worker.send(data):
                self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)
        elif not self.queue.send(data):
            self._poll.register(self.queue.channel, select.POLLOUT)
        if FAULTS is not None:
            FAULTS.reach("main.dispatch")
        return None

    def _spill(self, ticket: Any, body: bytes) -> bytes:
        """Put a long index list into the ticket's slot. Returns its length."""
        memory, nbytes = self.memory, len(body)
        if nbytes > memory.arena.slot_bytes:
            raise SharedMemoryError(
                f"the indices of batch {ticket.seq} take {size(nbytes)}, but "
                f"{memory.arena.describe_limit(nbytes)}. Or lower batch_size."
            )
        memory.grow(ticket.slot_id, nbytes).memory[:nbytes] = body
        memory.count_pages(ticket.slot_id, nbytes)
        return b"%d" % nbytes

    def start_epoch(self, worker_id: int, epoch: int) -> bool:  # noqa: ARG002 - workers count none
        """Tell a worker to begin a further epoch."""
        self._send(worker_id, messages.StartEpoch(self.dataset_epoch))
        return False

    def resume(self, worker_id: int, checkpoint: Checkpoint) -> None:
        """Tell a worker where its dataset resumes."""
        self._send(worker_id, messages.ResumeStream(checkpoint))

    def _send(self, worker_id: int, message: messages.ToWorker) -> None:
        """Send a message to a worker, without blocking. A message to a dead worker is dropped."""
        worker = self.handles[worker_id]
        for piece in messages.pieces(messages.pack(message)):
            if not worker.send(piece):
                self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)

    def _receive(self, worker_id: int, data: bytes, events: Any) -> None:
        """Report the contents of a worker's message."""
        if data[0] != DONE:
            self._receive_unusual(worker_id, data, events)
            return
        _, seq, epoch, slot_id, used_bytes = _unpack_head(data)
        reader = self.handles[worker_id].reader
        memory = self.memory
        if used_bytes > memory.slots[slot_id].touched_bytes:
            memory.count_pages(slot_id, used_bytes)
        memory.recent_bytes = max(memory.recent_bytes, used_bytes)
        memory.batches += 1
        if isinstance(reader, RemoteError):
            answer = Answer(error=reader)
        else:
            answer = Answer(reader, None, data[_HEAD_BYTES:], used_bytes)
            if reader.lends:
                answer.lends = True
        events.answered(seq, epoch, worker_id, answer)

    def _receive_unusual(self, worker_id: int, data: bytes, events: Any) -> None:
        """Report the contents of a message that is not a batch with a known layout."""
        whole = messages.join(self.handles[worker_id].pieces, data)
        if whole is None:
            return
        message = messages.unpack(whole)
        if isinstance(message, messages.Answered):
            seq, epoch, slot_id, touched_bytes, answer, layout = message
            self.memory.count_pages(slot_id, touched_bytes)
            if isinstance(answer.snapshot, messages.InSlot):
                answer.snapshot = self._copy_out(*answer.snapshot)
            if answer.error is None and not answer.is_empty:
                self.memory.count_batch(slot_id, answer.nbytes)
                worker = self.handles[worker_id]
                if layout is not None:
                    worker.reader = read_layout(layout, [each.reader for each in self.handles])
                if isinstance(worker.reader, RemoteError):
                    answer.error = worker.reader
                else:
                    answer.content, answer.lends = worker.reader, worker.reader.lends
            events.answered(seq, epoch, worker_id, answer)
        elif isinstance(message, messages.StreamEnded):
            events.stream_ended(message.seq, message.epoch, message.beginning or Checkpoint())
        elif isinstance(message, messages.EpochStarted):
            events.epoch_entered(worker_id, message.beginning)
        else:
            raise InternalError(f"a worker sent {message!r}")

    def _copy_out(self, slot_id: int, offset: int, nbytes: int) -> bytes:
        """Return a copy of bytes that lie in a slot."""
        memory, end = self.memory, offset + nbytes
        memory.count_pages(slot_id, end)
        slot = memory.mapped(slot_id, end)
        memory.recent_bytes = max(memory.recent_bytes, end)
        return bytes(slot.memory[offset:end])

    def close(self) -> None:
        """End all workers, and free all memory except what lies under the user's views."""
        try:
            self.end_workers()
        finally:
            uninterruptible(self.memory.close)
