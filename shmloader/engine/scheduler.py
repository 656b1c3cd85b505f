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

One method for each thing that happens; what is to be done about it is what the method returns.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass

from shmloader.engine.routing import Router, pick_idle
from shmloader.engine.slots import SlotState, SlotTable
from shmloader.errors import InternalError


@dataclass(slots=True)
class Ticket:
    """A unit of work in flight.

    Attributes:
        seq: Its number in the epoch.
        worker_id: Who has it; None: it waits for a worker.
        slot_id: Where the batch is to lie; None for as long.
        indices: What the sampler gave.
        answer: What came back; None until then. The scheduler does not look at it.
        is_dropped: Nothing will be delivered: the worker's stream ended before it, or the epoch.
        is_kept: Its worker goes on looking at the slot, which must not be filled again.
        kill_count: Workers that died while they loaded it.
        offered_ns: When it was offered, by the engine's clock.
        sent_ns: When it was sent to its worker.
    """

    seq: int
    worker_id: int | None
    slot_id: int | None
    indices: object
    answer: object = None
    is_dropped: bool = False
    is_kept: bool = False
    kill_count: int = 0
    offered_ns: int = 0
    sent_ns: int = 0

    @property
    def holder(self) -> int:
        """Its worker, where it has one."""
        assert self.worker_id is not None
        return self.worker_id

    @property
    def place(self) -> int:
        """Its slot, where it has one."""
        assert self.slot_id is not None
        return self.slot_id


def _after_use(is_kept: bool) -> SlotState:
    return SlotState.RETIRED if is_kept else SlotState.FREE


