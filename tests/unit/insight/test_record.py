"""Where the next batch was while the consumer waited, from the times of batches, and as text."""

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.grammar import seconds
from shmloader.insight.measurements import WorkTimes, pack_batch, pack_work
from shmloader.insight.record import Record
from shmloader.insight.stats import Finding, LoaderStats, SlotStats, Times, WaitStats, WorkerStats
from shmloader.insight.sums import Histogram
from shmloader.insight.verdict import snapshot

# The times of a batch: drawn at 10, sent at 20, begun at 30, fetched until 50, collated until 65,
# encoded until 70, noticed and handed over at 80.
WORK = WorkTimes(began_ns=30, fetch_ns=20, collate_ns=15, encode_ns=5, sample_count=1)


def times_of(worker_id: int = 0, work: WorkTimes = WORK, **changed: int) -> bytes:
    plain = {"offered_ns": 10, "sent_ns": 20, "looked_ns": 0, "seen_ns": 79, "handed_ns": 80}
    return pack_batch(worker_id, *{**plain, **changed}.values(), 1, 0) + pack_work(*work)


def record_of(worker_count: int = 2) -> Record:
    return Record(0, "processes", worker_count, begin_ns=0)


def stats_of(record: Record) -> LoaderStats:
    """Without CPU time, which depends on when it is read."""
    stats = snapshot(record.sums(), 1, 0)
    return dataclasses.replace(stats, cpu_s=0.0, consumer_cpu_s=0.0)


def waited(record: Record) -> dict[str, int]:
    places = stats_of(record).wait.causes._asdict()
    return {place: round(spent_s * 1e9) for place, spent_s in places.items() if spent_s}


ALL = {"slot": 10, "queue": 10, "fetch": 20, "collate": 15, "encode": 5, "transport": 10}


@pytest.mark.parametrize(
    ("asked_ns", "received_ns", "stage", "draw_ns", "expected"),
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
    asked_ns, received_ns, stage, draw_ns, expected
) -> None:
    record = record_of()
    first = times_of(work=WorkTimes(-9, 1, 1, 1, 1), handed_ns=0)
    record.add(0, 0, 0, first, None)  # its worker's first is another matter
    record.add(asked_ns, received_ns, draw_ns, times_of(), stage)
    assert waited(record) == expected


def test_until_a_worker_begins_its_first_batch_it_starts() -> None:
    record = record_of()
    record.add(10, 80, 0, times_of(), None)
    assert waited(record) == {"start": 20, "fetch": 20, "collate": 15, "encode": 5, "transport": 10}


def test_iter_and_calls_without_a_batch_have_places() -> None:
    record = record_of()
    record.add(0, 20, 3, None, "start")
    record.add(100, 107, 0, None, "end")
    record.add(100, 102, 0, None, "other")
    assert waited(record) == {"draw": 3, "start": 17, "end": 7, "other": 2}


def test_without_workers_the_places_are_what_the_thread_did() -> None:
    record = Record(0, "in-process", 0, begin_ns=0)
    record.add(0, 100, 30, times_of(work=WORK._replace(encode_ns=0)), ("pin", 65, 70))
    assert waited(record) == {"draw": 30, "fetch": 20, "collate": 15, "pin": 5, "build": 30}


spans = st.lists(st.integers(0, 50), min_size=9, max_size=9)


@given(st.lists(st.tuples(spans, st.integers(0, 2), st.booleans(), st.integers(0, 60))))
def test_places_add_up_to_all_waits(batches: list[Any]) -> None:
    record = record_of()
    received_ns = 0
    for steps, worker_id, has_stage, draw_ns in batches:
        at = list(itertools.accumulate(steps, initial=max(0, received_ns - 60)))
        work = WorkTimes(at[2], steps[2], steps[3], steps[4], 1)
        times = times_of(
            worker_id, work, offered_ns=at[0], sent_ns=at[1], seen_ns=at[6], handed_ns=at[6]
        )
        stage = ("device", at[7], at[8]) if has_stage else None
        asked_ns = received_ns + steps[0]
        received_ns = max(asked_ns, at[9])
        record.add(asked_ns, received_ns, draw_ns, times, stage)
    assert all(spent_ns >= 0 for spent_ns in waited(record).values())
    wait = stats_of(record).wait
    assert sum(wait.causes) == pytest.approx(wait.total_s)


