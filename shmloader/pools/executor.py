"""The pool whose batches are made by tasks of the user's executor: on Dask, on Ray, anywhere.

::

    engine's thread                              a thread of the executor     one of its processes
    ───────────────                              ────────────────────────     ────────────────────
    send: executor.submit(make_batch, task) ────────────────────────────────▶ dataset[i] …, collate
                                                                                      │
    poll: the batch is built over the       ◀─── the future is done,       ◀─── a pickle and arrays
          arrays that have come                  and the wakeup is set

A worker of this pool is not a process, but a number: it stands for one task in flight. The executor
decides which process makes a batch. So the engine's order and restarts are those of worker
processes, and only this pool knows the executor. There are no slots: the executor's own transport
has made the memory in which a batch arrives.

A task carries no dataset, but the handle of a payload (:mod:`shmloader.batch.payload`). A process
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
"""

import collections
import concurrent.futures
import contextlib
import functools
import math
import os
import pickle
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.failures import RemoteError
from shmloader.batch.payload import PortablePayload
from shmloader.grammar import UNKNOWN_PID
from shmloader.insight.measurements import Counts, Readings
from shmloader.interruptions import Caught, attempt
from shmloader.pools import Events, SentTicket
from shmloader.pools.answers import Answer, Batch, Death, Empty, Failure
from shmloader.pools.executor_kinds import CHECK_S, Future, open_executor
from shmloader.pools.executor_task import Outcome, Result, make_batch, this_version
from shmloader.pools.object_answers import unpack_batch
from shmloader.pools.process_numbers import ProcessNumbers
from shmloader.pools.status_page import AtWork, Phase
from shmloader.process_state import PROCESS
from shmloader.threads.uninterruptible import uninterruptible
from shmloader.threads.wakeup import Wakeup

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

    def put(self, attempt: int, _: Future | None = None) -> None:
        """Note that a future is done, perhaps once more. Called from any thread."""
        if not self.is_closed:
            self.done.append((attempt, time.monotonic_ns()))
            self.wakeup.set()


@dataclass(eq=False, slots=True)
class _Sent:
    """A ticket that was sent.

    Attributes:
        seq: Number of the ticket.
        epoch: Number of its epoch.
        worker_id: Number of the worker that the ticket has.
        indices: Its pickled indices.
        dataset_epoch: The number for the dataset's ``set_epoch()``; None for no call.
        began_ns: When the ticket was first submitted, by ``time.monotonic_ns()``.
        number: The worker number that its task offers to the process that runs it.
        attempt: Number of the call that was submitted last for the ticket.
        future: The future of that call.
    """

    seq: int
    epoch: int
    worker_id: int
    indices: bytes
    dataset_epoch: int | None
    began_ns: int
    number: int = 0
    attempt: int = 0
    future: Any = None


