"""How far streams have come: the same for every timing, and enough to go on from anywhere."""

import json
import pickle
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.batch.dataset_checkpoint import Beginning, DatasetCheckpoint
from shmloader.engine.dataset_checkpoints import DatasetCheckpoints
from shmloader.engine.dataset_progress import DatasetNote
from shmloader.engine.scheduler import Scheduler

#: States of random number generators, which are only passed on here.
RNG = {"torch": "text"}


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
            self.scheduler.stream_ended(ticket.seq, 0, Beginning(None, b"at the end"))
            for _ in range(self.scheduler.take_wanted_tickets()):
                self.offer()
            return
        self.given[worker_id] += 1
        snapshot = b"%d" % self.given[worker_id]
        self.scheduler.answered(ticket.seq, 0, snapshot, note=DatasetNote(worker_id, snapshot))

    def take(self):
        """What `next()` does, if a batch is there."""
        ticket = self.scheduler.take_next()
        if ticket is None:
            return False
        worker_id = ticket.worker_id
        self.user.note(self.scheduler.handed_over(ticket))
        self.scheduler.slots.free(ticket.slot_id)
        self.walk.append((worker_id, ticket.answer))
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
        self.user.note(self.scheduler.progress.take_notes())
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


streams = st.lists(st.integers(0, 6), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=150)
@given(lengths=streams, ahead=st.integers(1, 3), data=st.data())
def test_in_order_the_batches_are_a_walk_round_the_streams_whatever_their_speed(
    lengths, ahead, data
):
    beginning = DatasetCheckpoints.at_beginning(len(lengths))
    run = Run(lengths, ahead * len(lengths), beginning).finish(data.draw)
    assert run.walk == walked(lengths)
    other = Run(lengths, len(lengths), beginning).finish(data.draw)
    assert other.seen == run.seen, "what is noted depends on the timing"
    assert all(checkpoint.has_ended for checkpoint in run.user.checkpoints)
    assert [checkpoint.given for checkpoint in run.user.checkpoints] == lengths


@pytest.mark.slow
@settings(max_examples=150)
@given(lengths=streams, stop=st.integers(0, 24), ahead=st.integers(1, 3), data=st.data())
def test_from_anywhere_the_walk_goes_on_as_it_would_have(lengths, stop, ahead, data):
    run = Run(lengths, ahead * len(lengths), DatasetCheckpoints.at_beginning(len(lengths)))
    run.finish(data.draw)
    stop = min(stop, len(run.walk))
    resumed = Run(lengths, len(lengths), DatasetCheckpoints(*run.seen[stop])).finish(data.draw)
    assert resumed.walk == run.walk[stop:]
    assert resumed.seen == run.seen[stop:]


@pytest.mark.slow
@settings(max_examples=150)
@given(lengths=streams, stop=st.integers(0, 24), ahead=st.integers(1, 3), data=st.data())
def test_in_any_order_each_stream_goes_on_from_its_own_place(lengths, stop, ahead, data):
    beginning = DatasetCheckpoints.at_beginning(len(lengths))
    run = Run(lengths, ahead * len(lengths), beginning, in_order=False).finish(data.draw)
    assert run.user.checkpoints == tuple(
        DatasetCheckpoint(length, b"at the end", length, has_ended=True) for length in lengths
    )
    stop = min(stop, len(run.walk))
    states = DatasetCheckpoints(*run.seen[stop])
    resumed = Run(lengths, len(lengths), states, in_order=False).finish(data.draw)
    assert sorted(run.walk[:stop] + resumed.walk) == sorted(walked(lengths))
    for worker_id, length in enumerate(lengths):
        mine = [batch for batch in resumed.walk if batch[0] == worker_id]
        assert mine == [(worker_id, b"%d" % n) for n in range(length - len(mine) + 1, length + 1)]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_stream_that_ends_before_its_last_batch_is_taken_has_ended_afterwards(in_order):
    run = Run([1], 2, DatasetCheckpoints.at_beginning(1), in_order=in_order)
    run.answer(0)
    run.answer(0)
    run.take()
    run.user.note(run.scheduler.progress.take_notes())
    assert run.user.checkpoints == (DatasetCheckpoint(1, b"at the end", 1, has_ended=True),)


def test_a_new_worker_goes_on_from_what_its_predecessor_answered_not_from_what_was_delivered():
    run = Run([9], 4, DatasetCheckpoints.at_beginning(1))
    for _ in range(3):
        run.answer(0)
    run.take()
    assert run.scheduler.workers[0].checkpoint == DatasetCheckpoint(3, b"3", 3)
    assert run.user.checkpoints == (DatasetCheckpoint(1, b"1", 1),)


def subject_of(worker_count, **options):
    """A scheduler whose workers have a ticket each."""
    options = {"in_order": True, "beginnings": [DatasetCheckpoint()] * worker_count, **options}
    subject = Scheduler(worker_count, worker_count, 4, **options)
    for number in range(worker_count):
        subject.offer([number])
        subject.unsent.popleft()
    return subject


def test_an_epoch_that_is_left_gives_a_new_worker_nothing_to_go_on_from():
    subject = subject_of(3)
    subject.answered(0, 0, "batch", note=DatasetNote(0, b"in the midst"))
    subject.stream_ended(1, 0, Beginning(RNG, b"at the end"))
    subject.end_epoch()
    subject.stream_ended(2, 0, Beginning(None, b"late"))
    assert [worker.checkpoint for worker in subject.workers] == [
        DatasetCheckpoint(), DatasetCheckpoint(0, b"at the end", rng=RNG), DatasetCheckpoint(),
    ]  # fmt: skip


