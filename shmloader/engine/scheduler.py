"""Tickets, their order, and their slots. Pure: every decision of the engine is made here.

Invariants (tests cite the numbers):
    I1  A slot has exactly one holder: free list, worker, reorder buffer, or lease.
    I2  Only the engine's thread changes the scheduler; others append to a deque.
    I3  Processes share no lock; every socket has one writer and one reader at each end.
    I4  Shared memory = the slots' bytes; slots <= window + lend_limit.
    I5  The loader makes progress whatever the user keeps.
    I6  A result of an earlier epoch never reaches the user.
    I7  Batches come in ``seq`` order, each once (in any order with ``in_order=False``).
    I8  After ``close()`` no process, thread, mapping or descriptor of ours remains, but for
        mappings under live user tensors.
    I9  A batch once handed over never changes under the user's eyes, nor in a child that the
        user's process forks.

Each event has one method: a ticket is offered, a worker has answered, a worker is lost, and so on.
What is to be done about it stays in the scheduler until the engine takes it: by :meth:`next_task`,
:meth:`take_dropped_slots` and :meth:`take_wanted_tickets`, by the worker table's ``next_restart``,
``next_start`` and ``next_stop``, and the next batch by :meth:`take_next`. So nothing that was
decided is forgotten when an exception ends the call in which the engine would have done it. Events
and actions are calls and not objects, since an event object that is matched, with a list of
actions, takes 1.7 µs more than a call, three times a batch.

Nobody else changes a ticket, a slot's state or a worker's record.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shmloader.engine.routing import Pace, Router, pick_idle
from shmloader.engine.slots import FREE, FULL, RETIRED, SlotState, SlotTable
from shmloader.engine.workers import DEAD, GONE, LOST, READY, STARTING, Worker, WorkerTable
from shmloader.errors import InternalError

# The worker or the slot of a ticket that has none yet.
UNASSIGNED = -1


@dataclass(slots=True)
class Ticket:
    """A unit of work in flight.

    Attributes:
        seq: Its number in the epoch.
        worker_id: The worker it was assigned to, or UNASSIGNED until then.
        slot_id: The slot its batch goes to, or UNASSIGNED until then.
        indices: What the sampler gave.
        offered_ns: When it was offered, by the engine's clock.
        answer: What came back; None until then. The scheduler does not look at it.
        is_dropped: Nothing will be delivered: the worker's stream ended before it, or the epoch.
        is_kept: Its worker goes on looking at the slot, which must not be filled again.
        kill_count: Workers that died while they loaded it.
        sent_ns: When it was last taken to be sent to its worker, by the same clock.
        is_slot_new: Whether its worker is sent the slot's descriptor with it.
    """

    seq: int
    worker_id: int
    slot_id: int
    indices: object
    offered_ns: int = 0
    answer: object = None
    is_dropped: bool = False
    is_kept: bool = False
    kill_count: int = 0
    sent_ns: int = 0
    is_slot_new: bool = False


class DroppedSlot(NamedTuple):
    """A slot that was retired, to be let go of.

    Attributes:
        slot_id: The slot.
        worker_ids: Workers that have mapped it.
    """

    slot_id: int
    worker_ids: list[int]


def _after_use(is_kept: bool) -> SlotState:
    return RETIRED if is_kept else FREE


class Scheduler:
    """What is in flight, who works on it, and what comes next.

    Attributes:
        epoch: Number of the present epoch, from 0.
        slots: The slots' states.
        workers: The workers' records.
        is_dynamic: Whether tickets are dispatched dynamically: a ticket waits until a worker has
            room for it, and any will do. Else each has its worker, and its slot, from the start; or
            no worker until its answer comes, where the pool has a queue.
        task_limit: Most tasks of a worker, with dynamic dispatch.
    """

    def __init__(
        self,
        worker_count: int,
        window: int,
        lend_limit: int,
        *,
        in_order: bool,
        restart_limit: int = 0,
        first_worker: int = 0,
        ended: Sequence[bool] = (),
        is_dynamic: bool = False,
        has_queue: bool = False,
        present: int | None = None,
    ) -> None:
        """Start with an empty window.

        Args:
            worker_count: The most workers there may be.
            window: Most tickets in flight.
            lend_limit: Most slots lent at once.
            in_order: Whether batches are delivered by ``seq``, or as they come.
            restart_limit: Most workers restarted in an epoch.
            first_worker: The worker that gets the first ticket of the first epoch.
            ended: Workers whose streams have ended in it before.
            is_dynamic: See the attribute; not for workers with streams that end.
            has_queue: Whether the pool says who takes a ticket, and drops what is in flight when
                an epoch is given up; its workers do not die, and its batches have no slots.
            present: Workers that there are at first, with dynamic dispatch; None: all.
        """
        self.epoch = 0
        self.is_dynamic = is_dynamic
        self._has_queue = has_queue
        self.task_limit = 1
        self.slots = SlotTable(window + lend_limit)
        self.workers = WorkerTable(
            worker_count, worker_count if present is None else present, ended
        )
        self._window = max(1, window)
        self._lend_limit = lend_limit
        self._in_order = in_order
        self._router = Router(window, in_order=in_order, first=first_worker)
        self._pace = Pace()
        self._restart_limit = self._restarts_left = restart_limit
        self._tickets: dict[int, Ticket] = {}
        self._next_seq = 0
        self._next_delivery = 0
        self._arrived: collections.deque[Ticket] = collections.deque()
        # Tickets that wait for a worker, the oldest first; tickets that have one, to be sent.
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._unsent: collections.deque[Ticket] = collections.deque()
        # Tickets to be drawn, besides those in place of delivered ones; and how many there should
        # have been since the epoch began, for as many workers.
        self._wanted_tickets = 0
        self._ticket_share = window // worker_count
        self._tickets_asked = self.workers.wanted_count * self._ticket_share

    # Tickets -----------------------------------------------------------------------------

    def offer(self, indices: object, now_ns: int = 0) -> Ticket | None:
        """A ticket is offered.

        Returns:
            The ticket; answered already if its worker is dead. None if no worker takes any more. A
            pool with a queue is to be sent it at once.
        """
        if self.is_dynamic or self._has_queue:
            if len(self._tickets) >= self._window:
                raise InternalError("there are more tickets than the window has (I4)")
            ticket = self._add(indices, now_ns)
            if self.is_dynamic:
                self._waiting.append(ticket)
            else:
                ticket.sent_ns = now_ns
            return ticket
        worker = self._router.pick(self.workers)
        if worker is None:
            return None
        ticket = self._add(indices, now_ns)
        self._assign(ticket, worker)
        return ticket

    def offer_inline(self, indices: object) -> Ticket:
        """A ticket is offered whose batch is made at once, by the thread that asks for it.

        It is never in flight: its answer is there before anything else can happen.
        """
        seq = self._next_seq
        self._next_seq = seq + 1
        return Ticket(seq, 0, UNASSIGNED, indices)

    def _add(self, indices: object, now_ns: int) -> Ticket:
        seq = self._next_seq
        self._next_seq = seq + 1
        ticket = self._tickets[seq] = Ticket(seq, UNASSIGNED, UNASSIGNED, indices, now_ns)
        return ticket

    def _assign(self, ticket: Ticket, worker: Worker) -> None:
        """Give a ticket to a worker. It is sent at once, unless the worker does not run."""
        ticket.worker_id, ticket.slot_id = worker.worker_id, self._take_slot(worker.worker_id)
        worker.in_flight += 1
        if worker.state is DEAD:
            # The user is told at the ticket's place in the order.
            self._answer(ticket, worker, worker.death)
        elif worker.state is not LOST:
            self._unsent.append(ticket)

    def _take_slot(self, worker_id: int) -> int:
        slot_id = self.slots.take(worker_id)
        if slot_id is None:
            raise InternalError("all slots are in use (I5)")
        return slot_id

    def next_task(self, now_ns: int = 0) -> Ticket | None:
        """The next ticket to be sent to its worker; None if there is none, or no room.

        Not for a pool with a queue. To be asked after each event, until it returns None.
        """
        if self._waiting:
            self._assign_waiting()
        if not self._unsent:
            return None
        ticket = self._unsent.popleft()
        ticket.sent_ns = now_ns
        slot_id, mapped_slots = ticket.slot_id, self.workers[ticket.worker_id].mapped_slots
        ticket.is_slot_new = slot_id not in mapped_slots
        mapped_slots.add(slot_id)
        return ticket

    def _assign_waiting(self) -> None:
        """Give the oldest tickets that wait to workers, as far as these have room."""
        while self._waiting:
            worker = self._teller() or pick_idle(self.workers, self.task_limit)
            if worker is None:
                return
            worker.is_death_untold = False
            self._assign(self._waiting.popleft(), worker)

    def _teller(self) -> Worker | None:
        """The dead worker that the next waiting ticket tells of; None if it may be loaded."""
        dead = self.workers.first_dead()
        if dead is None or self.workers.are_all_dead:
            return dead
        return next((worker for worker in self.workers if worker.is_death_untold), None)

    @property
    def has_room(self) -> bool:
        """Whether a further ticket would be assigned, or answered, at once."""
        return not self._waiting and (
            self._teller() is not None or pick_idle(self.workers, self.task_limit) is not None
        )

    def answered(
        self,
        seq: int,
        epoch: int,
        answer: object,
        *,
        taker: int | None = None,
        is_kept: bool = False,
        now_ns: int = 0,
    ) -> Ticket:
        """A worker has answered a ticket, with a batch or with an error.

        Args:
            seq: The ticket's.
            epoch: The ticket's.
            answer: What came.
            taker: Who took it, where the pool has a queue; else known from the ticket.
            is_kept: Whether the worker goes on looking at the slot.
            now_ns: The time, by the engine's clock.

        Returns:
            The ticket. Its slot is FULL; or FREE, or RETIRED, if nobody wants the answer (I6).
        """
        ticket = self._in_work(seq, epoch, taker)
        worker = self.workers[ticket.worker_id]
        if self.is_dynamic and worker.last_answer_ns:  # to its first answer a worker gets ready
            began_ns = max(worker.last_answer_ns, ticket.sent_ns)
            self.task_limit = self._pace.note(now_ns - began_ns)
        worker.last_answer_ns = now_ns
        if worker.state is STARTING:
            self.workers.move(worker.worker_id, READY)
        self._answer(ticket, worker, answer, is_kept)
        return ticket

    def layout_sent(self, worker_id: int, layout: object) -> None:
        """A worker has sent the layout of its batches from now on."""
        self.workers[worker_id].last_layout = layout

    def _answer(
        self, ticket: Ticket, worker: Worker, answer: object, is_kept: bool = False
    ) -> None:
        worker.in_flight -= 1
        if ticket.is_dropped:
            del self._tickets[ticket.seq]
            self._move_slot(ticket, _after_use(is_kept))
            return
        ticket.is_kept = is_kept
        ticket.answer = answer
        if not self._has_queue:
            self.slots.move(ticket.slot_id, FULL)
        if not self._in_order:
            self._arrived.append(ticket)

    def _move_slot(self, ticket: Ticket, state: SlotState) -> None:
        """Change the state of a ticket's slot. Batches of a pool with a queue have none."""
        if not self._has_queue:
            self.slots.move(ticket.slot_id, state)

    def stream_ended(self, seq: int, epoch: int, *, is_kept: bool = False, now_ns: int = 0) -> bool:
        """A worker's iterable dataset has nothing for this ticket, nor for any later one.

        Returns:
            Whether this is the worker's first such answer. Then a ticket is wanted in its place.
        """
        ticket = self._in_work(seq, epoch)
        ticket.is_dropped = True
        worker = self.workers[ticket.worker_id]
        worker.last_answer_ns = now_ns
        if worker.state is STARTING:
            self.workers.move(worker.worker_id, READY)
        self._answer(ticket, worker, None, is_kept)
        if not worker.has_stream:
            return False
        worker.has_stream = False
        for other in self._tickets.values():
            if other.worker_id == ticket.worker_id and other.answer is None:
                other.is_dropped = True
        self._wanted_tickets += 1
        return True

    def take_wanted_tickets(self) -> int:
        """How many tickets should be drawn now, besides those in place of delivered ones."""
        count, self._wanted_tickets = self._wanted_tickets, 0
        return count

    def slot_returned(self, slot_id: int, *, clean: bool) -> None:
        """A lease has died.

        Args:
            slot_id: Its slot, which is FREE now, or else RETIRED.
            clean: False if somebody else may still look at the slot (I9).
        """
        self.slots.move(slot_id, FREE if clean else RETIRED)

    def take_dropped_slots(self) -> list[DroppedSlot]:
        """The slots that were retired since the last call, to be let go of."""
        dropped = []
        for slot_id in self.slots.retired:
            mappers = [worker for worker in self.workers if slot_id in worker.mapped_slots]
            for worker in mappers:
                worker.mapped_slots.remove(slot_id)
            dropped.append(DroppedSlot(slot_id, [worker.worker_id for worker in mappers]))
        self.slots.retired.clear()
        return dropped

    # Workers -----------------------------------------------------------------------------

    def worker_lost(self, worker_id: int, death: object, at_work: int | None = None) -> None:
        """A worker is dead, and reaped.

        It is to be restarted, unless as many as may be were in this epoch, or the ticket that it
        was loading has killed one before. With dynamic dispatch, the tickets that it had not begun
        wait for another worker, at their place.

        Args:
            worker_id: Which.
            death: If it is not restarted, the answer to all its tickets, those in flight and those
                to come.
            at_work: The ticket of this epoch that it was loading; None if there was none.
        """
        worker = self.workers[worker_id]
        worker.death = death
        unanswered = [
            ticket
            for ticket in self._tickets.values()
            if ticket.worker_id == worker_id and ticket.answer is None
        ]
        self._unsent = collections.deque(
            ticket for ticket in self._unsent if ticket.worker_id != worker_id
        )
        culprit = next((ticket for ticket in unanswered if ticket.seq == at_work), None)
        if culprit is not None:
            culprit.kill_count += 1
        if self._restarts_left == 0 or (culprit is not None and culprit.kill_count > 1):
            self.workers.move(worker_id, DEAD)
            worker.is_death_untold = all(ticket.is_dropped for ticket in unanswered)
            for ticket in unanswered:
                self._answer(ticket, worker, death)
            return
        self._restarts_left -= 1
        self.workers.move(worker_id, LOST)
        for ticket in unanswered:
            if ticket.is_dropped:
                self._answer(ticket, worker, None)
            elif self.is_dynamic and ticket is not culprit:
                self._take_back(ticket, worker)

    def _take_back(self, ticket: Ticket, worker: Worker) -> None:
        """A lost worker had not begun a ticket, which waits for another one now."""
        worker.in_flight -= 1
        self.slots.move(ticket.slot_id, FREE)
        ticket.worker_id = ticket.slot_id = UNASSIGNED
        younger = [other for other in self._waiting if other.seq > ticket.seq]
        older = [other for other in self._waiting if other.seq < ticket.seq]
        self._waiting = collections.deque([*older, ticket, *younger])

    def worker_started(self, worker_id: int) -> None:
        """A worker runs in place of a lost one, or of none.

        It is sent what the lost one had in work. It knows nothing of an epoch before.
        """
        worker = self.workers[worker_id]
        self.workers.move(worker_id, STARTING)
        worker.death = None
        worker.has_left_epoch = True
        self._unsent.extend(self.wanted_of(worker_id))
        self._balance()

    def worker_stopped(self, worker_id: int) -> None:
        """A worker that was not wanted has been told to end."""
        self.workers.move(worker_id, GONE)

    def workers_wanted(self, count: int) -> None:
        """So many workers should be present from now on; with dynamic dispatch."""
        self.workers.wanted_count = count
        self._balance()

    def _balance(self) -> None:
        self.workers.balance()
        tickets = self.workers.present_count * self._ticket_share
        self._wanted_tickets += max(0, tickets - self._tickets_asked)
        self._tickets_asked = max(self._tickets_asked, tickets)

    def wanted_of(self, worker_id: int) -> list[Ticket]:
        """The tickets whose answer a worker owes, but for those that nobody wants; in order."""
        return [
            ticket
            for ticket in self._tickets.values()
            if ticket.worker_id == worker_id and ticket.answer is None and not ticket.is_dropped
        ]

    # What comes next ---------------------------------------------------------------------

    @property
    def has_next(self) -> bool:
        """Whether :meth:`take_next` would return one."""
        if not self._in_order:
            return bool(self._arrived)
        first = self._first()
        return first is not None and first.answer is not None

    def take_next(self) -> Ticket | None:
        """The next ticket to be delivered, if its answer is here. Its slot stays FULL."""
        if not self._in_order:
            if not self._arrived:
                return None
            ticket = self._arrived.popleft()
            del self._tickets[ticket.seq]
            return ticket
        first = self._first()
        if first is None or first.answer is None:
            return None
        del self._tickets[first.seq]
        self._next_delivery = first.seq + 1
        return first

    def _first(self) -> Ticket | None:
        """The first ticket in order that will be delivered, answered or not."""
        seq = self._next_delivery
        while seq < self._next_seq:
            ticket = self._tickets.get(seq)
            if ticket is not None and not ticket.is_dropped:
                self._next_delivery = seq
                return ticket
            seq += 1
        return None

    def awaited(self) -> Ticket | None:
        """The ticket that must be answered before anything can be delivered; None if any will."""
        return self._first() if self._in_order else None

    @property
    def delivers_in_order(self) -> bool:
        """Whether batches come by ``seq``, or as they arrive."""
        return self._in_order

    @property
    def takes_tickets(self) -> bool:
        """Whether any worker does: not so when all their streams have ended."""
        return any(worker.has_stream for worker in self.workers)

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing is left that could be delivered, unless a ticket is offered."""
        return all(ticket.is_dropped for ticket in self._tickets.values())

    @property
    def tickets(self) -> list[Ticket]:
        """All tickets in flight, in order."""
        return list(self._tickets.values())

    @property
    def may_lend(self) -> bool:
        """Whether one more batch may be lent, rather than copied out (I4, I5)."""
        return self.slots.lent_count < self._lend_limit

    def delivered(self, ticket: Ticket, state: SlotState) -> None:
        """A ticket's batch has been built: its slot is LENT, FREE or RETIRED now."""
        self._move_slot(ticket, state)

    # Epochs ------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Give up what is in flight: slots of answers that are here are freed, others will be (I6).

        Tickets that no worker has been sent are gone at once, and so are those in a queue. Workers
        that were about to leave stay, since they have to be waited for.
        """
        queued = [one for one in self._tickets.values() if one.answer is None]
        for ticket in queued if self._has_queue else [*self._waiting, *self._unsent]:
            self._forget(ticket)
        self._waiting.clear()
        self._unsent.clear()
        for ticket in list(self._tickets.values()):
            if ticket.answer is None:
                ticket.is_dropped = True
            else:
                del self._tickets[ticket.seq]
                self._move_slot(ticket, _after_use(ticket.is_kept))
        self._arrived.clear()
        self.workers.let_all_stay()
        self._wanted_tickets = 0
        self._tickets_asked = self.workers.wanted_count * self._ticket_share
        for worker in self.workers:
            worker.has_left_epoch = False

    def _forget(self, ticket: Ticket) -> None:
        """A ticket that no worker was sent is not wanted any more."""
        del self._tickets[ticket.seq]
        if ticket.slot_id != UNASSIGNED:
            self.slots.move(ticket.slot_id, FREE)
        if ticket.worker_id != UNASSIGNED:
            self.workers[ticket.worker_id].in_flight -= 1

    def left_epoch(self, worker_id: int) -> None:
        """A worker has finished with the epoch that was given up."""
        self.workers[worker_id].has_left_epoch = True

    @property
    def is_epoch_left(self) -> bool:
        """Whether all workers have finished with the epoch that was given up."""
        return self._has_queue or not any(
            worker.state is LOST or (worker.is_alive and not worker.has_left_epoch)
            for worker in self.workers
        )

    def start_epoch(self) -> None:
        """Begin the next epoch.

        All workers have said that they are done with the last one: a ticket that is still in
        flight was never sent, since the sending was interrupted.
        """
        for ticket in self.tickets:
            ticket.is_dropped = True
            self._answer(ticket, self.workers[ticket.worker_id], None)
        self.epoch += 1
        self._restarts_left = self._restart_limit
        self._next_seq = self._next_delivery = 0
        self._router.restart()
        for worker in self.workers:
            worker.has_stream = True
            worker.is_death_untold = False

    def close(self) -> None:
        """Let go of batches, and of what the layouts keep of slots."""
        self._tickets.clear()
        self._arrived.clear()
        for worker in self.workers:
            worker.last_layout = None

    def _in_work(self, seq: int, epoch: int, taker: int | None = None) -> Ticket:
        """The ticket of an answer, whose worker is known now."""
        ticket = self._tickets.get(seq) if epoch == self.epoch else None
        if taker is not None and ticket is not None:
            ticket.worker_id = taker
            self.workers[taker].in_flight += 1
        if ticket is None or ticket.answer is not None or ticket.worker_id == UNASSIGNED:
            raise InternalError(f"an answer came for ticket {seq} of epoch {epoch}, not in flight")
        return ticket