class ExecutorPool:
    """Tasks on an executor. See :class:`~shmloader.pools.Pool` for what methods do and raise.

    Attributes:
        dataset_epoch: The number for the dataset's ``set_epoch()`` in the present epoch; None for
            no call.

    Args:
        executor: The user's executor.
        payload: The dataset and the functions; the pool owns it from now on.
        loader: Identifies the loader among those that use the executor.
        numbers: The worker numbers of the executor's processes.
        base_seed: Seeds the random generators of a process, together with its number.
    """

    has_queue = False
    memory = None

    def __init__(
        self,
        executor: concurrent.futures.Executor,
        payload: PortablePayload,
        *,
        loader: bytes,
        numbers: ProcessNumbers,
        base_seed: int,
    ) -> None:
        self.counts, self.readings = Counts(), Readings()
        self.dataset_epoch: int | None = None
        self.is_waiting = False
        self._executor = open_executor(executor)
        self._check = self._executor.check
        self._payload = payload
        self._numbers = numbers
        self._owner_pid = os.getpid()
        # The fields of ``Shared``.
        self._shared = loader, tuple(payload.handle), PROCESS.tasks.token, base_seed
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
        self._pids: dict[int, int] = {}

    @property
    def waiter(self) -> "ExecutorPool":
        """The pool itself."""
        return self

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, which does not own the tasks."""
        return os.getpid() != self._owner_pid

    # Tasks -------------------------------------------------------------------------------

    def send(self, ticket: SentTicket, epoch: int) -> Failure | None:
        """Submit a ticket's task."""
        # Pickling the user's keys may raise anything.
        indices = attempt(pickle.dumps, ticket.indices, pickle.HIGHEST_PROTOCOL)
        if isinstance(indices, Caught):
            return Failure(RemoteError.of(indices.error, "while sending indices to the executor"))
        began_ns = time.monotonic_ns()
        sent = _Sent(ticket.seq, epoch, ticket.worker_id, indices, self.dataset_epoch, began_ns)
        self._submit(sent, self._reference)
        return None

    def _submit(self, sent: _Sent, contents: Any) -> None:
        """Submit a task.

        Args:
            sent: The ticket.
            contents: The payload, or a reference to it; None if the task carries no payload.
        """
        self._attempts += 1
        sent.attempt, sent.number = self._attempts, self._numbers.offer()
        self._pids.pop(sent.worker_id, None)  # any process may take it
        future = attempt(
            self._executor.submit, self._name_of(sent), make_batch, this_version(), self._shared,
            sent.number, sent.dataset_epoch, sent.indices, contents,
        )  # fmt: skip
        if isinstance(future, Caught):
            self._numbers.take_back(sent.number)
            self._report_loss(
                sent, f"the executor refuses tasks ({_text_of(future.error)})", is_final=True
            )
            return
        sent.future = future
        self._tasks[sent.attempt] = sent
        # concurrent.futures swallows what a callback raises, including what a signal handler raises
        # in it. So a future that is done calls nothing on this thread.
        if not future.done():
            future.add_done_callback(functools.partial(self._post.put, sent.attempt))
        if future.done():
            self._post.put(sent.attempt)

    def recall(self) -> list[int]:
        """Return nothing: there is no queue."""
        return []

    def start_epoch(self, worker_id: int, epoch: int) -> bool:  # noqa: ARG002 - reports need none
        """Give up a worker's tasks. Running tasks are left to end."""
        for sent in self._tasks_of(worker_id):
            if self._give_up(sent):
                self._reports.append(functools.partial(_report, sent, Empty(None)))
        self._reports.append(lambda events: events.epoch_entered(worker_id, None))
        return False

    def _tasks_of(self, worker_id: int) -> list[_Sent]:
        return [sent for sent in self._tasks.copy().values() if sent.worker_id == worker_id]

    def _give_up(self, sent: _Sent) -> bool:
        """Forget a task, and cancel it if it has not begun. Returns False if it was forgotten."""
        with contextlib.suppress(Exception):  # the executor may be gone
            sent.future.cancel()
        if self._tasks.pop(sent.attempt, None) is None:  # another thread was faster
            return False
        if sent.future.cancelled() and self._check is None:
            self._numbers.take_back(sent.number)
        else:
            self._numbers.leave(sent.number, sent.future)
        return True

    def resume(self, worker_id: int, checkpoint: DatasetCheckpoint) -> None:
        """Do nothing: executors do not load datasets with states."""

    # Events ------------------------------------------------------------------------------

    def poll(self, worker_id: int, events: Events) -> bool:  # noqa: ARG002 - of all workers
        """Report the answers that have come."""
        done = self._post.done
        while done:
            attempt, done_ns = done.popleft()
            sent = self._tasks.pop(attempt, None)
            if sent is not None:
                self._take(sent, done_ns)
        has_any = bool(self._reports)
        while self._reports:
            self._reports.popleft()(events)
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
                for sent in self._tasks.copy().values():
                    if sent.future.done():
                        self._post.put(sent.attempt)
        self.is_waiting = False
        return self.poll(-1, events)

    def enable_wake(self) -> None:
        """Do nothing: ``wake`` works from the beginning."""

    def wake(self) -> None:
        """Make the present or the next :meth:`wait` return. Called from any thread."""
        self._post.wakeup.set()

    # Answers -----------------------------------------------------------------------------

    def _take(self, sent: _Sent, done_ns: int) -> None:
        """Make the report on a task that is done, or send it again with the payload."""
        future, result = sent.future, None
        if future.cancelled():
            reason = "the executor has cancelled its task"
        elif (error := future.exception()) is not None:
            reason = f"the executor lost its task ({_text_of(error)})"
        else:
            result = Result(*future.result()[: len(Result._fields)])
            reason = result.refusal
            if not reason and result.number >= 0:
                self._numbers.note(result.number)
        self._numbers.take_back(sent.number)
        if result is None:
            self._reference = None  # the payload in the store may be lost with the process
        if result is None or reason:
            self._report_loss(sent, reason, is_final=result is not None)
        elif result.outcome is None:
            self._send_with_payload(sent)
        else:
            self._pids[sent.worker_id] = result.pid
            answer = _read(Outcome(*result.outcome), done_ns)
            self._reports.append(functools.partial(_report, sent, answer))

    def _send_with_payload(self, sent: _Sent) -> None:
        """Send a task again, with the payload: by reference where that is possible."""
        if self._reference is None:
            contents = self._payload.contents()
            shared = attempt(self._executor.share, contents)
            if isinstance(shared, Caught):  # for instance, the store is full
                reason = f"the executor's store refused the dataset ({_text_of(shared.error)})"
                self._report_loss(sent, reason, is_final=True)
                return
            self._reference = shared
        self._submit(sent, contents if self._reference is None else self._reference)

    def _report_loss(self, sent: _Sent, reason: str, *, is_final: bool) -> None:
        """Report that a task is lost, as the loss of a worker that was at work on it."""
        death = Death(UNKNOWN_PID, None, reason=reason, is_final=is_final)
        at_work = _describe(sent)
        self._reports.append(lambda events: events.lost(sent.worker_id, death, at_work))

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
        return _describe(sent, self._executor.location_of(self._name_of(sent)))

    def _at_work(self, worker_id: int) -> _Sent | None:
        tasks = self._tasks_of(worker_id)
        return next((sent for sent in tasks if not sent.future.done()), None)

    def _name_of(self, sent: _Sent) -> str:
        return f"{self._name}-{sent.attempt}"

    def replace(self, worker_id: int) -> None:
        """Do nothing: a worker is free at once."""

    def end_workers(self) -> None:
        """Cancel all tasks that have not begun. May be called again, and from any thread."""
        if not self.is_inherited:
            uninterruptible(self._end)

    def _end(self) -> None:
        self._post.is_closed = True
        for sent in self._tasks.copy().values():
            self._give_up(sent)
        self._reports.clear()
        self._post.done.clear()
        self._reference = None
        self.wake()

    def close(self) -> None:
        """Cancel all tasks, and free the dataset's memory."""
        try:
            self.end_workers()
        finally:
            self._payload.close()


