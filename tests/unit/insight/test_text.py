"""Durations, sizes and numbers as text."""

import dataclasses
import json

import pytest

from shmloader.grammar import seconds
from shmloader.insight.stats import Finding, LoaderStats, SlotStats, Times, WaitStats, WorkerStats


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
