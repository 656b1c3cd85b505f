"""Makes every decision of the engine: tickets, their order, slots and workers. Pure.

Invariants (tests cite the numbers):
    I1  A slot has exactly one holder: free list, ticket (with a worker or answered), or lease.
    I2  Only the engine's thread changes the scheduler; others append to a deque.
    I3  Processes share no lock. A socket has one writer. Only the queue of tasks has several
        readers, each of which receives whole messages.
    I4  Shared memory = the slots' bytes; slots <= window + lend_limit.
    I5  The loader makes progress whatever the user keeps.
    I6  A result of an earlier epoch never reaches the user.
    I7  Batches come in ``seq`` order, each once (in any order with ``in_order=False``).
    I8  After ``close()`` no process, thread, mapping or descriptor of ours remains, except
        mappings under live user tensors.
    I9  A batch once handed over never changes under the user's eyes, nor in a child that the
        user's process forks.

A ticket gets its worker in one of two ways. If the pool has a queue, any idle worker receives the
oldest ticket, and the answer says which worker did. Otherwise the scheduler assigns it, by torch's
rules: with ``in_order``, ticket i goes to worker i mod n, and workers whose streams have ended are
skipped. Without it, the ticket goes to the next worker in turn that has less than its share of the
window. The readings of a stream of shards name their worker themselves.

Each event has one method. The resulting actions stay in the scheduler until the engine performs
them, so that no exception loses one: tasks by ``unsent``, tickets to draw by
:meth:`pop_wanted_tickets`, workers by the worker table, and the next batch by :meth:`first`.

The module is long because tickets, slots and workers change together: one event, such as a worker's
death, changes all three and the order of delivery.
"""

import collections
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from shmloader.batch.checkpoint import Checkpoint
from shmloader.engine.records import (
    DEAD,
    GONE,
    LOST,
    RUNNING,
    SlotTable,
    Worker,
    WorkerTable,
)
from shmloader.errors import InternalError

# The worker or the slot of a ticket that has none yet.
UNASSIGNED = -1

_by_seq = attrgetter("seq")


@dataclass(eq=False)
class Ticket:
    """A unit of work in flight, and then what is said of its delivery.

    Attributes:
        seq: Its number in the epoch.
        worker_id: The worker it was assigned to, or UNASSIGNED until then.
        slot_id: The slot its batch goes to, or UNASSIGNED until then.
        indices: The index batch that the sampler yielded.
        offered_ns: When it was offered, by the engine's clock.
        answer: The answer; None until it comes. The scheduler does not look at it.
        is_dropped: Whether nothing will be delivered, since the worker's stream or the epoch ended.
        sent_ns: When it was last sent to its worker, by the same clock.
        hung: Samples of the batch that took too long, by sample number, each with what its worker
            was doing when it was ended. The next worker raises in their places.
        checkpoint: Where the worker's dataset is after its batch, if checkpoints are kept.
        times: When its batch passed each step, packed as in :mod:`shmloader.insight.measurements`,
            once it is delivered; None if an error was raised.
        left_out: The tickets since the last delivery whose batches were left out, since all their
            samples failed.
    """

    seq: int
    worker_id: int
    slot_id: int
    indices: object
    offered_ns: int = 0
    # Values of the class take no time in the constructor.
    answer: object = field(default=None, init=False)
    is_dropped: bool = field(default=False, init=False)
    sent_ns: int = field(default=0, init=False)
    hung: dict[int, str] | None = field(default=None, init=False)
    checkpoint: Checkpoint | None = field(default=None, init=False)
    times: bytes | None = field(default=None, init=False)
    left_out: tuple["Ticket", ...] = field(default=(), init=False)

    @property
    def is_awaited(self) -> bool:
        """Whether it is to be delivered, and not answered yet."""
        return self.answer is None and not self.is_dropped

    @property
    def datasets(self) -> list[tuple[int, Checkpoint]]:
        """The checkpoints after the batches that were left out and this one, with the workers."""
        tickets = (*self.left_out, self)
        return [(one.worker_id, one.checkpoint) for one in tickets if one.checkpoint is not None]