def _report(sent: _Sent, answer: Answer, events: Events) -> None:
    """Report the answer to a ticket."""
    events.answered(sent.seq, sent.epoch, sent.worker_id, answer)


def _describe(sent: _Sent, location: str = "") -> AtWork:
    """Describe what a task that was sent is doing."""
    elapsed_s = (time.monotonic_ns() - sent.began_ns) / 1e9
    return AtWork(Phase.LOADING, sent.epoch, sent.seq, elapsed_s, location=location)


def _read(outcome: Outcome, done_ns: int) -> Answer:
    """Return the answer that came at ``done_ns``, with its batch."""
    answer = outcome.answer()
    if not isinstance(answer, Batch):
        return answer
    batch = attempt(unpack_batch, *answer.content)
    if isinstance(batch, Caught):  # unpickling the user's objects may raise anything
        error = RemoteError.of(batch.error, "while reading a batch in the main process")
        return Failure(error, report=answer.report)
    answer.content = batch
    # The other process's clock may be another one, so only durations count. The rest of the time
    # since the task was sent is put before the work.
    _, *work_ns, sample_count = answer.times
    answer.times = (done_ns - sum(work_ns), *work_ns, sample_count)
    return answer


def _text_of(error: BaseException | None) -> str:
    """Return an error's class and text in one line, without the middle of a long one."""
    text = " ".join(str(error).split()) or "no further text"
    if len(text) > _REASON_CHARACTERS:
        # A traceback within the text ends with the error itself.
        text = f"{text[: _REASON_CHARACTERS // 3]} … {text[-2 * _REASON_CHARACTERS // 3 :]}"
    return f"{type(error).__name__}: {text.rstrip('.')}"
