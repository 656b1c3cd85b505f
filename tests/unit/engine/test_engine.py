"""What the engine makes of events, without worker or clock; bad samples; how far streams are."""

import contextlib
import gc
import json
import pickle
import time
import weakref
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.failures import BadSample, SampleReport
from shmloader.device.stage import Stage
from shmloader.device.thread import StagedEngine
from shmloader.engine.delivery import DatasetCheckpoints
from shmloader.engine.engine import Engine
from shmloader.engine.failures import FailureLimit, FailureList, FailureWatch
from shmloader.engine.scheduler import Scheduler
from shmloader.errors import SharedMemoryError
from shmloader.pools.answers import Answer, Death
from tests.pools.scripted import ScriptedPool, call_of, next_of
from tests.process.support import Bad


def nothing(pool: ScriptedPool) -> None:
    """No worker does anything."""


def everything(pool: ScriptedPool) -> None:
    """Each worker answers all that it has."""
    pool.answer_all()


def engine_of(idle=everything, worker_count=2, window=4, **options) -> tuple[Engine, ScriptedPool]:
    pool = ScriptedPool(worker_count, idle)
    scheduler = Scheduler(worker_count, window, 1, in_order=True)
    return Engine(pool, scheduler, **({"timeout_s": 0} | options)), pool


def all_of(engine: Engine) -> list[int]:
    found = []
    while True:
        try:
            found.append(next_of(engine))
        except StopIteration:
            return found


def watch(max_failures=None, *, keep_size=False) -> FailureWatch:
    return FailureWatch(FailureList(), max_failures, keep_size=keep_size, replaces=False)


def answer_of(batch: int | None, samples: int) -> Answer:
    """A batch of so many samples, or none because all of them failed."""
    failed = samples if batch is None else 0
    answer = Answer(batch, SampleReport(samples, failed))
    answer.is_empty = batch is None
    return answer


def test_what_is_left_out_is_told_with_the_next_batch():
    engine, pool = engine_of(nothing, watch=watch(), worker_count=1)
    engine.start(iter(range(3)))
    for batch in (None, None, 2):
        pool.answer(0, answer=answer_of(batch, 2))
    assert next_of(engine) == 2
    assert engine.delivery.seq == 2
    assert [ticket.seq for ticket in engine.delivery.left_out] == [0, 1]


def test_what_is_left_out_at_an_epoch_s_end_is_not_told_in_the_next():
    engine, pool = engine_of(nothing, watch=watch(), worker_count=1)
    engine.start(iter(range(2)))
    pool.answer(0, answer=answer_of(0, 2))
    pool.answer(0, answer=answer_of(None, 2))
    assert all_of(engine) == [0]
    pool.idle = everything
    engine.restart(iter(range(2)))
    assert next_of(engine) == 0
    assert engine.delivery.left_out == ()


def test_a_sample_that_has_time_left_is_looked_at_again_when_it_has_not(monkeypatch):
    engine, pool = engine_of(nothing, sample_timeout_s=2)
    monkeypatch.setattr(time, "monotonic", lambda: pool.now_s)
    engine.start(iter(range(4)))
    pool.hang(0, seq=0, sample=0, left_s=0.5)
    began_s = pool.now_s

    def look(pool: ScriptedPool) -> None:
        if pool.hanging and pool.now_s == began_s:
            pool.hang(0, seq=0, sample=0, left_s=0.0)
        elif not pool.hanging:
            pool.answer_all()

    pool.idle = look
    assert next_of(engine) == 0
    assert pool.now_s == began_s + 0.5


def test_a_slot_that_cannot_be_mapped_costs_its_batch_and_is_filled_again():
    engine, pool = engine_of(nothing, worker_count=1, window=1)

    def refuse(slot_id: int) -> None:
        raise SharedMemoryError("no address space is left")

    pool.memory.lock = refuse
    engine.start(iter(range(4)))
    for _ in range(3):  # there are two slots
        pool.answer(0, answer=Answer("large"), lends=True)
        with pytest.raises(SharedMemoryError, match="no address space is left"):
            next_of(engine)
    pool.answer(0)
    assert next_of(engine) == 3


def test_what_is_passed_over_begins_the_time_anew(monkeypatch):
    engine, pool = engine_of(nothing, timeout_s=7, watch=watch(), worker_count=1)
    monkeypatch.setattr(time, "monotonic", lambda: pool.now_s)
    engine.start(iter(range(3)))

    def after_five_seconds(pool: ScriptedPool) -> None:
        pool.now_s += 5
        seq = next(iter(pool.sent[0]))
        pool.answer(0, answer=answer_of(2 if seq == 2 else None, 1))

    pool.idle = after_five_seconds
    assert next_of(engine) == 2
    assert pool.now_s == pytest.approx(115)


