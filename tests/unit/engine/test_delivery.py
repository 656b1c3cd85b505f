"""How far streams have come: the same for every timing, and enough to go on from anywhere."""

import json
import pickle
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.batch.checkpoint import Checkpoint
from shmloader.engine.delivery import DatasetCheckpoints
from shmloader.engine.scheduler import Scheduler
from shmloader.pools.answers import Answer, Death

#: States of random number generators, which are only passed on here.
RNG = ({"torch": "text"},)


def answer_with(snapshot):
    """An answer after which the dataset has this state."""
    answer = Answer(snapshot)
    answer.snapshot = snapshot
    return answer


class Run:
    """An epoch over streams of given lengths, whose workers answer when they are told to."""

    def __init__(self, lengths, window, states, *, in_order=True):
        count = len(lengths)
        self.lengths = lengths
        self.scheduler = Scheduler(
            count, window, 4, in_order=in_order, first_worker=states.next_worker,
            beginnings=states.checkpoints,
        )  # fmt: skip
        self.user = DatasetCheckpoints(*states.mark())
        self.given = [checkpoint.given for checkpoint in states.checkpoints]
        self.queues = [deque() for _ in range(count)]
        self.walk = []
        self.seen = [self.user.mark()]
        for _ in range(window):
            self.offer()

    def offer(self):
        ticket = self.scheduler.offer([None])
        if ticket is not None:
            self.queues[ticket.worker_id].append(ticket)

    def busy(self):
        return [worker_id for worker_id, queue in enumerate(self.queues) if queue]

    def answer(self, worker_id):
        """What a worker and the engine do about its next task."""
        ticket = self.queues[worker_id].popleft()
        if self.given[worker_id] >= self.lengths[worker_id]:
            self.scheduler.stream_ended(ticket.seq, 0, Checkpoint(snapshot=b"at the end"))
            for _ in range(self.scheduler.pop_wanted_tickets()):
                self.offer()
            return
        self.given[worker_id] += 1
        snapshot = b"%d" % self.given[worker_id]
        self.scheduler.answered(ticket.seq, 0, answer_with(snapshot))

    def take(self):
        """What `next()` does, if a batch is there."""
        ticket = self.scheduler.first()
        if ticket is None or ticket.answer is None:
            return False
        self.scheduler.pop(ticket)
        self.user.update([(ticket.worker_id, ticket.checkpoint)])
        self.scheduler.slots.free(ticket.slot_id)
        self.walk.append((ticket.worker_id, ticket.answer.content))
        self.seen.append(self.user.mark())
        self.offer()
        return True

    def finish(self, draw):
        """To the end, in any order of events."""
        while not self.scheduler.is_exhausted or self.busy():
            busy = self.busy()
            choice = draw(st.integers(0, len(busy)))
            if choice == len(busy) and (self.take() or not busy):
                continue
            if busy:
                self.answer(busy[min(choice, len(busy) - 1)])
        while self.take():
            pass
        return self


def walked(lengths):
    """The walk round the workers that passes over ended ones."""
    given, walk = [0] * len(lengths), []
    while any(g < n for g, n in zip(given, lengths, strict=True)):
        for worker_id, length in enumerate(lengths):
            if given[worker_id] < length:
                given[worker_id] += 1
                walk.append((worker_id, b"%d" % given[worker_id]))
    return walk


@pytest.mark.slow
@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    stop=st.integers(0, 24),
    ahead=st.integers(1, 3),
    in_order=st.booleans(),
    data=st.data(),
)
def test_from_anywhere_and_whatever_their_speed_the_streams_go_on(
    lengths, stop, ahead, in_order, data
):
    beginning = DatasetCheckpoints([Checkpoint()] * len(lengths))
    run = Run(lengths, ahead * len(lengths), beginning, in_order=in_order).finish(data.draw)
    stop = min(stop, len(run.walk))
    states = DatasetCheckpoints(*run.seen[stop])
    resumed = Run(lengths, len(lengths), states, in_order=in_order).finish(data.draw)
    if in_order:
        assert run.walk == walked(lengths)
        assert resumed.walk == run.walk[stop:]
        assert resumed.seen == run.seen[stop:]
    assert sorted(run.walk[:stop] + resumed.walk) == sorted(walked(lengths))
    for each in (run, resumed):
        assert [one.given for one in each.user.checkpoints] == lengths
        assert each.scheduler.next_beginnings == (Checkpoint(snapshot=b"at the end"),) * len(
            lengths
        )


