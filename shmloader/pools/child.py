"""What runs in a worker process.

One loop: receive a message, load the batch that it asks for, answer. A worker shares nothing
with its siblings and waits for nothing but its own socket. It ends when that socket is closed
or shut down, and at once when the main process dies.
"""

import contextlib
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
from typing import Any, cast

import torch
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker

from shmloader.batch.array_fetch import AnyIndexFetcher, fetcher_of_arrays
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.fetch import EmptyBatchError, FetchConfig, OnError
from shmloader.batch.fingerprint import FingerprintingCollate
from shmloader.batch.iterable_state import (
    Beginning,
    IterableCheckpoint,
    Saved,
    dump_here,
    load_dataset,
    load_iterator,
    read,
    replay,
    save,
    save_dataset,
    take_fingerprints,
)
from shmloader.batch.maker import BatchMaker
from shmloader.batch.payload import receive_payload
from shmloader.batch.remote_error import RemoteError
from shmloader.batch.sample_rng import SampleRng
from shmloader.batch.seeding import seed_worker
from shmloader.batch.timer import Timer
from shmloader.errors import InternalError, SharedMemoryError
from shmloader.faults import FAULTS
from shmloader.memory.admission import MemoryAdmission, MemoryConfig
from shmloader.memory.collate import SlotCollate, install
from shmloader.memory.encoder import encode
from shmloader.memory.flat import FlatLayout, ShardLayouts
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
    NewSlot,
    ResumeStream,
    Spilled,
    StartEpoch,
    StatePart,
    StreamEnded,
    Task,
    TooLong,
    pack,
    unpack,
)
from shmloader.pools.allocator import give_freed_memory_back
from shmloader.pools.channel import receive_soon
from shmloader.pools.parent_death import ParentDeathPipe, WorkerParentDeathPipe
from shmloader.pools.startup_semaphore import StartupSemaphore, WorkerTurn, is_ready
from shmloader.pools.status_page import MEMORY_IDLE_MS, Line, Phase, StatusPage, WorkerStatusPage
from shmloader.sampling.rng import global_rng_state, set_global_rng_state

# Batches of which the user's code may keep memory before it gets no more of it.
_KEPT_LIMIT = 4

# A state without a slot is sent in pieces of this length.
_PART_BYTES = INLINE_BYTES // 2

