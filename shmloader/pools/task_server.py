"""Serves the tasks of one channel: makes each task's batch in its slot, and answers.

A worker of one process has one channel. A worker that the ranks of a host share has one for each
rank, and an object of this class for each. All of it runs in the worker, on its main thread.
"""

import ctypes
import errno
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from shmloader.batch.failures import RemoteError
from shmloader.batch.fetch import EmptyBatchError, FetchConfig
from shmloader.batch.timer import Timer
from shmloader.errors import InternalError
from shmloader.faults import FAULTS
from shmloader.memory.admission import MemoryAdmission, MemoryConfig
from shmloader.memory.collate import install
from shmloader.memory.lease import checksum
from shmloader.memory.slot import FIRST_BYTES, Slot
from shmloader.memory.slot_writer import SlotWriter
from shmloader.messages import (
    INLINE_BYTES,
    Attached,
    BatchDone,
    BatchEmpty,
    BatchFailed,
    DropSlot,
    EpochStarted,
    FromWorker,
    NewSlot,
    ResumeStream,
    SampleHung,
    Spilled,
    StartEpoch,
    StatePart,
    StreamEnded,
    Task,
    TooLong,
    pack,
)
from shmloader.pools.answer_writer import AnswerWriter
from shmloader.pools.status_page import Line, Phase
from shmloader.pools.worker_dataset import WorkerDataset

# A state that has no slot is sent in pieces of this length.
_PART_BYTES = INLINE_BYTES // 2

#: Receive buffer for one descriptor beside a message.
DESCRIPTOR_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """How a channel's tasks are served.

    Attributes:
        config: How batches are made.
        memory: The memory that workers may take; None if memory is not checked.
        is_debugging: Whether answers carry a checksum.
    """

    config: FetchConfig
    memory: MemoryConfig | None = None
    is_debugging: bool = False