def test_a_worker_is_idle_between_its_batches() -> None:
    """The second worker has done its batch at 40, and gets another at 100; the first needs 90."""
    record = record_of()
    record.add(10, 91, 0, times_of(0, WorkTimes(1, 89, 0, 0, 1), handed_ns=91), None)
    record.add(92, 92, 0, times_of(1, WorkTimes(1, 39, 0, 0, 1), handed_ns=92), None)
    record.add(95, 110, 0, times_of(1, WorkTimes(100, 10, 0, 0, 1), handed_ns=110), None)
    sums = record.sums()
    assert (sums.added[0, "idle"], sums.added[1, "idle"]) == (0, 60)
    sums.merge(record.sums())
    assert sums.added[1, "idle"] == 120


@pytest.mark.parametrize("in_order", [True, False])
def test_calls_that_were_summed_up_early_count_the_same(in_order) -> None:
    early, late = (Record(0, "processes", 2, begin_ns=0, in_order=in_order) for _ in range(2))
    early.most_calls = 1
    for number, asked_ns in enumerate(range(10, 400, 45)):
        work = WorkTimes(asked_ns + 5 - 20 * (number % 3), 20 + number, 3, 2, 1)
        times = times_of(number % 2, work, seen_ns=asked_ns + 60, handed_ns=asked_ns + 62)
        for record in (early, late):
            record.add(asked_ns, asked_ns + 70, 3, times, None)
    assert stats_of(early) == stats_of(late)


DURATIONS = st.lists(st.integers(0, 10**13), min_size=1, max_size=200)


def recorded(durations: list[int]) -> Histogram:
    histogram = Histogram()
    histogram.record(durations)
    return histogram


@given(DURATIONS, DURATIONS, st.sampled_from([50, 90, 99, 100]))
def test_a_percentile_is_right_to_seven_per_cent(some, others, percent) -> None:
    exact = sorted(some + others)[math.ceil(len(some + others) * percent / 100) - 1]
    histogram = recorded(some)
    histogram.update(recorded(others))
    assert abs(histogram.percentile(percent) - exact) <= 0.07 * exact


def test_a_histogram_of_like_durations_does_not_grow() -> None:
    assert Histogram().percentile(99) == 0
    assert len(recorded(list(range(10**6, 2 * 10**6, 100)))) <= 9


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 s"),
        (5e-9, "5 ns"),
        (1.234e-5, "12.3 µs"),
        (9.996e-4, "1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (123.456, "123.46 s"),
    ],
)
def test_a_duration_has_the_unit_that_fits(duration_s, text) -> None:
    assert seconds(duration_s) == text


STATS = LoaderStats(
    epoch=3,
    epochs=1,
    kind="processes",
    num_workers=1,
    batches=1_000,
    samples=4_000,
    elapsed_s=2.0,
    samples_per_s=2_000.0,
    wait=WaitStats(total_s=0.5, share=0.25),
    stages=Times(fetch=1.5),
    workers=(WorkerStats(worker_id=0, batches=1_000, busy_share=0.5, cpu_s=1.0),),
    slots=SlotStats(count=6, nbytes=1_000),
)


def test_places_of_the_wait_are_shown_if_they_have_a_share_of_it() -> None:
    places = Times(draw=0.1, fetch=0.397, pin=0.003)
    stats = dataclasses.replace(STATS, wait=dataclasses.replace(STATS.wait, causes=places))
    head, _, rest = str(stats).partition("where the next batch was while the consumer waited\n")
    assert "draw" not in head
    assert rest.splitlines()[:3] == [
        "  draw         100 ms    20%  the batch sampler was drawing",
        "  fetch        397 ms    79%  in the dataset",
        "",
    ]


def test_statistics_as_a_dict_are_json_with_the_names_of_the_fields() -> None:
    found = json.loads(json.dumps(STATS.to_dict()))
    assert found == STATS.to_dict()
    assert set(found) == {field.name for field in dataclasses.fields(LoaderStats)}
    assert found["wait"]["share"] == 0.25
    assert found["wait"]["causes"] == Times()._asdict()
    assert found["stages"]["fetch"] == 1.5
    assert found["workers"][0]["busy_share"] == 0.5
    assert found["finding"] == Finding.NOTHING_YET == "nothing yet"
    assert type(found["finding"]) is type(STATS.to_dict()["finding"]) is str
