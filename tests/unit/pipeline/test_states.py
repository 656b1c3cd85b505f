"""Resumed pipelines: no item is lost and none comes twice, whatever was read ahead."""

import asyncio
import json

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from shmloader import DataLoader, PipelineBuilder, TooManyFailures
from shmloader.pipeline.flow import Flow
from tests.unit.pipeline.support import chain


class Counter:
    """A source with a state of its own. Its epochs differ."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = self.position = 0
        self.states = 0

    def __iter__(self):
        while self.position < self.length:
            self.position += 1
            yield self.epoch * 1000 + self.position - 1
        self.epoch += 1
        self.position = 0

    def state_dict(self):
        self.states += 1
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


def add_one(number):
    return number + 1


def drop_thirds(number):
    return number if number % 3 else None


def fail_fifths(number):
    if number % 5 == 0:
        raise ValueError(number)
    return number


def repeat(number):
    for _ in range(number % 4):
        yield number
    yield None


async def repeat_soon(number):
    for part in range(number % 3):
        await asyncio.sleep(0)
        yield number * 10 + part


async def wait(number):
    await asyncio.sleep(0.0001 * (number % 3))
    return number


def split(numbers):
    yield from numbers[::-1]
    yield -1


# Each takes numbers and gives numbers.
PARTS = {
    "function": lambda b: b.pipe(add_one, concurrency=3, output_order="input"),
    "filter": lambda b: b.pipe(drop_thirds, concurrency=2, output_order="input"),
    "failing": lambda b: b.pipe(fail_fifths),
    "generator": lambda b: b.pipe(repeat, concurrency=2, output_order="input"),
    "async generator": lambda b: b.pipe(repeat_soon),
    "coroutine": lambda b: b.pipe(wait, concurrency=4, output_order="input"),
    "lists": lambda b: b.aggregate(3).disaggregate(),
    "whole lists": lambda b: b.aggregate(2, drop_last=True).disaggregate(),
    "lists by a generator": lambda b: b.aggregate(4).pipe(split),
    "collated": lambda b: b.aggregate(3, collate=sum),
}


def build(source, parts, last=0, **options):
    builder = PipelineBuilder().add_source(source, **options)
    for part in parts:
        PARTS[part](builder)
    if last:
        builder.aggregate(last)
    return builder.add_sink(2).build(num_threads=2, max_failures=1000)


def state_after(pipeline, count):
    """The first items of an epoch that is left after them, and the state then."""
    items = iter(pipeline)
    taken = [next(items) for _ in range(count)]
    return taken, json.loads(json.dumps(pipeline.state_dict()))


def resumed_at_each_item(make, count):
    """What a pipeline gives, and what two of them give together, one after so many items."""
    whole = list(make())
    places = range(len(whole) + 1) if count is None else count
    for place in places:
        first = make()
        taken, state = state_after(first, min(place, len(whole)))
        assert first.state_dict() == state
        second = make()
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert taken + list(second) == whole, place
    return whole


@pytest.mark.sampled(6)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("source", [range, Counter])
def test_nothing_is_lost_and_nothing_comes_twice_after_any_item(part, source):
    whole = resumed_at_each_item(lambda: build(source(10), [part, "function"]), None)
    assert len(whole) >= 2


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.sampled_from(list(PARTS)), max_size=4), st.integers(0, 3), st.data())
def test_whatever_the_stages_are(parts, last, data):
    every = data.draw(st.integers(0, 4))
    place = data.draw(st.integers(0, 20))
    try:
        list(build(Counter(14), parts, last))
    except TooManyFailures:  # the stages before leave only what fails
        reject()
    resumed_at_each_item(
        lambda: build(Counter(14), parts, last, snapshot_every_n_steps=every), [place]
    )


def test_after_the_end_of_an_epoch_the_next_one_begins():
    pipeline = chain(Counter(5), add_one)
    assert list(pipeline) == [1, 2, 3, 4, 5]
    state = pipeline.state_dict()
    second = chain(Counter(5), add_one)
    second.load_state_dict(state)
    assert list(second) == [1001, 1002, 1003, 1004, 1005]
    assert list(pipeline) == list(range(1001, 1006))


def test_before_the_first_epoch_the_state_is_the_sources():
    source = Counter(5)
    source.position = 3
    state = chain(source).state_dict()
    assert state["source"] == {"epoch": 0, "position": 3}


def test_an_iterator_as_source_can_be_resumed_though_it_was_used():
    class Once(Counter):
        def __iter__(self):
            return self

        def __next__(self):
            if self.position == self.length:
                raise StopIteration
            self.position += 1
            return self.position - 1

    pipeline = chain(Once(6))
    taken, state = state_after(pipeline, 2)
    assert taken == [0, 1]
    pipeline.load_state_dict(state)
    assert list(pipeline) == [2, 3, 4, 5]


def test_a_state_is_taken_after_every_so_many_items_and_the_others_are_read_again():
    source = Counter(50)
    taken, state = state_after(build(source, [], snapshot_every_n_steps=10), 25)
    assert (state["source"]["position"], state["read"]) == (20, 5)
    assert source.states < 8
    again = build(Counter(50), [], snapshot_every_n_steps=10)
    again.load_state_dict(state)
    assert next(iter(again)) == taken[-1] + 1


def test_a_loader_is_a_source_with_a_state():
    def make():
        loader = DataLoader(list(range(20)), batch_size=2, shuffle=True, seed=3)
        return chain(loader, lambda batch: batch.tolist())

    resumed_at_each_item(make, [0, 1, 4, 9, 10])


def test_a_source_may_change_its_state_after_it_has_returned_it():
    class Growing:
        def __init__(self):
            self.seen = []

        def __iter__(self):
            for number in range(len(self.seen), 6):
                self.seen.append(number)
                yield number

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    resumed_at_each_item(lambda: chain(Growing(), add_one), None)


def test_an_item_that_an_interruption_has_lost_was_not_delivered(monkeypatch):
    pipeline = chain(range(9), add_one)
    items = iter(pipeline)
    assert next(items) == 1

    take = Flow.take

    def interrupted(flow, timeout_s):
        take(flow, timeout_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(Flow, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(items)
    monkeypatch.undo()
    pipeline.load_state_dict(pipeline.state_dict())
    assert list(pipeline) == list(range(2, 10))


def test_an_item_that_has_failed_was_not_delivered():
    fails = [4]

    def op(number):
        if number in fails:
            raise ValueError(number)
        return number

    pipeline = chain(range(9), op, sink=1)
    taken = []
    with pytest.raises(ValueError, match="4"):
        taken.extend(pipeline)
    fails.clear()
    pipeline.load_state_dict(pipeline.state_dict())
    assert taken + list(pipeline) == list(range(9))


def test_completion_order_has_no_position():
    pipeline = PipelineBuilder().add_source(range(9)).pipe(add_one, concurrency=2).add_sink()
    built = pipeline.build()
    for call in (built.state_dict, lambda: built.load_state_dict({})):
        with pytest.raises(RuntimeError, match=r"'add_one'.*output_order='input'"):
            call()
    assert sorted(built) == list(range(1, 10))


@pytest.mark.parametrize("source", [{1, 2}, iter([1]), {"a": 1}])
def test_a_source_without_a_state_is_told(source):
    with pytest.raises(RuntimeError, match=f"{type(source).__name__}, cannot be resumed.*state"):
        chain(source).state_dict()


def test_what_the_sources_state_dict_raises_is_raised_where_the_state_is_asked_for():
    class Stateless(Counter):
        def state_dict(self):
            raise NotImplementedError("not yet")

    pipeline = chain(Stateless(3))
    assert list(pipeline) == [0, 1, 2]
    with pytest.raises(NotImplementedError, match="not yet"):
        pipeline.state_dict()


def test_a_state_cannot_change_an_epoch_that_is_under_way():
    pipeline = chain(range(9))
    state = pipeline.state_dict()
    items = iter(pipeline)
    with pytest.raises(RuntimeError, match="under way"):
        pipeline.load_state_dict(state)
    del items
    pipeline.load_state_dict(state)
    assert list(pipeline) == list(range(9))


@pytest.mark.parametrize("state", [[], {}, {"epoch": 1}, {"pipeline": "", "version": 99}])
def test_a_state_that_is_none_is_told(state):
    with pytest.raises(ValueError, match="not saved by a pipeline"):
        chain(range(9)).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: chain(range(10), add_one), ["length 9", "length 10"]),
        (lambda: chain(Counter(9), add_one), ["own state", "length 9"]),
        (lambda: chain(range(9), repeat), ["one result", "many results"]),
        (lambda: build(range(9), ["function"], 2), ["aggregate(2)"]),
    ],
)
def test_a_state_of_another_pipeline_is_told(make, words):
    state = chain(range(9), add_one).state_dict()
    with pytest.raises(ValueError, match="does not fit this pipeline") as caught:
        make().load_state_dict(state)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_source_with_fewer_items_than_before_is_told():
    pipeline = build(Counter(9), [], snapshot_every_n_steps=0)
    taken, state = state_after(pipeline, 5)
    assert taken == list(range(5))
    other = build(Counter(3), [], snapshot_every_n_steps=0)
    other.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"yielded 3 items .* but 5 were read"):
        list(other)


def test_the_concurrency_may_change():
    taken, state = state_after(build(range(20), ["function", "lists"]), 7)
    builder = PipelineBuilder().add_source(range(20)).pipe(add_one, name="other")
    second = builder.aggregate(3).disaggregate().add_sink(9).build()
    second.load_state_dict(state)
    assert taken + list(second) == list(range(1, 21))
