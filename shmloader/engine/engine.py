"""Acts on what the scheduler decides: sends tasks, takes answers, builds batches.

Runs on the thread that calls ``next_batch``, and only then: the user's, or one of
:mod:`shmloader.stages.thread`. While that thread does other things, workers go on with the tasks
they have, and their answers wait in the sockets.
"""

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import cast

from shmloader.engine.answers import (
    Batch,
    Death,
    Empty,
    Failure,
    Reader,
    UnreadableLayout,
    read_layout,
)
from shmloader.engine.arena import Arena, PageLocker
from shmloader.engine.base import EngineBase
from shmloader.engine.failures import FailureWatch
from shmloader.engine.inbox import Inbox
from shmloader.engine.lateness import late_batch, late_start
from shmloader.engine.scheduler import Scheduler, Ticket
from shmloader.engine.sender import Sender
from shmloader.engine.slots import FREE, LENT, RETIRED
from shmloader.engine.stream_states import StreamNote, StreamStates
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
from shmloader.interruptions import is_interruption
from shmloader.memory.debug import checksum, is_debugging
from shmloader.memory.room import Demand, Room
from shmloader.memory.slot import Slot
from shmloader.messages import (
    BatchDone,
    BatchEmpty,
    BatchFailed,
    EpochStarted,
    NextWanted,
    Spilled,
    StartEpoch,
    StatePart,
    StreamEnded,
    TooLong,
    pack,
    unpack,
)
from shmloader.stats.times import BatchTimes
from shmloader.workers.bad_samples import SampleReport
from shmloader.workers.board import Phase
from shmloader.workers.finishing import finish
from shmloader.workers.pool import Pool
from shmloader.workers.remote_error import RemoteError
from shmloader.workers.stream import Beginning

_log = logging.getLogger("shmloader")


def _is_final(answer: object) -> bool:
    """Whether it stands for no batch, since a dataset could not be resumed."""
    return isinstance(answer, Failure) and answer.is_final


def _note_of(worker_id: int, answer: object) -> StreamNote:
    """What an answer says of its worker's dataset."""
    if isinstance(answer, Batch):
        return StreamNote(worker_id, answer.snapshot, answer.fingerprint)
    if isinstance(answer, Failure):
        return StreamNote(worker_id, answer.snapshot, answer.fingerprint, has_failed=True)
    return StreamNote(worker_id, answer.snapshot if isinstance(answer, Empty) else None)


def _explained(error: StopIteration) -> RuntimeError:
    explained = RuntimeError("a batch raised StopIteration while it was read")
    explained.__cause__ = error
    return explained


