"""A flow under every order of events: what is bounded, what arrives, and in which order."""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.pipeline.flow import Flow
from shmloader.pipeline.stages import (
    END,
    NOTHING,
    Clock,
    Job,
    Raised,
    Stage,
    StageQueue,
)

QUEUE = 2


class FailureCounter:
    """Fails at its stage's end if it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls = 0
        self.error = error

    def add_good(self) -> None:
        self.calls += 1

    def end(self) -> BaseException | None:
        return self.error


def make_flow(*stages: Any, sink: int = 1) -> Flow:
    """Stages are (capacity, in_order), or (size, drop_last, "group")."""
    clock = Clock()
    sizes = [1, *(QUEUE for _ in stages), sink]
    queues = [StageQueue(size, size - 1) for size in sizes]
    made = [Stage(0, queues[0], queues[1], clock)]
    for number, stage in enumerate(stages, start=1):
        before, after = queues[number : number + 2]
        if stage[-1] == "group":
            made.append(Stage(number, before, after, clock, size=stage[0], drop_last=stage[1]))
        else:
            capacity, in_order, *counters = stage
            made.append(
                Stage(
                    number, before, after, clock, capacity, in_order=in_order,
                    counter=counters[0] if counters else None, judged=counters,
                )
            )  # fmt: skip
    return Flow(made, clock)


class Runner:
    """Runs a flow's jobs one by one, in an order that is drawn, and consumes now and then."""

    def __init__(self, flow: Flow, count: int, many: int = 1) -> None:
        self.flow = flow
        self.source = iter(range(count))
        self.many = many
        self.drawn = 0
        self.taken: list[Any] = []
        self.is_ended = False
        self.jobs: collections.Counter[int] = collections.Counter()
        self.most: collections.Counter[int] = collections.Counter()
        self.resting: dict[int, tuple[Job, Any]] = {}
        self.left: list[Job] = []
        flow.begin()
        self.collect()

    def collect(self) -> None:
        for job in self.flow.ready:
            number = job.number
            if job.results is None:
                self.jobs[number] += 1
                self.most[number] = max(self.most[number], self.jobs[number])
                job.results = (
                    self.source if number == 0 else iter([(job.item, n) for n in range(self.many)])
                )
            self.left.append(job)
        self.flow.ready = []

    def step(self, place: int) -> None:
        """Have one of the jobs that may run give its next result, or end."""
        job = self.left[place % len(self.left)]
        number = job.number
        stream: Any = job.results
        output = next(stream, NOTHING)
        if output is NOTHING:
            self.left.remove(job)
            self.jobs[number] -= 1
            self.flow.finished(job)
        else:
            self.drawn += number == 0
            if not self.flow.yielded(job, output):
                self.left.remove(job)
        self.collect()

    def take(self) -> None:
        item = self.flow.take()
        self.collect()
        if item is END:
            self.is_ended = True
        elif item is not NOTHING:
            self.taken.append(item)


STAGES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 4), st.booleans()),
        st.tuples(st.integers(1, 3), st.just(False), st.just("group")),
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
    many = many if sum(stage[-1] != "group" for stage in stages) < 3 else 1
    runner = Runner(make_flow(*stages, sink=sink), count, many)
    pipes = [stage for stage in stages if stage[-1] != "group"]
    places = [stage[0] for stage in stages if stage[-1] != "group"]
    while not runner.is_ended:
        # Nothing is stuck: a job may go on, or there is something for the consumer.
        assert runner.left or runner.flow.has_news
        if runner.left and draw.random() < 0.6:
            runner.step(draw.randrange(20))
        else:
            runner.take()
        for number, stage in enumerate(stages, start=1):
            if stage[-1] != "group":
                assert runner.jobs[number] <= stage[0]
    assert not runner.left
    arrived = flatten(runner.taken)
    assert sorted(arrived) == sorted(list(range(count)) * many ** len(pipes))
    # The results of one list are lists, one after the other.
    is_in_order = all(stage[1] or stage[0] == 1 for stage in pipes)
    if is_in_order and (many == 1 or len(pipes) == len(stages)):
        assert arrived == sorted(arrived)
    assert all(most <= max([1, *places]) for most in runner.most.values())


@given(STAGES, st.integers(1, 3), SEEDS)
def test_a_consumer_that_takes_nothing_stops_the_source(stages, sink, seed):
    draw = random.Random(seed)
    runner = Runner(make_flow(*stages, sink=sink), 10_000)
    while runner.left:
        runner.step(draw.randrange(5))
    # The formula of Pipeline's docstring, in items of the source.
    size, bound = 1, 1
    for stage in stages:
        bound += size * QUEUE
        if stage[-1] == "group":
            bound += size * stage[0] * 2
            size *= stage[0]
        else:
            bound += size * stage[0]
    bound += size * sink
    assert runner.drawn <= bound
    # And all that room is used, but for what a group has begun.
    assert runner.drawn >= sink


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [[0, 1], [2]]), (True, [[0, 1]])])
def test_a_last_list_that_is_short_is_kept_or_left_out(drop_last, expected):
    runner = Runner(make_flow((2, drop_last, "group"), sink=3), 3)
    while runner.left:
        runner.step(0)
    while not runner.is_ended:
        runner.take()
    assert runner.taken == expected


