"""What comes out of pipelines on threads and coroutines, and which mistakes are told at once."""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import queue
import threading
from fractions import Fraction

import pytest

from shmloader import ClosedLoaderError, PipelineBuilder, TooManyFailures
from tests.unit.pipeline.support import SOON_S, Gate, Most, chain, pipeline_threads


def double(number):
    return 2 * number


async def double_soon(number):
    await asyncio.sleep(0)
    return 2 * number


def twice(number):
    yield number
    yield number


async def twice_soon(number):
    for _ in range(2):
        await asyncio.sleep(0)
        yield number


def odd_only(number):
    return number if number % 2 else None


def odd_yielded(number):
    yield None
    if number % 2:
        yield number


class Doubler:
    def __call__(self, number):
        return 2 * number

    def method(self, number):
        return 2 * number

    async def async_method(self, number):
        return 2 * number


class SoonDoubler:
    async def __call__(self, number):
        return 2 * number


class SoonTwice:
    async def __call__(self, number):
        yield number
        yield number


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (double, [0, 2, 4, 6, 8]),
        (double_soon, [0, 2, 4, 6, 8]),
        (twice, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
        (twice_soon, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
        (odd_only, [1, 3]),
        (odd_yielded, [1, 3]),
        (Doubler(), [0, 2, 4, 6, 8]),
        (Doubler().method, [0, 2, 4, 6, 8]),
        (Doubler().async_method, [0, 2, 4, 6, 8]),
        (SoonDoubler(), [0, 2, 4, 6, 8]),
        (functools.partial(SoonTwice()), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
        (functools.partial(pow, 2), [1, 2, 4, 8, 16]),
    ],
)
def test_each_kind_of_op_does_its_work_and_none_is_left_out(op, expected):
    assert list(chain(range(5), op)) == expected


def test_a_source_may_give_none_and_an_op_may_see_it():
    assert list(chain([None, 1], lambda item: [item])) == [[None], [1]]
    assert list(chain([None, 1])) == [None, 1]


@pytest.mark.parametrize("sink", [1, 3])
def test_items_are_aggregated_and_taken_apart(sink):
    builder = PipelineBuilder().add_source(range(7)).aggregate(3).disaggregate().aggregate(2)
    assert list(builder.add_sink(sink).build()) == [[0, 1], [2, 3], [4, 5], [6]]
    builder = PipelineBuilder().add_source(range(7)).aggregate(3, drop_last=True)
    assert list(builder.add_sink(sink).build()) == [[0, 1, 2], [3, 4, 5]]


def test_an_op_may_submit_to_an_executor_of_the_users():
    with concurrent.futures.ThreadPoolExecutor(2, "theirs") as pool:

        async def op(number):
            return await asyncio.wrap_future(pool.submit(double, number))

        assert list(chain(range(4), op)) == [0, 2, 4, 6]


def meet(parties):
    """An op in which so many calls meet."""
    barrier = threading.Barrier(parties)

    def op(number):
        barrier.wait(SOON_S)
        return number

    return op


@pytest.mark.parametrize("order", ["completion", "input"])
def test_as_many_calls_as_asked_for_are_at_once_on_threads(order):
    builder = PipelineBuilder().add_source(range(8))
    builder.pipe(meet(4), concurrency=4, output_order=order)
    assert sorted(builder.add_sink().build()) == list(range(8))


def test_no_more_than_asked_for_are_at_once():
    most = {name: Most() for name in "abcd"}

    def on_thread(number):
        with most["a"]:
            return number

    async def on_loop(number):
        with most["b"]:
            await asyncio.sleep(0)
            return number

    async def many(number):
        with most["c"]:
            await asyncio.sleep(0)
            yield number

    def shared(number):
        with most["d"]:
            return number

    builder = PipelineBuilder().add_source(range(200)).pipe(on_thread, concurrency=2)
    builder.pipe(on_loop, concurrency=3).pipe(many, concurrency=2).pipe(shared, concurrency=9)
    assert sorted(builder.add_sink().build(num_threads=3)) == list(range(200))
    assert [one.total for one in most.values()] == [200] * 4
    assert most["a"].most <= 2
    assert most["b"].most <= 3
    assert most["c"].most <= 2
    assert most["d"].most <= 3  # the threads


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("order", ["completion", "input"])
def test_a_slow_item_is_overtaken_or_waited_for(is_async, order):
    others_done = threading.Event()
    count = []

    def finish(number):
        count.append(number)
        if len(count) == 3:
            others_done.set()
        return number

    def op(number):
        if number == 0:
            assert others_done.wait(SOON_S)
            return number
        return finish(number)

    async def op_async(number):
        while number == 0 and not others_done.is_set():  # noqa: ASYNC110 - set on any thread
            await asyncio.sleep(0)
        return number if number == 0 else finish(number)

    builder = PipelineBuilder().add_source(range(4))
    builder.pipe(op_async if is_async else op, concurrency=4, output_order=order)
    taken = list(builder.add_sink(4).build())
    assert sorted(taken) == [0, 1, 2, 3]
    assert (taken[0] == 0) == (order == "input")


def test_a_source_that_blocks_holds_up_neither_the_loop_nor_threads():
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    items = iter(chain(iter(inbox.get, None), double, double_soon, num_threads=1, timeout=SOON_S))
    for number in range(3):
        inbox.put(number)
        assert next(items) == 4 * number
    inbox.put(None)
    assert list(items) == []


def test_an_iterator_goes_on_after_a_timeout():
    gate = Gate()
    items = iter(chain(range(3), gate.at(1), timeout=0.01))
    taken = []
    while len(taken) < 3:
        try:
            taken.append(next(items))
        except TimeoutError:
            gate.open()
    assert taken == [0, 1, 2]


class Bad(LookupError):  # noqa: N818 - as users name theirs
    pass


KINDS = ("function", "coroutine", "generator", "async generator")


def bad_at(*numbers, kind="function"):
    """An op of a kind that raises for some numbers."""

    def op(number):
        if number in numbers:
            raise Bad(f"no {number}")
        return number

    async def op_soon(number):
        return op(number)

    def op_stream(number):
        yield op(number)

    async def op_soon_stream(number):
        yield op(number)

    return dict(zip(KINDS, (op, op_soon, op_stream, op_soon_stream), strict=True))[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_an_ops_own_exception_is_raised_with_stage_and_item(kind):
    builder = PipelineBuilder().add_source(range(100)).pipe(double)
    builder.pipe(bad_at(6, kind=kind), name="checked")
    pipeline = builder.pipe(double_soon).add_sink().build()
    taken = []
    with pytest.raises(Bad, match="no 6") as caught:
        taken.extend(pipeline)
    assert caught.value.__notes__ == ["Stage 'checked' failed for item 6."]
    assert pipeline.failures.total == 0
    items = iter(pipeline)  # it begins anew
    taken = [next(items) for _ in range(3)]
    assert taken == [0, 4, 8]
    with pytest.raises(Bad):
        next(items)
    with pytest.raises(ClosedLoaderError, match="Bad: no 6"):
        next(items)


class BadSource:
    def __iter__(self):
        yield 1
        raise Bad("the source")


def test_what_a_source_raises_is_raised_whatever_may_fail():
    pipeline = chain(BadSource(), double, max_failures=10)
    items = iter(pipeline)
    assert next(items) == 2
    with pytest.raises(Bad) as caught:
        next(items)
    assert caught.value.__notes__ == ["Stage 'the source' failed."]


@pytest.mark.parametrize("kind", [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_would_end_a_loop_or_the_program_is_told_as_an_error(kind, is_async):
    def op(number):
        raise kind("of the op")

    async def op_async(number):
        if kind is StopIteration:
            raise asyncio.CancelledError  # a coroutine cannot raise StopIteration
        raise kind("of the op")

    with pytest.raises(RuntimeError, match=r"stage 'op(_async)?' raised"):
        list(chain([1], op_async if is_async else op))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_a_task_of_an_ops_own_raises_does_not_end_the_loop(kind):
    async def die():
        raise kind("of the task")

    async def op(number):
        await asyncio.create_task(die())

    with pytest.raises(RuntimeError, match=f"stage 'op' raised {kind.__name__}"):
        list(chain([1], op, timeout=SOON_S))


def test_a_coroutine_that_nobody_awaits_is_an_error():
    with pytest.raises(TypeError, match="returned a coroutine"):
        list(chain([1], lambda number: double_soon(number + 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_failed_items_are_left_out_counted_and_listed(kind, caplog):
    caplog.set_level(logging.WARNING, "shmloader")
    builder = PipelineBuilder().add_source(range(10))
    builder.pipe(bad_at(2, 5, kind=kind), name="checked")
    pipeline = builder.add_sink().build(max_failures=2)
    for epoch in (1, 2):
        assert list(pipeline) == [0, 1, 3, 4, 6, 7, 8, 9]
        assert pipeline.failures.total == 2 * epoch
        assert len(caplog.records) == epoch  # the first of each epoch
    assert [failed.item for failed in pipeline.failures] == [2, 5, 2, 5]
    failed = pipeline.failures[0]
    assert failed.stage == "checked"
    assert type(failed.error) is Bad
    assert str(failed.error) == "no 2"
    assert failed.traceback.endswith("no 2\n")
    assert "in op" in failed.traceback  # where it was raised
    assert "Traceback" not in repr(failed)
    assert failed.error.__traceback__ is None
    assert "'checked'" in caplog.text


def test_a_list_of_failures_keeps_a_url_and_nothing_large():
    def op(item):
        if item is not None:
            raise Bad

    items = ["http://" + "x" * 1000, "x" * 10_000, [0] * 10_000, 3, None]
    pipeline = chain(items, op, max_failures=4)
    assert list(pipeline) == []
    url, text, other, number = (failed.item for failed in pipeline.failures)
    assert (url, number) == (items[0], 3)
    assert len(text) < 100
    assert len(other) < 100


def test_past_the_limit_too_many_failures_is_raised_with_the_ops_exception_as_cause():
    builder = PipelineBuilder().add_source(range(10)).pipe(bad_at(2, 5, 7), name="checked")
    pipeline = builder.add_sink().build(max_failures=2)
    taken = []
    with pytest.raises(TooManyFailures, match="max_failures=2") as caught:
        taken.extend(pipeline)
    assert taken == [0, 1, 3, 4, 6]
    assert "3 of 8 calls" in str(caught.value)
    assert "item 7" in str(caught.value)
    assert type(caught.value.__cause__) is Bad
    assert str(caught.value.__cause__) == "no 7"
    assert pipeline.failures.total == 3


def test_the_limit_counts_the_calls_of_all_stages():
    def make(limit):
        ops = bad_at(1, 2), bad_at(3, kind="coroutine"), bad_at(4)
        return chain(range(20), *ops, max_failures=limit)

    assert len(list(make(4))) == 16
    with pytest.raises(TooManyFailures, match=r"4 of \d+ calls failed, .* max_failures=3"):
        list(make(3))


def test_an_epoch_in_which_all_failed_raises():
    builder = PipelineBuilder().add_source(range(3)).pipe(bad_at(0, 1, 2))
    pipeline = builder.aggregate(2).add_sink().build(max_failures=Fraction(1))
    with pytest.raises(TooManyFailures, match=r"(\d) of \1 calls failed"):
        list(pipeline)


def test_epoch_after_epoch_with_nothing_carried_over():
    builder = PipelineBuilder().add_source([0, 1, 4, 9, 16, 25, 36])
    builder.pipe(double).aggregate(3, drop_last=True)
    pipeline = builder.add_sink().build()
    expected = [[0, 2, 8], [18, 32, 50]]
    assert [list(pipeline) for _ in range(3)] == [expected] * 3
    with pipeline.auto_stop():
        assert list(pipeline) == expected
        for item in pipeline:
            assert item == expected[0]
            break
        assert list(pipeline) == expected


def test_threads_are_kept_from_epoch_to_epoch_between_start_and_stop():
    def ident(_):
        return threading.get_ident()

    pipeline = chain(range(50), ident, num_threads=1)
    with pipeline.auto_stop() as same:
        assert same is pipeline
        assert len({thread for _ in range(3) for thread in pipeline}) == 1


@pytest.mark.parametrize("keeps_threads", [False, True])
def test_a_second_iterator_leaves_the_firsts_epoch_and_stops_what_it_has_started(keeps_threads):
    pipeline = chain(range(100))
    with pipeline.auto_stop() if keeps_threads else contextlib.nullcontext():
        first = iter(pipeline)
        assert next(first) == 0
        second = iter(pipeline)
        assert next(second) == 0
        with pytest.raises(ClosedLoaderError, match="another iterator"):
            next(first)
        assert list(second) == list(range(1, 100))
        assert bool(pipeline_threads()) == keeps_threads


def test_an_ended_iterator_stays_ended():
    items = iter(chain(range(1)))
    assert list(items) == [0]
    assert list(items) == []


def test_an_iterator_as_source_is_good_for_one_epoch():
    pipeline = chain(iter(range(5)))
    assert list(pipeline) == list(range(5))
    with pytest.raises(RuntimeError, match="iterator"):
        iter(pipeline)


# Mistakes are told when the pipeline is built, with the argument's name and value --------------


def op(item):
    return item


def gen(item):
    yield item


async def coro(item):
    return item


async def agen():
    yield 1


def with_source():
    return PipelineBuilder().add_source([1])


def with_sink():
    return with_source().add_sink()


class Indexed:
    def __getitem__(self, index):
        return index

    def __len__(self):
        return 3


@pytest.mark.sampled(22)
@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: PipelineBuilder().add_sink().build(), ValueError, ["no source", "add_source"]),
        (lambda: with_source().build(), ValueError, ["no sink", "add_sink"]),
        (lambda: with_source().add_source([2]), ValueError, ["add_source", "before"]),
        (lambda: with_sink().add_sink(), ValueError, ["add_sink", "before"]),
        (lambda: PipelineBuilder().add_source(3), TypeError, ["source=3"]),
        (lambda: with_sink().pipe(op), ValueError, ["pipe", "after add_sink"]),
        (lambda: with_sink().aggregate(2), ValueError, ["aggregate", "after add_sink"]),
        (lambda: with_sink().disaggregate(), ValueError, ["disaggregate", "after add_sink"]),
        (lambda: with_sink().transfer("cpu"), ValueError, ["transfer", "after add_sink"]),
        (lambda: with_source().pipe(3), TypeError, ["callable", "op=3"]),
        (lambda: with_source().pipe(op, concurrency=0), ValueError, ["concurrency", "=0"]),
        (lambda: with_source().pipe(op, executor="gpu"), ValueError, ["executor", "'gpu'"]),
        (lambda: with_source().pipe(op, executor=4), TypeError, ["executor", "got 4"]),
        (
            lambda: with_source().pipe(op, executor=concurrent.futures.ThreadPoolExecutor(1)),
            TypeError,
            ["Executor of yours", "async def op(x)", "wrap_future"],
        ),
        (
            lambda: with_source().pipe(coro, executor="thread"),
            ValueError,
            ["cannot be combined", "loop"],
        ),
        (lambda: with_source().pipe(coro, executor="process"), ValueError, ["the op is async"]),
        (lambda: with_source().pipe(op, output_order="any"), ValueError, ["output_order", "'any'"]),
        (lambda: with_source().aggregate(0), ValueError, ["n ", "=0"]),
        (lambda: with_source().aggregate(2, 1), TypeError, ["drop_last", "=1"]),
        (lambda: with_source().add_sink(0), ValueError, ["buffer_size", "=0"]),
        (lambda: with_source().transfer(1.5), TypeError, ["device", "1.5"]),
        (lambda: with_sink().build(num_threads=0), ValueError, ["num_threads", "=0"]),
        (lambda: with_sink().build(timeout=-1), ValueError, ["timeout", "=-1"]),
        (lambda: with_sink().build(timeout=float("nan")), ValueError, ["timeout", "=nan"]),
        (lambda: with_sink().build(timeout="3"), TypeError, ["timeout", "='3'"]),
        (lambda: with_sink().build(max_failures=0.0), ValueError, ["max_failures", "above 0"]),
        (lambda: with_sink().build(max_failures=1.5), ValueError, ["at most 1", "=1.5"]),
        (lambda: PipelineBuilder().add_source(Indexed()), TypeError, ["range(len(dataset))"]),
        (lambda: PipelineBuilder().add_source(agen()), TypeError, ["pipe an async generator"]),
        (
            lambda: PipelineBuilder().add_source([1], snapshot_every_n_steps=-1),
            ValueError,
            ["snapshot_every_n_steps", "=-1"],
        ),
    ],
)
def test_a_mistake_is_told_at_once(build, error, words):
    with pytest.raises(error) as caught:
        build()
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_pipeline_shows_what_it_is_made_of():
    builder = PipelineBuilder().add_source([1, 2]).pipe(coro, concurrency=64).aggregate(32)
    builder.pipe(op, executor="process", concurrency=2).pipe(gen, name="each")
    chain = "<list of length 2> → coro (64 on coroutines) → aggregate(32)"
    chain += " → op (2 on processes) → each (1 on threads) → sink(4)"
    assert repr(builder.add_sink(4).build()) == f"<Pipeline: {chain}, not started>"


def test_a_pipeline_shows_whether_an_epoch_is_under_way():
    def fail(item):
        raise ValueError("no 1")

    pipeline = with_source().pipe(op).add_sink().build()
    with pipeline.auto_stop():
        items = iter(pipeline)
        assert repr(pipeline).endswith(", running>")
        assert list(items) == [1]
        assert repr(pipeline).endswith(", ended>")
        items = iter(pipeline)
    assert repr(pipeline).endswith(", ended: it was stopped>")
    failing = with_source().pipe(fail).add_sink().build()
    with pytest.raises(ValueError, match="no 1"):
        list(failing)
    assert repr(failing).endswith(", ended: ValueError: no 1>")
