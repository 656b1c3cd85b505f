"""Acts on what the scheduler decides: has its pool make batches, and hands them over.

Runs on the thread that calls ``next_batch``, and only then: the user's, or one of
:mod:`shmloader.device.thread`. While that thread does other things, workers go on with the tasks
they have, and their answers wait in the pool.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from shmloader.batch.iterable_state import Beginning
from shmloader.engine.base import Delivery, EngineBase
from shmloader.engine.failures import FailureWatch
from shmloader.engine.inbox import Inbox
from shmloader.engine.iterable_checkpoints import IterableCheckpoints, StreamNote
from shmloader.engine.lateness import late_batch, late_start
from shmloader.engine.scheduler import Scheduler, Ticket
from shmloader.engine.slots import FREE, LENT, RETIRED
from shmloader.engine.streams import StreamBook
from shmloader.engine.wording import (
    describe_change,
    describe_death,
    describe_loading,
    describe_lost_state,
    describe_restart,
    describe_ticket,
)
from shmloader.errors import (
    ClosedLoaderError,
    InternalError,
    LoaderTimeoutError,
    SharedMemoryError,
    WorkerDiedError,
)
from shmloader.faults import FAULTS
from shmloader.insight.times import BatchTimes
from shmloader.interruptions import is_interruption
from shmloader.memory.lease import is_debugging
from shmloader.pools import Pool
from shmloader.pools.answers import Answer, Batch, Death, Empty, Failure
from shmloader.pools.status_page import AtWork, Phase

_log = logging.getLogger("shmloader")


def _note_of(worker_id: int, answer: Answer) -> StreamNote:
    """What an answer says of its worker's dataset."""
    if isinstance(answer, Batch):
        return StreamNote(worker_id, answer.snapshot, answer.fingerprint)
    if isinstance(answer, Failure):
        return StreamNote(worker_id, answer.snapshot, answer.fingerprint, has_failed=True)
    return StreamNote(worker_id, answer.snapshot)


def _explained(error: StopIteration) -> RuntimeError:
    explained = RuntimeError("a batch raised StopIteration while it was read")
    explained.__cause__ = error
    return explained