def test_a_new_worker_goes_on_from_what_its_predecessor_answered_not_from_what_was_delivered():
    run = Run([9], 4, DatasetCheckpoints([Checkpoint()]))
    for _ in range(3):
        run.answer(0)
    run.take()
    assert run.scheduler.workers[0].checkpoint == Checkpoint(3, b"3", 3)
    assert run.user.checkpoints == (Checkpoint(1, b"1", 1),)


def subject_of(worker_count, **options):
    """A scheduler whose workers have a ticket each."""
    options = {"in_order": True, "beginnings": [Checkpoint()] * worker_count, **options}
    subject = Scheduler(worker_count, worker_count, 4, **options)
    for number in range(worker_count):
        subject.offer([number])
        subject.unsent.popleft()
    return subject


def checkpoints_of(subject):
    return [worker.checkpoint for worker in subject.workers]


def test_an_epoch_that_is_left_gives_a_new_worker_nothing_to_go_on_from():
    subject = subject_of(3)
    subject.answered(0, 0, answer_with(b"in the midst"))
    subject.stream_ended(1, 0, Checkpoint(snapshot=b"at the end", rng=RNG))
    subject.end_epoch()
    subject.stream_ended(2, 0, Checkpoint(snapshot=b"late"))
    ended = Checkpoint(0, b"at the end", rng=RNG)
    assert checkpoints_of(subject) == [Checkpoint(), ended, Checkpoint()]


def test_the_state_of_a_map_style_dataset_stays_with_its_worker_when_an_epoch_is_left():
    subject = subject_of(2, is_iterable=False)
    subject.answered(0, 0, answer_with(b"after a batch"))
    subject.end_epoch()
    assert checkpoints_of(subject) == [Checkpoint(0, b"after a batch"), Checkpoint()]


def test_an_epoch_begins_from_what_each_dataset_says():
    subject = subject_of(3, restart_limit=1)
    one, other = Checkpoint(0, b"one", rng=RNG), Checkpoint(0, b"state")
    subject.stream_ended(0, 0, Checkpoint())
    subject.end_epoch()
    subject.worker_lost(1, Death(1, -9))
    subject.worker_started(1)
    subject.left_epoch(0, one)
    subject.left_epoch(1, other)
    subject.left_epoch(2)
    subject.start_epoch()
    assert subject.beginnings == (one, other, Checkpoint())
    assert checkpoints_of(subject) == list(subject.beginnings)


def test_what_is_dumped_loads_and_is_plain():
    states = DatasetCheckpoints([Checkpoint()] * 2, base_seed=12)
    one = Checkpoint(rng=RNG).after_batch(None, 3).after_batch(None, 5)
    states.update([(0, one), (1, Checkpoint().after_batch(None, None))])
    mark, dumped = states.mark(), json.loads(json.dumps(states.dump()))
    again = DatasetCheckpoints.load(dumped, 2)
    assert again.mark() == mark
    assert again.dump() == dumped
    states.update([(0, one.after_batch(None, 6))])
    assert states.dump() != dumped
    states.go_back(mark)
    assert states.dump() == dumped


def test_the_order_of_fingerprints_counts():
    one, other = (Checkpoint().after_batch(None, a).after_batch(None, 3 - a) for a in (1, 2))
    assert one.check != other.check


@pytest.mark.parametrize(("worker_count", "other"), [(2, 3), (0, 1), (1, 0)])
def test_another_number_of_workers_is_refused(worker_count, other):
    begun = DatasetCheckpoints([Checkpoint()] * max(1, worker_count), worker_count=worker_count)
    state = begun.dump()
    assert DatasetCheckpoints.load(state, worker_count).dump() == state
    with pytest.raises(ValueError, match="the state does not fit") as raised:
        DatasetCheckpoints.load(state, other)
    assert str(raised.value) == (
        f"the state does not fit this loader:\n- num_workers: {worker_count} in the state, {other} "
        "in this loader. Each worker reads its own part of an IterableDataset: set "
        f"num_workers={worker_count}, or start the epoch from the beginning."
    )


def test_a_state_that_pickle_cannot_name_is_loaded_by_value():
    whole = DatasetCheckpoints([Checkpoint()]).dump()
    snapshot = {"at": 0, "of": "iterator", "is_short": False, "state": lambda: 5}
    whole["checkpoints"][0]["snapshot"] = snapshot
    loaded = DatasetCheckpoints.load(whole, 1)
    assert pickle.loads(loaded.checkpoints[0].snapshot)[2]() == 5
