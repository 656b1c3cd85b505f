"""Serves the tasks of one channel: makes each task's batch in its slot, and answers.

A worker that serves one process has one channel. A worker that the ranks of a host share has one
channel for each iterator of each rank, and a :class:`TaskServer` for each channel. All of it runs
in the worker, on its main thread.
"""

import socket
from dataclasses import dataclass
from os import getpid
from typing import Any

from shmloader.batch.fetch import FetchConfig
from shmloader.batch.remote_error import RemoteError
from shmloader.errors import InternalError
from shmloader.faults import FAULTS
from shmloader.forked_child import end_if_forked
from shmloader.memory.admission import MemoryAdmission, MemoryConfig
from shmloader.memory.arena import Arena
from shmloader.memory.collate import install
from shmloader.messages import (
    PART_BYTES,
    BeginningPart,
    CheckpointPart,
    EpochStarted,
    ResumeStream,
    SampleHung,
    StartEpoch,
    StreamEnded,
    Task,
    pack,
)
from shmloader.pools.batch_server import BatchServer
from shmloader.pools.status_page import Line, Phase


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """How a channel's tasks are served.

    Attributes:
        config: How batches are made.
        arena: The slots.
        memory: The memory that workers may take; None if memory is not checked.
        is_debugging: Whether answers carry a checksum.
    """

    config: FetchConfig
    arena: Arena
    memory: MemoryConfig | None = None
    is_debugging: bool = False


class TaskServer:
    """Takes the messages of one channel.

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
        # Samples of the next task that hung.
        self._hung: dict[int, str] = {}
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

    def take(self, message: object) -> None:
        """Do what a message says, and answer it if it is a task or begins an epoch."""
        if type(message) is not Task:
            self._follow(message)
            return
        server, dataset = self._server, self._server.dataset
        if not dataset.is_ready:
            self._line.note(Phase.GETTING_READY)
            dataset.get_ready(message.dataset_epoch)
        self._line.note(Phase.LOADING, message.epoch, message.seq)
        if FAULTS is not None:
            FAULTS.reach("worker.task")
        if dataset.has_ended:
            answer = pack(StreamEnded(message.seq, message.epoch, message.slot_id))
        else:
            dataset.hung, self._hung = self._hung, {}
            answer = server.serve(message, self._slots[message.slot_id])
        self._send(answer)

    def _follow(self, message: object) -> None:
        """Do what a message that is not a task says."""
        if type(message) is SampleHung:
            self._hung[message.number] = message.text
        elif type(message) is StartEpoch:
            self._line.note(Phase.LEAVING_EPOCH)
            beginning = self._server.dataset.start_epoch(message.dataset_epoch)
            self._answer_start(message.epoch, beginning)
        elif type(message) is CheckpointPart:
            self._checkpoint += message.data
        elif type(message) is ResumeStream:
            self._server.dataset.resume(bytes(self._checkpoint + message.checkpoint))
            self._checkpoint.clear()
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