class Engine(EngineBase):
    """Batches out of a pool of workers.

    Args:
        pool: Its workers, and their memory; the engine owns it from now on.
        worker_count: How many they are.
        window: Most tickets in flight.
        lend_limit: Most batches lent at once.
        in_order: Whether batches come in the sampler's order.
        timeout_s: Longest wait for a batch; 0 for ever.
        worker_restarts: Dead workers that are replaced in an epoch.
        streams: Where the workers' datasets begin, if they are iterable, or have a state of their
            own.
        is_iterable: Whether they are iterable.
        is_dynamic: Whether tickets are dispatched dynamically; see :class:`Scheduler`.
        is_seeded: Whether each sample has random streams of its own.
        watch: Notes bad samples; None if they are raised.
        present: Workers that there are at first; others come by :meth:`want_workers`. None: all.
            With dynamic dispatch only.
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
        worker_restarts: int = 0,
        streams: IterableCheckpoints | None = None,
        is_iterable: bool = True,
        is_dynamic: bool = False,
        is_seeded: bool = False,
        watch: FailureWatch | None = None,
        present: int | None = None,
    ) -> None:
        super().__init__(window=window, timeout_s=timeout_s, watch=watch)
        self._pool = pool
        self.counts = pool.counts
        # How many workers another thread wants; None once the scheduler knows.
        self._wanted_workers: int | None = None
        self._restart_limit = worker_restarts
        self._streams: StreamBook | None = None
        if streams is not None:
            self._streams = StreamBook(streams, in_order=in_order, is_iterable=is_iterable)
        self.is_dynamic = is_dynamic
        self._is_seeded = is_seeded
        self._scheduler = Scheduler(
            worker_count,
            window,
            lend_limit,
            in_order=in_order,
            restart_limit=worker_restarts,
            first_worker=0 if streams is None else streams.next_worker,
            ended=()
            if streams is None
            else [checkpoint.has_ended for checkpoint in streams.checkpoints],
            is_dynamic=is_dynamic,
            has_queue=pool.has_queue,
            present=present,
        )
        if is_debugging():
            self._scheduler.slots.on_free = pool.poison

    # Epochs ------------------------------------------------------------------------------

    def resume(self) -> None:
        """Tell each worker where its dataset begins. Before the first task is sent.

        Raises:
            OSError: If there are no descriptors left for a state.
            SharedMemoryError: If there is no memory for it.
        """
        for worker in self._scheduler.workers:
            self._resume(worker.worker_id)

    def _resume(self, worker_id: int) -> None:
        if self._streams is not None:
            self._pool.resume(worker_id, self._streams.checkpoint(worker_id))

    @property
    def stream_beginnings(self) -> IterableCheckpoints | None:
        """See :attr:`EngineBase.stream_beginnings`."""
        return None if self._streams is None else self._streams.beginnings

    def take_stream_ends(self) -> list[StreamNote]:
        """See :meth:`EngineBase.take_stream_ends`."""
        return [] if self._streams is None else self._streams.take_ends()

    def wake(self) -> None:
        """Get the engine's thread out of its wait; from any thread."""
        self._pool.wake()

    def wake_soon(self) -> None:
        """See :meth:`EngineBase.wake_soon`."""
        self._pool.wake_soon()

    def hurry(self) -> None:
        """See :meth:`EngineBase.hurry`."""
        self._pool.hurry()

    def restart(self, tickets: Iterator[object]) -> None:
        """Begin a further epoch with the same workers.

        What was in flight is waited for and thrown away: the workers load it anyway, as torch's
        do, so that their random streams are where torch's would be. What waits for a worker is
        thrown away at once.

        Raises:
            WorkerDiedError: If a worker is gone. The engine is closed then.
            LoaderTimeoutError: If they took too long. The engine is closed then.
        """
        self.check_open()
        try:
            self._leave_epoch()
            self.start(tickets)
        except BaseException as error:
            if is_interruption(error):  # and not of the user's sampler, which may go on
                self.give_up(error)
            raise

    def _leave_epoch(self) -> None:
        self._draw = iter(()).__next__
        try:
            self._finish_epoch()
        except BaseException as error:
            if not is_interruption(error):
                self.close()
            raise

    def _finish_epoch(self) -> None:
        scheduler = self._scheduler
        scheduler.end_epoch()
        self._drop_slots()
        if self._streams is not None:
            self._streams.leave()
        for worker in scheduler.workers:
            if worker.is_alive:
                self._pool.start_epoch(worker.worker_id, scheduler.epoch + 1)
        self._restart_workers()
        while True:
            dead = scheduler.workers.first_dead()
            if dead is not None:
                assert isinstance(dead.death, Death)
                self._fail(WorkerDiedError(describe_death(dead.worker_id, dead.death, None)))
            if scheduler.is_epoch_left:
                break
            try:
                self._receive_any(self._deadline())
            except LoaderTimeoutError:
                busy = [one for one in self._alive() if not scheduler.workers[one].has_left_epoch]
                self._fail(late_start(self._timeout_s, self._pool, scheduler, busy))
            self.check_open()
        scheduler.start_epoch()
        self._left_out.clear()
        if self._streams is not None:
            self._streams.start_epoch()
        if self._watch is not None:
            self._watch.start_epoch()

    # One batch ---------------------------------------------------------------------------

    @property
    def _has_only_waited(self) -> bool:
        return self._pool.is_waiting

    def _next_batch(self) -> object:
        self._pool.is_waiting = False
        scheduler = self._scheduler
        self._tidy()
        deadline: float | None = None
        while True:
            if self._inbox:
                self.take_tickets()
            has_place = self._may_deliver is None or self._may_deliver()
            if has_place:
                # With dynamic dispatch all workers are to be looked after.
                has_taken = not self.is_dynamic and self._take_awaited()
                self.in_transit = True
                ticket = scheduler.take_next()
                if ticket is not None:
                    if self._watch is not None and self._note_samples(self._watch, ticket):
                        deadline = None
                        continue
                    return self._hand_over(ticket)
                self.in_transit = False
                if has_taken:
                    continue
                if scheduler.is_exhausted and not self._awaits_tickets():
                    if self._inbox:
                        continue
                    self._raise_end()
            if self._inbox is None:  # else the user's thread looks at its clock
                deadline = deadline or self._deadline()
            if FAULTS is not None:
                FAULTS.reach("main.next")
            self._restart_workers()
            if self.is_dynamic:
                self._adapt()
            if self._inbox is None or self._may_wait(self._inbox, has_place=has_place):
                self._receive_any(deadline)
            self._pause()
            self.check_open()

    def _tidy(self) -> None:
        """Give back memory that slots do not need, before anything else is done."""
        if self._pool.wants_tidying:
            self._collect_returns()
            self._pool.tidy(self._scheduler.slots.free_ids)

    def _may_wait(self, inbox: Inbox, *, has_place: bool) -> bool:
        """Have the user's thread wake us if we have use for what it brings; whether to wait for it.

        Not if it has come since we looked: that woke nobody.
        """
        if not self.is_dynamic:
            return True
        lacks_place = not has_place and self._scheduler.has_next
        inbox.is_awaited = lacks_place or self._scheduler.has_room
        if not inbox.is_awaited:
            return True
        return not inbox and (has_place or self._may_deliver is None or not self._may_deliver())

    def _take_awaited(self) -> bool:
        """Take a message of the worker whose answer must come next, if one is here, or about to be.

        Most often it is here already, which spares us asking for events.

        Returns:
            Whether there was one.
        """
        awaited = self._scheduler.awaited()
        if awaited is None or awaited.answer is not None:
            return False
        self.in_transit = True
        has_taken = self._pool.poll(awaited.worker_id, self)
        self.in_transit = False
        return has_taken

    @property
    def _takes_tickets(self) -> bool:
        return self._scheduler.takes_tickets

    def _note_samples(self, watch: FailureWatch, ticket: Ticket) -> bool:
        """Count the samples of a ticket that is next; whether nothing is left of its batch."""
        answer = ticket.answer
        if not isinstance(answer, Batch | Failure | Empty):
            return False
        worker_id, error = ticket.worker_id, None
        if answer.report is not None:
            batch = f"batch {ticket.seq}"
            error = watch.note(answer.report, batch, worker_id, self._pool.pid(worker_id))
        if error is None and type(answer) is Empty:
            error = watch.left_out(describe_ticket(ticket))
        if error is not None:
            self._fail(error)
        if type(answer) is not Empty:
            return False
        self._settle(ticket, is_kept=answer.is_kept)
        self._left_out.append(ticket.seq)
        self._replace_ticket()
        return True

    def _hand_over(self, ticket: Ticket) -> object:
        """Build a ticket's batch, or raise what came instead; and offer one more ticket."""
        if FAULTS is not None:
            FAULTS.reach("main.deliver")
        if self._pool.ended_leases:
            self._collect_returns()
        answer = ticket.answer
        if not isinstance(answer, Batch):
            self._raise_instead(ticket, answer)
        self._note_delivery(ticket, answer, self._times(ticket, answer))
        try:
            batch = self._build(ticket, answer)
        except Exception as error:
            if is_interruption(error):
                raise
            self._offer()
            # A StopIteration of an object that is unpickled.
            self._raise_told(_explained(error) if isinstance(error, StopIteration) else error)
        self._offer()
        return batch

    def _raise_instead(self, ticket: Ticket, answer: object) -> NoReturn:
        """Raise what came in place of a batch; and offer one more ticket, if there are more."""
        pid = self._pool.pid(ticket.worker_id)
        if isinstance(answer, Failure):
            # No local name for the error: its traceback holds this frame.
            self._settle(ticket, is_kept=answer.is_kept)
            note = describe_loading(ticket, pid)
            if answer.is_final:
                self._fail(answer.error.rebuilt(note), "its dataset could not be resumed")
            self._note_delivery(ticket, answer, None)
            self._offer()
            self._raise_told(answer.error.rebuilt(note))
        if isinstance(answer, Death):
            self._settle(ticket, is_kept=False)
            self._fail(WorkerDiedError(describe_death(ticket.worker_id, answer, ticket)))
        raise InternalError(f"an answer of unknown type: {answer!r}")

    def _note_delivery(
        self, ticket: Ticket, answer: Batch | Failure, times: BatchTimes | None
    ) -> None:
        """A ticket is handed over: as a batch, or as what is raised in its place."""
        notes: Sequence[StreamNote] = ()
        if self._streams is not None:
            notes = self._streams.handed_over(ticket.seq, _note_of(ticket.worker_id, answer))
        self.delivery = Delivery(ticket.seq, tuple(self._left_out), notes, times)
        self._left_out.clear()

    def _times(self, ticket: Ticket, answer: Batch) -> BatchTimes | None:
        if answer.times is None:
            return None
        return BatchTimes(
            ticket.worker_id,
            ticket.offered_ns,
            ticket.sent_ns,
            answer.times,
            answer.looked_ns,
            answer.seen_ns,
            time.monotonic_ns(),
            answer.nbytes,
            self._scheduler.slots.lent_count,
        )

    def _build(self, ticket: Ticket, answer: Batch) -> object:
        slot_id = ticket.slot_id
        if answer.check is not None:
            self._check(ticket, answer)
        if answer.lends and self._scheduler.may_lend:
            try:
                self._pool.lock(slot_id)
            except BaseException:
                self._settle(ticket, is_kept=answer.is_kept)
                raise
            self._scheduler.delivered(ticket, LENT)
            self.counts.lent += 1
            return self._pool.lend(slot_id, answer)
        self.counts.copied += answer.lends
        try:
            return self._pool.copy_out(slot_id, answer)
        finally:
            self._settle(ticket, is_kept=answer.is_kept)

    def _check(self, ticket: Ticket, answer: Batch) -> None:
        """Whether a batch lies in its slot as its worker left it (``SHMLOADER_DEBUG=1``)."""
        try:
            change = self._pool.find_change(ticket.slot_id, answer)
        except SharedMemoryError:
            self._settle(ticket, is_kept=answer.is_kept)
            raise
        if change:
            # Whoever writes there may go on to do so.
            self._settle(ticket, is_kept=True)
            pid = self._pool.pid(ticket.worker_id)
            raise InternalError(describe_change(ticket, pid, change))

    def _settle(self, ticket: Ticket, *, is_kept: bool) -> None:
        """A ticket's slot is done with, nothing of it is lent."""
        state = RETIRED if is_kept else FREE
        self._scheduler.delivered(ticket, state)
        if is_kept:
            self._drop_slots()

    def _collect_returns(self) -> None:
        for slot_id, is_clean in self._pool.take_returns():
            self._scheduler.slot_returned(slot_id, clean=is_clean)
        self._drop_slots()

    def _drop_slots(self) -> None:
        """Let go of the slots that were retired."""
        if self._scheduler.slots.retired:
            for dropped in self._scheduler.take_dropped_slots():
                self._pool.drop_slot(dropped.slot_id, dropped.worker_ids)

    # Tickets out -------------------------------------------------------------------------

    def _offer_indices(self, indices: object) -> None:
        now_ns = time.monotonic_ns()
        self._scheduler.offer(indices, now_ns)
        self._send_tasks(now_ns)

    def _send_tasks(self, now_ns: int) -> None:
        """Send the tickets that have a worker, or that a worker has room for."""
        while (ticket := self._scheduler.next_task(now_ns)) is not None:
            self._send(ticket)

    def _ask_for_tickets(self) -> None:
        for _ in range(self._scheduler.take_wanted_tickets()):
            self._replace_ticket()

    def _send(self, ticket: Ticket) -> None:
        """Send a ticket to its worker."""
        try:
            refused = self._pool.send(ticket, self._scheduler.epoch)
        except (OSError, SharedMemoryError) as error:
            if is_interruption(error):
                raise
            self._fail(error)
        if refused is not None:
            # Told at its place in the order, as a failure of the dataset is.
            self.answered(ticket.seq, self._scheduler.epoch, ticket.worker_id, refused)

    # Answers in --------------------------------------------------------------------------

    def _receive_any(self, deadline: float | None) -> None:
        """Wait for something to happen, and take note of all that has."""
        timeout_s = None if deadline is None else deadline - time.monotonic()
        self.in_transit = True
        happened = self._pool.wait(timeout_s, self)
        if not happened and deadline is not None and time.monotonic() >= deadline:
            self.in_transit = False
            raise self.late()
        if self.is_dynamic and happened:
            self._send_tasks(time.monotonic_ns())
        self.in_transit = False
        self._restart_workers()

    def late(self) -> LoaderTimeoutError:
        """What is to be raised when a batch has not come in time. From any thread."""
        return late_batch(self._timeout_s, self._pool, self._scheduler, self._alive())

    def _alive(self) -> list[int]:
        return [worker.worker_id for worker in self._scheduler.workers if worker.is_alive]

    def _restart_workers(self) -> None:
        """Start a worker in place of each that was lost, and have it do what that one had in work.

        Not where the loss is noted: the thread that we belong to may be told to end while it waits
        for the user's, and then the next epoch finds here what is left to do.
        """
        while (worker := self._scheduler.workers.next_restart()) is not None:
            worker_id = worker.worker_id
            assert isinstance(worker.death, Death)
            checkpoint = None if self._streams is None else self._streams.checkpoint(worker_id)
            seqs = [ticket.seq for ticket in self._scheduler.wanted_of(worker_id)]
            text = describe_restart(
                worker_id, worker.death, seqs, checkpoint, is_seeded=self._is_seeded
            )
            self._have_done(functools.partial(self._restart_worker, worker_id, text))
            self._note_start(worker_id)

    def _restart_worker(self, worker_id: int, text: str) -> None:
        """Start a worker in place of a lost one, on the user's thread."""
        # An interrupt here leaves the engine unusable.
        self.in_transit = True
        try:
            self._pool.replace(worker_id)
        except OSError as error:
            self._fail(error)
        except ClosedLoaderError:
            self.check_open()
            raise
        _log.warning(text)
        self.counts.restarts += 1

    def _note_start(self, worker_id: int) -> None:
        """A worker has been started: tell it where its dataset begins, and what there is to do."""
        self._resume(worker_id)
        self._scheduler.worker_started(worker_id)
        self._send_tasks(time.monotonic_ns())
        self.in_transit = False

    # More workers, or fewer ---------------------------------------------------------------

    @property
    def present_workers(self) -> int:
        """Workers that are given tasks. Asked by any thread."""
        return self._scheduler.workers.present_count

    def want_workers(self, count: int) -> None:
        """Have so many workers from now on. From any thread."""
        self._wanted_workers = count
        self.wake()

    def _adapt(self) -> None:
        """Have as many workers as are wanted: start some, or let some go when they are done."""
        scheduler = self._scheduler
        if self._wanted_workers is not None:
            wanted, self._wanted_workers = self._wanted_workers, None
            scheduler.workers_wanted(wanted)
            self._send_tasks(time.monotonic_ns())
        while (worker := scheduler.workers.next_start()) is not None and self._add_worker(
            worker.worker_id
        ):
            pass
        self._ask_for_tickets()
        while (worker := scheduler.workers.next_stop()) is not None:
            self._pool.retire(worker.worker_id)
            scheduler.worker_stopped(worker.worker_id)

    def _add_worker(self, worker_id: int) -> bool:
        """Start a worker; whether there is one now."""
        try:
            self._have_done(functools.partial(self._start_worker, worker_id))
        except OSError as error:
            present = self.present_workers
            _log.warning("num_workers stays at %d: %s", present, error)
            self._scheduler.workers_wanted(present)
            return False
        self._note_start(worker_id)
        return True

    def _start_worker(self, worker_id: int) -> None:
        """Start a worker, on the user's thread."""
        self.in_transit = True
        try:
            self._pool.start(worker_id)
        except ClosedLoaderError:
            self.check_open()
            raise
        except OSError:
            self.in_transit = False
            raise

    # What the pool tells: see :class:`shmloader.pools.Events` --------------------------------

    def last_layout(self, worker_id: int) -> object:
        """The last layout of a worker's batches."""
        return self._scheduler.workers[worker_id].last_layout

    def last_layouts(self) -> Iterable[object]:
        """The same of all workers."""
        return [worker.last_layout for worker in self._scheduler.workers]

    def layout_sent(self, worker_id: int, layout: object) -> None:
        """A worker's batches have this layout from now on."""
        self._scheduler.layout_sent(worker_id, layout)

    def answered(self, seq: int, epoch: int, worker_id: int, answer: Answer) -> None:
        """A task has been done, or has failed."""
        now_ns = time.monotonic_ns()
        if type(answer) is Batch:
            answer.looked_ns, answer.seen_ns = self._looked_ns, now_ns
        ticket = self._scheduler.answered(
            seq,
            epoch,
            answer,
            taker=worker_id if self._pool.has_queue else None,
            is_kept=answer.is_kept,
            now_ns=now_ns,
        )
        if ticket.is_dropped:
            self._drop_slots()
        elif self._streams is not None and not (type(answer) is Failure and answer.is_final):
            # What stands for no batch, since a dataset could not be resumed, is not noted.
            self._streams.answered(_note_of(worker_id, answer))

    def stream_ended(
        self, seq: int, epoch: int, worker_id: int, beginning: Beginning, *, is_kept: bool
    ) -> None:
        """A worker's iterable dataset has nothing for this task, nor for any later one."""
        is_first = self._scheduler.stream_ended(
            seq, epoch, is_kept=is_kept, now_ns=time.monotonic_ns()
        )
        if is_first and self._streams is not None:
            self._streams.ended(worker_id, seq, beginning)
        self._drop_slots()
        self._ask_for_tickets()

    def state_part(self, worker_id: int, data: bytes) -> None:
        """A piece of what the worker's next epoch begins with has come."""
        if self._streams is not None:
            self._streams.note_part(worker_id, data)

    def state_lost(self, worker_id: int, nbytes: int, most_bytes: int) -> None:
        """The state of a worker's dataset has found no room in a slot."""
        _log.warning("%s", describe_lost_state(worker_id, nbytes, most_bytes))

    def epoch_entered(self, worker_id: int, beginning: bytes | None) -> None:
        """A worker has done all tasks of the epoch before."""
        if self._streams is not None:
            self._streams.entered(worker_id, beginning)
        self._scheduler.left_epoch(worker_id)

    def lost(self, worker_id: int, death: Death, was_at: AtWork) -> None:
        """A worker is dead: another is to do its work, or all that waits for it fails."""
        scheduler = self._scheduler
        death = dataclasses.replace(death, restart_limit=self._restart_limit)
        is_ours = was_at.phase is Phase.LOADING and was_at.epoch == scheduler.epoch
        scheduler.worker_lost(worker_id, death, was_at.seq if is_ours else None)
        if self._streams is not None:
            self._streams.lost(worker_id)

    # Ends --------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ClosedLoaderError if it is closed, or in a forked child."""
        if self._pool.is_inherited:
            raise ClosedLoaderError("the iterator belongs to the process that made it")
        if self._is_closed:
            raise ClosedLoaderError(f"the iterator is closed{self._closed_because}")

    def close(self) -> None:
        """End the workers and let go of all memory. May be called again, and from any thread."""
        self._is_closed = True
        try:
            self._pool.end_workers()
        finally:
            self._scheduler.close()  # before the pool: layouts keep something of slots
            self._draw = iter(()).__next__
            self._pool.close()

    def end_workers(self) -> None:
        """End the workers alone, where another thread looks at the slots; from any thread."""
        self._is_closed = True
        self._pool.end_workers()
