"""Acts on what the scheduler decides: has its pool make batches, and delivers them.

An engine runs on the thread that calls ``next_batch``, and only during that call: the user's
thread, or one of :mod:`shmloader.device.thread`. While that thread does other things, workers work
on the tasks that they have, and their answers wait in the pool.

The module is long because one object performs every action of the scheduler and receives every
report of the pool.
"""

import abc
import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

from shmloader.batch.checkpoint import Checkpoint
from shmloader.engine.delivery import DatasetCheckpoints, Instead, not_an_end
from shmloader.engine.failures import FailureWatch
from shmloader.engine.records import DEAD, LOST
from shmloader.engine.scheduler import UNASSIGNED, Scheduler, Ticket
from shmloader.engine.workers import (
    describe_death,
    describe_loading,
    describe_restart,
    describe_ticket,
    end_hanging,
    late_batch,
)
from shmloader.errors import (
    ITERATOR_CLOSED,
    ClosedLoaderError,
    LoaderTimeoutError,
    SharedMemoryError,
    WorkerDiedError,
)
from shmloader.insight.measurements import pack_batch
from shmloader.interruptions import Caught, attempt, describe_interruption, is_interruption
from shmloader.pools import Pool
from shmloader.pools.answers import Answer, Death
from shmloader.pools.slot_memory import TRIM_EVERY, SlotMemory
from shmloader.streams.order import ReaderOrder
from shmloader.threads import BackgroundThread, may_wait

_log = logging.getLogger("shmloader")


class Stopped(BaseException):
    """Ends an engine's own thread, at its next pause."""


class OwnThread(BackgroundThread):
    """A thread that an engine belongs to.

    Attributes:
        engine: The engine.
        is_ended: Whether the user's thread draws no further ticket.
        is_stopping: Whether the thread is to end.
    """

    engine: "Engine"
    is_ended = is_stopping = False

    @abc.abstractmethod
    def next_ticket(self) -> object:
        """Return the next index batch from the user's thread, or raise StopIteration for now."""

    def ask(self, *, is_addition: bool) -> None:
        """Ask for a ticket: beside all others, or in place of one that yielded no batch."""

    def call(self, function: Callable[[], None]) -> None:
        """Have a thread that may fork call a function, and wait until it has."""
        function()

    def pause(self) -> None:
        """Pause or end if asked to. Called between two steps, when no lock is held."""
        if self.is_stopping:
            raise Stopped
        super().pause()

    def wake(self) -> None:
        """End the present or the next wait of the engine."""
        self.engine.wake()

    def ends_in(self, timeout_s: float | None) -> bool:
        """Wait for the thread's end. Returns whether the caller is to close what it has used.

        A thread that cannot be waited for closes the engine itself when it ends. Only the workers
        are ended here then.
        """
        if super().join(timeout_s) or not self.leave_closing():
            return True
        if may_wait():
            self.engine.end_workers()
        return False


