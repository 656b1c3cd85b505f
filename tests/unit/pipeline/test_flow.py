"""A flow under every order of events: what is bounded, what arrives, and in which order."""

import collections
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.engine.failures import FailureList
from shmloader.pipeline.config import PipelineConfig, StageConfig
from shmloader.pipeline.flow import Flow
from shmloader.pipeline.source import SourceReader
from shmloader.pipeline.stages import END, NOTHING, Job, Raised

QUEUE, SOURCE_QUEUE = 2, 8


class Hand:
    """Runs the jobs of a flow one by one, as a test says. The time stands still."""

    def __init__(self, *stages: Any, sink: int = 1) -> None:
        """Stages are (capacity, in_order), or (size, drop_last, "list")."""
        self.now_ns = 0
        self.jobs: list[Job] = []
        configs = [
            StageConfig("list", "aggregate", size=stage[0], drop_last=stage[1])
            if len(stage) == 3
            else StageConfig("op", "thread", concurrency=stage[0], in_order=stage[1])
            for stage in stages
        ]
        config = PipelineConfig(iter(()), tuple(configs), sink, 1, None, None, 1)
        source = StageConfig("the source", "source", makes_many=True)
        reader = SourceReader(config, None)
        runners = [(stage, self) for stage in (source, *configs)]
        self.flow = Flow(config, runners, FailureList(), reader, lambda: self.now_ns)
        self.flow.begin()

    def put(self, job: Job) -> None:
        self.jobs.append(job)

    def only(self) -> Job:
        [job] = self.jobs
        self.jobs.clear()
        return job

    def finish(self, job: Job, *outputs: Any) -> None:
        """End a job. The flow returns one of the next jobs, which the same thread would run."""
        following = self.flow.finished(job, outputs, 0)
        if following is not None:
            self.put(following)

    def take(self) -> Any:
        """The next item, or NOTHING: nobody waits."""
        found = self.flow.take(0)
        return NOTHING if type(found) is Raised and type(found.error) is TimeoutError else found


class Runner(Hand):
    """Runs the jobs in an order that is drawn, and consumes now and then."""

    def __init__(self, *stages: Any, count: int, many: int = 1, sink: int = 1) -> None:
        self.source, self.many = iter(range(count)), many
        self.drawn = 0
        self.taken: list[Any] = []
        self.is_ended = False
        self.running: collections.Counter[int] = collections.Counter()
        super().__init__(*stages, sink=sink)

    def put(self, job: Job) -> None:
        if job.iterator is None:
            self.running[job.number] += 1
            results = [(job.item, n) for n in range(self.many)]
            job.iterator = iter(results) if job.number else self.source
        super().put(job)

    def step(self, which: int) -> None:
        """Have one of the jobs that may run give its next result, or end."""
        job = self.jobs[which % len(self.jobs)]
        output = next(job.iterator, NOTHING)
        if output is NOTHING:
            self.jobs.remove(job)
            self.running[job.number] -= 1
            self.finish(job)
        else:
            self.drawn += job.number == 0
            # It may come back before this call has returned.
            self.jobs.remove(job)
            if self.flow.yielded(job, output, 0):
                self.jobs.append(job)

    def consume(self) -> None:
        item = self.take()
        if item is END:
            self.is_ended = True
        elif item is not NOTHING:
            self.taken.append(item)


STAGES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 4), st.booleans()),
        st.tuples(st.integers(1, 3), st.just(False), st.just("list")),
    ),
    max_size=4,
)


SEEDS = st.integers(0, 2**32)


def flatten(items: Any) -> list[int]:
    if isinstance(items, int):
        return [items]
    if isinstance(items, tuple):
        return flatten(items[0])
    return [number for item in items for number in flatten(item)]