def test_the_state_of_a_map_style_dataset_stays_with_its_worker_when_an_epoch_is_left():
    subject = subject_of(2, is_iterable=False)
    subject.answered(0, 0, "batch", note=DatasetNote(0, b"after a batch"))
    subject.end_epoch()
    assert subject.workers[0].checkpoint.snapshot == b"after a batch"
    assert subject.workers[1].checkpoint == DatasetCheckpoint()


def test_an_epoch_begins_from_what_each_dataset_says_piece_by_piece():
    subject = subject_of(3, restart_limit=1)
    long, short = Beginning(RNG, b"long").dumps(), Beginning(None, b"state").dumps()
    assert Beginning().dumps() is None
    subject.stream_ended(0, 0, Beginning())
    subject.end_epoch()
    subject.beginning_part(0, long[:5])
    subject.beginning_part(1, b"lost ")
    subject.worker_lost(1, "death")
    subject.worker_started(1)
    subject.beginning_part(0, long[5:9])
    subject.left_epoch(0, long[9:])
    subject.left_epoch(1, short)
    subject.left_epoch(2, None)
    subject.start_epoch()
    assert subject.progress.beginnings == (
        DatasetCheckpoint(0, b"long", rng=RNG),
        DatasetCheckpoint(0, b"state"),
        DatasetCheckpoint(),
    )
    assert [worker.checkpoint for worker in subject.workers] == list(subject.progress.beginnings)
    assert subject.progress.take_notes() == []


def test_a_batch_that_is_left_out_is_told_with_the_next_one_or_at_the_end_of_its_epoch():
    subject = subject_of(3, is_iterable=False)
    notes = [DatasetNote(worker_id, b"state") for worker_id in range(3)]
    for note in notes:
        subject.answered(note.worker_id, 0, "batch", note=note)
    subject.left_out(subject.take_next())
    assert subject.handed_over(subject.take_next()) == notes[:2]
    subject.left_out(subject.take_next())
    assert subject.progress.take_notes() == notes[2:]
    assert [worker.undelivered for worker in subject.workers] == [0, 0, 0]
    subject.progress.left_out(notes[0])  # the last of an epoch that is left
    subject.end_epoch()
    subject.start_epoch()
    assert subject.progress.take_notes() == []


def test_in_any_order_a_batch_of_an_epoch_that_was_left_delays_no_end():
    subject = subject_of(2, in_order=False)
    subject.answered(0, 0, "batch", note=DatasetNote(0))  # and is not handed over
    subject.end_epoch()
    subject.answered(1, 0, "late")
    for worker_id in range(2):
        subject.left_epoch(worker_id)
    subject.start_epoch()
    for number in range(2):
        subject.offer([number])
        subject.unsent.popleft()
    subject.stream_ended(0, 1, Beginning())
    subject.answered(1, 1, "batch", note=DatasetNote(1))
    end = DatasetNote(0, next_epoch=Beginning())
    assert subject.handed_over(subject.take_next()) == [DatasetNote(1), end]


# ---------------------------------------------------------------- dump and load


def test_what_is_dumped_loads_and_is_plain():
    states = DatasetCheckpoints.at_beginning(2, base_seed=12)
    failed = DatasetNote(0, has_failed=True)
    states.note([DatasetNote(0, None, 3), DatasetNote(1, None, 4), DatasetNote(0, None, 5), failed])
    states.note([DatasetNote(1, next_epoch=Beginning())])
    dumped = json.loads(json.dumps(states.dump()))
    assert [each["given"] for each in dumped["checkpoints"]] == [3, 1]
    again = DatasetCheckpoints.load(dumped, 2)
    assert again.mark() == states.mark()
    assert again.dump() == dumped


def test_going_back_takes_back_what_was_noted_since():
    states = DatasetCheckpoints.at_beginning(2)
    states.note([DatasetNote(0)])
    mark, before = states.mark(), states.dump()
    states.note([DatasetNote(1, next_epoch=Beginning()), DatasetNote(0)])
    assert states.dump() != before
    states.go_back(mark)
    assert states.dump() == before


def test_the_next_epoch_begins_where_the_dataset_was_at_the_end():
    ended = DatasetCheckpoint(3, b"end", 3, has_ended=True, rng=RNG)
    states = DatasetCheckpoints([ended, DatasetCheckpoint(2, b"now", 2)], 1, base_seed=5)
    assert states.next_epoch().mark() == (
        (DatasetCheckpoint(0, b"end", rng=RNG), DatasetCheckpoint()),
        0,
    )
    assert states.next_epoch().base_seed == 5


@pytest.mark.parametrize(("worker_count", "other"), [(2, 3), (0, 1), (1, 0)])
def test_another_number_of_workers_is_refused(worker_count, other):
    begun = DatasetCheckpoints(
        [DatasetCheckpoint()] * max(1, worker_count), worker_count=worker_count
    )
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
    whole = DatasetCheckpoints.at_beginning(1, 7).dump()
    snapshot = {"at": 0, "of": "iterator", "is_short": False, "state": lambda: 5}
    whole["checkpoints"][0]["snapshot"] = snapshot
    loaded = DatasetCheckpoints.load(whole, 1)
    assert pickle.loads(loaded.checkpoints[0].snapshot)[2]() == 5
