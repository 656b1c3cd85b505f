"""The scheduler under random orders of events, single decisions of it, and its tables."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.batch.checkpoint import Checkpoint
from shmloader.engine.records import SlotTable, WorkerState, WorkerTable
from shmloader.engine.scheduler import Scheduler, Ticket
from shmloader.errors import InternalError
from shmloader.pools.answers import Death

DEATH = Death(7, -9)


def sent(subject: Scheduler) -> list[Ticket]:
    """Send what is to be sent."""
    tickets = [*subject.unsent]
    subject.unsent.clear()
    return tickets


def pop_next(subject: Scheduler) -> Ticket | None:
    """The next ticket if its answer is here."""
    ticket = subject.first()
    if ticket is None or ticket.answer is None:
        return None
    subject.pop(ticket)
    return ticket


class Play:
    """A scheduler, and what its workers and its user do, in a random order.

    Workers answer first come, first served. A task is the number and the slot of a ticket, as it
    was sent.
    """

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.count, self.window = draw.randint(1, 4), draw.randint(1, 8)
        self.lend_limit = draw.randint(0, 3)
        self.in_order, self.has_queue = draw.random() < 0.5, draw.random() < 0.5
        self.restart_limit = draw.choice([0, 1, 3])
        self.length = draw.choice([10**9, draw.randint(0, 30)])
        self.subject = Scheduler(
            self.count,
            self.window,
            self.lend_limit,
            in_order=self.in_order,
            restart_limit=self.restart_limit,
            has_queue=self.has_queue,
            present=draw.randint(1, self.count) if self.has_queue else None,
        )
        self.workers = self.subject.workers
        self.pool: list[tuple[int, int]] = []  # the tasks in the pool's queue
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        self.lent: list[int] = []
        self.deaths: list[Death] = []
        self.begin()

    def begin(self) -> None:
        self.is_running, self.restarts, self.turn = True, 0, 0
        self.worker_of: list[int] = []  # by ticket
        self.ended_at: dict[int, int] = {}  # by worker, the ticket at which its stream ended
        self.arrived: list[int] = []
        self.delivered: list[int] = []
        self.unreported: Death | None = None  # no ticket was there to report it

    def in_state(self, *states: WorkerState) -> list[int]:
        return [worker.worker_id for worker in self.workers if worker.state in states]

    @property
    def alive(self) -> list[int]:
        return self.in_state(WorkerState.RUNNING)

    @property
    def busy(self) -> list[int]:
        return [number for number in self.alive if self.queues[number]]

    @property
    def idle(self) -> list[int]:
        return [one for one in self.in_state(WorkerState.RUNNING) if not self.queues[one]]

    @property
    def streams(self) -> list[int]:
        return [number for number in range(self.count) if number not in self.ended_at]

    def may_offer(self) -> bool:
        is_room = len(self.subject.tickets) < self.window and len(self.worker_of) < self.length
        return self.is_running and is_room and bool(self.streams)

    def events(self) -> list:
        """What may happen now, with what is likely several times."""
        often = [self.next_batch]
        often += [self.offer] * self.may_offer()
        often += [self.answer] * bool(self.busy)
        often += [self.receive] * bool(self.pool and self.idle)
        seldom = [self.stray_answer]
        seldom += [self.drop_batch] * bool(self.lent)
        seldom += [self.replace] * bool(self.in_state(WorkerState.LOST))
        seldom += [self.want_workers] * self.has_queue
        seldom += [self.next_epoch] * (not self.is_running)
        rare = [self.break_off] * self.is_running + [self.die] * bool(self.alive)
        rare += [self.end_stream] * bool(self.busy and not self.has_queue)
        return often * 12 + seldom * 4 + rare

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.draw.choice(self.events())()
            self.send()
            self.check()
        self.finish()

    def send(self) -> None:
        for ticket in sent(self.subject):
            assert ticket.is_awaited, "a task is sent that nobody wants"
            assert ticket.seq not in self.tasks(), "a task is sent twice"
            if self.has_queue:
                self.pool.append((ticket.seq, ticket.slot_id))
                assert self.pool == sorted(self.pool), "a task overtakes an older one"
            else:
                assert self.workers[ticket.worker_id].state is WorkerState.RUNNING
                self.queues[ticket.worker_id].append((ticket.seq, ticket.slot_id))

    def tasks(self) -> dict[int, int]:
        """What was sent and has not been answered: the slot of each ticket."""
        return dict(task for queue in [self.pool, *self.queues] for task in queue)

    def offer(self) -> None:
        indices, seq = object(), len(self.worker_of)
        owed = [one.worker_id for one in self.subject.tickets if one.answer is None]
        ticket = self.subject.offer(indices)
        assert ticket is not None, "I5: refused though workers take tickets"
        assert (ticket.seq, ticket.indices) == (seq, indices)
        self.worker_of.append(ticket.worker_id)
        expected = self.unreported
        self.unreported = None
        if not self.has_queue:
            worker = self.workers[ticket.worker_id]
            assert ticket.worker_id in self.streams, "its stream has ended"
            if worker.state is WorkerState.DEAD:
                expected = worker.death
            if self.in_order:
                turn = [*range(self.turn, self.count), *range(self.turn)]
                assert ticket.worker_id == next(one for one in turn if one in self.streams), "I7"
                self.turn = (ticket.worker_id + 1) % self.count
            else:
                loads = {one: owed.count(one) for one in self.streams}
                share = max(self.window // len(loads) - 1, min(loads.values()))
                assert loads[ticket.worker_id] <= share, "more than its share"
        assert ticket.answer is expected, "a dead worker's death answers, and nothing else"

    def receive(self) -> None:
        self.queues[self.draw.choice(self.idle)].append(self.pool.pop(0))

    def answer(self, worker_id: int | None = None) -> None:
        subject = self.subject
        if worker_id is None:
            worker_id = self.draw.choice(self.busy)
        seq, slot_id = self.queues[worker_id].pop(0)
        if worker_id in self.ended_at:
            subject.pop_wanted_tickets()
            had_stream = self.workers[worker_id].has_stream
            subject.stream_ended(seq, subject.epoch, Checkpoint())
            assert subject.pop_wanted_tickets() == had_stream, "one ticket more for each stream"
            assert not self.workers[worker_id].has_stream
            assert not subject.wanted_of(worker_id), "what follows the end is awaited"
            return
        answer = (subject.epoch, seq)
        ticket = subject.answered(seq, subject.epoch, answer, taker=worker_id)
        assert ticket.slot_id == slot_id, "I1: a ticket keeps its slot"
        assert ticket.is_dropped == (not self.is_running), "I6, or a wanted answer was dropped"
        self.arrived += [seq] * self.is_running

    def end_stream(self) -> None:
        worker_id = self.draw.choice(self.busy)
        self.ended_at.setdefault(worker_id, self.queues[worker_id][0][0])
        self.answer(worker_id)

    def next_batch(self, *, may_lend: bool = True) -> bool:
        subject = self.subject
        is_here = any(one.answer is not None and not one.is_dropped for one in subject.tickets)
        ticket = pop_next(subject)
        if ticket is None:
            assert self.in_order or not is_here, "I5: the next batch is here"
            return False
        assert self.is_running, "I6"
        assert ticket.slot_id in subject.slots.taken_ids, "I1"
        if isinstance(ticket.answer, Death):
            assert self.workers[ticket.worker_id].death is ticket.answer
        else:
            assert ticket.answer == (subject.epoch, ticket.seq), "another ticket's answer"
            assert self.in_order or ticket.seq == self.arrived[0], "not in order of arrival"
            self.arrived.remove(ticket.seq)
        self.delivered.append(ticket.seq)
        if may_lend and len(self.lent) < self.lend_limit and self.draw.random() < 0.5:
            subject.slots.lend(ticket.slot_id)
            self.lent.append(ticket.slot_id)
        else:
            subject.free_slot(ticket)
        return True

    def drop_batch(self) -> None:
        self.subject.slots.free(self.lent.pop(self.draw.randrange(len(self.lent))))

    def die(self) -> None:
        """A worker dies, while it loads its first ticket or none."""
        subject, worker_id = self.subject, self.draw.choice(self.alive)
        queue, worker = self.queues[worker_id], self.workers[worker_id]
        is_restarted = self.restarts < self.restart_limit
        expected = WorkerState.LOST if is_restarted else WorkerState.DEAD
        self.restarts += is_restarted
        had_task = bool(queue or self.pool)
        queue.clear()
        subject.recalled(seq for seq, _ in self.pool)
        self.pool.clear()
        death = Death(len(self.deaths), -9)
        self.deaths.append(death)
        subject.worker_lost(worker_id, death, held=self.tasks())
        assert worker.state is expected, "a restart too many, or too few"
        assert worker.death is death
        if not is_restarted and self.has_queue and self.is_running and not had_task:
            self.unreported = death

    def replace(self) -> None:
        worker_id = self.workers.first(WorkerState.LOST).worker_id
        self.subject.worker_started(worker_id)
        assert self.workers[worker_id].has_left_epoch, "it has no earlier epoch"

    def want_workers(self) -> None:
        count = self.draw.randint(1, self.count)
        self.subject.workers_wanted(count)
        while (one := self.workers.next_missing()) and one.state is WorkerState.GONE:
            self.subject.worker_started(one.worker_id)

    def break_off(self) -> None:
        """The user leaves the epoch, perhaps by an interruption while a ticket is sent."""
        if self.may_offer() and not self.has_queue and self.draw.random() < 0.5:
            self.offer()
            if self.subject.unsent:
                self.subject.unsent.popleft()
        self.subject.end_epoch(seq for seq, _ in self.pool)
        self.pool.clear()
        self.is_running, self.unreported = False, None

    def next_epoch(self) -> None:
        while self.in_state(WorkerState.LOST):
            assert not self.subject.is_epoch_left
            self.replace()
            self.send()
        while self.busy:
            self.answer()
        for worker_id in self.alive:
            assert not self.subject.is_epoch_left or self.workers[worker_id].has_left_epoch
            self.subject.left_epoch(worker_id)
        assert self.subject.is_epoch_left
        epoch = self.subject.epoch
        self.subject.start_epoch()
        assert self.subject.epoch == epoch + 1
        assert self.subject.tickets == []
        self.begin()

    def stray_answer(self) -> None:
        seq, back = self.draw.randint(-1, 40), self.draw.randint(0, 2)
        if back or all(one.seq != seq or one.answer for one in self.subject.tickets):
            before = copy.deepcopy(vars(self.subject.slots))
            with pytest.raises(InternalError):
                self.subject.answered(seq, self.subject.epoch - back, "stray", taker=0)
            assert vars(self.subject.slots) == before, "I6: a stray answer moved a slot"

    def check(self) -> None:
        """The invariants, after each event."""
        subject, slots, tasks = self.subject, self.subject.slots, self.tasks()
        tickets = {ticket.seq: ticket.slot_id for ticket in subject.tickets}
        assert tasks.items() <= tickets.items(), "I1: a task's ticket or slot is gone"
        held = [*tickets.values(), *self.lent]
        assert len(set(held)) == len(held), "I1: a slot has two holders"
        assert slots.taken_ids == {*tickets.values()}, "I1"
        assert slots.lent_ids == {*self.lent}, "I1"
        used_count = len(held) + len(slots.free_ids)
        assert sorted([*held, *slots.free_ids]) == [*range(used_count)], "I1"
        assert used_count <= self.window + self.lend_limit, "I4"
        for ticket in subject.tickets:
            is_to_come = ticket.worker_id in self.in_state(WorkerState.LOST)
            assert ticket.seq in tasks or is_to_come or not ticket.is_awaited, "never sent"
        if self.in_order:
            assert subject.is_exhausted == (subject.first() is None)

    def finish(self) -> None:
        """All answer, and all that was wanted comes, once; then no slot is held."""
        while self.in_state(WorkerState.LOST):
            self.replace()
            self.send()
        if self.pool and not self.in_state(WorkerState.RUNNING):
            return
        while self.pool or self.busy:
            if self.busy:
                self.answer(self.busy[-1])
            else:
                self.receive()
        while self.next_batch(may_lend=False):
            pass
        if self.is_running:
            ended = {
                seq
                for seq, worker_id in enumerate(self.worker_of)
                if seq >= self.ended_at.get(worker_id, self.length)
            }
            assert sorted([*self.delivered, *ended]) == [*range(len(self.worker_of))], "I5, I7"
            assert not self.in_order or self.delivered == sorted(self.delivered), "I7"
        else:
            self.next_epoch()
        assert self.subject.is_exhausted
        while self.lent:
            self.drop_batch()
        self.check()
        assert not self.subject.slots.taken_ids | self.subject.slots.lent_ids, "I1"


@given(st.integers(0, 2**32))
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_every_order_of_events_keeps_the_invariants(seed):
    Play(seed).run(100)


def offered(subject: Scheduler, count: int) -> list[Ticket]:
    tickets = [subject.offer([number]) for number in range(count)]
    assert all(tickets)
    assert sent(subject) == tickets
    return tickets


def test_an_epoch_may_go_on_at_any_worker():
    subject = Scheduler(3, 6, 4, in_order=True, first_worker=1)
    assert [ticket.worker_id for ticket in offered(subject, 4)] == [1, 2, 0, 1]
    subject.end_epoch()
    subject.start_epoch()
    assert [ticket.worker_id for ticket in offered(subject, 4)] == [0, 1, 2, 0]


def test_more_tickets_than_the_window_are_an_internal_error():
    subject = Scheduler(2, 2, 0, in_order=True)
    offered(subject, 2)
    with pytest.raises(InternalError, match="I5"):
        subject.offer([2])


def test_each_worker_that_is_started_later_asks_for_its_share_of_the_window():
    subject = Scheduler(3, 6, 2, in_order=True, has_queue=True, present=1, restart_limit=1)
    for count, asked in ((1, 0), (2, 2), (1, 0), (3, 2)):
        subject.workers_wanted(count)
        while (worker := subject.workers.next_missing()) is not None:
            subject.worker_started(worker.worker_id)
        assert subject.pop_wanted_tickets() == asked
        assert subject.tickets_at_start == 2 * subject.workers.present_count
    subject.worker_lost(1, DEATH)
    subject.worker_started(1)
    assert subject.pop_wanted_tickets() == 0


def test_a_worker_that_is_ended_for_a_sample_is_restarted_whatever_restarts_are_left():
    subject = Scheduler(1, 4, 2, in_order=True)
    offered(subject, 3)
    for sample in (2, 5):
        subject.sample_timed_out(0, subject.find(0, 0), sample, "in f", "it hung")
        assert subject.workers[0].hang == "it hung"
        subject.worker_lost(0, DEATH)
        subject.worker_started(0)
        assert [ticket.seq for ticket in sent(subject)] == [0, 1, 2]
        assert not subject.workers[0].hang
    assert subject.tickets[0].hung == {2: "in f", 5: "in f"}
    assert subject.tickets[1].hung is None
    subject.worker_lost(0, DEATH)
    assert [ticket.answer for ticket in subject.tickets] == [DEATH] * 3


def test_only_a_sample_that_is_awaited_counts_as_hung():
    subject = Scheduler(2, 4, 0, in_order=True, has_queue=True)
    offered(subject, 3)
    subject.answered(1, 0, "batch", taker=0)
    for seq, hung, again in ((1, None, []), (2, {3: "in f"}, [2])):
        subject.sample_timed_out(1, subject.find(seq, 0), 3, "in f", "it hung")
        subject.worker_lost(1, DEATH, held={0, 2} - {seq})
        subject.worker_started(1)
        assert [ticket.seq for ticket in sent(subject)] == again
        assert subject.tickets[seq].hung == hung
    subject.end_epoch([0, 2])
    subject.start_epoch()
    offered(subject, 1)
    subject.sample_timed_out(0, subject.find(0, 0), 3, "in f", "it hung")  # in the epoch before
    subject.worker_started(0)
    assert sent(subject) == []
    assert subject.tickets[0].hung is None


def test_slots_are_made_up_to_the_capacity_and_no_further():
    table = SlotTable(capacity=2)
    assert [table.take(), table.take()] == [0, 1]
    with pytest.raises(InternalError, match="all slots are in use"):
        table.take()


def test_the_slot_that_was_freed_last_is_taken_first():
    table = SlotTable(capacity=9)
    for taken in [table.take() for _ in range(3)]:
        table.free(taken)
    assert [table.take() for _ in range(4)] == [2, 1, 0, 3]


def test_the_first_worker_that_is_missing_is_started():
    table = WorkerTable(5, 3)
    assert table.present_count == 3
    assert table.next_missing() is None
    table.wanted_count = 5
    assert table.next_missing() is table[3]
    table[2].state = WorkerState.LOST
    assert table.next_missing() is table[2]