@given(STAGES, st.integers(1, 3), st.integers(0, 12), st.integers(1, 3), SEEDS)
def test_every_item_arrives_once_whatever_comes_first(stages, sink, count, many, seed):
    draw = random.Random(seed)
    many = many if sum(len(stage) == 2 for stage in stages) < 3 else 1
    runner = Runner(*stages, sink=sink, count=count, many=many)
    pipes = [stage for stage in stages if len(stage) == 2]
    while not runner.is_ended:
        if runner.jobs and draw.random() < 0.6:
            runner.step(draw.randrange(20))
        else:
            before = len(runner.taken)
            runner.consume()
            # Nothing is stuck: a job may go on, or there was something for the consumer.
            assert runner.jobs or runner.is_ended or len(runner.taken) > before
        for number, stage in enumerate(stages, start=1):
            assert len(stage) == 3 or runner.running[number] <= stage[0]
    assert not runner.jobs
    arrived = flatten(runner.taken)
    assert sorted(arrived) == sorted(list(range(count)) * many ** len(pipes))
    # The results of one list are lists, one after the other.
    is_in_order = all(stage[1] or stage[0] == 1 for stage in pipes)
    if is_in_order and (many == 1 or len(pipes) == len(stages)):
        assert arrived == sorted(arrived)


@given(STAGES, st.integers(1, 3), SEEDS)
def test_a_consumer_that_takes_nothing_stops_the_source(stages, sink, seed):
    draw = random.Random(seed)
    runner = Runner(*stages, sink=sink, count=10_000)
    while runner.jobs:
        runner.step(draw.randrange(5))
    # The formula of Pipeline's docstring, in items of the source.
    size, bound, queue = 1, 1, SOURCE_QUEUE
    for stage in stages:
        bound += size * queue
        queue = QUEUE
        if len(stage) == 3:
            bound += size * stage[0] * 2
            size *= stage[0]
        else:
            bound += size * stage[0]
    bound += size * sink
    assert sink <= runner.drawn <= bound


def test_what_failed_comes_after_what_was_before_it_and_begins_no_list():
    hand = Hand((1, False), (2, False, "list"), (1, False), sink=4)
    error = ValueError("of the op")
    source = hand.only()
    for number in range(4):
        hand.flow.yielded(source, number, 0)
    for number in range(3):
        job = next(job for job in hand.jobs if job.number == 1)
        hand.jobs.remove(job)
        hand.finish(job, number)
    of_list, job = sorted(hand.jobs, key=lambda job: -job.number)
    assert of_list.item == [0, 1]
    assert hand.flow.failed(job, error) is None
    hand.finish(of_list, "first")
    assert hand.take() == "first"
    raised = hand.take()
    assert type(raised) is Raised
    assert raised.error is error


def test_in_order_only_the_first_job_gives_more_than_one_result_ahead():
    hand = Hand((2, True), sink=1)
    source = hand.only()
    hand.flow.yielded(source, "a", 0)
    hand.flow.yielded(source, "b", 0)
    first, second = hand.jobs
    hand.jobs.clear()
    assert not hand.flow.yielded(second, "b1", 0)  # it rests until all of the first is passed on
    assert hand.flow.yielded(first, "a1", 0)
    assert hand.take() == "a1"
    assert hand.jobs == []
    hand.finish(first)
    assert hand.take() == "b1"
    assert second in hand.jobs


@pytest.mark.parametrize("in_order", [False, True])
def test_a_result_that_waits_for_space_holds_its_item_no_longer(in_order):
    hand = Hand((1, in_order))
    source = hand.only()
    for _ in range(2):  # the second finds the sink full
        hand.flow.yielded(source, "the item", 0)
        job = hand.only()
        hand.finish(job, "the result")
    assert [output for output, _ in job.outputs] == ["the result"]
    assert job.item is None


def test_a_job_is_busy_until_it_ends_or_cannot_continue():
    hand = Hand((2, True), sink=1)
    flow, ms = hand.flow, 1_000_000
    hand.now_ns = 10 * ms
    source = hand.only()
    flow.yielded(source, "a", 0)
    flow.yielded(source, "b", 0)
    first, second = hand.jobs
    hand.now_ns = 15 * ms  # both are in work for 5 ms
    flow.finished(second, ["b"], 0)
    hand.now_ns = 18 * ms  # one is in work, the other waits for it
    flow.measure()
    flow.finished(first, ["a"], 0)
    hand.now_ns = 25 * ms  # "a" fills the sink
    assert [flow.take(0), flow.take(0)] == ["a", "b"]
    assert flow._pop() is NOTHING
    hand.now_ns = 30 * ms  # both are free, while the consumer waits
    flow.measure()
    _, meter = flow.measured[1]
    assert meter.busy_ns == (2 * 5 + 3) * ms
    assert flow.waited_ns == 5 * ms
    assert (meter.out_count, flow.item_count) == (2, 2)