class Engine:
    """Delivers the batches that a pool of workers makes.

    Attributes:
        scheduler: Decides. Only the engine changes it.
        delivery: The ticket whose batch the last call of ``next_batch`` returned, or whose error it
            raised; None if it raised anything else, after which no batch is missing.
        counts: Counters of slots and workers. Any thread may read them.
        draw_ns: How long the last call of :meth:`start`, :meth:`restart` or :meth:`next_batch` was
            in the sampler, unless the user's thread draws for a thread of the engine's own.
        staged: Times of a stage; None here, since an engine is no stage.
        is_closed: Whether the engine was closed, by the user or because of an error.

    Args:
        pool: The workers and their memory. The engine owns the pool from now on.
        scheduler: Decides. It was made for this pool.
        timeout_s: Longest wait for a batch in seconds; 0 waits without a limit.
        sample_timeout_s: Longest time for a sample in seconds, for a pool whose workers can be
            replaced; None for no limit.
        base_seed: The base seed of the workers, if checkpoints of their datasets are kept.
        watch: Counts bad samples; None if their errors are raised.
    """

    def __init__(
        self,
        pool: Pool,
        scheduler: Scheduler,
        *,
        timeout_s: float,
        sample_timeout_s: float | None = None,
        base_seed: int | None = None,
        watch: FailureWatch | None = None,
    ) -> None:
        self._pool, self.scheduler = pool, scheduler
        self._memory: SlotMemory | None = pool.memory
        self._timeout_s, self._sample_timeout_s = timeout_s, sample_timeout_s
        self._base_seed, self._watch = base_seed, watch
        self.counts = pool.counts
        self.delivery: Ticket | None = None
        self.draw_ns = 0
        self.staged: tuple[str, int, int] | None = None
        self._draw: Callable[[], object] = iter(()).__next__
        self._readings: ReaderOrder | None = None
        # When the last call of next_batch began to look for answers.
        self._looked_ns = 0
        self._left_out: list[Ticket] = []
        self.is_closed = False
        # Only the text, since the error's traceback would keep the engine alive.
        self._closed_because = ""
        self._own: OwnThread | None = None
        # The worker count that another thread has set; None once the scheduler knows it.
        self._wanted_workers: int | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether ``next_batch`` waits, or was left by an exception while it only waited."""
        return self._pool.is_waiting

    def resume(self) -> None:
        """Tell each worker where its dataset begins, before the first task is sent.

        Raises:
            OSError: If there are no descriptors left for a state.
            SharedMemoryError: If there is no memory for it.
        """
        for worker in self.scheduler.workers:
            if worker.is_alive:
                self._pool.resume(worker.worker_id, worker.checkpoint)

    @property
    def beginnings(self) -> DatasetCheckpoints | None:
        """The datasets' checkpoints at the epoch's beginning; None if none are kept."""
        first = self.scheduler.beginnings
        return None if first is None else DatasetCheckpoints(first, base_seed=self._base_seed)

    def start(self, tickets: Iterator[object]) -> None:
        """Begin the first epoch. Raises an Instead with the sampler's own exception."""
        self._draw = tickets.__next__
        self._readings = tickets if type(tickets) is ReaderOrder else None
        self.draw_ns = 0
        for _ in range(self.scheduler.tickets_at_start):
            self._offer()

    def restart(self, tickets: Iterator[object]) -> None:
        """Begin a further epoch with the same workers.

        Batches in flight are awaited and dropped. Workers finish them, as torch's do, so that
        their random number generators are in the same states as torch's. Tickets that no worker
        has received from the pool's queue are dropped at once.

        Raises:
            Instead: With a WorkerDiedError if a worker is dead, or a LoaderTimeoutError if the
                workers took too long; the engine is closed then. Or with the sampler's own
                exception.
        """
        self.check_open()
        self._draw = iter(()).__next__
        pool, scheduler = self._pool, self.scheduler
        scheduler.end_epoch(pool.recall())
        for worker in scheduler.workers:
            if worker.is_alive and pool.start_epoch(worker.worker_id, scheduler.epoch + 1):
                scheduler.left_epoch(worker.worker_id)
        while True:
            if scheduler.is_workers_due:
                self._adjust_workers()
            dead = scheduler.workers.first(DEAD)
            if dead is not None:
                self._fail(self._died(dead.worker_id, dead.death, None))
            if scheduler.is_epoch_left:
                break
            if not self._receive_any(self._deadline()):
                self._fail(late_batch(self._timeout_s, pool, scheduler, is_start=True))
            self.check_open()
        scheduler.start_epoch()
        self._left_out.clear()
        if self._watch is not None:
            self._watch.start_epoch()
        self.start(tickets)

    def attach(self, own: OwnThread) -> None:
        """Make the engine belong to a thread of its own until :meth:`detach` or :meth:`close`."""
        self._own, self._draw = own, own.next_ticket

    def detach(self) -> None:
        """Make the engine belong to the user's thread again."""
        self._own, self._draw = None, iter(()).__next__

    def send_drawn(self) -> bool:
        """Send workers the tickets that the user's thread has drawn. Returns whether it has any."""
        has_any = False
        while self._own is not None and self._offer():
            has_any = True
        return has_any

    def wake(self) -> None:
        """End the present or the next wait of the engine's thread. Called from any thread."""
        self._pool.wake()

    def next_batch(self) -> object:
        """Return the next batch.

        Raises:
            Instead: With a StopIteration at the epoch's end; a WorkerDiedError or TooManyFailures,
                after which the engine is closed; a LoaderTimeoutError, after which no batch is
                lost; a ClosedLoaderError after ``close()``; or the user's own exception, which
                takes the place of one batch.
        """
        pool, scheduler = self._pool, self.scheduler
        memory, own = self._memory, self._own
        pool.is_waiting = False
        self.delivery = None
        self.draw_ns = 0
        self._looked_ns = time.monotonic_ns()
        if self.is_closed or pool.is_inherited:
            self.check_open()
        if memory is not None:
            while memory.ended:
                scheduler.slots.free(memory.ended.popleft().slot_id)
            if memory.is_short or memory.batches >= TRIM_EVERY:
                memory.tidy(scheduler.slots.free_ids)
        deadline: float | None = None
        while True:
            if own is not None:
                self.send_drawn()
            if scheduler.is_workers_due or self._wanted_workers is not None:
                self._adjust_workers()
            ticket = scheduler.first()
            if ticket is None or ticket.answer is None:
                # Most often the awaited answer has come by now, or comes soon.
                is_over = ticket is None and scheduler.is_exhausted
                awaited = UNASSIGNED if ticket is None else ticket.worker_id
                if is_over or not pool.poll(self, awaited):
                    deadline = self._wait(deadline, is_over=is_over)
                    continue
                if ticket is None or ticket.answer is None:
                    continue
            scheduler.pop(ticket)
            if self._watch is None or not self._is_left_out(self._watch, ticket):
                return self._deliver(ticket)
            deadline = None

    def _wait(self, deadline: float | None, *, is_over: bool) -> float | None:
        """Wait until something happens, or raise what comes at the epoch's end.

        Args:
            deadline: When the wait for the next batch ends; None if that is not known.
            is_over: Whether no ticket in flight will be delivered.

        Returns:
            When the wait for the next batch ends; None without a limit.
        """
        pool, own = self._pool, self._own
        # The user's thread may still send a ticket that a worker accepts.
        if is_over and (own is None or own.is_ended or not self.scheduler.accepts_tickets):
            if self.send_drawn():
                return deadline
            if self._readings is not None and self._readings.draw_owed(self._offer, may_wait=True):
                return deadline
            error = None if self._watch is None else self._watch.end_epoch()
            if error is not None:
                self._fail(error)
            raise Instead(StopIteration())
        if own is None and self._timeout_s > 0:  # otherwise the user's thread keeps it
            deadline = deadline or self._deadline()
        if not self._receive_any(deadline):
            raise Instead(self.late())
        if own is not None:
            own.pause()
        if self.is_closed or pool.is_inherited:
            self.check_open()
        return deadline

    def _deadline(self) -> float | None:
        return time.monotonic() + self._timeout_s if self._timeout_s > 0 else None

    def _is_left_out(self, watch: FailureWatch, ticket: Ticket) -> bool:
        """Count the samples of the next ticket; return whether its batch is empty and left out."""
        answer, error = ticket.answer, None
        if not isinstance(answer, Answer):  # the death of a worker
            return False
        if answer.report is not None:
            pid = self._pool.pid(ticket.worker_id) if answer.report.failed_count else None
            error = watch.add(answer.report, f"batch {ticket.seq}", ticket.worker_id, pid)
        if error is None and answer.is_empty:
            error = watch.left_out(describe_ticket(ticket))
        if error is not None:
            self._fail(error)
        if not answer.is_empty:
            return False
        self.scheduler.free_slot(ticket)
        self._left_out.append(ticket)
        self._offer_another()
        return True

    def _deliver(self, ticket: Ticket) -> object:
        """Offer one more ticket, and return the batch of this one or raise its error."""
        answer, scheduler = ticket.answer, self.scheduler
        ticket.answer, self.delivery = None, ticket
        if self._left_out:
            ticket.left_out = tuple(self._left_out)
            self._left_out.clear()
        if not isinstance(answer, Answer) or answer.error is not None:
            self._raise_instead(ticket, answer)
        if answer.times is not None:
            handed = pack_batch(
                ticket.worker_id,
                ticket.offered_ns,
                ticket.sent_ns,
                answer.looked_ns,
                answer.seen_ns,
                time.monotonic_ns(),
                answer.nbytes,
                len(scheduler.slots.lent_ids),
            )
            ticket.times = handed + answer.times
        batch = answer.content
        if self._memory is not None:
            try:
                batch = self._build(self._memory, ticket, answer)
            except Exception as error:
                if is_interruption(error):
                    raise
                self._offer()
                raise Instead(not_an_end(error, "unpickling a batch")) from None
        self._offer()
        if self._readings is not None:
            self._readings.draw_owed(self._offer)
        return batch

    def _build(self, memory: SlotMemory, ticket: Ticket, answer: Answer) -> object:
        """Return a batch that lies in a slot: views of the slot, which is lent, or a copy.

        Raises:
            SharedMemoryError: If the slot cannot be mapped.
            Exception: What unpickling a part of the batch raises.
        """
        slots, slot_id, lease = self.scheduler.slots, ticket.slot_id, None
        reader = answer.content
        is_lent = reader.lends and len(slots.lent_ids) < self.scheduler.lend_limit
        try:
            slot = memory.slots[slot_id]
            if memory.locks_pages or slot.nbytes < slot.touched_bytes:
                slot = memory.lock(slot_id) if is_lent else memory.mapped(slot_id)
            if is_lent:
                slots.lend(slot_id)
                lease = slot.lend(memory.ended.append)
                memory.counts.lent += 1
            elif reader.lends:
                memory.counts.copied += 1
            return reader.read(slot, lease)
        finally:
            if lease is None:  # otherwise the slot is free when the lease dies
                slots.free(slot_id)

    def _raise_instead(self, ticket: Ticket, answer: Any) -> NoReturn:
        """Raise the error that came in place of a batch, and offer one more ticket if possible."""
        self.scheduler.free_slot(ticket)
        if isinstance(answer, Death):
            self._fail(self._died(ticket.worker_id, answer, ticket))
        error = answer.error.rebuilt(describe_loading(ticket, self._pool.pid(ticket.worker_id)))
        if answer.is_final:
            self._fail(error, "its dataset could not be resumed")
        self._offer()
        raise Instead(error)

    def _died(self, worker_id: int, death: Death, ticket: Ticket | None) -> WorkerDiedError:
        limit = self.scheduler.restart_limit
        return WorkerDiedError(describe_death(worker_id, death, ticket, restart_limit=limit))

    def _offer(self) -> bool:
        """Draw one index batch and send it to a worker. Returns False if there is none."""
        began_ns = time.monotonic_ns()
        try:
            indices = self._draw()
        except StopIteration:
            return False
        except Exception as error:
            if is_interruption(error):
                raise
            # The sampler's own error comes in place of the batch, after which it may continue.
            self.delivery = None
            raise Instead(error) from None
        drawn_ns = time.monotonic_ns()
        self.draw_ns += drawn_ns - began_ns
        scheduler = self.scheduler
        scheduler.offer(indices, drawn_ns)
        if scheduler.unsent:
            self._send_tasks(drawn_ns)
        return True

    def _offer_another(self, *, is_addition: bool = False) -> None:
        """Offer a ticket in place of one that yields no batch, or in addition to all others."""
        if self._own is None:
            self._offer()
        else:
            self._own.ask(is_addition=is_addition)

    def _send_tasks(self, now_ns: int) -> None:
        """Send the tickets that are to be sent."""
        scheduler = self.scheduler
        unsent = scheduler.unsent
        while unsent:
            ticket = unsent.popleft()
            ticket.sent_ns = now_ns
            try:
                refused = self._pool.send(ticket, scheduler.epoch)
            except SharedMemoryError as error:
                self._fail(error)
            if refused is not None:
                # Delivered in order, like a failure of the dataset.
                self.answered(ticket.seq, scheduler.epoch, ticket.worker_id, refused)

    def _ask_for_tickets(self) -> None:
        # With a queue, more tickets are wanted for more workers: no stream can end there.
        # Otherwise a stream has ended, and its ticket yields no batch.
        for _ in range(self.scheduler.pop_wanted_tickets()):
            self._offer_another(is_addition=self._pool.has_queue)

    def _receive_any(self, deadline: float | None) -> bool:
        """Wait for the pool's reports, and handle them. Returns False once the deadline is over."""
        timeout_s = None if deadline is None else deadline - time.monotonic()
        if self._sample_timeout_s is not None:
            look_s = end_hanging(self._pool, self.scheduler, self._sample_timeout_s)
            timeout_s = look_s if timeout_s is None else min(timeout_s, look_s)
        happened = self._pool.wait(timeout_s, self)
        return happened or deadline is None or time.monotonic() < deadline

    def late(self) -> LoaderTimeoutError:
        """Return the error for a batch that has not come in time. Called from any thread."""
        return late_batch(self._timeout_s, self._pool, self.scheduler)

    def _adjust_workers(self) -> None:
        """Replace lost workers, and start wanted ones."""
        scheduler, workers = self.scheduler, self.scheduler.workers
        if self._wanted_workers is not None:
            wanted, self._wanted_workers = self._wanted_workers, None
            scheduler.workers_wanted(wanted)
        if workers.next_missing() is not None:
            if self._own is None:
                self._start_workers()
            else:  # if it is told to end meanwhile, the next epoch replaces the worker
                self._own.call(self._start_workers)
                self.check_open()
        scheduler.is_workers_due = False
        self._send_tasks(time.monotonic_ns())
        self._ask_for_tickets()

    def _start_workers(self) -> None:
        """Start the missing workers, on the user's thread."""
        pool, scheduler = self._pool, self.scheduler
        while (worker := scheduler.workers.next_missing()) is not None:
            is_lost, worker_id = worker.state is LOST, worker.worker_id
            refused = attempt(pool.start, worker_id)
            if isinstance(refused, Caught):
                self.check_open()  # another thread may have closed the pool
                if is_lost or not pool.has_queue:  # tickets wait for this worker
                    self._fail(refused.error)
                present = scheduler.workers.present_count
                _log.warning("num_workers stays at %d: %s", present, refused.error)
                scheduler.workers_wanted(present)
                continue
            if is_lost:
                self.counts.restarts += 1
                _log.warning("%s", describe_restart(worker))
            pool.resume(worker_id, worker.checkpoint)
            scheduler.worker_started(worker_id)

    def want_workers(self, count: int) -> None:
        """Set how many workers there should be, at least. Called from any thread."""
        self._wanted_workers = count
        self.wake()

    def answered(self, seq: int, epoch: int, worker_id: int, answer: Answer) -> None:
        """Record the answer to a task: its batch, or a failure."""
        answer.looked_ns, answer.seen_ns = self._looked_ns, time.monotonic_ns()
        self.scheduler.answered(seq, epoch, answer, worker_id)

    def stream_ended(self, seq: int, epoch: int, beginning: Checkpoint) -> None:
        """Record that a worker's iterable dataset has no batch for this task or a later one.

        ``beginning`` is the checkpoint with which the worker's next epoch begins.
        """
        self.scheduler.stream_ended(seq, epoch, beginning)
        self._ask_for_tickets()

    def epoch_entered(self, worker_id: int, beginning: Checkpoint) -> None:
        """Record that a worker has finished the previous epoch, and begins the next one there."""
        self.scheduler.left_epoch(worker_id, beginning)

    def lost(
        self,
        worker_id: int,
        death: Death,
        recalled: Collection[int] = (),
        held: Collection[int] = (),
    ) -> None:
        """Record that a worker died and was reaped: it will be replaced, or its tickets fail.

        Args:
            worker_id: Number of the worker.
            death: How it ended.
            recalled: Numbers of the tasks that were in the pool's queue, and are no longer.
            held: Numbers of the tasks that other workers have received from the queue.
        """
        self.scheduler.recalled(recalled)
        self.scheduler.worker_lost(worker_id, death, held=held)

    def _fail(self, error: BaseException, why: str | None = None) -> NoReturn:
        """Close the engine, and raise an error. Later calls report ``why``, or its text."""
        self._closed_because = f" since: {error if why is None else why}"
        self.delivery = None
        self.close()
        raise Instead(error) from None

    def give_up(self, error: BaseException) -> None:
        """Close, and have later calls report the exception that interrupted the engine."""
        self.record_interruption(error)
        self.close()

    def record_interruption(self, error: BaseException) -> None:
        """Have calls after the end report an exception, unless the engine is closed already."""
        if not (self.is_closed or self._closed_because):
            self._closed_because = describe_interruption(error)

    def check_process(self) -> None:
        """Raise an Instead with a ClosedLoaderError in a forked child."""
        if self._pool.is_inherited:
            raise Instead(ClosedLoaderError("the iterator belongs to the process that made it"))

    def check_open(self) -> None:
        """Raise an Instead with a ClosedLoaderError if the engine is closed, or in a child."""
        self.check_process()
        if self.is_closed:
            because = self._closed_because
            text = f"the iterator is closed{because}" if because else ITERATOR_CLOSED
            raise Instead(ClosedLoaderError(text))

    def close(self) -> None:
        """End the workers and free all memory. May be called again, and from any thread."""
        try:
            self.end_workers()
        finally:
            self.detach()
            self.scheduler.close()  # before the pool, since layouts keep references to slots
            self._pool.close()

    def end_workers(self) -> None:
        """End only the workers, while another thread uses the slots. Called from any thread."""
        self.is_closed = True
        self._pool.end_workers()
