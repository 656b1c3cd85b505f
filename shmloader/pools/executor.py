"""The pool whose batches are made by tasks of the user's executor: on Dask, on Ray, anywhere.

::

    engine's thread                              a thread of the executor     one of its processes
    ───────────────                              ────────────────────────     ────────────────────
    send: executor.submit(make_batch, task) ────────────────────────────────▶ dataset[i] …, collate
                                                                                      │
    poll: the batch is built over the       ◀─── the future is done,       ◀─── a pickle and arrays
          arrays that have come                  and the wakeup is set

A worker of this pool is a number: it stands for one task in flight. The executor decides which
process makes a batch. Of the executor only ``submit`` and its futures are used, and two methods
that those of :mod:`shmloader.cluster` have: ``share(object)`` puts an object into a store and
returns a reference to it, and ``check()``, called every :data:`CHECK_S` seconds, fails the futures
of a cluster that is gone.

A task carries no dataset, but the handle of a payload (:mod:`shmloader.batch.payload`). A process
that cannot open the payload by its handle says so. Its task is then sent again with the payload.

Guarantees:
    * The executor is never shut down. Tasks that have not started are cancelled when the epoch is
      given up or the pool is closed. The results of running tasks are dropped.
    * An exception of the executor in place of a result, or in ``submit``, is the loss of a worker.
      An exception of the user's code is an answer.
    * Callbacks of futures only set an event. They refer neither to the pool nor to the loader.
"""

import concurrent.futures
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shmloader.batch.failures import RemoteError
from shmloader.batch.payload import PortablePayload
from shmloader.grammar import UNKNOWN_PID
from shmloader.interruptions import Caught, attempt
from shmloader.pools.answers import Answer, Death, ObjectPool
from shmloader.pools.executor_task import make_batch, read_answer, this_version
from shmloader.pools.status_page import AtWork, Phase
from shmloader.process_state import PROCESS

#: How often the ``check()`` of an executor that has one is called, in seconds.
CHECK_S = 2.0

# How much of the text of an executor's error is shown.
_REASON_CHARACTERS = 400


@dataclass(eq=False, slots=True)
class _Sent:
    """A ticket that was sent.

    ``sent_ns`` is when it was first submitted. ``future`` is that of its last task; None if the
    executor refused that, for ``refusal``.
    """

    seq: int
    epoch: int
    worker_id: int
    indices: bytes
    sent_ns: int
    future: Any = None
    refusal: str = ""