class Scheduler:
    """Keeps the tickets in flight, the workers that have them, and what is delivered next.

    Attributes:
        epoch: Number of the present epoch, from 0.
        slots: The slots' states.
        workers: The workers' records.
        in_order, lend_limit, restart_limit: See the arguments.
        beginnings: The checkpoints with which the workers' datasets began the epoch; None if none
            are kept.
        unsent: Tickets to be sent, the oldest first. Whoever sends one removes it.
        is_workers_due: Whether the worker table may have a worker to start or replace.

    Args:
        worker_count: The most workers there may be.
        window: The most tickets in flight.
        lend_limit: The most slots lent at once.
        in_order: Whether batches are delivered by ``seq``, or in the order of arrival.
        restart_limit: The most workers restarted in an epoch.
        first_worker: The worker that gets the first ticket of the first epoch, unless the pool has
            a queue.
        beginnings: The checkpoints at which the workers' datasets begin, if checkpoints are kept;
            else None.
        is_iterable: Whether the datasets are iterable.
        has_queue: Whether workers receive tickets from the pool's queue. Not for iterable datasets.
        has_slots: Whether batches come in slots.
        has_routes: Whether tickets decide which worker gets them, by their ``route``: any number.
            Not with a queue.
        present: How many workers run at first; None for all. Without a queue, another one is
            started for the first ticket that it is assigned. Until a worker is started, its share
            of the window is empty.
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
        beginnings: Iterable[Checkpoint] | None = None,
        is_iterable: bool = True,
        has_queue: bool = False,
        has_slots: bool = True,
        has_routes: bool = False,
        present: int | None = None,
    ) -> None:
        self.epoch = 0
        self.in_order, self._has_queue, self._has_slots = in_order, has_queue, has_slots
        self._window, self.lend_limit = window, lend_limit
        self._has_routes = has_routes
        self.slots = SlotTable(window + lend_limit)
        self.workers = WorkerTable(worker_count, worker_count if present is None else present)
        self.is_workers_due = False
        self.beginnings = None if beginnings is None else tuple(beginnings)
        for worker, checkpoint in zip(self.workers, self.beginnings or (), strict=False):
            worker.checkpoint = checkpoint
        self._is_iterable = is_iterable
        # Whether the epoch is being left: a worker that starts from now on begins the next one.
        self._is_leaving = False
        # The worker that gets the next ticket, if it takes tickets.
        self._next_worker = first_worker
        self.restart_limit = self._restarts_left = restart_limit
        self._tickets: dict[int, Ticket] = {}
        self._next_seq = 0
        self._arrived: collections.deque[Ticket] = collections.deque()
        self.unsent: collections.deque[Ticket] = collections.deque()
        # A worker that died without a ticket. Its death is to answer the next ticket.
        self._unreported: Worker | None = None
        # How many tickets are to be drawn in addition to those that replace delivered ones.
        self._wanted_tickets = 0
        # The tickets for a worker that is started later.
        self._share = window // worker_count

    def offer(self, indices: Any, now_ns: int = 0) -> Ticket | None:
        """Add a ticket for an index batch, and return it; None if no worker takes tickets.

        It is already answered if its worker is dead.
        """
        if self._has_queue:
            worker, self._unreported = self._unreported, None
        else:
            # Round robin, where this worker takes tickets: most often.
            worker = self.workers[self._next_worker]
            if self._has_routes:
                worker = self.workers[indices.route % len(self.workers)]
            elif worker.has_stream and self.in_order:
                following = worker.worker_id + 1
                self._next_worker = following if following < len(self.workers) else 0
            else:
                worker = self._pick()
                if worker is None:
                    return None
        worker_id = UNASSIGNED if worker is None else worker.worker_id
        seq = self._next_seq
        self._next_seq = seq + 1
        ticket = self._tickets[seq] = Ticket(seq, worker_id, UNASSIGNED, indices, now_ns)
        if self._has_slots:
            ticket.slot_id = self.slots.take()
        if worker is None or worker.state is RUNNING:
            self.unsent.append(ticket)
        elif worker.state is DEAD:
            self._answer(ticket, worker.death)  # delivered in the ticket's place in the order
        elif worker.state is GONE:
            self.workers_wanted(max(worker_id + 1, self.workers.wanted_count))
        return ticket

    def _pick(self) -> Worker | None:
        """Return the worker for the next ticket, in turn; None if no worker takes tickets."""
        turn = [*self.workers[self._next_worker :], *self.workers[: self._next_worker]]
        takers = [worker for worker in turn if worker.has_stream]
        if not takers:
            return None
        worker = takers[0]
        if not self.in_order:
            share, tickets = self._window // len(takers), self._tickets.values()
            loads = collections.Counter(one.worker_id for one in tickets if one.answer is None)
            least = min(takers, key=lambda one: loads[one.worker_id])
            worker = next((one for one in takers if loads[one.worker_id] < share), least)
        self._next_worker = (worker.worker_id + 1) % len(self.workers)
        return worker

    def answered(self, seq: int, epoch: int, answer: Any, taker: int = UNASSIGNED) -> Ticket:
        """Record the answer to a ticket, and return the ticket. If dropped, its slot is free (I6).

        Args:
            seq: Number of the ticket.
            epoch: Epoch of the ticket.
            answer: An :class:`~shmloader.pools.answers.Answer`; None if the stream has ended. Only
                the dataset's state is read, if checkpoints are kept.
            taker: The worker that has answered; UNASSIGNED if the ticket could not be sent.
        """
        ticket = self._tickets.get(seq)
        if ticket is None or ticket.answer is not None or epoch != self.epoch:
            raise InternalError(f"an answer came for ticket {seq} of epoch {epoch}, not in flight")
        if taker != UNASSIGNED:
            ticket.worker_id = taker
        if self.beginnings is not None and answer is not None and not ticket.is_dropped:
            worker = self.workers[ticket.worker_id]
            if not answer.is_final:
                worker.checkpoint = ticket.checkpoint = worker.checkpoint.after_batch(
                    answer.snapshot, answer.fingerprint
                )
        if ticket.is_dropped or not self.in_order:
            self._answer(ticket, answer)
        else:  # as _answer() does, in one call fewer
            ticket.answer = answer
        return ticket

    def _answer(self, ticket: Ticket, answer: object) -> None:
        if ticket.is_dropped:
            del self._tickets[ticket.seq]
            self.free_slot(ticket)
            return
        ticket.answer = answer
        if not self.in_order:
            self._arrived.append(ticket)

    def _drop(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            ticket.is_dropped = True
            self._answer(ticket, None)

    def free_slot(self, ticket: Ticket) -> None:
        """Free the slot of a ticket, if it has one."""
        if ticket.slot_id != UNASSIGNED:
            self.slots.free(ticket.slot_id)

    def stream_ended(self, seq: int, epoch: int, beginning: Checkpoint) -> None:
        """Record that a worker's iterable dataset has no batch for this ticket or a later one.

        After a worker's first such answer, one more ticket is to be drawn.
        """
        if seq in self._tickets:
            self._tickets[seq].is_dropped = True
        worker = self.workers[self.answered(seq, epoch, None).worker_id]
        if not worker.has_stream:
            return
        worker.has_stream = False
        if not self._is_leaving:
            worker.checkpoint = beginning._replace(has_ended=True)
        for other in self.wanted_of(worker.worker_id):
            other.is_dropped = True
        self._wanted_tickets += 1

    def pop_wanted_tickets(self) -> int:
        """Return how many tickets to draw in addition to those that replace delivered ones."""
        count, self._wanted_tickets = self._wanted_tickets, 0
        return count

    def sample_timed_out(
        self, worker_id: int, ticket: Ticket | None, sample: int, text: str, log_text: str
    ) -> None:
        """Record that a worker is ended because a sample takes too long.

        The ticket, if it is of this epoch, will be loaded again without the sample, of which
        ``text`` says what the worker was doing. :meth:`worker_lost` is called later.
        """
        self.workers[worker_id].hang = log_text
        if ticket is not None and ticket.is_awaited:
            ticket.hung = {**(ticket.hung or {}), sample: text}

    def recalled(self, seqs: Iterable[int]) -> None:
        """Record that tickets are in the pool's queue no longer, and are to be sent again."""
        again = [self._tickets[seq] for seq in seqs]
        self.unsent = collections.deque(sorted([*again, *self.unsent], key=_by_seq))

    def worker_lost(self, worker_id: int, death: Any, *, held: Collection[int] = ()) -> None:
        """Record that a worker is dead and reaped.

        It is restarted, unless no restart is left in this epoch. A worker that was ended since a
        sample took too long, or that was loading a batch of another rank, is always restarted.

        Args:
            worker_id: Number of the worker.
            death: A :class:`~shmloader.pools.answers.Death`, which answers all its present and
                future tickets if it is not restarted.
            held: Numbers of the tickets that other workers have, if the pool has a queue. What is
                neither answered, nor to be sent, nor held was the dead worker's.
        """
        worker = self.workers[worker_id]
        worker.death = death
        lost = [ticket for ticket in self._tickets.values() if ticket.answer is None]
        if self._has_queue:
            others = {*held, *map(_by_seq, self.unsent)}
            lost = [ticket for ticket in lost if ticket.seq not in others]
        else:
            lost = [ticket for ticket in lost if ticket.worker_id == worker_id]
        is_free = worker.hang or death.was_elsewhere
        if is_free or (not death.is_final and self._restarts_left):
            self._restarts_left -= not is_free
            worker.state = LOST
            worker.unfinished = [ticket.seq for ticket in lost if not ticket.is_dropped]
            self._drop(ticket for ticket in lost if ticket.is_dropped)
            if self._has_queue:
                self.recalled(worker.unfinished)
        else:
            worker.state = DEAD
            if self._has_queue and not lost:
                if self.unsent:
                    lost = [self.unsent.popleft()]
                else:
                    self._unreported = worker
            for ticket in lost:
                ticket.worker_id = worker_id
                self._answer(ticket, death)
        self.is_workers_due = True

    def worker_started(self, worker_id: int) -> None:
        """Record that a worker was started, for the first time or in place of a lost one.

        It has no earlier epoch to leave. Unless the pool has a queue, it is sent the unfinished
        tickets of the lost one.
        """
        worker = self.workers[worker_id]
        self._wanted_tickets += self._share * (worker.state is GONE)
        worker.state, worker.death, worker.hang = RUNNING, None, ""
        worker.has_left_epoch = True
        if not self._has_queue:
            self.unsent.extend(self.wanted_of(worker_id))

    @property
    def tickets_at_start(self) -> int:
        """How many tickets to draw at an epoch's beginning."""
        return self._window - self._share * (len(self.workers) - self.workers.present_count)

    def workers_wanted(self, count: int) -> None:
        """Set how many workers should be present: all that have tickets, without a queue."""
        self.workers.wanted_count = count
        self.is_workers_due = True

    def wanted_of(self, worker_id: int) -> list[Ticket]:
        """Return a worker's unanswered tickets in order, without dropped ones."""
        tickets = self._tickets.values()
        return [each for each in tickets if each.worker_id == worker_id and each.is_awaited]

    def first(self) -> Ticket | None:
        """Return the ticket that is delivered next, answered or not; None if there is none.

        Without an order, it is the first that was answered.
        """
        if not self.in_order:
            return self._arrived[0] if self._arrived else None
        for ticket in self._tickets.values():
            if not ticket.is_dropped:
                return ticket
        return None

    def pop(self, first: Ticket) -> None:
        """Remove the :meth:`first` ticket, which is delivered."""
        del self._tickets[first.seq]
        if not self.in_order:
            self._arrived.popleft()

    @property
    def accepts_tickets(self) -> bool:
        """Whether any worker accepts tickets, which ends when all their streams have ended."""
        return any(worker.has_stream for worker in self.workers)

    @property
    def is_exhausted(self) -> bool:
        """Whether no ticket in flight will be delivered."""
        return all(ticket.is_dropped for ticket in self._tickets.values())

    @property
    def tickets(self) -> list[Ticket]:
        """All tickets in flight, in order."""
        return list(self._tickets.values())

    def find(self, seq: int, epoch: int) -> Ticket | None:
        """Return a ticket in flight; None if it is of another epoch, or there is none."""
        return self._tickets.get(seq) if epoch == self.epoch else None

    def end_epoch(self, recalled: Iterable[int] = ()) -> None:
        """Drop all tickets in flight; their slots are freed now, or once they are answered (I6).

        No worker has the ``recalled`` ones, or the pool drops their answers.
        """
        self._drop([*(self._tickets[seq] for seq in recalled), *self.unsent])
        self.unsent.clear()
        for ticket in self.tickets:
            ticket.is_dropped = True
            if ticket.answer is not None:
                del self._tickets[ticket.seq]
                self.free_slot(ticket)
        self._arrived.clear()
        self._is_leaving = True
        for worker, checkpoint in zip(self.workers, self.next_beginnings, strict=True):
            worker.has_left_epoch = False
            worker.checkpoint = checkpoint

    @property
    def next_beginnings(self) -> tuple[Checkpoint, ...]:
        """The checkpoints with which the workers' datasets begin the next epoch."""
        checkpoints = (worker.checkpoint for worker in self.workers)
        return tuple(one.at_next_epoch(is_iterable=self._is_iterable) for one in checkpoints)

    def left_epoch(self, worker_id: int, beginning: Checkpoint | None = None) -> None:
        """Record that a worker has finished the epoch that is being left.

        ``beginning`` is where its next epoch begins; None for the dataset's own beginning.
        """
        worker = self.workers[worker_id]
        worker.checkpoint, worker.has_left_epoch = beginning or Checkpoint(), True

    @property
    def is_epoch_left(self) -> bool:
        """Whether all workers have finished the epoch that is being left."""
        return not any(
            worker.state is LOST or (worker.is_alive and not worker.has_left_epoch)
            for worker in self.workers
        )

    def start_epoch(self) -> None:
        """Begin the next epoch. A ticket still in flight was never sent: that was interrupted."""
        self._drop(self.tickets)
        self.unsent.clear()
        self._unreported = None
        self.epoch += 1
        self._restarts_left = self.restart_limit
        self._wanted_tickets = self._next_seq = self._next_worker = 0  # this one as torch does
        for worker in self.workers:
            worker.has_stream = True
        self._is_leaving = False
        if self.beginnings is not None:
            self.beginnings = tuple(worker.checkpoint for worker in self.workers)

    def close(self) -> None:
        """Release all batches."""
        self._tickets.clear()
        self._arrived.clear()