class Engine(EngineBase):
    """Batches out of worker processes.

    Attributes:
        arena: The memory of its slots.

    Args:
        pool: Its workers; the engine owns it from now on.
        worker_count: How many they are.
        window: Most tickets in flight.
        lend_limit: Most batches lent at once.
        slot_bytes: Length of each slot.
        in_order: Whether batches come in the sampler's order.
        timeout_s: Longest wait for a batch; 0 for ever.
        worker_restarts: Dead workers that are replaced in an epoch.
        streams: Where the workers' datasets begin, if they are iterable, or have a state of their
            own.
        is_iterable: Whether they are iterable.
        is_dynamic: Whether tickets are dispatched dynamically; see :class:`Scheduler`.
        is_seeded: Whether each sample has random streams of its own.
        locker: Locks the pages of slots, where a device reads them.
        demand: What it may ask of memory; None: nobody asks whether it is there.
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
        slot_bytes: int,
        in_order: bool,
        timeout_s: float,
        worker_restarts: int = 0,
        streams: StreamStates | None = None,
        is_iterable: bool = True,
        is_dynamic: bool = False,
        is_seeded: bool = False,
        locker: PageLocker | None = None,
        demand: Demand | None = None,
        watch: FailureWatch | None = None,
        present: int | None = None,
    ) -> None:
        super().__init__(window=window, timeout_s=timeout_s, watch=watch)
        self._pool = pool
        # How many workers another thread wants; None once the scheduler knows.
        self._wish: int | None = None
        self._restart_limit = worker_restarts
        self._streams: StreamBook | None = None
        if streams is not None:
            self._streams = StreamBook(streams, in_order=in_order, is_iterable=is_iterable)
        # A state that did not fit is told once.
        self._has_lost_state = False
        self.is_dynamic = is_dynamic
        self._is_seeded = is_seeded
        self._scheduler = Scheduler(
            worker_count,
            window,
            lend_limit,
            in_order=in_order,
            restart_limit=worker_restarts,
            first_worker=0 if streams is None else streams.next_worker,
            ended=() if streams is None else [place.has_ended for place in streams.places],
            is_dynamic=is_dynamic,
            present=present,
        )
        self.arena = Arena(slot_bytes, locker, None if demand is None else Room(demand))
        if is_debugging():
            self._scheduler.slots.on_free = self.arena.poison
        self.arena.counts = self.counts
        self.counts.slot_count = window + lend_limit
        self._sender = Sender(pool, self.arena)

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
            self._sender.resume(worker_id, self._streams.place(worker_id))

    @property
    def stream_beginnings(self) -> StreamStates | None:
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
        self._draw = iter(()).__next__
        try:
            self._finish_epoch()
        except BaseException:
            self.close()
            raise
        self._draw = tickets.__next__
        self._prime()

    def _finish_epoch(self) -> None:
        scheduler = self._scheduler
        scheduler.end_epoch()
        self._drop_slots()
        if self._streams is not None:
            self._streams.leave()
        message = pack(StartEpoch(scheduler.epoch + 1))
        for worker in scheduler.workers:
            if worker.is_alive:
                self._pool.send(worker.worker_id, message)
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
        self._give_back_early()
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

    def _give_back_early(self) -> None:
        """Where memory is short, have free slots give it back before anything else is done."""
        if self.arena.is_short:
            self._collect_returns()
            for slot_id in self._scheduler.slots.free_ids:
                self.arena.prepare(slot_id)

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
        worker_id = awaited.holder
        data = self._pool.receive(worker_id)
        if data is not None:
            self._take(worker_id, data)
        self.in_transit = False
        return data is not None

    @property
    def _takes_tickets(self) -> bool:
        return self._scheduler.takes_tickets

    def _note_samples(self, watch: FailureWatch, ticket: Ticket) -> bool:
        """Count the samples of a ticket that is next; whether nothing is left of its batch."""
        answer = ticket.answer
        if not isinstance(answer, Batch | Failure | Empty):
            return False
        worker_id, error = ticket.holder, None
        if answer.report is not None:
            report = SampleReport.loads(answer.report)
            batch = f"batch {ticket.seq}"
            error = watch.note(report, batch, worker_id, self._pool.pid(worker_id))
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
        if self.arena.leases.has_returns:
            self._collect_returns()
        if self.arena.wants_trim:
            self.arena.trim(self._scheduler.slots.free_ids)
        answer = ticket.answer
        if type(answer) is Failure and answer.is_final:
            self._settle(ticket, is_kept=answer.is_kept)
            error = answer.error.rebuilt(describe_loading(ticket, self._pool.pid(ticket.holder)))
            self._fail(error, "its dataset could not be resumed")
        if type(answer) is not Death:
            times = self._times(ticket, answer) if type(answer) is Batch else None
            notes: Sequence[StreamNote] = ()
            if self._streams is not None:
                notes = self._streams.handed_over(ticket.seq, _note_of(ticket.holder, answer))
            self._give_receipt(ticket.seq, notes, times)
        if type(answer) is Batch:
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
        if type(answer) is Failure:
            self._settle(ticket, is_kept=answer.is_kept)
            self._offer()
            note = describe_loading(ticket, self._pool.pid(ticket.holder))
            self._raise_told(answer.error.rebuilt(note))
        if type(answer) is Death:
            self._settle(ticket, is_kept=False)
            self._fail(WorkerDiedError(describe_death(ticket.holder, answer, ticket)))
        raise InternalError(f"an answer of unknown type: {answer!r}")

    def _times(self, ticket: Ticket, answer: Batch) -> BatchTimes | None:
        if answer.times is None:
            return None
        return BatchTimes(
            ticket.holder,
            ticket.offered_ns,
            ticket.sent_ns,
            answer.times,
            answer.looked_ns,
            answer.seen_ns,
            time.monotonic_ns(),
            answer.used_bytes,
            self._scheduler.slots.lent_count,
        )

    def _build(self, ticket: Ticket, answer: Batch) -> object:
        reader = answer.reader
        slot_id = ticket.place
        try:
            slot = self.arena[slot_id]
        except SharedMemoryError:
            self._settle(ticket, is_kept=answer.is_kept)
            raise
        if answer.check is not None:
            self._check(ticket, slot, *answer.check)
        if reader.lends and self._scheduler.may_lend:
            try:
                self.arena.lock(slot_id)
            except BaseException:
                self._settle(ticket, is_kept=answer.is_kept)
                raise
            self._scheduler.delivered(ticket, LENT)
            self.counts.lent += 1
            lease = self.arena.leases.open(slot_id, slot, is_clean=not answer.is_kept)
            return reader.read(slot, lease)
        self.counts.copied += reader.lends
        try:
            return reader.read(slot, None)
        finally:
            self._settle(ticket, is_kept=answer.is_kept)

    def _check(self, ticket: Ticket, slot: Slot, used_bytes: int, expected: int) -> None:
        """Whether a batch lies in its slot as its worker left it (``SHMLOADER_DEBUG=1``)."""
        found = checksum(slot, used_bytes)
        if found == expected:
            return
        # Whoever writes there may go on to do so.
        self._settle(ticket, is_kept=True)
        pid = self._pool.pid(ticket.holder)
        raise InternalError(
            describe_change(ticket, pid, f"{used_bytes} bytes: {expected:08x}, now {found:08x}")
        )

    def _settle(self, ticket: Ticket, *, is_kept: bool) -> None:
        """A ticket's slot is done with, nothing of it is lent."""
        state = RETIRED if is_kept else FREE
        self._scheduler.delivered(ticket, state)
        self._drop_slots()

    def _collect_returns(self) -> None:
        for slot_id, is_clean in self.arena.leases.collect():
            self._scheduler.slot_returned(slot_id, clean=is_clean)
        self._drop_slots()

    def _drop_slots(self) -> None:
        """Let go of the slots that were retired."""
        if self._scheduler.slots.retired:
            for dropped in self._scheduler.take_dropped_slots():
                self._sender.drop(dropped)

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
            refused = self._sender.send(ticket, self._scheduler.epoch)
        except (OSError, SharedMemoryError) as error:
            if is_interruption(error):
                raise
            self._fail(error)
        if refused is not None:
            # Told at its place in the order, as a failure of the dataset is.
            self._note_answer(ticket.seq, self._scheduler.epoch, Failure(refused, is_kept=False))

    # Answers in --------------------------------------------------------------------------

    def _receive_any(self, deadline: float | None) -> None:
        """Wait for something to happen, and take note of all that has."""
        timeout_s = None if deadline is None else deadline - time.monotonic()
        self.in_transit = True
        happened = self._pool.wait(timeout_s)
        if not happened and deadline is not None and time.monotonic() >= deadline:
            self.in_transit = False
            raise self.late()
        for worker_id, data in happened:
            if data is None:
                self._lose(worker_id)
            else:
                self._take(worker_id, data)
        if self.is_dynamic and happened:
            self._send_tasks(time.monotonic_ns())
        self.in_transit = False
        self._restart_workers()

    def late(self) -> LoaderTimeoutError:
        """What is to be raised when a batch has not come in time. From any thread."""
        return late_batch(self._timeout_s, self._pool, self._scheduler, self._alive())

    def _alive(self) -> list[int]:
        return [worker.worker_id for worker in self._scheduler.workers if worker.is_alive]

    def _lose(self, worker_id: int) -> None:
        """A worker is dead: another is to do its work, or all that waits for it fails."""
        scheduler = self._scheduler
        death = Death(
            self._pool.pid(worker_id),
            self._pool.exit_code(worker_id),
            self._pool.oom_kills(worker_id),
            self._restart_limit,
        )
        was_at = self._pool.was_at(worker_id)
        is_ours = was_at.phase is Phase.LOADING and was_at.epoch == scheduler.epoch
        scheduler.worker_lost(worker_id, death, was_at.seq if is_ours else None)
        if self._streams is not None:
            self._streams.lost(worker_id)

    def _restart_workers(self) -> None:
        """Start a worker in place of each that was lost, and have it do what that one had in work.

        Not where the loss is noted: the thread that we belong to may be told to end while it waits
        for the user's, and then the next epoch finds here what is left to do.
        """
        while (worker := self._scheduler.workers.next_restart()) is not None:
            worker_id = worker.worker_id
            assert isinstance(worker.death, Death)
            place = None if self._streams is None else self._streams.place(worker_id)
            seqs = [ticket.seq for ticket in self._scheduler.wanted_of(worker_id)]
            text = describe_restart(worker_id, worker.death, seqs, place, is_seeded=self._is_seeded)
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
        self._sender.forget(worker_id)
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
        self._wish = count
        self.wake()

    def _adapt(self) -> None:
        """Have as many workers as are wanted: start some, or let some go when they are done."""
        scheduler = self._scheduler
        if self._wish is not None:
            wish, self._wish = self._wish, None
            scheduler.workers_wanted(wish)
            self._send_tasks(time.monotonic_ns())
        while (worker := scheduler.workers.next_start()) is not None and self._add_worker(
            worker.worker_id
        ):
            pass
        self._ask_for_tickets()
        while (worker := scheduler.workers.next_stop()) is not None:
            self._pool.retire(worker.worker_id)
            self._sender.forget(worker.worker_id)
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

    def _take(self, worker_id: int, data: bytes) -> None:
        """Take note of a worker's message."""
        message = unpack(data)
        if self._streams is not None:
            self._sender.arrived(worker_id)
        if type(message) is BatchDone:
            self._take_batch(worker_id, message)
        elif type(message) is BatchFailed:
            self._take_failure(worker_id, message)
        elif type(message) is BatchEmpty:
            self._take_empty(worker_id, message)
        elif type(message) is StreamEnded:
            self._take_end(worker_id, message)
        elif type(message) is EpochStarted:
            if self._streams is not None:
                self._streams.entered(worker_id, message.beginning)
            self._scheduler.left_epoch(worker_id)
        elif type(message) is NextWanted:
            self._scheduler.requested(worker_id)
        elif type(message) is StatePart and self._streams is not None:
            self._streams.note_part(worker_id, message.data)
        else:
            raise InternalError(f"a worker sent {message!r}")

    def _take_batch(self, worker_id: int, message: BatchDone) -> None:
        seq, epoch, layout, used_bytes, is_kept, expected, sent, saved, times, taken = message
        report = None if sent is None else self._report_of(seq, sent)
        self.arena.note_use(self._scheduler.slot_of(seq), used_bytes)
        if layout is not None:
            data = layout if isinstance(layout, bytes) else self._spilled(seq, layout)
            self._note_layout(worker_id, data)
        reader = self._reader(worker_id)
        if isinstance(reader, UnreadableLayout):
            self._note_answer(seq, epoch, Failure(reader.error, is_kept=is_kept, report=report))
            return
        check = None if expected is None else (used_bytes, expected)
        snapshot = self._state(worker_id, seq, saved)
        answer = Batch(
            reader,
            is_kept=is_kept,
            check=check,
            report=report,
            snapshot=snapshot,
            times=times,
            used_bytes=used_bytes,
            looked_ns=self._looked_ns,
            seen_ns=time.monotonic_ns(),
            fingerprint=taken,
        )
        self._note_answer(seq, epoch, answer)

    def _note_layout(self, worker_id: int, data: bytes) -> None:
        known = [worker.last_layout for worker in self._scheduler.workers]
        self._scheduler.layout_sent(worker_id, read_layout(data, known))

    def _reader(self, worker_id: int) -> Reader | UnreadableLayout:
        """What reads a worker's batches."""
        reader = self._scheduler.workers[worker_id].last_layout
        if reader is None:
            raise InternalError(f"worker {worker_id} sent a batch without a layout")
        return cast("Reader | UnreadableLayout", reader)

    def _take_end(self, worker_id: int, message: StreamEnded) -> None:
        seq = message.seq
        slot_id = self._scheduler.slot_of(seq)
        self.arena.note_failed_use(slot_id, message.touched_bytes)
        # Before the slot is free.
        next_epoch = Beginning.loads(self._state(worker_id, seq, message.beginning))
        if (
            self._scheduler.stream_ended(
                seq, message.epoch, is_kept=message.kept, now_ns=time.monotonic_ns()
            )
            and self._streams is not None
        ):
            self._streams.ended(worker_id, seq, next_epoch)
        self._drop_slots()
        self._ask_for_tickets()

    def _take_empty(self, worker_id: int, message: BatchEmpty) -> None:
        seq = message.seq
        report = self._report_of(seq, message.report)
        snapshot = self._state(worker_id, seq, message.snapshot)
        answer = Empty(is_kept=message.kept, report=report, snapshot=snapshot)
        self._note_answer(seq, message.epoch, answer)

    def _take_failure(self, worker_id: int, message: BatchFailed) -> None:
        data = message.error
        if not isinstance(data, bytes):
            data = self._spilled(message.seq, data)
        self.arena.note_failed_use(self._scheduler.slot_of(message.seq), message.touched_bytes)
        report = self._report_of(message.seq, message.report)
        snapshot = self._state(worker_id, message.seq, message.snapshot)
        error = RemoteError.loads(data)
        answer = Failure(
            error,
            is_kept=message.kept,
            report=report,
            snapshot=snapshot,
            fingerprint=message.fingerprint,
            is_final=message.is_final,
        )
        self._note_answer(message.seq, message.epoch, answer)

    def _report_of(self, seq: int, report: bytes | Spilled | None) -> bytes | None:
        return self._spilled(seq, report) if isinstance(report, Spilled) else report

    def _note_answer(self, seq: int, epoch: int, answer: Batch | Failure | Empty) -> Ticket:
        ticket = self._scheduler.answered(
            seq, epoch, answer, is_kept=answer.is_kept, now_ns=time.monotonic_ns()
        )
        if ticket.is_dropped:
            self._drop_slots()
        elif self._streams is not None and not _is_final(answer):
            self._streams.answered(_note_of(ticket.holder, answer))
        return ticket

    def _state(
        self, worker_id: int, seq: int, sent: bytes | Spilled | TooLong | None
    ) -> bytes | None:
        """The state of a worker's dataset, if it came."""
        if isinstance(sent, TooLong):
            if not self._has_lost_state:
                self._has_lost_state = True
                slot = self.arena[self._scheduler.slot_of(seq)]
                _log.warning("%s", describe_lost_state(worker_id, sent.nbytes, slot.most_bytes))
            return None
        return self._spilled(seq, sent) if isinstance(sent, Spilled) else sent

    def _spilled(self, seq: int, where: Spilled) -> bytes:
        """What a worker has put into the slot of its ticket."""
        end = where.offset + where.nbytes
        return self.arena.up_to(self._scheduler.slot_of(seq), end).mapping[where.offset : end]

    # Ends --------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ClosedLoaderError if it is closed, or in a forked child."""
        if self._pool.is_inherited:
            raise ClosedLoaderError("the iterator belongs to the process that made it")
        super().check_open()

    def close(self) -> None:
        """End the workers and let go of all memory. May be called again, and from any thread."""
        self._is_closed = True
        try:
            self._pool.close()
        finally:
            self._scheduler.close()
            self._draw = iter(()).__next__
            self._sender.close()
            finish(self.arena.close)

    def end_workers(self) -> None:
        """End the workers alone, where another thread looks at the slots; from any thread."""
        self._is_closed = True
        self._pool.close()
