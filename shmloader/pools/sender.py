"""Tasks on their way to workers, with the descriptors of slots that a worker has not mapped."""

import pickle

from shmloader.batch.iterable_state import IterableCheckpoint
from shmloader.batch.remote_error import RemoteError
from shmloader.errors import SharedMemoryError
from shmloader.faults import FAULTS
from shmloader.interruptions import is_interruption
from shmloader.memory.slot import Slot, describe_most
from shmloader.messages import (
    INLINE_BYTES,
    Attached,
    DropSlot,
    NewSlot,
    ResumeStream,
    Spilled,
    Task,
    pack,
)
from shmloader.pools import SentTicket
from shmloader.pools.arena import Arena
from shmloader.pools.worker_processes import WorkerProcesses


class Sender:
    """Sends tasks, each slot's descriptor before the first one that names it.

    Args:
        workers: To whom.
        arena: Where the slots are.
    """

    def __init__(self, workers: WorkerProcesses, arena: Arena) -> None:
        self._workers = workers
        self._arena = arena
        #: Slots of long states on their way, by worker: a socket may not have taken them yet.
        self.attached: dict[int, Slot] = {}

    def send(self, ticket: SentTicket, epoch: int) -> RemoteError | None:
        """Send a ticket to its worker.

        Returns:
            What the user's indices raised, if they could not be sent.

        Raises:
            OSError: If there are no descriptors left for its slot, or no address space.
            SharedMemoryError: If there is no memory for its slot.
        """
        worker_id, slot_id = ticket.worker_id, ticket.slot_id
        if ticket.is_slot_new:
            self._introduce(worker_id, slot_id)
        self._arena.prepare(slot_id)
        try:
            data = pickle.dumps(ticket.indices, pickle.HIGHEST_PROTOCOL)
            body = data if len(data) <= INLINE_BYTES // 2 else self._spill(ticket, data)
        except Exception as error:
            if is_interruption(error):
                raise
            # Of the user's keys, which may raise anything.
            return RemoteError.caught("while sending indices to a DataLoader worker process")
        touched_bytes = self._arena.touched_bytes(slot_id)
        self._workers.send(worker_id, pack(Task(ticket.seq, epoch, slot_id, body, touched_bytes)))
        if FAULTS is not None:
            FAULTS.reach("main.dispatch")
        return None

    def resume(self, worker_id: int, checkpoint: IterableCheckpoint) -> None:
        """Tell a worker that was sent no task yet where its dataset goes on, unless it begins.

        Raises:
            OSError: If there are no descriptors left for its state.
            SharedMemoryError: If there is no memory for it.
        """
        if checkpoint == IterableCheckpoint():
            return
        data = pickle.dumps(tuple(checkpoint), pickle.HIGHEST_PROTOCOL)
        sent: bytes | Attached = data
        descriptors: tuple[int, ...] = ()
        if len(data) > INLINE_BYTES // 2:
            self._let_go(worker_id)
            slot = self.attached[worker_id] = Slot.create(len(data))
            slot.mapping[: len(data)] = data
            sent, descriptors = Attached(len(data)), (slot.fileno(),)
        self._workers.send(worker_id, pack(ResumeStream(sent)), *descriptors)

    def _let_go(self, worker_id: int) -> None:
        slot = self.attached.pop(worker_id, None)
        if slot is not None:
            slot.close()

    def close(self) -> None:
        """Let go of what is on its way. May be called again."""
        for worker_id in list(self.attached):
            self._let_go(worker_id)

    def _introduce(self, worker_id: int, slot_id: int) -> None:
        """Let a worker map a slot that it does not know yet."""
        try:
            slot = self._arena[slot_id]
        except OSError as error:
            raise OSError(
                error.errno,
                f"Too many open files, or no memory, for a further slot of shared memory "
                f"({error.strerror}). Please increase the limit using `ulimit -n` in the "
                "shell, or lower num_workers or prefetch_factor.",
            ) from error
        self._workers.send(worker_id, pack(NewSlot(slot_id, slot.most_bytes)), slot.fileno())

    def _spill(self, ticket: SentTicket, body: bytes) -> Spilled:
        """Put a long index list into the ticket's slot."""
        slot = self._arena[ticket.slot_id]
        if len(body) > slot.most_bytes:
            raise SharedMemoryError(
                f"the indices of batch {ticket.seq} take {len(body)} bytes, and a slot may have "
                f"{slot.most_bytes}: {describe_most(slot.most_bytes)}; or lower batch_size."
            )
        self._arena.grow(ticket.slot_id, len(body))
        slot = self._arena.up_to(ticket.slot_id, len(body))  # it may have been mapped anew
        slot.mapping[: len(body)] = body
        self._arena.note_use(ticket.slot_id, len(body))
        return Spilled(0, len(body))

    def drop(self, slot_id: int, worker_ids: list[int]) -> None:
        """Let go of a slot, here and in the workers that have mapped it."""
        for worker_id in worker_ids:
            self._workers.send(worker_id, pack(DropSlot(slot_id)))
        self._arena.retire(slot_id)

    def forget(self, worker_id: int) -> None:
        """A worker's process has ended: it takes nothing that is on its way."""
        self._let_go(worker_id)

    def arrived(self, worker_id: int) -> None:
        """A worker has answered, and so has all that was sent before."""
        self._let_go(worker_id)
