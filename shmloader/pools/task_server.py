"""Serves the tasks of one channel: makes each task's batch in its slot, and answers.

A worker that serves one process has one channel. A worker that the ranks of a host share has one
channel for each iterator of each rank, and a :class:`TaskServer` for each channel. All of it runs
in the worker, on its main thread.
"""

import socket
from dataclasses import dataclass
from os import getpid
from typing import Any

from shmloader.batch.failures import RemoteError
from shmloader.batch.fetch import FetchConfig
from shmloader.errors import InternalError
from shmloader.faults import FAULTS
from shmloader.forked_child import end_if_forked
from shmloader.memory.arena import Arena
from shmloader.memory.collate import install
from shmloader.memory.limits import MemoryAdmission, MemoryConfig
from shmloader.messages import (
    NO_EPOCH,
    PART_BYTES,
    TASK,
    TASK_HEAD,
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
from shmloader.pools.batch_server import BatchServer
from shmloader.pools.status_page import FIRST_TASK, NO_TASK, Line, Phase
from shmloader.pools.task_queue import ReceivedTaskQueue, TaskQueue


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """How a channel's tasks are served.

    Attributes:
        config: How batches are made.
        arena: The slots.
        queue: The queue from which the tasks are received; None if they come by the channel.
        memory: The memory that workers may take; None if memory is not checked.
        is_debugging: Whether answers carry a checksum.
    """

    config: FetchConfig
    arena: Arena
    queue: TaskQueue | ReceivedTaskQueue | None = None
    memory: MemoryConfig | None = None
    is_debugging: bool = False

    @property
    def own_queue(self) -> TaskQueue | None:
        """The queue, in the process that made it."""
        return self.queue if isinstance(self.queue, TaskQueue) else None

    def receiver(self) -> socket.socket | None:
        """Return the receiving end of the queue, in a worker, which owns it."""
        return None if self.queue is None else self.queue.receiver()

    def close(self) -> None:
        """Close the slots and the queue, in the process that made them."""
        self.arena.close()
        if self.own_queue is not None:
            self.own_queue.close()


class TaskServer:
    """Takes the messages of one channel, and of its queue.

    Attributes:
        uses_queue: Whether tasks are to be received from the queue: not before the worker knows
            where its dataset resumes, nor after it was asked to leave.

    Args:
        channel: The worker's end of a socket pair. Answers are sent on it.
        worker_id: Number of the worker, from 0.
        config: How tasks are served.
        line: Where the worker writes what it is doing.
    """

    def __init__(
        self, channel: socket.socket, worker_id: int, config: TaskConfig, line: Line
    ) -> None:
        self._channel, self._pid = channel, getpid()
        self._line = line
        self._has_queue, self.uses_queue = config.queue is not None, False
        self.where = f"in DataLoader worker process {worker_id}"
        self._slots, self._close = config.arena.slots, config.arena.close
        self._server = BatchServer(
            config.config,
            worker_id,
            self.where,
            config.arena,
            line.note_sample,
            admission=None if config.memory is None else MemoryAdmission(config.memory),
            is_debugging=config.is_debugging,
        )
        # Pieces of the dataset's checkpoint that have come.
        self._checkpoint = bytearray()

    def install(self) -> None:
        """Have collate functions write into the slots of this channel from now on."""
        install(self._server.writer)

    def open(self, dataset: Any, collate_fn: Any, on_error: Any, *, by_value: bool) -> None:
        """Take the dataset and the functions; see :meth:`WorkerDataset.open`."""
        self._server.open(dataset, collate_fn, on_error, by_value=by_value)

    def fail(self, error: RemoteError) -> None:
        """Answer every task with an error."""
        self._server.dataset.fail(error)

    def tell_epoch_again(self) -> None:
        """Tell the dataset its epoch before the next task: it served another channel meanwhile."""
        self._server.dataset.told = None

    def close(self) -> None:
        """Unmap the slots of this channel."""
        self._close()

    def take(self, data: bytes) -> None:
        """Do what a message says, and answer it if it is a task or asks for an answer."""
        has_hung = False
        if data[0] == TASK:
            _, seq, epoch, slot_id, touched_bytes, told = TASK_HEAD.unpack_from(data)
            indices: bytes | Spilled = data[TASK_HEAD.size :]
            dataset_epoch = None if told == NO_EPOCH else told
        else:
            message = unpack(data)
            if type(message) is not Task:
                self._line.held[0] = NO_TASK
                self._follow(message)
                return
            seq, epoch, slot_id, indices, touched_bytes, dataset_epoch, has_hung = message
        server, dataset, line = self._server, self._server.dataset, self._line
        line.held[0] = seq + FIRST_TASK
        if not dataset.is_ready:
            line.note(Phase.GETTING_READY)
            dataset.get_ready(dataset_epoch)
        line.note(Phase.LOADING, epoch, seq)
        if FAULTS is not None:
            FAULTS.reach("worker.task")
        if dataset.has_ended:
            answer = pack(StreamEnded(seq, epoch, slot_id))
        else:
            slot = self._slots[slot_id]
            slot.touched_bytes = touched_bytes
            answer = server.serve(seq, epoch, slot, indices, dataset_epoch, has_hung)
        self._send(answer)

    def _follow(self, message: object) -> None:
        """Do what a message that is not a task says."""
        if type(message) is StartEpoch:
            self._line.note(Phase.LEAVING_EPOCH)
            beginning = self._server.dataset.start_epoch(message.dataset_epoch)
            self._answer_start(message.epoch, beginning)
        elif type(message) is CheckpointPart:
            self._checkpoint += message.data
        elif type(message) is ResumeStream:
            if checkpoint := bytes(self._checkpoint + message.checkpoint):
                self._server.dataset.resume(checkpoint)
            self._checkpoint.clear()
            self.uses_queue = self._has_queue
        elif type(message) is Leave:
            self.uses_queue = False
            self._send(pack(Left()))
        else:
            raise InternalError(f"a worker does not take {message!r}")

    def _send(self, answer: bytes) -> None:
        if getpid() != self._pid:
            end_if_forked(self._pid)
        if FAULTS is not None:
            FAULTS.reach("worker.answer")
        self._channel.send(answer)
        if FAULTS is not None:
            FAULTS.reach("worker.answered")

    def _answer_start(self, epoch: int, beginning: bytes | None) -> None:
        """Answer that an epoch has started, and what it began with."""
        end_if_forked(self._pid)
        sent = 0
        while beginning is not None and len(beginning) - sent > PART_BYTES:
            self._channel.send(pack(BeginningPart(beginning[sent : sent + PART_BYTES])))
            sent += PART_BYTES
        self._send(pack(EpochStarted(epoch, None if beginning is None else beginning[sent:])))