# MemoryAdmission for one descriptor beside a message.
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker is told when it starts.

    Attributes:
        worker_id: Its number, from 0.
        worker_count: How many there are.
        base_seed: Its streams are seeded from this and its number.
        plan: How batches are made.
        parent_death: Ends this process with the main process.
        status_page: Where it says what it is at.
        demand: What the iterator may ask of memory; None: nobody asks whether it is there.
        is_debugging: Whether answers carry a checksum.
        startup: The start-up semaphore, held until the worker is ready; None if there is none.
        is_fresh: Whether it is an interpreter of its own, that was told how to get ready.
    """

    worker_id: int
    worker_count: int
    base_seed: int
    plan: FetchConfig
    parent_death: ParentDeathPipe | WorkerParentDeathPipe
    status_page: StatusPage | WorkerStatusPage
    demand: MemoryConfig | None = None
    is_debugging: bool = False
    startup: StartupSemaphore | WorkerTurn | None = None
    is_fresh: bool = False


def worker_main(
    payload: Any,
    channel: socket.socket,
    start: WorkerStart,
    close_inherited: Callable[[], None] | None,
) -> None:
    """Run a worker. The target of its process.

    Args:
        payload: ``load()`` gives (dataset, collate_fn, worker_init_fn, on_error). None: it is being
            pickled, and comes through the channel.
        channel: This worker's end of its socket pair.
        start: See there.
        close_inherited: In a forked worker, closes what other workers and loaders use.
    """
    # The collector notes what it finds in the objects themselves: the first full collection would
    # write to the page of every container of the main process, or of the fork server, and the
    # kernel would copy them all. Frozen objects are not looked at; what is garbage among them
    # stays. Not before the fork: to unfreeze there is to unfreeze what the user, or Python 3.12,
    # has frozen.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process's to handle
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if FAULTS is not None:
        FAULTS.worker_id = start.worker_id
        FAULTS.reach("worker.start")
    start.parent_death.hold()
    line = start.status_page.open_line(start.worker_id)
    if close_inherited is not None:
        close_inherited()
    # A write to a closed socket must raise, whatever the user's process does of SIGPIPE.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
    torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    channel.setblocking(True)  # whatever socket.setdefaulttimeout() says here
    # The main process is gone or has closed the loader: nobody is left to be told.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), channel:
        try:
            _Worker(channel, start, line).run(payload)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException:  # noqa: BLE001 - a worker's outermost line
            # At once, whatever threads of the user's there are: the main process waits for us.
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
        self._admission = None if start.demand is None else MemoryAdmission(start.demand)
        self._writer = SlotWriter(self._admission, self._slots.values)
        self._dataset: Any = None
        self._collate: SlotCollate | None = None
        self._on_error: OnError = "raise"
        self._maker: BatchMaker | None = None
        self._concurrent_fetcher: ConcurrentFetcher | None = None
        self._by_value = False
        # Raised while getting ready; the answer to every task, at its place in the order.
        self._prepare_error: bytes | None = None
        self._fetcher_error: bytes | None = None
        self._stream_ended = False
        # Where the dataset is resumed; an iterable one when it is iterated, before the first task.
        self._checkpoint = IterableCheckpoint()
        self._is_ready = False
        # Whether batches that were delivered before are yet to be read again.
        self._has_to_replay = False
        # Batches that its stream has given in this epoch, in this worker or those before it, or
        # failed to give.
        self._given = 0
        # The dataset's state after the batch in work, where one is due.
        self._snapshot: bytes | None = None
        # What the epoch began with, where it is not the first.
        self._beginning: bytes | None = None
        # Takes the fingerprints of an iterable dataset's batches.
        self._fingerprints: FingerprintingCollate | None = None
        # Whether the dataset could not be resumed.
        self._is_lost = False
        self._offers = True
        self._kept_count = 0
        # What the main process builds this worker's batches by, if not told otherwise.
        self._last_layout = b""
        self._last_flat_layout: object = None
        self._shard_layouts = ShardLayouts()
        self._timer = Timer()
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
            received = receive_soon(receive, RECEIVE_BYTES, _DESCRIPTOR_SPACE, socket.MSG_DONTWAIT)
            self._note_use(has_task=received is not None)
            data, ancillary, flags, _ = received or receive(RECEIVE_BYTES, _DESCRIPTOR_SPACE)
            if not data:
                self._line.note_usage()
                if FAULTS is not None:
                    FAULTS.reach("worker.stop")
                return
            message = unpack(data)
            if type(message) is Task:
                if not self._is_ready:
                    note(Phase.GETTING_READY)
                    self._get_ready(self._begin_stream)
                note(Phase.LOADING, message.epoch, message.seq)
                if FAULTS is not None:
                    FAULTS.reach("worker.task")
                self._send(self._serve(message))
            elif type(message) is NewSlot:
                self._add_slot(message, ancillary, flags)
            elif type(message) is DropSlot:
                self._drop_slot(message.slot_id)
            elif type(message) is StartEpoch:
                note(Phase.LEAVING_EPOCH)
                self._start_epoch(message.epoch)
            elif type(message) is ResumeStream:
                self._resume(_attached(message.checkpoint, ancillary, flags))
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
        start = self._start
        install(self._writer)
        try:
            try:
                payload = payload or receive_payload(self._channel)
                self._dataset, collate_fn, init_fn, self._on_error = payload.load()
            finally:
                # After the modules that this imports, which may seed or draw themselves.
                seed = seed_worker(start.base_seed, start.worker_id)
                if start.is_fresh:
                    is_ready(start.startup)
            self._by_value = payload.by_value
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=start.worker_id,
                num_workers=start.worker_count,
                seed=seed,
                dataset=self._dataset,
            )
            if init_fn is not None:
                init_fn(start.worker_id)
            self._collate = SlotCollate(collate_fn, self._writer)
        except BaseException:  # noqa: BLE001 - a worker's outermost line; it is handed on
            self._prepare_error = RemoteError.caught(self._where).dumps()
        if not start.plan.is_iterable:
            self._get_ready(self._index_dataset)

    def _get_ready(self, make_maker: Callable[[], BatchMaker | None]) -> None:
        """Make what makes batches; what that raises is the answer to every task."""
        self._is_ready = True
        self._fetcher_error = self._prepare_error
        if self._prepare_error is None:
            try:
                self._maker = make_maker()
            except BaseException:  # noqa: BLE001 - as above
                self._fetcher_error = RemoteError.caught(self._where).dumps()

    def _index_dataset(self) -> BatchMaker:
        plan = self._start.plan
        # One for all epochs: what an async dataset has opened belongs to its loop.
        if self._concurrent_fetcher is None:
            self._concurrent_fetcher = plan.make_concurrent_fetcher()
        assert self._collate is not None
        maker = self._make_maker(self._collate)
        if self._on_error == "raise" and plan.auto_collation:
            if self._collate.packer is None:
                maker.fetcher = AnyIndexFetcher(maker.fetcher)
            else:
                maker.fetcher = fetcher_of_arrays(
                    self._dataset,
                    self._writer,
                    maker.fetcher,
                    self._timer.count,
                    may_shard=plan.may_shard,
                )
        return maker

    def _iterate_dataset(self, saved: Saved | None = None) -> BatchMaker:
        load_dataset(self._dataset, saved)
        assert self._collate is not None
        maker = self._make_maker(self._collate)
        load_iterator(maker.fetcher, saved)
        self._fingerprints = take_fingerprints(maker.fetcher)
        return maker

    def _make_maker(self, collate: SlotCollate) -> BatchMaker:
        plan = self._start.plan
        rng: SampleRng | None = None
        if plan.seed is not None:
            rng = SampleRng(plan.seed, self._start.worker_id, sets_global=plan.sets_global_streams)
        # To pack a batch runs nothing that draws: setting its generators takes as long as a
        # sample's.
        is_packed = rng is not None and collate.packer is not None and not plan.is_iterable
        if is_packed and rng is not None:
            collate.before = rng.begin_collate
        return BatchMaker(
            plan,
            self._dataset,
            cast("Callable[[Any], Any]", collate),
            self._on_error,
            where=self._where,
            timer=self._timer,
            rng=rng,
            concurrent_fetcher=self._concurrent_fetcher,
            begins_collate=not is_packed,
        )

    def _resume(self, checkpoint: bytes) -> None:
        """Take over from a worker before this one, or from an earlier run."""
        self._checkpoint = IterableCheckpoint(*pickle.loads(checkpoint))
        if self._start.plan.is_iterable or self._prepare_error is not None:
            return
        try:
            if self._checkpoint.snapshot is not None:
                load_dataset(self._dataset, read(self._checkpoint.snapshot))
        except BaseException:  # noqa: BLE001 - as above
            self._lose_dataset()

    def _lose_dataset(self) -> None:
        """The dataset could not be resumed, as the exception says that is being handled."""
        self._is_lost = True
        self._fetcher_error = RemoteError.caught(self._where).dumps()

    def _begin_stream(self) -> BatchMaker | None:
        """Call ``iter(dataset)``, and go on where a worker before this one was."""
        checkpoint = self._checkpoint
        self._given, self._stream_ended = checkpoint.given, checkpoint.has_ended
        self._has_to_replay = checkpoint.skip > 0
        try:
            saved = None if checkpoint.snapshot is None else read(checkpoint.snapshot)
            if checkpoint.rng is not None:
                set_global_rng_state(checkpoint.rng)
            if not self._stream_ended:
                return self._iterate_dataset(saved)
            load_dataset(self._dataset, saved)  # for the next epoch
        except BaseException:
            if self._stream_ended:
                # No task of this epoch is there to be failed.
                self._prepare_error = RemoteError.caught(self._where).dumps()
            self._is_lost = checkpoint != IterableCheckpoint()
            raise
        return None

    def _begin_anew(self) -> BatchMaker:
        """Make the batch maker of a further epoch; what that begins with is noted before."""
        self._beginning = self._next_beginning()
        return self._iterate_dataset() if self._start.plan.is_iterable else self._index_dataset()

    def _next_beginning(self) -> bytes | None:
        """What the next epoch would begin with, at this moment.

        Raises:
            Exception: What the dataset's ``state_dict()`` raises, or pickling its state.
        """
        plan = self._start.plan
        if not plan.is_iterable and not plan.snapshot_every:
            return None
        saved = save_dataset(self._dataset)
        snapshot = None if saved is None else dump_here(saved, by_value=self._by_value)
        draws = plan.is_iterable and plan.seed is None
        return Beginning(global_rng_state() if draws else None, snapshot).dumps()

    def _start_epoch(self, epoch: int) -> None:
        if self._start.plan.is_iterable and not self._is_ready:
            self._get_ready(self._begin_stream)
        self._stream_ended = self._has_to_replay = False
        self._given = 0
        self._is_lost = False
        self._snapshot = self._beginning = None
        self._get_ready(self._begin_anew)
        self._answer_start(epoch, self._beginning)

    def _answer_start(self, epoch: int, beginning: bytes | None) -> None:
        """Say that an epoch has started, and what it began with."""
        sent = 0
        while beginning is not None and len(beginning) - sent > _PART_BYTES:
            self._channel.send(pack(StatePart(beginning[sent : sent + _PART_BYTES])))
            sent += _PART_BYTES
        self._send(pack(EpochStarted(epoch, None if beginning is None else beginning[sent:])))

    def _serve(self, task: Task) -> bytes:
        """Load a batch; returns the packed answer."""
        seq, epoch, slot_id, indices, touched_bytes = task
        if self._stream_ended:
            return pack(StreamEnded(seq, epoch, slot_id, kept=False))
        slot = self._slots[slot_id]
        writer = self._writer
        self._timer.begin()
        writer.open(
            slot,
            is_offered=self._offers and not self._start.plan.auto_collation,
            touched_bytes=touched_bytes,
        )
        self._snapshot = None
        error = self._fetcher_error
        layout: bytes | Spilled | None = None
        is_empty = False
        if error is None:
            try:
                wanted = pickle.loads(self._indices(slot, indices))
                load = self._load_streamed if self._start.plan.is_iterable else self._load_indexed
                layout = load(wanted)
            except EmptyBatchError:
                is_empty = True
            except StopIteration:
                if self._start.plan.is_iterable:
                    self._stream_ended = True
                    return self._answer_end(task)
                error = RemoteError.caught(self._where).dumps()
            except BaseException:  # noqa: BLE001 - as above
                error = RemoteError.caught(self._where).dumps()
        kept = self._is_kept()
        if error is not None:
            sent, report = self._spill_error(error, kept), self._take_report()
            snapshot = self._spill_state(self._snapshot)
            answer: BatchDone | BatchFailed | BatchEmpty = BatchFailed(
                seq,
                epoch,
                slot_id,
                sent,
                kept,
                writer.touched_bytes,
                report,
                snapshot,
                self._taken(),
                self._is_lost,
            )
        elif is_empty:
            report, snapshot = self._take_report(), self._spill_state(self._snapshot)
            answer = BatchEmpty(seq, epoch, slot_id, kept, report, snapshot)
        else:
            report, snapshot = self._take_report(), self._spill_state(self._snapshot)
            if self._admission is not None:
                self._admission.note_batch(writer.used_bytes)
                if self._admission.is_tight:
                    give_freed_memory_back()
            check = checksum(slot, writer.used_bytes) if self._start.is_debugging else None
            used_bytes = writer.used_bytes
            times = tuple(self._timer.read())  # plain: it pickles faster
            answer = BatchDone(
                seq,
                epoch,
                slot_id,
                layout,
                used_bytes,
                kept,
                check,
                report,
                snapshot,
                times,
                self._taken(),
            )
        writer.close()
        return pack(answer)

    def _indices(self, slot: Slot, sent: bytes | Spilled) -> bytes:
        """The pickled indices of a task, which may lie in its slot."""
        if isinstance(sent, bytes):
            return sent
        end = sent.offset + sent.nbytes
        slot.reach(end, others=self._slots.values())
        return slot.mapping[sent.offset : end]

    def _answer_end(self, task: Task) -> bytes:
        seq, epoch, slot_id = task.seq, task.epoch, task.slot_id
        kept = self._is_kept()
        writer = self._writer
        try:
            beginning = self._next_beginning() if self._start.plan.is_persistent else None
        except BaseException:  # noqa: BLE001 - as above
            # Told in place of a batch. The end is told at the next task.
            error = self._spill_error(RemoteError.caught(self._where).dumps(), kept)
            failed = BatchFailed(seq, epoch, slot_id, error, kept, writer.touched_bytes)
            writer.close()
            return pack(failed)
        sent = self._spill_state(beginning)
        ended = StreamEnded(seq, epoch, slot_id, kept, writer.touched_bytes, sent)
        writer.close()
        return pack(ended)

    def _taken(self) -> int | None:
        """The fingerprint of the batch in work, if its samples could be read."""
        return None if self._fingerprints is None else self._fingerprints.value

    def _is_kept(self) -> bool:
        """Whether the user's code holds memory of the slot, now that the batch is made."""
        self._writer.is_offered = False
        if not self._writer.is_kept():
            return False
        # Once is a cache. Always is a habit (a generator that has its last batch in hand), and
        # would cost a slot a batch: such code gets ordinary memory, from which we copy.
        self._kept_count += 1
        self._offers = self._kept_count < _KEPT_LIMIT
        return True

    def _load_indexed(self, indices: object) -> bytes | Spilled | None:
        """As :meth:`_load`, of a map-style dataset."""
        try:
            return self._load(indices)
        finally:
            if self._start.plan.snapshot_every:
                saved = save_dataset(self._dataset)
                if saved is not None:
                    self._snapshot = dump_here(saved, by_value=self._by_value)

    def _load_streamed(self, indices: object) -> bytes | Spilled | None:
        """As :meth:`_load`, of an iterable dataset, whose batches are counted."""
        if self._has_to_replay:
            self._replay(indices)
        self._given += 1  # also one that fails
        if self._fingerprints is not None:
            self._fingerprints.reset()
        try:
            return self._load(indices)
        except StopIteration:
            self._given -= 1
            raise
        except BaseException:
            # What a failed batch has read need not be what it reads when it is read again.
            with contextlib.suppress(BaseException):
                self._take_snapshot()
            raise

    def _replay(self, indices: object) -> None:
        """Read again what was delivered before; if that fails, so does every task of the epoch."""
        self._has_to_replay = False
        assert self._collate is not None
        assert self._fingerprints is not None
        assert self._maker is not None
        only_reads = self._collate.packer is not None
        fetcher = self._maker.fetcher
        try:
            with self._maker.loading(indices) as plain, self._writer.withheld():
                replay(fetcher, self._checkpoint, plain, self._fingerprints, only_reads=only_reads)
        except BaseException:
            self._lose_dataset()
            raise

    def _take_snapshot(self) -> None:
        """Note the stream's state, if it is due after the batch in work."""
        every = self._start.plan.snapshot_every
        if every and self._given % every == 0:
            assert self._maker is not None
            saved = save(self._maker.fetcher)
            if saved is not None:
                self._snapshot = dump_here(saved, by_value=self._by_value)

    def _spill_state(self, state: bytes | None) -> bytes | Spilled | TooLong | None:
        """A state as it is, or in the slot where it is long; the batch comes first."""
        if state is None or len(state) <= INLINE_BYTES // 4:
            return state
        try:
            return Spilled(*self._writer.put(state))
        except SharedMemoryError:
            return TooLong(len(state))

    def _load(self, indices: object) -> bytes | Spilled | None:
        """Fetch, collate and encode one batch.

        Returns:
            Its layout, pickled; None if that is the same as for the last batch.
        """
        assert self._maker is not None
        batch = self._maker.make(indices)
        if self._start.plan.is_iterable:
            self._take_snapshot()
        if type(batch) is list and self._start.plan.may_shard:
            batch = self._shard_layouts.joined(batch, self._writer.slot)
        flat = batch if type(batch) is FlatLayout else None
        if flat is None:
            layout = encode(
                batch, self._writer, by_value=self._by_value, spill_bytes=INLINE_BYTES // 2
            )
        elif flat is self._last_flat_layout:
            return None
        data = pickle.dumps(flat or layout, pickle.HIGHEST_PROTOCOL)
        sent: bytes | Spilled | None = None
        if data != self._last_layout:
            sent = data if len(data) <= INLINE_BYTES // 2 else Spilled(*self._writer.put(data))
        # Only now: what fails above is not known to the main process.
        self._last_layout, self._last_flat_layout = data, flat
        return sent

    def _spill_error(self, error: bytes, kept: bool) -> bytes | Spilled:
        """The error as it is, or in the slot where it is long, or shortened to what fits."""
        if len(error) <= INLINE_BYTES // 2:
            return error
        if not kept:
            self._writer.rewind()  # the batch is lost, so its place is free
        try:
            return Spilled(*self._writer.put(error))
        except SharedMemoryError:
            return RemoteError.loads(error).shortened(INLINE_BYTES // 4).dumps()

    def _take_report(self) -> bytes | Spilled | None:
        """What became of the samples, where that is counted; in the slot if it is long."""
        report = None if self._maker is None else self._maker.take_report()
        if report is None:
            return None
        data = report.dumps()
        if len(data) <= INLINE_BYTES // 4:
            return data
        try:
            return Spilled(*self._writer.put(data))
        except SharedMemoryError:
            return report.shortened().dumps()

    def _add_slot(self, message: NewSlot, ancillary: list[Any], flags: int) -> None:
        # Mapped further by its first batch, as far as that needs.
        self._slots[message.slot_id] = _attach(
            message.nbytes, ancillary, flags, mapped_bytes=FIRST_BYTES
        )

    def _drop_slot(self, slot_id: int) -> None:
        slot = self._slots.pop(slot_id, None)
        if slot is not None:
            slot.close()


def _attach(
    nbytes: int, ancillary: list[Any], flags: int, *, mapped_bytes: int | None = None
) -> Slot:
    """The slot whose descriptor has come beside a message.

    Args:
        nbytes: Length of its file.
        ancillary: What has come.
        flags: How it has come.
        mapped_bytes: How much of it to map; None: all.
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


def _attached(data: bytes | Attached, ancillary: list[Any], flags: int) -> bytes:
    """What a message has, or the slot that came beside it."""
    if not isinstance(data, Attached):
        return data
    slot = _attach(data.nbytes, ancillary, flags)
    try:
        return slot.mapping[:]
    finally:
        slot.close()
