"""Acts on what the scheduler decides: has its pool make batches, and delivers them.

An engine runs on the thread that calls ``next_batch``, and only during that call: the user's
thread, or one of :mod:`shmloader.device.thread`. While that thread does other things, workers work
on the tasks that they have, and their answers wait in the pool.

**One raise.** What the user's code raises, and what the engine reports, leaves ``next_batch`` as
an :class:`Instead`, which carries the exception for the user. Any other exception, such as a
Ctrl-C, has interrupted the engine. If the engine only waited (``is_waiting``), nothing is lost.
Otherwise a batch or a ticket may be, so the iterator closes the engine by :meth:`Engine.give_up`.

The module is long because one object performs every action of the scheduler and receives every
report of the pool. What can be separated has a module of its own: slots (``slot_batches``), bad
samples (``failures``) and texts (``wording``, ``lateness``).
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import NoReturn, cast

from shmloader.batch.checkpoint import Checkpoint
from shmloader.engine.dataset_checkpoints import DatasetCheckpoints, DatasetUpdate
from shmloader.engine.delivery import Delivery, Instead, delivery_of
from shmloader.engine.failures import FailureWatch
from shmloader.engine.hang_watch import HangWatch
from shmloader.engine.inbox import Inbox
from shmloader.engine.lateness import late_batch, late_start
from shmloader.engine.scheduler import UNASSIGNED, Scheduler, Ticket
from shmloader.engine.slot_batches import SlotBatches
from shmloader.engine.wording import (
    describe_death,
    describe_loading,
    describe_lost_state,
    describe_restart,
    describe_ticket,
)
from shmloader.engine.workers import DEAD, GONE, LOST, Worker
from shmloader.errors import (
    ITERATOR_CLOSED,
    ClosedLoaderError,
    InternalError,
    LoaderTimeoutError,
    SharedMemoryError,
    WorkerDiedError,
)
from shmloader.faults import FAULTS
from shmloader.insight.measurements import BatchTimes, batch_times
from shmloader.interruptions import describe_interruption, is_interruption
from shmloader.pools import Pool, SlotPool
from shmloader.pools.answers import Answer, Batch, Death, Empty, Failure
from shmloader.pools.slot_memory import TRIM_EVERY
from shmloader.pools.status_page import AtWork, Phase

_log = logging.getLogger("shmloader")


def _explained(error: StopIteration) -> RuntimeError:
    explained = RuntimeError("unpickling a batch raised StopIteration")
    explained.__cause__ = error
    return explained


def _do_nothing() -> None:
    """Do nothing: the pause of an engine without a thread of its own."""


def _do_it(function: Callable[[], None]) -> None:
    function()


class Engine:
    """Delivers the batches that a pool of workers makes.

    Attributes:
        delivery: Describes what the last call of ``next_batch`` returned, or raised in place of a
            batch; None if it raised anything else, after which no batch is missing.
        counts: Counters of slots and workers. Any thread may read them.
        draw_ns: How long the last call of :meth:`start`, :meth:`restart` or :meth:`next_batch` was
            in the sampler. Not meaningful while the engine belongs to a thread of its own, since
            the user's thread draws then.
        staged: Times of a stage; None here, since an engine is no stage.

    Args:
        pool: The workers and their memory. The engine owns the pool from now on.
        worker_count: The most workers there may be.
        window: The most tickets in flight.
        lend_limit: The most batches lent at once.
        in_order: Whether batches are delivered in the sampler's order.
        timeout_s: Longest wait for a batch in seconds; 0 waits without a limit.
        sample_timeout_s: Longest time for a sample in seconds, for a pool whose workers can be
            replaced; None for no limit.
        worker_restarts: How many dead workers are replaced in an epoch.
        checkpoints: The checkpoints at which the workers' datasets begin, if these are iterable or
            have a state of their own.
        is_iterable: Whether the datasets are iterable.
        is_seeded: Whether each sample has random number generators of its own.
        watch: Notes bad samples; None if their errors are raised.
        present: How many workers run at first, None for all; :meth:`want_workers` changes that.
            For a pool with a queue only.
        sharers: How many engines share the workers.
        tickets_each: How many tickets should be in flight for each present worker; 0 for a whole
            window, however many workers are present.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        worker_count: int,
        window: int,
        lend_limit: int,
        in_order: bool,
        timeout_s: float,
        sample_timeout_s: float | None = None,
        worker_restarts: int = 0,
        checkpoints: DatasetCheckpoints | None = None,
        is_iterable: bool = True,
        is_seeded: bool = False,
        watch: FailureWatch | None = None,
        present: int | None = None,
        sharers: int = 1,
        tickets_each: int = 0,
    ) -> None:
        self._pool = pool
        self._waiter = pool.waiter
        self._has_queue = pool.has_queue
        # ``pool`` again, typed for calls that only a pool with slots (and so without a queue) has.
        self._slot_pool = cast("SlotPool", pool)
        self._in_order = in_order
        self._timeout_s = timeout_s
        self._watch = watch
        self.counts = pool.counts
        self.delivery: Delivery | None = None
        self.draw_ns = 0
        self.staged: tuple[str, int, int] | None = None
        self._draw: Callable[[], object] = iter(()).__next__
        # When the last call of next_batch began to look for answers.
        self._looked_ns = 0
        self._left_out: list[Ticket] = []
        self._is_closed = False
        # Only the text, since the error's traceback would keep the engine alive.
        self._closed_because = ""
        # Set while the engine belongs to a thread of its own.
        self._inbox: Inbox | None = None
        self._pause: Callable[[], None] = _do_nothing
        self._have_done: Callable[[Callable[[], None]], None] = _do_it
        # The worker count that another thread has set; None once the scheduler knows it.
        self._wanted_workers: int | None = None
        self._base_seed = None if checkpoints is None else checkpoints.base_seed
        self._is_seeded = is_seeded
        self._scheduler = Scheduler(
            worker_count,
            window,
            lend_limit,
            in_order=in_order,
            restart_limit=worker_restarts,
            first_worker=0 if checkpoints is None else checkpoints.next_worker,
            beginnings=None if checkpoints is None else checkpoints.checkpoints,
            is_iterable=is_iterable,
            has_queue=self._has_queue,
            has_slots=pool.memory is not None,
            present=present,
            sharers=sharers,
            tickets_each=tickets_each,
        )
        self._hang_watch: HangWatch | None = None
        if sample_timeout_s is not None:
            self._hang_watch = HangWatch(self._slot_pool, self._scheduler, sample_timeout_s)
        self._slots: SlotBatches | None = None
        if pool.memory is not None:
            self._slots = SlotBatches(self._slot_pool, self._scheduler.slots, lend_limit)

    @property
    def is_waiting(self) -> bool:
        """Whether ``next_batch`` waits, or was left by an exception while it only waited."""
        return self._waiter.is_waiting

    # Epochs ------------------------------------------------------------------------------

    def resume(self) -> None:
        """Tell each worker where its dataset begins. Called before the first task is sent.

        Raises:
            OSError: If there are no descriptors left for a state.
            SharedMemoryError: If there is no memory for it.
        """
        for worker in self._scheduler.workers:
            if worker.is_alive:
                self._pool.resume(worker.worker_id, worker.checkpoint)

    @property
    def beginnings(self) -> DatasetCheckpoints | None:
        """The datasets' checkpoints at the epoch's beginning; None if none are kept."""
        begun = self._scheduler.beginnings
        return None if begun is None else DatasetCheckpoints(begun, base_seed=self._base_seed)

    @property
    def next_beginnings(self) -> tuple[Checkpoint, ...]:
        """The datasets' checkpoints at the next epoch's beginning. Read at an epoch's end."""
        return self._scheduler.next_beginnings

    def start(self, tickets: Iterator[object]) -> None:
        """Begin the first epoch.

        Args:
            tickets: The sampler's index batches, drawn on the calling thread.

        Raises:
            Instead: With the sampler's own exception.
        """
        self._draw = tickets.__next__
        self.draw_ns = 0
        for _ in range(self._scheduler.first_tickets):
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
        scheduler = self._scheduler
        scheduler.end_epoch(self._pool.recall())
        for worker in scheduler.workers:
            if worker.is_alive and self._pool.start_epoch(worker.worker_id, scheduler.epoch + 1):
                scheduler.left_epoch(worker.worker_id)
        while True:
            if scheduler.is_workers_due:
                self._adjust_workers()
            dead = scheduler.workers.first(DEAD)
            if dead is not None:
                assert isinstance(dead.death, Death)
                self._fail(WorkerDiedError(describe_death(dead.worker_id, dead.death, None)))
            if scheduler.is_epoch_left:
                break
            if not self._receive_any(self._deadline()):
                busy = [one for one in self._alive() if not scheduler.workers[one].has_left_epoch]
                self._fail(late_start(self._timeout_s, self._pool, scheduler, busy))
            self.check_open()
        scheduler.start_epoch()
        self._left_out.clear()
        if self._watch is not None:
            self._watch.start_epoch()
        self.start(tickets)

    # A thread of the engine's own ----------------------------------------------------------

    def attach(
        self,
        inbox: Inbox,
        pause: Callable[[], None],
        have_done: Callable[[Callable[[], None]], None],
    ) -> None:
        """Make the engine belong to a thread of its own until :meth:`detach`.

        Args:
            inbox: Yields index batches, instead of the iterator given to :meth:`start`.
            pause: Called between two steps, where no lock is held. May raise.
            have_done: Runs a function on the user's thread.
        """
        self._inbox, self._draw = inbox, inbox.__next__
        self._pause, self._have_done = pause, have_done

    def detach(self) -> None:
        """Make the engine belong to the user's thread again."""
        self._inbox, self._draw = None, iter(()).__next__
        self._pause, self._have_done = _do_nothing, _do_it

    def take_tickets(self) -> None:
        """Send workers the tickets that the user's thread has drawn."""
        for indices in self._inbox or ():
            now_ns = time.monotonic_ns()
            self._scheduler.offer(indices, now_ns)
            self._send_tasks(now_ns)

    def wake(self) -> None:
        """End the present or the next wait of the engine's thread. Called from any thread."""
        self._pool.wake()

    # One batch ---------------------------------------------------------------------------

    def next_batch(self) -> object:  # noqa: PLR0912 - each call of a part would cost 0.1 µs
        """Return the next batch.

        Raises:
            Instead: With a StopIteration at the epoch's end; a WorkerDiedError or TooManyFailures,
                after which the engine is closed; a LoaderTimeoutError, after which no batch is
                lost; a ClosedLoaderError after ``close()``; or the user's own exception, which
                takes the place of one batch.
        """
        pool, scheduler, slots = self._pool, self._scheduler, self._slots
        self._waiter.is_waiting = False
        self.delivery = None
        self.draw_ns = 0
        self._looked_ns = time.monotonic_ns()
        if self._is_closed or self._waiter.is_inherited:
            self.check_open()
        if slots is not None and (slots.memory.batches >= TRIM_EVERY or slots.memory.is_short):
            slots.tidy()
        deadline: float | None = None
        while True:
            if self._inbox:
                self.take_tickets()
            if scheduler.is_workers_due or self._wanted_workers is not None:
                self._adjust_workers()
            # Most often the awaited answer is here already, or about to be. Receiving it now saves
            # a call of the selector.
            has_received, awaited = False, scheduler.awaited()
            if awaited is not None and awaited.answer is None:
                has_received = pool.poll(awaited.worker_id, self)
            ticket = scheduler.take_next()
            if ticket is not None:
                if self._watch is not None and self._note_samples(self._watch, ticket):
                    deadline = None
                    continue
                return self._hand_over(ticket)
            if has_received or (awaited is None and pool.poll(UNASSIGNED, self)):
                continue
            if scheduler.is_exhausted and not self._awaits_tickets():
                if self._inbox:
                    continue
                self._raise_end()
            if self._inbox is None:  # otherwise the user's thread keeps the deadline
                deadline = deadline or self._deadline()
            if FAULTS is not None:
                FAULTS.reach("main.next")
            if not self._receive_any(deadline):
                raise Instead(self.late())
            self._pause()
            self.check_open()

    def _deadline(self) -> float | None:
        return time.monotonic() + self._timeout_s if self._timeout_s > 0 else None

    def _raise_end(self) -> NoReturn:
        """Raise StopIteration, or TooManyFailures if too many samples of the epoch failed."""
        error = None if self._watch is None else self._watch.end_epoch()
        if error is not None:
            self._fail(error)
        raise Instead(StopIteration())

    def _note_samples(self, watch: FailureWatch, ticket: Ticket) -> bool:
        """Note the samples of the next ticket; return whether its batch is empty and left out."""
        answer = ticket.answer
        if not isinstance(answer, Answer):
            return False
        worker_id, error = ticket.worker_id, None
        if answer.report is not None:
            batch, pool = f"batch {ticket.seq}", self._pool
            error = watch.note(answer.report, batch, worker_id, pool.pid(worker_id))
        if error is None and type(answer) is Empty:
            error = watch.left_out(describe_ticket(ticket))
        if error is not None:
            self._fail(error)
        if type(answer) is not Empty:
            return False
        self._scheduler.free_slot(ticket)
        self._left_out.append(ticket)
        self._offer_another()
        return True

    def _hand_over(self, ticket: Ticket) -> object:
        """Offer one more ticket, and return the batch of this one or raise its error."""
        if FAULTS is not None:
            FAULTS.reach("main.deliver")
        answer, scheduler = ticket.answer, self._scheduler
        if not isinstance(answer, Batch):
            self._raise_instead(ticket, answer)
        times = None
        if answer.times is not None:
            times = batch_times(
                (
                    ticket.worker_id,
                    ticket.offered_ns,
                    ticket.sent_ns,
                    answer.times,
                    answer.looked_ns,
                    answer.seen_ns,
                    time.monotonic_ns(),
                    answer.nbytes,
                    scheduler.slots.lent_count,
                )
            )
        if scheduler.beginnings is None and not self._left_out:
            self.delivery = delivery_of((ticket.seq, (), (), times))
        else:
            self._note_delivery(ticket, times)
        if self._slots is None:
            self._offer()
            return answer.content
        try:
            batch = self._slots.build(ticket, answer)
        except Exception as error:
            if is_interruption(error):
                raise
            self._offer()
            # Unpickling an object may raise StopIteration, which would end the epoch.
            told = _explained(error) if isinstance(error, StopIteration) else error
            raise Instead(told) from None
        self._offer()
        return batch

    def _raise_instead(self, ticket: Ticket, answer: object) -> NoReturn:
        """Raise the error that came in place of a batch, and offer one more ticket if possible."""
        pid = self._pool.pid(ticket.worker_id)
        self._scheduler.free_slot(ticket)
        if isinstance(answer, Failure):
            error = answer.error.rebuilt(describe_loading(ticket, pid))
            if answer.is_final:
                self._fail(error, "its dataset could not be resumed")
            self._note_delivery(ticket, None)
            self._offer()
            raise Instead(error)
        if isinstance(answer, Death):
            self._fail(WorkerDiedError(describe_death(ticket.worker_id, answer, ticket)))
        raise InternalError(f"an answer of unknown type: {answer!r}")

    def _note_delivery(self, ticket: Ticket, times: BatchTimes | None) -> None:
        """Set ``delivery`` for a ticket whose batch is delivered, or whose error is raised."""
        left_out, self._left_out = self._left_out, []
        updates = [
            DatasetUpdate(one.worker_id, one.checkpoint, getattr(one.answer, "state_ns", 0))
            for one in (*left_out, ticket)
            if one.checkpoint is not None
        ]
        self.delivery = Delivery(ticket.seq, tuple(one.seq for one in left_out), updates, times)

    # Tickets out -------------------------------------------------------------------------

    def _offer(self) -> None:
        """Draw one index batch and send it to a worker."""
        began_ns = time.monotonic_ns()
        try:
            indices = self._draw()
        except StopIteration:
            return
        except Exception as error:
            if is_interruption(error):
                self.note_interruption(error, in_sampler=True)
                raise
            # The sampler's own error comes in place of the batch, after which it may continue.
            self.delivery = None
            raise Instead(error) from None
        except BaseException as error:
            self.note_interruption(error, in_sampler=True)
            raise
        drawn_ns = time.monotonic_ns()
        self.draw_ns += drawn_ns - began_ns
        scheduler = self._scheduler
        scheduler.offer(indices, drawn_ns)
        if scheduler.unsent:
            self._send_tasks(drawn_ns)

    def _offer_another(self, *, is_addition: bool = False) -> None:
        """Offer a ticket in place of one that yields no batch, or in addition to all others."""
        if self._inbox is None:
            self._offer()
        else:
            self._inbox.ask(is_addition)

    def _awaits_tickets(self) -> bool:
        """Return whether the user's thread may still send a ticket that a worker takes."""
        inbox = self._inbox
        return inbox is not None and not inbox.is_ended and self._scheduler.takes_tickets

    def _send_tasks(self, now_ns: int) -> None:
        """Send the tickets that are to be sent."""
        scheduler = self._scheduler
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
        for _ in range(self._scheduler.take_wanted_tickets()):
            self._offer_another(is_addition=self._has_queue)

    # Answers in --------------------------------------------------------------------------

    def _receive_any(self, deadline: float | None) -> bool:
        """Wait until the pool reports something, and handle all reports.

        Returns:
            False if nothing has happened and the deadline has passed.
        """
        timeout_s = None if deadline is None else deadline - time.monotonic()
        if self._hang_watch is not None:
            look_s = self._hang_watch.look()
            timeout_s = look_s if timeout_s is None else min(timeout_s, look_s)
        happened = self._pool.wait(timeout_s, self)
        return happened or deadline is None or time.monotonic() < deadline

    def late(self) -> LoaderTimeoutError:
        """Return the error for a batch that has not come in time. Called from any thread."""
        return late_batch(self._timeout_s, self._pool, self._scheduler, self._alive())

    def _alive(self) -> list[int]:
        return [worker.worker_id for worker in self._scheduler.workers if worker.is_alive]

    # Workers -----------------------------------------------------------------------------

    def _adjust_workers(self) -> None:
        """Replace lost workers, start wanted ones, and have others leave.

        This is not done where the loss is reported: a stage's thread may be told to end while it
        waits for the user's thread to start the worker. The worker then stays LOST, and the next
        epoch replaces it here.
        """
        scheduler, workers = self._scheduler, self._scheduler.workers
        if self._wanted_workers is not None:
            wanted, self._wanted_workers = self._wanted_workers, None
            scheduler.workers_wanted(wanted)
        while (worker := workers.first(LOST)) is not None:
            self._have_done(functools.partial(self._restart_worker, worker, self._describe(worker)))
            self._resume_started(worker.worker_id)
        while (worker := workers.next_leaving()) is not None:
            self._slot_pool.leave(worker.worker_id)
        while (worker := workers.next_start()) is not None and self._add_worker(worker.worker_id):
            pass
        scheduler.is_workers_due = False
        self._send_tasks(time.monotonic_ns())
        self._ask_for_tickets()

    def _describe(self, worker: Worker) -> str:
        """Return the text for the log on a worker's restart."""
        death = worker.death if isinstance(worker.death, Death) else None
        checkpoint = None if self._scheduler.beginnings is None else worker.checkpoint
        return describe_restart(
            worker.worker_id,
            death,
            worker.unfinished,
            checkpoint,
            is_seeded=self._is_seeded,
            hang=worker.hang,
        )

    def _restart_worker(self, worker: Worker, text: str) -> None:
        """Start a worker in place of a lost one, on the user's thread."""
        try:
            self._slot_pool.replace(worker.worker_id)
        except ClosedLoaderError:
            self.check_open()
            raise
        except (OSError, RuntimeError) as error:
            if is_interruption(error):
                raise
            self._fail(error)
        _log.warning(text)
        self.counts.restarts += 1

    def _resume_started(self, worker_id: int) -> None:
        """Tell a worker that was started where its dataset begins."""
        self._pool.resume(worker_id, self._scheduler.workers[worker_id].checkpoint)
        self._scheduler.worker_started(worker_id)

    @property
    def present_workers(self) -> int:
        """The number of workers, without LEAVING and GONE ones. May be read from any thread."""
        return self._scheduler.workers.present_count

    def want_workers(self, count: int) -> None:
        """Set how many workers there should be. Called from any thread."""
        self._wanted_workers = count
        self.wake()

    def _add_worker(self, worker_id: int) -> bool:
        """Start a worker; return whether it runs."""
        refusals: list[str] = []
        self._have_done(functools.partial(self._start_worker, worker_id, refusals))
        if refusals:
            present = self.present_workers
            _log.warning("num_workers stays at %d: %s", present, *refusals)
            self._scheduler.workers_wanted(present)
            return False
        self._resume_started(worker_id)
        return True

    def _start_worker(self, worker_id: int, refusals: list[str]) -> None:
        """Start a worker, on the user's thread. If that fails, add the reason to ``refusals``."""
        try:
            self._slot_pool.start(worker_id)
        except ClosedLoaderError:
            self.check_open()
            raise
        except (OSError, RuntimeError) as error:
            if is_interruption(error) or isinstance(error, InternalError):
                raise
            refusals.append(str(error))

    # Reports of the pool: see :class:`shmloader.pools.Events` --------------------------------

    def answered(self, seq: int, epoch: int, worker_id: int, answer: Answer) -> None:
        """Note the answer to a task: its batch, or a failure."""
        now_ns = time.monotonic_ns()
        if type(answer) is Batch:
            answer.looked_ns, answer.seen_ns = self._looked_ns, now_ns
        scheduler = self._scheduler
        state = None
        if scheduler.beginnings is not None and not getattr(answer, "is_final", False):
            state = answer.snapshot, getattr(answer, "fingerprint", None)
        has_taker = self._has_queue and worker_id != UNASSIGNED
        scheduler.answered(seq, epoch, answer, taker=worker_id if has_taker else None, state=state)

    def stream_ended(self, seq: int, epoch: int, beginning: Checkpoint) -> None:
        """Note that a worker's iterable dataset has no batch for this task or a later one."""
        self._scheduler.stream_ended(seq, epoch, beginning)
        self._ask_for_tickets()

    def beginning_part(self, worker_id: int, data: bytes) -> None:
        """Note one piece of the state that a worker's next epoch begins with."""
        self._scheduler.beginning_part(worker_id, data)

    def state_lost(self, worker_id: int, nbytes: int, most_bytes: int) -> None:
        """Log that the state of a worker's dataset did not fit into a slot."""
        _log.warning("%s", describe_lost_state(worker_id, nbytes, most_bytes))

    def epoch_entered(self, worker_id: int, beginning: bytes | None) -> None:
        """Note that a worker has finished all tasks of the previous epoch."""
        self._scheduler.left_epoch(worker_id, beginning)

    def workers_wanted(self, count: int) -> None:
        """Note how many of the host's workers there should be."""
        self._wanted_workers = count

    def left(self, worker_id: int) -> None:
        """Note that a worker receives no more tasks, as it was asked to, and end it."""
        self._slot_pool.retire(worker_id)
        self._scheduler.worker_left(worker_id)

    def lost(
        self,
        worker_id: int,
        death: Death,
        was_at: AtWork,
        recalled: Collection[int] = (),
        held: Collection[int] = (),
    ) -> None:
        """Note a worker's death: it will be replaced, or its tickets fail."""
        scheduler = self._scheduler
        scheduler.recalled(recalled)
        if scheduler.workers[worker_id].state is GONE:
            return  # it had left
        death = dataclasses.replace(death, restart_limit=scheduler.restart_limit)
        is_ours = was_at.phase is Phase.LOADING and was_at.epoch == scheduler.epoch
        scheduler.worker_lost(
            worker_id,
            death,
            was_at.seq if is_ours else None,
            held=held,
            was_elsewhere=death.was_elsewhere,
            may_restart=not death.is_final,
            is_blameless=bool(death.reason),
        )

    # Ends --------------------------------------------------------------------------------

    def _fail(self, error: BaseException, why: str | None = None) -> NoReturn:
        """Close the engine, and raise an error.

        Args:
            error: The error to raise.
            why: The reason that later calls report; None for the error's own text.
        """
        self._closed_because = f" since: {error if why is None else why}"
        self.close()
        raise Instead(error) from None

    def give_up(self, error: BaseException) -> None:
        """Close, and have later calls report the exception that interrupted the engine."""
        self.note_interruption(error)
        self.close()

    def note_interruption(self, error: BaseException, *, in_sampler: bool = False) -> None:
        """Have calls after the end report an exception, unless the engine is closed already."""
        if not (self._is_closed or self._closed_because):
            self._closed_because = describe_interruption(error, in_sampler=in_sampler)

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed, by the user or because of an error."""
        return self._is_closed

    @property
    def was_closed_by_user(self) -> bool:
        """Whether ``close()`` was called, perhaps by another thread, and nothing else closed it."""
        return self._is_closed and not self._closed_because

    def check_open(self) -> None:
        """Raise an Instead with a ClosedLoaderError if the engine is closed, or in a child."""
        if self._waiter.is_inherited:
            raise Instead(ClosedLoaderError("the iterator belongs to the process that made it"))
        if self._is_closed:
            because = self._closed_because
            text = f"the iterator is closed{because}" if because else ITERATOR_CLOSED
            raise Instead(ClosedLoaderError(text))

    def close(self) -> None:
        """End the workers and free all memory. May be called again, and from any thread."""
        self._is_closed = True
        try:
            self._pool.end_workers()
        finally:
            self._scheduler.close()  # before the pool, since layouts keep references to slots
            self._draw = iter(()).__next__
            self._pool.close()

    def end_workers(self) -> None:
        """End only the workers, while another thread uses the slots. Called from any thread."""
        self._is_closed = True
        self._pool.end_workers()
