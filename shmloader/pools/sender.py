"""Sends tasks to workers, and descriptors of slots that a worker has not mapped yet."""

import pickle
from typing import Any

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.remote_error import RemoteError
from shmloader.errors import SharedMemoryError
from shmloader.faults import FAULTS
from shmloader.interruptions import is_interruption
from shmloader.memory.slot import Slot
from shmloader.memory.slot_size import describe_most
from shmloader.messages import (
    INLINE_BYTES,
    Attached,
    DropSlot,
    NewSlot,
    ResumeStream,
    SampleHung,
    Spilled,
    Task,
    pack,
)
from shmloader.pools import SentTicket
from shmloader.pools.arena import Arena
from shmloader.pools.worker_channels import WorkerChannels


class Sender:
    """Sends tasks, and each slot's descriptor before the first task that names the slot.

    Attributes:
        attached: By worker number, the slots of long states that are on their way. The socket may
            not have taken their descriptors yet.

    Args:
        workers: The workers.
        arena: The slots.
    """

    def __init__(self, workers: WorkerChannels[Any], arena: Arena) -> None:
        self._workers = workers
        self._arena = arena
        self.attached: dict[int, Slot] = {}

    def send(self, ticket: SentTicket, epoch: int, dataset_epoch: int | None) -> RemoteError | None:
        """Send a ticket to its worker; see :class:`Task` for the numbers of the epoch.

        Returns:
            None, or the error that answers the ticket: the user's indices could not be pickled.

        Raises:
            OSError: If there are no descriptors, or no address space, left for the ticket's slot.
            SharedMemoryError: If there is no memory for the ticket's slot.
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
            # Pickling the user's keys may raise anything.
            return RemoteError.caught("while sending indices to a DataLoader worker process")
        for sample, text in (ticket.hung or {}).items():
            self._workers.send(worker_id, pack(SampleHung(sample, text)))
        touched_bytes = self._arena.touched_bytes(slot_id)
        self._workers.note_task(worker_id, epoch, ticket.seq)
        task = Task(ticket.seq, epoch, slot_id, body, touched_bytes, dataset_epoch)
        self._workers.send(worker_id, pack(task))
        if FAULTS is not None:
            FAULTS.reach("main.dispatch")
        return None

    def resume(self, worker_id: int, checkpoint: DatasetCheckpoint) -> None:
        """Tell a worker where its dataset resumes, before its first task.

        Sends nothing if the dataset starts at its beginning.

        Raises:
            OSError: If there are no descriptors left for the dataset's state.
            SharedMemoryError: If there is no memory for the dataset's state.
        """
        if checkpoint == DatasetCheckpoint():
            return
        data = pickle.dumps(tuple(checkpoint), pickle.HIGHEST_PROTOCOL)
        sent: bytes | Attached = data
        descriptors: tuple[int, ...] = ()
        if len(data) > INLINE_BYTES // 2:
            self.release_state(worker_id)
            slot = self.attached[worker_id] = Slot.create(len(data))
            slot.mapping[: len(data)] = data
            sent, descriptors = Attached(len(data)), (slot.fileno(),)
        self._workers.send(worker_id, pack(ResumeStream(sent)), *descriptors)

    def release_state(self, worker_id: int) -> None:
        """Close the slot of a state that has arrived, or whose worker has ended."""
        slot = self.attached.pop(worker_id, None)
        if slot is not None:
            slot.close()

    def close(self) -> None:
        """Close the slots of states on their way. May be called again."""
        for worker_id in list(self.attached):
            self.release_state(worker_id)

    def _introduce(self, worker_id: int, slot_id: int) -> None:
        """Send a worker the descriptor of a slot."""
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
        slot = self._arena.grow(ticket.slot_id, len(body))  # perhaps mapped anew
        slot.mapping[: len(body)] = body
        self._arena.note_use(ticket.slot_id, len(body))
        return Spilled(0, len(body))

    def drop(self, slot_id: int, worker_ids: list[int]) -> None:
        """Unmap a slot here and in the workers that have mapped it."""
        for worker_id in worker_ids:
            self._workers.send(worker_id, pack(DropSlot(slot_id)))
        self._arena.retire(slot_id)