class Unchanged(Stage):
    ahead, name, kind = 1, "unchanged", "pin"

    def run(self, batch: Any) -> Any:
        return batch


def failing() -> Iterator[object]:
    raise Bad(0)
    yield


def test_a_sampler_that_fails_at_once_ends_the_epoch_whatever_the_one_before_left() -> None:
    pool: Any = ScriptedPool(2, lambda pool: pool.answer_all())
    engine = Engine(pool, Scheduler(2, 4, 1, in_order=True), timeout_s=0)
    staged = StagedEngine(engine, Unchanged(), timeout_s=20)
    with contextlib.closing(staged):
        staged.start(iter(range(9)))
        assert next_of(staged) == 0
        with pytest.raises(Bad):
            call_of(staged.restart, failing())
        with pytest.raises(StopIteration):
            next_of(staged)
        staged.restart(iter(range(3)))
        assert [next_of(staged) for _ in range(3)] == [0, 1, 2]


HALF, TENTH = Fraction(1, 2), Fraction(1, 10)


def verdicts(limit: FailureLimit, batches: list[tuple[int, int]]) -> list[bool]:
    """What it says of each batch of (samples, failures), and of the epoch's end."""
    return [*(limit.add_samples(*batch) for batch in batches), limit.is_too_much]


@pytest.mark.parametrize(
    ("most", "batches", "expected"),
    [
        (None, [(10, 9), (10, 9)], [False, False, False]),
        (0, [(10, 0), (10, 1)], [False, True, True]),
        (3, [(10, 3), (10, 0)], [False, False, False]),
        (3, [(10, 3), (10, 1), (10, 0)], [False, True, True, True]),
        (3, [(10, 4)], [True, True]),
        # A share is judged from the hundredth sample on, and at the end.
        (TENTH, [(99, 98)], [False, True]),
        (TENTH, [(100, 11)], [True, True]),
        (TENTH, [(100, 10)], [False, False]),
        (TENTH, [(50, 40), (49, 0), (1, 0)], [False, False, True, True]),
        (TENTH, [(50, 11), (50, 0), (10, 0)], [False, True, False, False]),
        (HALF, [(3, 2)], [False, True]),
        (HALF, [(4, 2)], [False, False]),
        (Fraction(1), [(1000, 999)], [False, False]),
        # Nothing was looked at.
        (0, [], [False]),
        (HALF, [(0, 0)], [False, False]),
    ],
)
def test_too_many_is_more_than_the_number_or_the_share(most, batches, expected):
    assert verdicts(FailureLimit(most, may_all_fail=True), batches) == expected


@pytest.mark.parametrize("most", [None, 1000, Fraction(1)])
def test_an_epoch_in_which_all_failed_is_too_many_unless_they_were_replaced(most):
    batches = [(64, 64), (64, 64)]
    assert verdicts(FailureLimit(most, may_all_fail=False), batches) == [False, False, True]
    assert verdicts(FailureLimit(most, may_all_fail=True), batches) == [False, False, False]
    one_good = [*batches, (64, 63)]
    assert verdicts(FailureLimit(most, may_all_fail=False), one_good) == [False] * 4
    assert verdicts(FailureLimit(most, may_all_fail=False), []) == [False]


def report_of_a_bad_sample() -> SampleReport:
    report = SampleReport(1)
    try:
        raise ValueError("sample 0 is bad")
    except ValueError:
        report.add(BadSample.caught(0, "in DataLoader worker process 1"))
    return report


def test_an_error_noted_while_another_is_handled_does_not_hold_that():
    class Held(Exception):  # noqa: N818 - what matters is who holds it
        pass

    listed = FailureList()
    watch = FailureWatch(listed, None, keep_size=False, replaces=False)
    try:
        raise Held
    except Held as held:
        seen = weakref.ref(held)
        watch.add(report_of_a_bad_sample(), "batch 0")
    gc.collect()
    assert listed[0].error.__context__ is None
    assert seen() is None


@pytest.mark.parametrize(
    ("keep_size", "found", "is_refused"),
    [(True, 2, True), (True, 0, False), (False, 2, False)],
)
def test_a_rank_may_not_leave_out_a_batch_that_its_reader_has(keep_size, found, is_refused):
    heard = []
    watch = FailureWatch(
        FailureList(), None, keep_size=keep_size, replaces=False, hear=heard.append
    )
    report = SimpleNamespace(
        found=SimpleNamespace(size=found), sample_count=found, failed_count=found, newest=()
    )
    assert watch.add(report, "batch 0") is None
    assert heard == [report.found]
    assert (watch.left_out("batch 0") is not None) is is_refused


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