def drain(flow: Flow) -> list[Any]:
    taken = []
    while (item := flow.take()) is not END:
        assert item is not NOTHING
        taken.append(item)
    return taken


def test_what_failed_comes_after_what_was_before_it_and_nothing_comes_after():
    flow = make_flow((1, False), (2, False, "group"), (1, False), sink=4)
    error = ValueError("of the op")
    flow.begin()
    (source,) = flow.ready
    flow.ready = []
    for number in range(3):
        flow.yielded(source, number)
    (job,) = flow.ready
    flow.ready = []
    flow.finished(job, ["first"])
    (job,) = flow.ready
    flow.ready = []
    flow.failed(job, error, None)
    # The source may still give what it has in hand; nobody begins it.
    flow.yielded(source, 3)
    flow.finished(source)
    assert flow.ready == []
    (raised,) = drain(flow)
    assert type(raised) is Raised
    assert raised.error is error


def test_a_stage_whose_end_is_judged_bad_raises_before_the_end():
    error = ValueError("too many")
    failure_counter = FailureCounter(error)
    flow = make_flow((1, False, failure_counter), (1, True), sink=2)
    runner = Runner(flow, 1)
    while runner.left:
        runner.step(0)
    first, raised = drain(flow)
    assert first == ((0, 0), 0)
    assert raised.error is error
    assert failure_counter.calls == 1


def test_in_order_only_the_first_job_gives_more_than_one_result_ahead():
    flow = make_flow((2, True), sink=1)
    flow.begin()
    (source,) = flow.ready
    flow.ready = []
    flow.yielded(source, "a")
    flow.yielded(source, "b")
    first, second = flow.ready
    flow.ready = []
    assert not flow.yielded(second, "b1")  # it rests until all of the first is passed on
    assert flow.yielded(first, "a1")
    assert flow.take() == "a1"
    assert flow.ready == []
    flow.finished(first)
    assert flow.take() == "b1"
    assert second in flow.ready


@pytest.mark.parametrize("in_order", [False, True])
def test_a_result_that_waits_for_room_holds_its_item_no_longer(in_order):
    flow = make_flow((1, in_order))
    flow.begin()
    [source] = flow.ready
    for _ in range(2):  # the second finds the sink full
        flow.ready = []
        flow.yielded(source, "the item")
        [job] = flow.ready
        flow.finished(job, ["the result"])
    assert [output for output, _ in job.outputs] == ["the result"]
    assert job.item is None


@pytest.mark.parametrize(
    "stages", [[(1, False)], [(1, True), (1, True)], [(1, False, "group"), (1, True)]]
)
def test_a_source_is_not_asked_for_more_once_a_stage_has_failed(stages):
    flow = make_flow(*stages)
    flow.begin()
    [source] = flow.ready
    flow.ready = []
    assert flow.yielded(source, 1)
    [job] = flow.ready
    while job.number < len(stages):
        flow.ready = []
        flow.finished(job, [1])
        [job] = flow.ready
    flow.ready = []
    flow.failed(job, ValueError(), None)
    assert not flow.yielded(source, 2)
    while not isinstance(flow.take(), Raised):
        pass
    assert flow.ready == []


def test_each_place_is_in_work_behind_blocked_or_free_for_as_long_as_it_was():
    flow = make_flow((2, True), sink=1)
    clock, [_, stage] = flow.clock, flow.stages
    ms = 1_000_000

    def at(time_ms):
        ready, flow.ready = flow.ready, []
        flow.set_time(time_ms * ms)
        return ready

    flow.begin()
    [source] = at(10)  # both workers are free for 10 ms
    flow.yielded(source, "a")
    flow.yielded(source, "b")
    first, second = at(15)  # both in work for 5 ms
    flow.finished(second, ["b"])
    at(18)  # one in work, the other behind it
    flow.finished(first, ["a"])
    at(25)  # "a" fills the sink, "b" is blocked, and a worker is free
    clock.is_waiting = False
    assert flow.take() == "a"
    clock.is_waiting = True
    at(30)  # both are free, while the consumer waits
    assert flow.take() == "b"
    flow.measure()
    meter = stage.meter
    assert meter.working_ns == (2 * 5 + 3) * ms
    assert meter.behind_ns == 3 * ms
    assert meter.blocked_ns == 7 * ms
    assert meter.waited_occupied_ns == 0
    assert clock.waited_ns == 5 * ms
    assert flow.sink_meter.queued_ns == (7 + 5) * ms
    assert [one.out_count for one in (stage.meter, flow.sink_meter)] == [2, 2]
