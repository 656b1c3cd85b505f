"""The program of a worker process.

It loops: it receives a message, makes the batch, and answers. A worker shares nothing with
its siblings, and waits only for its own socket. It ends when that socket is closed or shut down,
and at once when the main process dies.
"""

import contextlib
import ctypes
import errno
import gc
import os
import pickle
import select
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker

from shmloader.batch.failures import RemoteError, note_sample
from shmloader.batch.fetch import EmptyBatchError, FetchConfig
from shmloader.batch.payload import receive_payload
from shmloader.batch.sample_rng import seed_worker
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
    RECEIVE_BYTES,
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
    unpack,
)
from shmloader.pools.answer_writer import AnswerWriter
from shmloader.pools.parent_death import ParentDeathPipe, WorkerParentDeathPipe
from shmloader.pools.startup_semaphore import StartupSemaphore, WorkerStartupSemaphore, end_startup
from shmloader.pools.status_page import MEMORY_IDLE_MS, Line, Phase, StatusPage, WorkerStatusPage
from shmloader.pools.waker import receive_soon
from shmloader.pools.worker_dataset import WorkerDataset, call_init

# A state that has no slot is sent in pieces of this length.
_PART_BYTES = INLINE_BYTES // 2

# Receive buffer for one descriptor beside a message.
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The values that a worker gets when it starts.

    Attributes:
        worker_id: Number of the worker, from 0.
        worker_count: The most workers there may be.
        base_seed: Seeds the worker's random generators, together with its number.
        config: How batches are made.
        parent_death: Ends this process with the main process.
        status_page: Where the worker writes what it is doing.
        memory: The memory that workers may take; None if memory is not checked.
        is_debugging: Whether answers carry a checksum.
        startup: The start-up semaphore, held until the worker is ready; None if nothing limits it.
        is_fresh: Whether the process is a fresh interpreter, which waits for its start-up.
    """

    worker_id: int
    worker_count: int
    base_seed: int
    config: FetchConfig
    parent_death: ParentDeathPipe | WorkerParentDeathPipe
    status_page: StatusPage | WorkerStatusPage
    memory: MemoryConfig | None = None
    is_debugging: bool = False
    startup: StartupSemaphore | WorkerStartupSemaphore | None = None
    is_fresh: bool = False


def worker_main(
    payload: Any,
    channel: socket.socket,
    start: WorkerStart,
    close_inherited: Callable[[], None] | None,
) -> None:
    """Run a worker. The target of its process.

    Args:
        payload: Its ``load()`` returns (dataset, collate_fn, worker_init_fn, on_error). None if it
            is being pickled, and will arrive through the channel.
        channel: The worker's end of its socket pair.
        start: What the worker gets.
        close_inherited: In a forked worker, closes what other workers and loaders use.
    """
    # The garbage collector writes its notes into the objects themselves. The first full collection
    # would write to the page of every container of the main process, or of the fork server, and
    # the kernel would copy them all. Frozen objects are left alone; garbage among them stays. This
    # is not done before the fork, since unfreezing there would also unfreeze what the user, or
    # Python 3.12, has frozen.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if FAULTS is not None:
        FAULTS.worker_id = start.worker_id
        FAULTS.reach("worker.start")
    start.parent_death.hold()
    line = start.status_page.open_line(start.worker_id)
    if close_inherited is not None:
        close_inherited()
    # Writing to a closed socket must raise, whatever the user's process does about SIGPIPE.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
    torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    channel.setblocking(True)  # whatever socket.setdefaulttimeout() says here
    # These two mean that the main process is gone or has closed the loader.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), channel:
        try:
            _Worker(channel, start, line).run(payload)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException:  # noqa: BLE001 - a worker's outermost line
            # At once, whatever threads the user's code has: the main process waits for this end.
            traceback.print_exc()
            os._exit(1)


class _Worker:
    """State of a worker between its messages."""

    def __init__(self, channel: socket.socket, start: WorkerStart, line: Line) -> None:
        self._channel = channel
        self._start = start
        self._line = line
        self._where = f"in DataLoader worker process {start.worker_id}"
        self._slots: dict[int, Slot] = {}
        self._admission = None if start.memory is None else MemoryAdmission(start.memory)
        self._writer = SlotWriter(self._admission, self._slots.values)
        self._answers = AnswerWriter(self._writer)
        self._timer = Timer()
        self._dataset = WorkerDataset(
            start.config, start.worker_id, self._where, self._writer, self._timer, line.note_sample
        )
        # Samples of the next task that hung.
        self._hung: dict[int, str] = {}
        self._poll = select.poll()

    def run(self, payload: Any) -> None:
        """Get ready, then serve until the socket ends."""
        self._prepare(payload)
        del payload
        receive, note, idle = self._channel.recvmsg, self._line.note, self._line.idle
        self._poll.register(self._channel, select.POLLIN)
        while True:
            idle()
            if FAULTS is not None:
                FAULTS.reach("worker.idle")
            received = receive_soon(receive, RECEIVE_BYTES, _DESCRIPTOR_BYTES, socket.MSG_DONTWAIT)
            self._note_use(has_task=received is not None)
            data, ancillary, flags, _ = received or receive(RECEIVE_BYTES, _DESCRIPTOR_BYTES)
            if not data:
                self._line.note_usage()
                if FAULTS is not None:
                    FAULTS.reach("worker.stop")
                return
            message = unpack(data)
            if type(message) is Task:
                if not self._dataset.is_ready:
                    note(Phase.GETTING_READY)
                    self._dataset.get_ready()
                note(Phase.LOADING, message.epoch, message.seq)
                if FAULTS is not None:
                    FAULTS.reach("worker.task")
                self._send(self._serve(message))
            else:
                self._follow(message, ancillary, flags)

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

    def _note_use(self, *, has_task: bool) -> None:
        line = self._line
        line.note_use(has_task=has_task)
        if not has_task and line.memory_is_due and not self._poll.poll(MEMORY_IDLE_MS):
            line.note_memory()

    def _send(self, answer: bytes) -> None:
        if FAULTS is not None:
            FAULTS.reach("worker.answer")
        self._channel.send(answer)
        if FAULTS is not None:
            FAULTS.reach("worker.answered")

    def _prepare(self, payload: Any) -> None:
        """Load the dataset and the functions, and call ``worker_init_fn``."""
        start = self._start
        install(self._writer)
        try:
            try:
                payload = payload or receive_payload(self._channel)
                dataset, collate_fn, init_fn, on_error = _load(payload)
            finally:
                # After the modules that this imports, which may seed or draw themselves.
                seed = seed_worker(start.base_seed, start.worker_id)
                if start.is_fresh:
                    end_startup(start.startup)
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=start.worker_id,
                num_workers=start.worker_count,
                seed=seed,
                dataset=dataset,
            )
            if init_fn is not None:
                call_init(init_fn, start.worker_id)
            self._answers.by_value = payload.by_value
            self._dataset.open(dataset, collate_fn, on_error, by_value=payload.by_value)
        except BaseException:  # noqa: BLE001 - it answers every task
            self._dataset.fail(RemoteError.caught(self._where))

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
            is_offered=self._answers.offers and not self._start.config.auto_collation,
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
                if self._start.config.is_iterable:
                    dataset.has_ended = True
                else:
                    error = RemoteError.caught(self._where)
            except BaseException:  # noqa: BLE001 - it is the answer
                error = RemoteError.caught(self._where)
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
            self._dataset.load(pickle.loads(indices)), may_shard=self._start.config.may_shard
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
        check = checksum(slot, used_bytes) if self._start.is_debugging else None
        times = tuple(self._timer.read())  # plain: it pickles faster
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
        is_persistent = self._start.config.is_persistent
        try:
            beginning = self._dataset.next_beginning() if is_persistent else None
        except BaseException:  # noqa: BLE001 - it is the answer
            # The error answers this task, and the end answers the next one.
            error = self._answers.put_error(RemoteError.caught(self._where), is_kept=is_kept)
            return BatchFailed(seq, epoch, slot_id, error, is_kept, self._writer.touched_bytes)
        sent = self._answers.put_state(beginning)
        return StreamEnded(seq, epoch, slot_id, is_kept, self._writer.touched_bytes, sent)

    def _drop_slot(self, slot_id: int) -> None:
        slot = self._slots.pop(slot_id, None)
        if slot is not None:
            slot.close()


def _load(payload: Any) -> Any:
    """Unpickle the dataset and the functions."""
    try:
        return payload.load()
    except AttributeError as error:
        if str(error).startswith("Can't get attribute"):
            note_sample(
                error,
                "The worker has imported the program's main file, but classes and functions under "
                "its main guard are not defined there. Define what the dataset uses above the "
                "guard, or in a module of its own.",
            )
        raise


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
