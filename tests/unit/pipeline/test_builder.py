"""Mistakes are told when the pipeline is built, with the argument's name and value."""

import concurrent.futures

import pytest

from shmloader import PipelineBuilder


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