class Scheduler:
    """What is in flight, and what comes next.

    Attributes:
        epoch: Number of the present epoch, from 0.
        slots: The slots' states.
        any_worker: Whether a ticket waits until a worker has room for it, and any will do; else
            each has its worker, and its slot, from the start.
        task_limit: Most tasks of a worker, where any will do.
        away: Workers that are not to be given anything, and need not be there; where any will do.
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
        any_worker: bool = False,
    ) -> None:
        """Start with an empty window.

        Args:
            worker_count: Number of workers.
            window: Most tickets in flight.
            lend_limit: Most slots lent at once.
            in_order: Whether batches are delivered by ``seq``, or as they come.
            restart_limit: Most workers replaced in an epoch.
            first_worker: Who gets the first ticket of the first epoch.
            ended: Workers whose streams have ended in it before.
            any_worker: See the attribute; not for workers with streams that end.
        """
        self.epoch = 0
        self.any_worker = any_worker
        self.task_limit = 1
        self.away: set[int] = set()
        self.slots = SlotTable(window + lend_limit)
        self._window = window
        self._lend_limit = lend_limit
        self._in_order = in_order
        self._router = Router(worker_count, window, in_order=in_order, first=first_worker)
        self._active = [not has_ended for has_ended in ended or [False] * worker_count]
        self._deaths: list[object] = [None] * worker_count
        self._restart_limit = self._restarts_left = restart_limit
        self._in_flight = [0] * worker_count
        self._tickets: dict[int, Ticket] = {}
        self._next_seq = 0
        self._next_delivery = 0
        self._arrived: collections.deque[Ticket] = collections.deque()
        # Tickets that wait for a worker, the oldest first.
        self._waiting: collections.deque[Ticket] = collections.deque()
        # Workers that will be done with a ticket in a moment.
        self._asking: set[int] = set()
        # Workers that are lost, and will be replaced.
        self._absent: set[int] = set()
        # Workers that are lost for good, and had no ticket in which the user would be told.
        self._untold: collections.deque[int] = collections.deque()

    # What happens ------------------------------------------------------------------------

    def offer(self, indices: object) -> Ticket | None:
        """A ticket is offered.

        Returns:
            It with its worker and slot, to be sent; answered already if its worker is lost. None
            if no worker takes any more. Where any worker will do it has neither yet, and
            :meth:`assign` says when it has.
        """
        if self.any_worker:
            if len(self._tickets) >= self._window:
                raise InternalError("there are more tickets than the window has (I4)")
            ticket = self._add(None, None, indices)
            self._waiting.append(ticket)
            return ticket
        worker_id = self._router.pick(self._active, self._in_flight)
        if worker_id is None:
            return None
        ticket = self._add(worker_id, self._take_slot(worker_id), indices)
        self._in_flight[worker_id] += 1
        if self._deaths[worker_id] is not None:
            # Its place in the order is where the user is told.
            self._answer(ticket, self._deaths[worker_id])
        return ticket

    def _add(self, worker_id: int | None, slot_id: int | None, indices: object) -> Ticket:
        seq = self._next_seq
        self._next_seq = seq + 1
        ticket = self._tickets[seq] = Ticket(seq, worker_id, slot_id, indices)
        return ticket

    def _take_slot(self, worker_id: int) -> int:
        slot_id = self.slots.take(worker_id)
        if slot_id is None:
            raise InternalError("all slots are in use (I5)")
        return slot_id

    def assign(self) -> Ticket | None:
        """Give the oldest ticket that waits for a worker to one that has room.

        To be asked again and again after each event, until it returns None.

        Returns:
            The ticket with its worker and slot, to be sent; None if there is none, or no room.
        """
        while self._waiting:
            if self._untold:
                worker_id: int | None = self._untold.popleft()
            elif not self._has_any_left():
                worker_id = 0  # nobody is left: as if it had been given to one of them
            else:
                worker_id = self._idle()
            if worker_id is None:
                return None
            ticket = self._waiting.popleft()
            ticket.worker_id, ticket.slot_id = worker_id, self._take_slot(worker_id)
            self._in_flight[worker_id] += 1
            if self._deaths[worker_id] is None:
                return ticket
            self._answer(ticket, self._deaths[worker_id])
        return None

    @property
    def has_room(self) -> bool:
        """Whether a further ticket would be assigned, or answered, at once."""
        return not self._waiting and (
            bool(self._untold) or not self._has_any_left() or self._idle() is not None
        )

    def _idle(self) -> int | None:
        return pick_idle(self._present(), self._in_flight, self.task_limit, self._asking)

    def _has_any_left(self) -> bool:
        return any(
            death is None and worker_id not in self.away
            for worker_id, death in enumerate(self._deaths)
        )

    def _present(self) -> list[int]:
        """The workers that can take a task now."""
        return [
            worker_id
            for worker_id, death in enumerate(self._deaths)
            if death is None and worker_id not in self._absent and worker_id not in self.away
        ]

    def task_count(self, worker_id: int) -> int:
        """Tickets that a worker has, and has not answered."""
        return self._in_flight[worker_id]

    def answered(self, seq: int, epoch: int, answer: object, *, is_kept: bool = False) -> Ticket:
        """A worker has answered a ticket, with a batch or with an error.

        Args:
            seq: The ticket's.
            epoch: The ticket's.
            answer: What came.
            is_kept: Whether the worker goes on looking at the slot.

        Returns:
            The ticket. Its slot is FULL; or FREE, or RETIRED, if nobody wants the answer (I6).
        """
        ticket = self._in_work(seq, epoch)
        self._answer(ticket, answer, is_kept=is_kept)
        return ticket

    def asked(self, worker_id: int) -> None:
        """A worker will answer a ticket in a moment: it may be given one more."""
        self._asking.add(worker_id)

    def _answer(self, ticket: Ticket, answer: object, *, is_kept: bool = False) -> None:
        worker_id = ticket.holder
        self._in_flight[worker_id] -= 1
        self._asking.discard(worker_id)
        if ticket.is_dropped:
            del self._tickets[ticket.seq]
            self.slots.move(ticket.place, _after_use(is_kept))
            return
        ticket.is_kept = is_kept
        ticket.answer = answer
        self.slots.move(ticket.place, SlotState.FULL)
        if not self._in_order:
            self._arrived.append(ticket)

    def stream_ended(self, seq: int, epoch: int, *, is_kept: bool = False) -> bool:
        """A worker's iterable dataset has nothing for this ticket, nor for any later one.

        Returns:
            Whether a ticket should be offered in its place: at a worker's first such answer.
        """
        ticket = self._in_work(seq, epoch)
        ticket.is_dropped = True
        self._answer(ticket, None, is_kept=is_kept)
        if not self._active[ticket.holder]:
            return False
        self._active[ticket.holder] = False
        for other in self._tickets.values():
            if other.worker_id == ticket.worker_id and other.answer is None:
                other.is_dropped = True
        return True

    def worker_lost(
        self, worker_id: int, death: object, at_work: int | None = None
    ) -> list[Ticket] | None:
        """A worker is dead, and reaped.

        It is replaced, unless as many as may be were in this epoch, or the ticket that it was
        loading has killed one before.

        Args:
            worker_id: Which.
            death: If it is not replaced, the answer to all its tickets, those in flight and those
                to come.
            at_work: The ticket of this epoch that it was loading; None if there was none.

        Returns:
            The tickets that its replacement is to be sent, in order; None if there is none. Where
            any worker will do, those that it had not begun wait for one again, at their place.
        """
        unanswered = [
            ticket
            for ticket in self.tickets
            if ticket.worker_id == worker_id and ticket.answer is None
        ]
        self._asking.discard(worker_id)
        culprit = next((ticket for ticket in unanswered if ticket.seq == at_work), None)
        if culprit is not None:
            culprit.kill_count += 1
        if self._restarts_left == 0 or (culprit is not None and culprit.kill_count > 1):
            self._deaths[worker_id] = death
            if self.any_worker and all(ticket.is_dropped for ticket in unanswered):
                self._untold.append(worker_id)
            for ticket in unanswered:
                self._answer(ticket, death)
            return None
        self._restarts_left -= 1
        for ticket in unanswered:
            if ticket.is_dropped:
                self._answer(ticket, None)
            elif self.any_worker and ticket is not culprit:
                self._take_back(ticket)
        self._absent.add(worker_id)
        return self.wanted_of(worker_id)

    def _take_back(self, ticket: Ticket) -> None:
        """A lost worker had not begun a ticket: it waits for another one."""
        self._in_flight[ticket.holder] -= 1
        self.slots.move(ticket.place, SlotState.FREE)
        ticket.worker_id = ticket.slot_id = None
        younger = [other for other in self._waiting if other.seq > ticket.seq]
        older = [other for other in self._waiting if other.seq < ticket.seq]
        self._waiting = collections.deque([*older, ticket, *younger])

    def worker_replaced(self, worker_id: int) -> None:
        """A new worker is there in place of a lost one."""
        self._absent.discard(worker_id)

    def wanted_of(self, worker_id: int) -> list[Ticket]:
        """The tickets whose answer a worker owes, but for those that nobody wants; in order."""
        return [
            ticket
            for ticket in self.tickets
            if ticket.worker_id == worker_id and ticket.answer is None and not ticket.is_dropped
        ]

    @property
    def deaths(self) -> list[object]:
        """For each worker, what :meth:`worker_lost` was told; None if it lives."""
        return list(self._deaths)

    def slot_of(self, seq: int) -> int:
        """The slot of a ticket that a worker has."""
        return self._tickets[seq].place

    def slot_returned(self, slot_id: int, *, clean: bool) -> bool:
        """A lease has died.

        Args:
            slot_id: Its slot.
            clean: False if somebody else may still look at the slot (I9).

        Returns:
            Whether the slot may be filled again; else it is retired.
        """
        self.slots.move(slot_id, SlotState.FREE if clean else SlotState.RETIRED)
        return clean

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
        if not self.has_next:
            return None
        if not self._in_order:
            ticket = self._arrived.popleft()
            del self._tickets[ticket.seq]
            return ticket
        first = self._tickets.pop(self._next_delivery)
        self._next_delivery += 1
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
        return any(self._active)

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
        self.slots.move(ticket.place, state)

    # Epochs ------------------------------------------------------------------------------

    def end_epoch(self) -> list[int]:
        """Give up what is in flight: slots of answers that are here are freed, others will be (I6).

        Tickets that wait for a worker are gone at once.

        Returns:
            Slots that were retired instead, since their workers keep looking at them.
        """
        retired = []
        for ticket in list(self._tickets.values()):
            if ticket.worker_id is None:
                del self._tickets[ticket.seq]
            elif ticket.answer is None:
                ticket.is_dropped = True
            else:
                del self._tickets[ticket.seq]
                self.slots.move(ticket.place, _after_use(ticket.is_kept))
                if ticket.is_kept:
                    retired.append(ticket.place)
        self._waiting.clear()
        self._arrived.clear()
        return retired

    def start_epoch(self) -> None:
        """Begin the next epoch.

        All workers have said that they are done with the last one: a ticket that is still in
        flight was never sent, since the sending was interrupted.
        """
        for ticket in self.tickets:
            ticket.is_dropped = True
            self._answer(ticket, None)
        self.epoch += 1
        self._restarts_left = self._restart_limit
        self._next_seq = self._next_delivery = 0
        self._active = [True] * len(self._active)
        self._untold.clear()
        self._router.restart()

    def _in_work(self, seq: int, epoch: int) -> Ticket:
        """The ticket of an answer."""
        ticket = self._tickets.get(seq) if epoch == self.epoch else None
        if ticket is None or ticket.answer is not None or ticket.worker_id is None:
            raise InternalError(f"an answer came for ticket {seq} of epoch {epoch}, not in flight")
        return ticket
