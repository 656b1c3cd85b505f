"""A pipeline's statistics, and its verdict."""

import asyncio
import dataclasses
import json
import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader import PipelineBuilder
from shmloader.pipeline.stats import PipelineStageStats, PipelineStats
from tests.unit.pipeline.support import SOON_S, Gate, chain
from tests.wording import long_sentences, sentences_of


def same(number):
    return number


def drop_odd(number):
    return None if number % 2 else number


def fail_tens(number):
    if number % 10 == 0:
        raise ValueError(number)
    return number


def twice(number):
    yield number
    yield number


async def soon(number):
    await asyncio.sleep(0)
    return number


def test_each_stage_counts_what_goes_in_and_out_fails_and_is_left_out():
    builder = PipelineBuilder().add_source(range(40)).pipe(soon, concurrency=4)
    builder.pipe(fail_tens).pipe(drop_odd, name="even").pipe(twice)
    pipeline = builder.aggregate(8).add_sink(5).build(max_failures=4)
    assert len(list(pipeline)) == 4
    stats = pipeline.stats()
    assert [
        (stage.name, stage.kind, stage.concurrency, stage.items_in, stage.items_out)
        for stage in stats.stages
    ] == [
        ("the source", "source", 1, 0, 40),
        ("stage 'soon'", "coroutine", 4, 40, 40),
        ("stage 'fail_tens'", "thread", 1, 40, 36),
        ("stage 'even'", "thread", 1, 36, 16),
        ("stage 'twice'", "thread", 1, 16, 32),
        ("aggregate(8)", "aggregate", 1, 32, 4),
    ]
    assert [stage.failures for stage in stats.stages] == [0, 0, 4, 0, 0, 0]
    assert (stats.items, stats.state) == (4, "ended")
    assert stats.elapsed_s >= stats.wait_s > 0
    assert all(0 <= stage.busy_share <= 1 for stage in stats.stages)


def test_the_time_in_an_op_is_that_of_the_op():
    def op(number):
        time.sleep(0.02 if number == 9 else 0.002)
        return number

    async def op_soon(number):
        await asyncio.sleep(0.002)
        return number

    def op_twice(number):
        time.sleep(0.001)
        yield number
        time.sleep(0.001)

    def source():
        for number in range(20):
            time.sleep(0.002)
            yield number

    pipeline = chain(source(), op, op_soon, op_twice)
    assert list(pipeline) == list(range(20))
    for stage in pipeline.stats().stages:
        assert stage.op_mean_s >= 0.0019
    assert pipeline.stats().stages[1].op_mean_s >= 0.0028


def test_before_the_first_epoch_there_is_nothing():
    pipeline = chain(range(3), same)
    stats = pipeline.stats()
    assert stats == PipelineStats()
    assert repr(stats) == "<PipelineStats: not started>"
    assert "No item" in str(stats)


def test_statistics_are_those_of_the_newest_epoch_and_stay_after_stop():
    pipeline = chain(range(30), same)
    for item in pipeline:
        if item == 9:
            break
    stats = pipeline.stats()
    assert stats.items == 10
    assert stats.state == "ended: its iterator was left"
    assert stats.stages[1].items_in >= 10
    assert pipeline.stats() == stats
    assert len(list(pipeline)) == 30
    assert pipeline.stats().items == 30


def test_a_stage_that_is_stuck_shows_while_it_is():
    gate = Gate()
    pipeline = chain(range(9), same, gate.at(1), timeout=0.3)
    with pipeline.auto_stop():
        items = iter(pipeline)
        assert next(items) == 0
        with pytest.raises(TimeoutError, match=r"within 0.3 seconds\. Nothing is lost"):
            next(items)
        found = []
        other = threading.Thread(target=lambda: found.append(pipeline.stats()))
        other.start()
        other.join(SOON_S)
        [stats] = found
        gate.open()
    assert stats.state == "running"
    assert stats.stages[2].busy_share > 0.5
    assert stats.stages[1].busy_share < 0.5


def test_a_table_and_a_line():
    builder = PipelineBuilder().add_source(range(20)).pipe(same, name="<decode>").aggregate(4)
    pipeline = builder.add_sink().build()
    list(pipeline)
    stats = pipeline.stats()
    lines = str(stats).splitlines()
    assert lines[0].startswith("shmloader pipeline: ended, 5 items in ")
    assert lines[2].split()[:3] == ["stage", "at", "once"]
    assert [line.split()[0] for line in lines[3:6]] == ["the", "'<decode>'", "aggregate(4)"]
    assert lines[-1] == stats.verdict
    assert all(line == line.rstrip() for line in lines)
    assert repr(stats).startswith("<PipelineStats: ended, 5 items in ")
    assert "\n" not in repr(stats)


def stage(name, share, **changes):
    kind = "source" if name == "the source" else "thread"
    made = PipelineStageStats(name, kind, 1, op_mean_s=0.01, busy_share=share)
    return dataclasses.replace(made, **changes)


def judged(*stages, **changes):
    stats = PipelineStats("ended", stages, items=100, elapsed_s=10.0, wait_s=5.0)
    return dataclasses.replace(stats, **changes)


@pytest.mark.parametrize(
    ("stats", "limiting", "words"),
    [
        (judged(items=0), "", ["No item"]),
        (
            judged(stage("the source", 1.0), wait_s=0.4),
            "the consumer",
            ["waited 400 ms (4%)", "gain nothing"],
        ),
        (
            judged(stage("the source", 0.99), stage("a", 0.5)),
            "the source",
            ["the source limits. Let it yield only keys"],
        ),
        (
            judged(stage("the source", 0.1), stage("a", 0.5), stage("b", 0.95)),
            "b",
            ["waited 5.00 s (50%)", "b limits. Raise its concurrency above 1"],
        ),
        (
            judged(stage("the source", 0.1), stage("a", 0.93), stage("b", 0.95)),
            "b",
            ["; b limits. Raise"],
        ),
    ],
)
def test_a_rule_makes_the_verdict(stats, limiting, words):
    assert stats.limiting == limiting
    assert all(word in stats.verdict for word in words), stats.verdict


KINDS = ("source", "aggregate", "thread", "coroutine", "process", "device")


@given(
    st.lists(
        st.builds(
            PipelineStageStats,
            st.sampled_from(["the source", "stage 'decode'", "transfer to cuda:0"]),
            st.sampled_from(KINDS),
            st.integers(1, 64),
            busy_share=st.floats(0, 1),
        ),
        max_size=9,
    ),
    st.floats(0, 10),
)
def test_a_verdict_is_a_cause_and_mostly_an_action(stages, wait_s):
    stats = judged(stage("the source", 0.5), *stages, wait_s=wait_s)
    cause, *actions = sentences_of(stats.verdict)
    assert not long_sentences(stats.verdict), stats.verdict
    assert len(actions) <= 1
    assert "gain" not in cause or not actions
    [waited] = re.findall(r"waited \S+ \S+ \(\d+%\)", cause)
    assert waited in repr(stats)
    assert stats.verdict.count("%") == 1, "the only share is that of the wait"


def test_statistics_as_a_dict_are_json() -> None:
    assert json.loads(json.dumps(PipelineStats().to_dict())) == {
        "state": "not started",
        "stages": [],
        "items": 0,
        "elapsed_s": 0.0,
        "wait_s": 0.0,
        "wait_share": 0.0,
        "limiting": "",
        "verdict": "No item has been delivered yet.",
    }
    stage = PipelineStageStats("stage 'decode'", "thread", 4, items_in=3)
    (found,) = PipelineStats(stages=(stage,)).to_dict()["stages"]
    assert found == dataclasses.asdict(stage)