class TaskServer:
    """Takes the messages of one channel.

    Args:
        channel: The worker's end of a socket pair. Answers are sent on it.
        worker_id: Number of the worker, from 0.
        config: How tasks are served.
        line: Where it writes what it is doing.
    """

    def __init__(
        self, channel: socket.socket, worker_id: int, config: TaskConfig, line: Line
    ) -> None:
        self._channel = channel
        self._config = config.config
        self._is_debugging = config.is_debugging
        self._line = line
        self.where = f"in DataLoader worker process {worker_id}"
        self._slots: dict[int, Slot] = {}
        self._admission = None if config.memory is None else MemoryAdmission(config.memory)
        self._writer = SlotWriter(self._admission, self._slots.values)
        self._answers = AnswerWriter(self._writer)
        self._timer = Timer()
        self._dataset = WorkerDataset(
            config.config,
            worker_id,
            self.where,
            self._writer,
            self._timer,
            line.note_sample,
        )
        # Samples of the next task that hung.
        self._hung: dict[int, str] = {}

    def install(self) -> None:
        """Have collate functions write into the slots of this channel from now on."""
        install(self._writer)

    def open(self, dataset: Any, collate_fn: Any, on_error: Any, *, by_value: bool) -> None:
        """Take the dataset and the functions; see :meth:`WorkerDataset.open`."""
        self._answers.by_value = by_value
        self._dataset.open(dataset, collate_fn, on_error, by_value=by_value)

    def fail(self, error: RemoteError) -> None:
        """Answer every task with an error."""
        self._dataset.fail(error)

    def close(self) -> None:
        """Unmap the slots of this channel."""
        for slot_id in list(self._slots):
            self._drop_slot(slot_id)

    def take(self, message: object, ancillary: list[Any], flags: int) -> None:
        """Do what a message says, and answer it if it is a task or begins an epoch.

        Args:
            message: The message.
            ancillary: Ancillary data that came with it.
            flags: Flags that it came with.
        """
        if type(message) is not Task:
            self._follow(message, ancillary, flags)
            return
        if not self._dataset.is_ready:
            self._line.note(Phase.GETTING_READY)
            self._dataset.get_ready()
        self._line.note(Phase.LOADING, message.epoch, message.seq)
        if FAULTS is not None:
            FAULTS.reach("worker.task")
        self._send(self._serve(message))

    def _follow(self, message: object, ancillary: list[Any], flags: int) -> None:
        """Do what a message says that is no task."""
        if type(message) is NewSlot:
            # Its first batch maps more of it, as much as it needs.
            self._slots[message.slot_id] = _receive_slot(
                message.nbytes, ancillary, flags, mapped_bytes=FIRST_BYTES
            )
        elif type(message) is DropSlot:
            self._drop_slot(message.slot_id)
        elif type(message) is SampleHung:
            self._hung[message.number] = message.text
        elif type(message) is StartEpoch:
            self._line.note(Phase.LEAVING_EPOCH)
            self._answer_start(message.epoch, self._dataset.start_epoch())
        elif type(message) is ResumeStream:
            self._dataset.resume(_read_attached(message.checkpoint, ancillary, flags))
        else:
            raise InternalError(f"a worker does not take {message!r}")

    def _send(self, answer: bytes) -> None:
        if FAULTS is not None:
            FAULTS.reach("worker.answer")
        self._channel.send(answer)
        if FAULTS is not None:
            FAULTS.reach("worker.answered")

    def _answer_start(self, epoch: int, beginning: bytes | None) -> None:
        """Answer that an epoch has started, and what it began with."""
        sent = 0
        while beginning is not None and len(beginning) - sent > _PART_BYTES:
            self._channel.send(pack(StatePart(beginning[sent : sent + _PART_BYTES])))
            sent += _PART_BYTES
        self._send(pack(EpochStarted(epoch, None if beginning is None else beginning[sent:])))

    def _serve(self, task: Task) -> bytes:
        """Make a task's batch. Returns the packed answer."""
        seq, epoch, slot_id, indices, touched_bytes = task
        dataset = self._dataset
        if dataset.has_ended:
            return pack(StreamEnded(seq, epoch, slot_id, kept=False))
        slot = self._slots[slot_id]
        self._timer.begin()
        self._writer.open(
            slot,
            is_offered=self._answers.offers and not self._config.auto_collation,
            touched_bytes=touched_bytes,
        )
        dataset.snapshot = None
        dataset.hung, self._hung = self._hung, {}
        error = dataset.error
        layout: bytes | Spilled | None = None
        is_empty = False
        if error is None:
            try:
                layout = self._load(slot, indices)
            except EmptyBatchError:
                is_empty = True
            except StopIteration:
                if self._config.is_iterable:
                    dataset.has_ended = True
                else:
                    error = RemoteError.caught(self.where)
            except BaseException:  # noqa: BLE001 - it is the answer
                error = RemoteError.caught(self.where)
        is_kept = self._answers.is_kept()
        if dataset.has_ended:
            answer = self._end(task, is_kept=is_kept)
        elif error is not None:
            answer = self._fail(task, error, is_kept=is_kept)
        elif is_empty:
            answer = BatchEmpty(seq, epoch, slot_id, is_kept, *self._put_notes())
        else:
            answer = self._finish(task, slot, layout, is_kept=is_kept)
        self._writer.close()
        return pack(answer)

    def _load(self, slot: Slot, indices: bytes | Spilled) -> bytes | Spilled | None:
        """Make a batch and write it to the slot. Returns its layout, if that is a new one."""
        if not isinstance(indices, bytes):
            end = indices.offset + indices.nbytes
            slot.reach(end, others=self._slots.values())
            indices = slot.mapping[indices.offset : end]
        return self._answers.put_batch(
            self._dataset.load(pickle.loads(indices)), may_shard=self._config.may_shard
        )

    def _finish(
        self, task: Task, slot: Slot, layout: bytes | Spilled | None, *, is_kept: bool
    ) -> FromWorker:
        report, snapshot = self._put_notes()
        used_bytes = self._writer.used_bytes
        if self._admission is not None:
            self._admission.note_batch(used_bytes)
            if self._admission.is_tight:
                _give_freed_memory_back()
        check = checksum(slot, used_bytes) if self._is_debugging else None
        times = self._timer.read()
        return BatchDone(
            task.seq, task.epoch, task.slot_id, layout, used_bytes, is_kept, check, report,
            snapshot, times, self._dataset.fingerprint,
        )  # fmt: skip

    def _put_notes(self) -> tuple[bytes | Spilled | None, bytes | Spilled | TooLong | None]:
        """Write what goes with a batch: the report on its samples, and the dataset's state."""
        maker = self._dataset.maker
        report = self._answers.put_report(None if maker is None else maker.take_report())
        return report, self._answers.put_state(self._dataset.snapshot)

    def _fail(self, task: Task, error: RemoteError, *, is_kept: bool) -> FromWorker:
        sent = self._answers.put_error(error, is_kept=is_kept)
        report, snapshot = self._put_notes()
        dataset = self._dataset
        return BatchFailed(
            task.seq, task.epoch, task.slot_id, sent, is_kept, self._writer.touched_bytes, report,
            snapshot, dataset.fingerprint, dataset.is_lost,
        )  # fmt: skip

    def _end(self, task: Task, *, is_kept: bool) -> FromWorker:
        seq, epoch, slot_id = task.seq, task.epoch, task.slot_id
        is_persistent = self._config.is_persistent
        try:
            beginning = self._dataset.next_beginning() if is_persistent else None
        except BaseException:  # noqa: BLE001 - it is the answer
            # The error answers this task, and the end answers the next one.
            error = self._answers.put_error(RemoteError.caught(self.where), is_kept=is_kept)
            return BatchFailed(seq, epoch, slot_id, error, is_kept, self._writer.touched_bytes)
        sent = self._answers.put_state(beginning)
        return StreamEnded(seq, epoch, slot_id, is_kept, self._writer.touched_bytes, sent)

    def _drop_slot(self, slot_id: int) -> None:
        slot = self._slots.pop(slot_id, None)
        if slot is not None:
            slot.close()


def _receive_slot(
    nbytes: int, ancillary: list[Any], flags: int, *, mapped_bytes: int | None = None
) -> Slot:
    """Make the slot whose descriptor came beside a message.

    Args:
        nbytes: Length of its file.
        ancillary: Ancillary data of the message.
        flags: Flags of the message.
        mapped_bytes: How much of it to map; None maps all.
    """
    if flags & socket.MSG_CTRUNC or not ancillary:
        raise OSError(
            errno.EMFILE,
            "a DataLoader worker has no file descriptor left for its shared memory; raise "
            "`ulimit -n`",
        )
    _, _, data = ancillary[0]
    (fd,) = struct.unpack("i", data[:4])
    return Slot(fd, nbytes, mapped_bytes)


def _read_attached(data: bytes | Attached, ancillary: list[Any], flags: int) -> bytes:
    """Return a message's bytes, which may have come in a slot of their own."""
    if not isinstance(data, Attached):
        return data
    slot = _receive_slot(data.nbytes, ancillary, flags)
    try:
        return slot.mapping[:]
    finally:
        slot.close()


def _give_freed_memory_back() -> None:
    """Make glibc's ``malloc`` return free memory to the kernel. Does nothing with another libc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
