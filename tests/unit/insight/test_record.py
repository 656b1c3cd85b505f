"""Where the next batch was while the consumer waited, from the times of batches."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.insight.core_time import ConsumerUsage, CoreTime, core_time_here
from shmloader.insight.measurements import BatchTimes, WorkTimes
from shmloader.insight.record import Record

# The times of a batch: drawn at 10, sent at 20, begun at 30, fetched until 50, collated until 65,
# encoded until 70, noticed and handed over at 80.
WORK = WorkTimes(began_ns=30, fetch_ns=20, collate_ns=15, encode_ns=5, sample_count=1)


def times_of(worker_id: int = 0, work: WorkTimes = WORK, **changed: int) -> BatchTimes:
    plain = {"offered_ns": 10, "sent_ns": 20, "looked_ns": 0, "seen_ns": 79, "handed_ns": 80}
    return BatchTimes(worker_id, work=work, nbytes=1, **{**plain, **changed})


def record_of(worker_count: int = 2) -> Record:
    return Record(0, "processes", worker_count, begin_ns=0)


def waited(record: Record) -> dict[str, int]:
    return {place: spent_ns for place, spent_ns in record.places().items() if spent_ns}


ALL = {"send": 10, "queue": 10, "fetch": 20, "collate": 15, "encode": 5, "transport": 10}


@pytest.mark.parametrize(
    ("asked_ns", "taken_ns", "stage", "draw_ns", "expected"),
    [
        (10, 100, None, 12, {**ALL, "build": 8, "draw": 12}),
        (40, 80, None, 0, {"fetch": 10, "collate": 15, "encode": 5, "transport": 10}),
        (75, 90, None, 0, {"transport": 5, "build": 10}),
        (85, 90, None, 5, {"draw": 5}),
        (10, 140, ("pin", 90, 120), 4, {**ALL, "build": 26, "pin": 30, "draw": 4}),
        (100, 140, ("pin", 90, 120), 0, {"pin": 20, "build": 20}),
        (130, 140, ("pin", 90, 120), 4, {"build": 6, "draw": 4}),
        # It drew for another batch while it waited for this one.
        (10, 82, None, 9, {**ALL, "draw": 2}),
    ],
)
def test_a_wait_is_divided_among_the_places_of_its_batch(
    asked_ns, taken_ns, stage, draw_ns, expected
) -> None:
    record = record_of()
    first = times_of(work=WorkTimes(-9, 1, 1, 1, 1), handed_ns=0)
    record.note_batch(first, 0, 0, None)  # its worker's first is another matter
    record.note_batch(times_of(), asked_ns, taken_ns, stage, draw_ns)
    assert waited(record) == expected


def test_until_a_worker_begins_its_first_batch_it_starts() -> None:
    record = record_of()
    record.note_batch(times_of(), 10, 80, None)
    assert waited(record) == {"start": 20, "fetch": 20, "collate": 15, "encode": 5, "transport": 10}


def test_iter_and_calls_without_a_batch_have_places() -> None:
    record = record_of()
    record.note_begun(draw_ns=3)
    record.note_wait(100, 107, "end")
    record.note_wait(100, 102)
    assert (record.waited["draw"], record.waited["end"], record.waited["other"]) == (3, 7, 2)
    assert record.waited["start"] == record.iter_ns - 3


def test_without_workers_the_places_are_what_the_thread_did() -> None:
    record = Record(0, "in-process", 0, begin_ns=0)
    record.note_local_batch(WORK, 0, 100, 1, "pin", draw_ns=30)
    assert waited(record) == {"draw": 30, "fetch": 20, "collate": 15, "pin": 5, "build": 30}


spans = st.lists(st.integers(0, 50), min_size=9, max_size=9)


@given(st.lists(st.tuples(spans, st.integers(0, 2), st.booleans(), st.integers(0, 60))))
def test_places_add_up_to_all_waits(batches: list[Any]) -> None:
    record = record_of()
    taken_ns = 0
    for steps, worker_id, has_stage, draw_ns in batches:
        at = list(itertools.accumulate(steps, initial=max(0, taken_ns - 60)))
        work = WorkTimes(at[2], steps[2], steps[3], steps[4], 1)
        times = times_of(
            worker_id, work, offered_ns=at[0], sent_ns=at[1], seen_ns=at[6], handed_ns=at[6]
        )
        stage = ("device", at[7], at[8]) if has_stage else None
        asked_ns = taken_ns + steps[0]
        taken_ns = max(asked_ns, at[9])
        record.note_batch(times, asked_ns, taken_ns, stage, draw_ns)
        assert all(spent_ns >= 0 for spent_ns in record.waited.values())
    assert sum(record.places().values()) == record.waits.total_ns


def test_a_worker_is_idle_between_its_batches_and_perhaps_awaited() -> None:
    """The second worker has done its batch at 40, and gets another at 100; the first needs 90."""
    record = record_of()
    record.note_batch(times_of(0, WorkTimes(1, 89, 0, 0, 1), handed_ns=91), 10, 91, None)
    record.note_batch(times_of(1, WorkTimes(1, 39, 0, 0, 1), handed_ns=92), 92, 92, None)
    record.note_batch(times_of(1, WorkTimes(100, 10, 0, 0, 1), handed_ns=110), 95, 110, None)
    worker = record.copy().workers[1]
    assert worker.idle_ns == 60
    # From 40 until the slow batch was loaded at 90; and from 95 on it was asked for another.
    assert worker.idle_awaited_ns == 50 + 5
    total = record_of()
    for _ in range(2):
        total.merge(record.copy())
    assert total.copy().workers[1].idle_ns == 120
    assert total.copy().workers[1].idle_awaited_ns == 110
    assert record.copy().workers[0].idle_ns == 0


def test_what_the_consumer_uses_counts_until_the_epoch_ends() -> None:
    record = record_of()
    until_ns = time.thread_time_ns() + 5_000_000
    while time.thread_time_ns() < until_ns:
        pass
    with ThreadPoolExecutor(1) as other:
        seen = other.submit(lambda: record.copy().consumer()).result()
    assert seen.process_cpu_ns >= 5_000_000
    if core_time_here() is not None:
        assert seen.core_time is not None
        assert 0 < seen.core_time.cpu_ns <= seen.process_cpu_ns + 10_000_000  # ticks of the clock
    record.end()
    assert record.consumer().process_cpu_ns >= seen.process_cpu_ns
    assert record.consumer() == record.consumer() == record.copy().consumer()


def test_what_the_consumer_used_in_two_epochs_is_added() -> None:
    one = ConsumerUsage(5, CoreTime(4, 2))
    assert one.and_then(ConsumerUsage(7, CoreTime(1, 3))) == ConsumerUsage(12, CoreTime(5, 5))
    assert one.and_then(ConsumerUsage(7)) == ConsumerUsage(12, CoreTime(4, 2))
    first, second = record_of(), record_of()
    first.end()
    second.end()
    total = first.copy()
    total.merge(second.copy())
    assert total.consumer() == first.consumer().and_then(second.consumer())
