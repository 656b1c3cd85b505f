"""The pool whose batches are made by tasks of the user's executor: on Dask, on Ray, anywhere.

::

    engine's thread                              a thread of the executor     one of its processes
    ───────────────                              ────────────────────────     ────────────────────
    send: executor.submit(make_batch, task) ────────────────────────────────▶ dataset[i] …, collate
                                                                                      │
    poll: the contents are copied to the    ◀─── the future is done,       ◀─── a message, and the
          ticket's slot, and the message         and the wakeup is set          slot's contents
          is read as a worker's is

A worker of this pool is not a process, but a number: it stands for one task in flight. The executor
decides which process makes a batch. So the engine's order, restarts, slots and leases are those of
worker processes, and only this pool knows the executor.

A task carries no dataset, but the handle of a payload (:mod:`shmloader.batch.portable`). A process
that cannot open the payload by its handle says so. Its task is then sent again with the payload: as
bytes, or by reference where the executor has a store of objects (Dask's ``scatter``, or
``RayExecutor``).

Guarantees:
    * The executor is the user's: it is never shut down. Tasks that have not begun are cancelled
      when the epoch is given up or the pool is closed. Running tasks are left to end.
    * An exception of the executor in place of a result (a node is lost, a process of a pool was
      killed), or in ``submit``, is the loss of a worker. An exception of the user's code is an
      answer.
    * Callbacks of futures only append to a deque and set an event. They refer neither to the pool
      nor to the loader.

The module is long because one object follows a task from ``submit`` to the slot: each way in which
a task can fail changes what is known of it, of its process and of its worker.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import math
import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.portable import PortablePayload
from shmloader.batch.remote_error import RemoteError
from shmloader.errors import InternalError, SharedMemoryError
from shmloader.insight.measurements import Readings
from shmloader.interruptions import is_interruption
from shmloader.memory.admission import MemoryAdmission
from shmloader.memory.arena import Arena
from shmloader.messages import BatchDone, BatchEmpty, BatchFailed, FromWorker, ToWorker, unpack
from shmloader.pools import Events, SentTicket
from shmloader.pools.answers import UNKNOWN_PID, Death, Empty, Failure
from shmloader.pools.executor_kinds import CHECK_S, Future, open_executor
from shmloader.pools.executor_task import (
    Own,
    Result,
    Shared,
    make_batch,
    this_version,
)
from shmloader.pools.process_numbers import ProcessNumbers
from shmloader.pools.slot_memory import PageLocker
from shmloader.pools.slot_reader import SlotReader
from shmloader.pools.status_page import AtWork, Phase
from shmloader.process_state import PROCESS
from shmloader.threads.uninterruptible import uninterruptible
from shmloader.threads.wakeup import Wakeup

# From this size on, bytes are copied without the GIL, so that other threads run, such as the
# executor's own.
_FREE_BYTES = 1 << 18

# How much of the text of an executor's error is shown.
_REASON_CHARACTERS = 600


class _Post:
    """Receives the notes of the futures' callbacks.

    Attributes:
        done: Attempts whose futures are done, each with the time by ``time.monotonic_ns()``.
        wakeup: Set after each of them.
        is_closed: Whether notes are dropped from now on.
    """

    def __init__(self) -> None:
        self.done: collections.deque[tuple[int, int]] = collections.deque()
        self.wakeup = Wakeup()
        self.is_closed = False

    def put(self, attempt: int) -> None:
        """Note that a future is done. Called from any thread."""
        if not self.is_closed:
            self.done.append((attempt, time.monotonic_ns()))
            self.wakeup.set()


class _Sent:
    """A ticket that was sent.

    Attributes:
        seq: Number of the ticket.
        epoch: Number of its epoch.
        attempt: Number of the call that was submitted last for the ticket.
        worker_id: Number of the worker that the ticket has.
        slot_id: The slot of its batch.
        indices: Its pickled indices.
        dataset_epoch: The number for the dataset's ``set_epoch()``; None for no call.
        number: The worker number that its task offers to the process that runs it.
        began_ns: When the ticket was first submitted, by ``time.monotonic_ns()``.
        future: The future of its task; None if it could not be submitted.
        error: Why the task could not be submitted.
    """

    __slots__ = (
        "attempt", "began_ns", "dataset_epoch", "epoch", "error", "future", "indices", "number",
        "seq", "slot_id", "worker_id",
    )  # fmt: skip

    def __init__(
        self,
        ticket: SentTicket,
        epoch: int,
        indices: bytes,
        number: int,
        dataset_epoch: int | None,
    ) -> None:
        self.seq, self.epoch = ticket.seq, epoch
        self.worker_id, self.slot_id = ticket.worker_id, ticket.slot_id
        self.indices, self.dataset_epoch = indices, dataset_epoch
        self.number = number
        self.attempt = 0
        self.began_ns = time.monotonic_ns()
        self.future: Future | None = None
        self.error: BaseException | None = None


class ExecutorPool(SlotReader):
    """Tasks on an executor, and the slots to which this process copies their batches.

    See :class:`~shmloader.pools.SlotPool` for what the methods do and raise.

    Args:
        executor: The user's executor.
        payload: The dataset and the functions; the pool owns it from now on.
        loader: Identifies the loader among those that use the executor.
        numbers: The worker numbers of the executor's processes.
        base_seed: Seeds the random generators of a process, together with its number.
        slot_bytes: The most bytes of a slot that a batch may take.
        slot_count: The most slots there may be.
        locker: Locks the pages of slots that are lent, if a device reads them.
        admission: Admits the first touch of memory here; None if memory is not checked.
    """

    def __init__(
        self,
        executor: concurrent.futures.Executor,
        payload: PortablePayload,
        *,
        loader: bytes,
        numbers: ProcessNumbers,
        base_seed: int,
        slot_bytes: int,
        slot_count: int,
        locker: PageLocker | None = None,
        admission: MemoryAdmission | None = None,
    ) -> None:
        super().__init__(Arena.create(slot_bytes, slot_count), locker, admission)
        self.readings = Readings()
        self.is_waiting = False
        self._executor = open_executor(executor)
        self._payload = payload
        self._numbers = numbers
        self._owner_pid = os.getpid()
        # The first two arguments of all tasks.
        self._version = this_version()
        self._shared = Shared(loader, payload.handle, PROCESS.tasks.token, base_seed).dumps()
        # The prefix of the names of this pool's tasks.
        self._name = f"make_batch-{secrets.token_hex(16)}"
        self._post = _Post()
        # Tasks that were sent and not answered, by the number of the attempt.
        self._tasks: dict[int, _Sent] = {}
        self._attempts = 0
        # Reports to make besides answers.
        self._reports: collections.deque[Callable[[Events], None]] = collections.deque()
        # The reference to the payload in the executor's store of objects, sent with each task; None
        # if the payload is not there.
        self._reference: Any = None
        self._check = self._executor.check
        self._pids: dict[int, int] = {}

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, which does not own the tasks."""
        return os.getpid() != self._owner_pid

    # Tasks -------------------------------------------------------------------------------

    def send(self, ticket: SentTicket, epoch: int) -> Failure | None:
        """Submit a ticket's task."""
        try:
            indices = pickle.dumps(ticket.indices, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            if is_interruption(error):
                raise
            # Pickling the user's keys may raise anything.
            return Failure(RemoteError.caught("while sending indices to the executor"))
        self.memory.prepare(ticket.slot_id)
        sent = _Sent(ticket, epoch, indices, self._numbers.offer(), self.dataset_epoch)
        self._submit(sent, self._reference)
        return None

    def _submit(self, sent: _Sent, contents: Any) -> None:
        """Submit a task.

        Args:
            sent: The ticket.
            contents: The payload, or a reference to it; None if the task carries no payload.
        """
        self._attempts += 1
        attempt = sent.attempt = self._attempts
        told = -1 if sent.dataset_epoch is None else sent.dataset_epoch
        own = Own(sent.number, sent.seq, sent.epoch, sent.slot_id, told, sent.indices).dumps()
        self._tasks[attempt] = sent
        self._pids.pop(sent.worker_id, None)  # any process may take it
        sent.future = sent.error = None
        put = self._post.put
        try:
            future = self._executor.submit(
                self._name_of(attempt),
                make_batch, self._version, self._shared, own, attempt, contents,
            )  # fmt: skip
        except BaseException as error:
            if is_interruption(error):
                raise
            sent.error = error
            put(attempt)
            return
        sent.future = future
        # concurrent.futures swallows what a callback raises, including what a signal handler raises
        # in it. So the callback does nothing if add_done_callback calls it on this thread, and this
        # method checks itself whether the future is done.
        adding_on: int | None = threading.get_ident()

        def done(_: Future) -> None:
            if adding_on != threading.get_ident():
                put(attempt)

        if not future.done():
            future.add_done_callback(done)
            adding_on = None
        if future.done():
            put(attempt)  # perhaps for the second time

    def start_epoch(self, worker_id: int, epoch: int) -> None:  # noqa: ARG002 - reports need none
        """Give up a worker's tasks. Running tasks are left to end."""
        for attempt in self._attempts_of(worker_id):
            sent = self._give_up(attempt)
            if sent is not None:
                self._reports.append(functools.partial(_report_dropped, sent))
        self._reports.append(lambda events: events.epoch_entered(worker_id, None))

    def _attempts_of(self, worker_id: int) -> list[int]:
        tasks = self._tasks.copy().items()
        return [attempt for attempt, sent in tasks if sent.worker_id == worker_id]

    def _give_up(self, attempt: int) -> _Sent | None:
        """Forget a task, and cancel it if it has not begun."""
        sent = self._tasks.get(attempt)
        if sent is None:
            return None
        if sent.future is not None:
            with contextlib.suppress(Exception):  # the executor may be gone
                sent.future.cancel()
        if self._tasks.pop(attempt, None) is None:  # another thread was faster
            return None
        if sent.future is None or (sent.future.cancelled() and self._check is None):
            self._numbers.take_back(sent.number)
        else:
            self._numbers.leave(sent.number, sent.future)
        return sent

    def resume(self, worker_id: int, checkpoint: DatasetCheckpoint) -> None:
        """Do nothing: executors do not load datasets with states."""

    # Events ------------------------------------------------------------------------------

    def poll(self, worker_id: int | None, events: Events) -> bool:  # noqa: ARG002 - of all workers
        """Report the answers that have come."""
        has_any = False
        while self._reports:
            has_any = True
            self._reports.popleft()(events)
        done = self._post.done
        while done:
            attempt, done_ns = done.popleft()
            sent = self._tasks.pop(attempt, None)
            if sent is not None:
                has_any = self._take(sent, done_ns, events) or has_any
        return has_any

    def wait(self, timeout_s: float | None, events: Events) -> bool:
        """Wait until a task is done or the time is up, and report what has come."""
        self.is_waiting = True
        # A wait that a signal handler has ended may have cleared the event.
        if not self._post.done and not self._reports:
            wait_s = math.inf if timeout_s is None else max(0.0, timeout_s)
            if self._check is not None:
                wait_s = min(wait_s, CHECK_S)
            self._post.wakeup.wait(None if math.isinf(wait_s) else wait_s)
            if self._check is not None and not self._post.done:
                self._check()
                # The callback of a future may have been lost: what a signal handler raises in it is
                # swallowed.
                for attempt, sent in self._tasks.copy().items():
                    if sent.future is not None and sent.future.done():
                        self._post.put(attempt)
        self.is_waiting = False
        return self.poll(None, events)

    def enable_wake(self) -> None:
        """Do nothing: ``wake`` works from the beginning."""

    def wake(self) -> None:
        """Make the present or the next :meth:`wait` return. Called from any thread."""
        self._post.wakeup.set()

    def wake_soon(self) -> None:
        """Do as :meth:`wake`, at once, since that only releases a lock."""
        self._post.wakeup.set()

    def hurry(self) -> None:
        """Do nothing: no wake-up is delayed."""

    # Answers -----------------------------------------------------------------------------

    def _take(self, sent: _Sent, done_ns: int, events: Events) -> bool:
        """Report the outcome of a task. Returns False if the task had to be sent again."""
        result, reason = _read(sent)
        if result is not None and result.number >= 0:
            self._numbers.note(result.number)
        self._numbers.take_back(sent.number)
        if result is None or result.refusal:
            reason = reason if result is None else result.refusal
            is_final = result is not None or sent.future is None
            if result is None:
                self._reference = None  # the payload in the store may be lost with the process
            _report_loss(sent, reason, events, is_final=is_final)
            return True
        if not result.message:
            return self._send_with_payload(sent, events)
        self._pids[sent.worker_id] = result.pid
        message = unpack(result.message)
        if result.contents is not None:
            try:
                self._write(sent.slot_id, result.contents)
            except (SharedMemoryError, OSError) as error:
                if is_interruption(error):
                    raise
                failure = Failure(RemoteError.caught("while taking a batch from the executor"))
                events.answered(sent.seq, sent.epoch, sent.worker_id, failure)
                return True
        if type(message) is BatchDone and message.times is not None:
            # The other process's clock may be another one, so only durations count. The rest of the
            # time since the task was sent is put before the work.
            _, fetch_ns, collate_ns, encode_ns, sample_count = message.times
            began_ns = done_ns - fetch_ns - collate_ns - encode_ns
            message = message._replace(
                times=(began_ns, fetch_ns, collate_ns, encode_ns, sample_count)
            )
        self._take_message(sent.worker_id, message, events)
        return True

    def _send_with_payload(self, sent: _Sent, events: Events) -> bool:
        """Send a task again, with the payload. Returns whether a loss was reported instead."""
        try:
            contents = self._contents()
        except Exception as error:
            if is_interruption(error):
                raise
            # For instance, the store is full.
            reason = f"the executor's store refused the dataset ({_text_of(error)})"
            _report_loss(sent, reason, events, is_final=True)
            return True
        sent.number = self._numbers.offer()
        self._submit(sent, contents)
        return False

    def _write(self, slot_id: int, contents: Any) -> None:
        """Copy a batch into its slot: the only copy on this machine."""
        nbytes = contents.nbytes
        slot = self.memory.grow(slot_id, nbytes)
        if nbytes < _FREE_BYTES:
            slot.memory[:nbytes] = contents
        else:
            ctypes.memmove(slot.address, contents.ctypes.data, nbytes)

    def _take_message(
        self, worker_id: int, message: "FromWorker | ToWorker", events: Events
    ) -> None:
        if type(message) is BatchDone:
            self.take_batch(worker_id, message, events)
        elif type(message) is BatchFailed:
            self.take_failure(worker_id, message, events)
        elif type(message) is BatchEmpty:
            self.take_empty(worker_id, message, events)
        else:
            raise InternalError(f"a process of the executor sent {message!r}")

    def _contents(self) -> Any:
        """Return the payload for a process that has none: by reference where that is possible."""
        if self._reference is not None:
            return self._reference
        contents = self._payload.contents()
        self._reference = self._executor.share(contents)
        return contents if self._reference is None else self._reference

    # Workers -----------------------------------------------------------------------------

    @property
    def processes(self) -> list[Any]:
        """An empty list: the processes are the executor's."""
        return []

    def pid(self, worker_id: int) -> int:
        """Return the process id, on its machine, of the process that answered last for a worker."""
        return self._pids.get(worker_id, UNKNOWN_PID)

    def was_at(self, worker_id: int) -> AtWork:
        """Return which task a worker has."""
        sent = self._at_work(worker_id)
        return AtWork(Phase.IDLE, 0, 0, 0.0) if sent is None else _describe(sent)

    def ask(self, worker_id: int) -> AtWork:
        """Return which task a worker has, and where the task runs, if the executor knows that.

        There is no stack, since the executor's processes cannot show one.
        """
        sent = self._at_work(worker_id)
        if sent is None:
            return AtWork(Phase.IDLE, 0, 0, 0.0)
        return _describe(sent, self._executor.location_of(self._name_of(sent.attempt)))

    def _at_work(self, worker_id: int) -> _Sent | None:
        for sent in self._tasks.copy().values():
            is_done = sent.future is None or sent.future.done()
            if sent.worker_id == worker_id and not is_done:
                return sent
        return None

    def _name_of(self, attempt: int) -> str:
        return f"{self._name}-{attempt}"

    def kill(self, worker_id: int, seq: int) -> bool:
        """Give up a task that takes too long. If it is running, it is left to end."""
        for attempt in self._attempts_of(worker_id):
            sent = self._give_up(attempt)
            if sent is not None:
                reason = f"batch {seq} took too long"
                self._reports.append(functools.partial(_report_loss, sent, reason))
        return True

    def replace(self, worker_id: int) -> None:
        """Do nothing: a worker is free at once."""

    def start(self, worker_id: int) -> None:
        """Do nothing: workers need no start."""

    def retire(self, worker_id: int) -> None:
        """Do nothing: workers need no end."""

    def end_workers(self) -> None:
        """Cancel all tasks that have not begun. May be called again, and from any thread."""
        if not self.is_inherited:
            uninterruptible(self._end)

    def _end(self) -> None:
        self._post.is_closed = True
        for attempt in list(self._tasks):
            self._give_up(attempt)
        self._reports.clear()
        self._post.done.clear()
        self._reference = None
        self.wake()

    def close(self) -> None:
        """Cancel all tasks, and free all memory except what lies under the user's views."""
        try:
            self.end_workers()
        finally:
            self._payload.close()
            uninterruptible(self.memory.close)


def _report_dropped(sent: _Sent, events: Events) -> None:
    """Answer a ticket whose epoch was given up, with an empty batch."""
    events.answered(sent.seq, sent.epoch, sent.worker_id, Empty(None))


def _describe(sent: _Sent, location: str = "") -> AtWork:
    """Describe what a task that was sent is doing."""
    elapsed_s = (time.monotonic_ns() - sent.began_ns) / 1e9
    return AtWork(Phase.LOADING, sent.epoch, sent.seq, elapsed_s, location=location)


def _report_loss(sent: _Sent, reason: str, events: Events, *, is_final: bool = False) -> None:
    """Report that a ticket's task is lost, as the loss of a worker that was at work on it."""
    death = Death(UNKNOWN_PID, None, reason=reason, is_final=is_final)
    events.lost(sent.worker_id, death, _describe(sent))


def _read(sent: _Sent) -> tuple[Result | None, str]:
    """Return a task's result and ""; or None and what the executor says of the task's loss."""
    future = sent.future
    error = sent.error
    if future is not None:
        if future.cancelled():
            return None, "the executor has cancelled its task"
        error = future.exception()
        if error is None:
            pid, refusal, *others = future.result()
            return Result(pid, refusal, *(() if refusal else others)), ""
    what = "refuses tasks" if future is None else "lost its task"
    return None, f"the executor {what} ({_text_of(error)})"


def _text_of(error: BaseException | None) -> str:
    """Return an error's class and text in one line, without the middle of a long one."""
    text = " ".join(str(error).split()) or "no further text"
    if len(text) > _REASON_CHARACTERS:
        # A traceback within the text ends with the error itself.
        text = f"{text[: _REASON_CHARACTERS // 3]} … {text[-2 * _REASON_CHARACTERS // 3 :]}"
    return f"{type(error).__name__}: {text.rstrip('.')}"