class ExecutorPool(ObjectPool):
    """Tasks on an executor. See :class:`~shmloader.pools.Pool` for what methods do and raise.

    Args:
        executor: The user's executor.
        payload: The dataset and the functions; the pool owns it from now on.
        loader: Identifies the loader among those that use the executor.
        numbers: Numbers the tasks of all iterators of the loader, from 0. A process takes the
            number of its first task as its worker number, so no two processes have one.
        base_seed: Seeds the random generators of a process, together with its number.
    """

    has_queue = False
    _tasks: dict[int, _Sent]

    def __init__(
        self,
        executor: concurrent.futures.Executor,
        payload: PortablePayload,
        *,
        loader: bytes,
        numbers: Iterator[int],
        base_seed: int,
    ) -> None:
        super().__init__()
        self.dataset_epoch: int | None = None
        self._submit_task = executor.submit
        self._check: Callable[[], None] | None = getattr(executor, "check", None)
        self._share: Callable[[Any], Any] | None = getattr(executor, "share", None)
        self._payload, self._numbers = payload, numbers
        home = PROCESS.tasks.token
        self._common = loader, tuple(payload.handle), home, base_seed
        # The reference to the payload in the executor's store, sent with each task; None if the
        # payload is not there.
        self._reference: Any = None

    def send(self, ticket: Any, epoch: int) -> Answer | None:
        """Submit a ticket's task."""
        # Pickling the user's keys may raise anything.
        indices = attempt(pickle.dumps, ticket.indices, pickle.HIGHEST_PROTOCOL)
        if isinstance(indices, Caught):
            where = "while sending indices to the executor"
            return Answer(error=RemoteError.of(indices.error, where))
        sent = _Sent(ticket.seq, epoch, ticket.worker_id, indices, time.monotonic_ns())
        self._tasks[ticket.seq] = sent
        self._submit(sent, self._reference)
        return None

    def _submit(self, sent: _Sent, contents: Any) -> None:
        """Submit a task, with the payload, a reference to it, or None."""
        future = attempt(
            self._submit_task, make_batch, this_version(), self._common,
            next(self._numbers), self.dataset_epoch, sent.indices, contents,
        )  # fmt: skip
        if isinstance(future, Caught):
            self._refuse(sent, "the executor refuses tasks", future.error)
            return
        sent.future = future
        # concurrent.futures swallows what a callback raises, including what a signal handler raises
        # in it. So a future that is done calls nothing on this thread.
        if not future.done():
            wakeup = self.wakeup
            future.add_done_callback(lambda _: wakeup.set())

    def _refuse(self, sent: _Sent, reason: str, error: BaseException) -> None:
        sent.future, sent.refusal = None, f"{reason} ({_text_of(error)})"

    def recall(self) -> list[int]:
        """Give up all tasks in flight, and return their tickets' numbers. Ends an epoch."""
        dropped, self._tasks = self._tasks, {}
        for sent in dropped.values():
            if sent.future is not None:
                attempt(sent.future.cancel)  # the executor may be gone
        return [*dropped]

    def poll(self, events: Any, worker_id: int = -1) -> bool:  # noqa: ARG002
        """Report the answers that have come."""
        return sum(self._report(sent, events) for sent in self._done) > 0

    def wait(self, timeout_s: float | None, events: Any) -> bool:
        """Wait until a task is done or the time is up, and report what has come."""
        self.is_waiting = True
        if not self._done:
            if self._check is not None:
                timeout_s = CHECK_S if timeout_s is None else min(timeout_s, CHECK_S)
            self.wakeup.wait(None if timeout_s is None else max(0.0, timeout_s))
            if self._check is not None and not self._done:
                self._check()
        self.is_waiting = False
        return self.poll(events)

    @property
    def _done(self) -> list[_Sent]:
        """The tasks with something to report."""
        tasks = self._tasks.copy().values()
        return [one for one in tasks if one.future is None or one.future.done()]

    def _report(self, sent: _Sent, events: Any) -> bool:
        """Report on a task that is done. Returns False if it is sent again with the payload."""
        future, is_final = sent.future, True
        packed: list[Any] = []
        if future is None:
            reason = sent.refusal
        elif future.cancelled() or future.exception() is not None:
            is_final, self._reference = False, None  # the payload in the store may be lost, too
            reason = "the executor has cancelled its task"
            if not future.cancelled():
                reason = f"the executor lost its task ({_text_of(future.exception())})"
        else:
            reason, *packed = future.result()
            if not reason and not packed:
                self._send_with_payload(sent)
                return False
        if self._tasks.pop(sent.seq, None) is None:  # another thread has closed the pool
            return False
        if reason:
            death = Death(UNKNOWN_PID, None, reason=reason, is_final=is_final)
            events.lost(sent.worker_id, death)
        else:
            events.answered(sent.seq, sent.epoch, sent.worker_id, read_answer(*packed))
        return True

    def _send_with_payload(self, sent: _Sent) -> None:
        """Send a task again, with the payload: by reference where that is possible."""
        contents = self._reference
        if contents is None:
            contents = self._payload.contents()
            if self._share is not None:
                contents = attempt(self._share, contents)
                if isinstance(contents, Caught):  # for instance, the store is full
                    reason = "the executor's store refused the dataset"
                    self._refuse(sent, reason, contents.error)
                    return
                self._reference = contents
        self._submit(sent, contents)

    def pid(self, worker_id: int) -> int:  # noqa: ARG002 - any process may have its task
        """Return ``UNKNOWN_PID``. Errors of samples name the process."""
        return UNKNOWN_PID

    def was_at(self, worker_id: int, *, with_stack: bool = False) -> AtWork:  # noqa: ARG002
        """Return which task a worker has. The executor's processes show no stack."""
        done = self._done
        for sent in self._tasks.copy().values():
            if sent.worker_id == worker_id and sent not in done:
                elapsed_s = (time.monotonic_ns() - sent.sent_ns) / 1e9
                return AtWork(Phase.LOADING, sent.epoch, sent.seq, elapsed_s)
        return AtWork(Phase.IDLE, 0, 0, 0.0)

    def start(self, worker_id: int) -> None:
        """Do nothing: a worker is free at once."""

    def _end(self) -> None:
        self.recall()
        self._reference = None
        self.wake()

    def close(self) -> None:
        """Cancel all tasks, and free the dataset's memory."""
        try:
            self.end_workers()
        finally:
            self._payload.close()


def _text_of(error: BaseException) -> str:
    """Return an error's class and text in one line: of a traceback, the end."""
    text = " ".join(str(error).split()) or "no further text"
    return f"{type(error).__name__}: {text[-_REASON_CHARACTERS:].rstrip('.')}"
