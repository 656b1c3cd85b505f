"""`setup` and `teardown` of stages: where, how often, and what they raise."""

import asyncio
import gc
import logging
import threading

import pytest

from shmloader import PipelineBuilder
from tests.process.support import Program, wait_until
from tests.unit.pipeline.support import SOON_S, Gate


class Connections:
    """Counts contexts that are made and torn down, and where."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.closed: list[int] = []

    def connect(self) -> int:
        self.made.append(threading.get_ident())
        return threading.get_ident()

    def close(self, connection: int) -> None:
        assert connection == threading.get_ident()
        self.closed.append(connection)

    async def connect_soon(self) -> int:
        await asyncio.sleep(0.01)
        return self.connect()

    async def close_soon(self, connection: int) -> None:
        await asyncio.sleep(0)
        self.close(connection)

    def are_closed(self) -> bool:
        return sorted(self.made) == sorted(self.closed)


@pytest.fixture
def connections():
    made = Connections()
    yield made
    wait_until(made.are_closed)


def use(number, connection):
    assert connection == threading.get_ident()
    return number


async def use_soon(number, connection):
    await asyncio.sleep(0)
    return use(number, connection)


def use_twice(number, connection):
    yield use(number, connection)
    yield use(number, connection)


async def use_twice_soon(number, connection):
    yield use(number, connection)
    await asyncio.sleep(0)
    yield use(number, connection)


def build(op, setup, teardown=None, *, concurrency=3, max_failures=None, **options):
    builder = PipelineBuilder().add_source(range(40))
    builder.pipe(
        op, name="load", concurrency=concurrency, setup=setup, teardown=teardown, **options
    )
    return builder.add_sink().build(num_threads=3, max_failures=max_failures)


@pytest.mark.parametrize(("op", "times"), [(use, 1), (use_twice, 2)])
def test_a_thread_has_one_context_from_its_first_item_to_the_end(op, times, connections):
    pipeline = build(op, connections.connect, connections.close)
    assert connections.made == []
    with pipeline.auto_stop():
        for _ in range(3):
            assert sorted(pipeline) == sorted([*range(40)] * times)
        assert 1 <= len(connections.made) <= 3
        assert len(set(connections.made)) == len(connections.made)
        assert connections.closed == []
    wait_until(connections.are_closed)
    assert len(list(pipeline)) == 40 * times  # with new ones


@pytest.mark.parametrize(("op", "times"), [(use_soon, 1), (use_twice_soon, 2)])
@pytest.mark.parametrize("ending", ["", "_soon"])
def test_the_loop_has_one_context_for_all_coroutines_of_the_stage(op, times, ending, connections):
    setup, teardown = (getattr(connections, name + ending) for name in ("connect", "close"))
    with build(op, setup, teardown, concurrency=16).auto_stop() as pipeline:
        for _ in range(2):
            assert sorted(pipeline) == sorted([*range(40)] * times)
        assert len(connections.made) == 1


def test_each_stage_has_contexts_of_its_own():
    builder = PipelineBuilder().add_source(range(9))
    builder.pipe(lambda item, context: (item, context), setup=lambda: "a")
    builder.pipe(lambda item, context: (*item, context), setup=lambda: None)
    assert list(builder.add_sink().build(num_threads=1))[-1] == (8, "a", None)


@pytest.mark.parametrize("how", ["break", "error", "garbage", "stop"])
@pytest.mark.parametrize("is_async", [False, True])
def test_however_it_ends_each_context_is_torn_down_once(how, is_async, connections):
    def fail(number, connection):
        if number == 5 and how == "error":
            raise ValueError("no 5")
        return use(number, connection)

    async def fail_soon(number, connection):
        return fail(number, connection)

    if is_async:
        pipeline = build(fail_soon, connections.connect_soon, connections.close_soon)
    else:
        pipeline = build(fail, connections.connect, connections.close)
    if how == "stop":
        pipeline.start()
        pipeline.get_item(SOON_S)
        pipeline.stop()
        pipeline.stop()
    elif how == "error":
        with pytest.raises(ValueError, match="no 5"):
            list(pipeline)
    elif how == "break":
        for _ in pipeline:
            break
    else:
        items = iter(pipeline)
        next(items)
        del items, pipeline
        gc.collect()
    wait_until(lambda: connections.made and connections.are_closed())


def test_an_op_that_is_stuck_at_the_end_is_torn_down_when_it_returns(connections):
    gate = Gate()

    def stuck(number, connection):
        gate.pass_through()
        return number

    pipeline = build(stuck, connections.connect, connections.close, concurrency=1)
    pipeline.start()
    gate.wait_until_reached()
    pipeline.stop()
    assert connections.closed == []
    gate.open()
    wait_until(connections.are_closed)


class Refused(ConnectionError):  # noqa: N818 - as users name theirs
    pass


def refuse():
    raise Refused("no server")


async def refuse_soon():
    raise Refused("no server")


@pytest.mark.parametrize(
    ("op", "setup"), [(use, refuse), (use_soon, refuse), (use_soon, refuse_soon)]
)
def test_what_setup_raises_is_raised_once_with_the_stages_name(op, setup):
    torn_down = []
    pipeline = build(op, setup, torn_down.append, max_failures=1000, concurrency=8)
    for _ in range(2):
        with pytest.raises(Refused, match="no server") as caught:
            list(pipeline)
        assert caught.value.__notes__ == ["Setup of stage 'load' failed."]
    assert pipeline.failures.total == 0
    assert torn_down == []


@pytest.mark.parametrize("is_async", [False, True])
def test_what_teardown_raises_is_logged_and_delays_no_other(is_async, caplog, connections):
    def fail(context):
        raise Refused("already gone")

    async def op(number, context):
        return number

    builder = PipelineBuilder().add_source(range(9))
    if is_async:
        builder.pipe(op, setup=connections.connect, teardown=connections.close)
        builder.pipe(op, name="other", setup=lambda: 1, teardown=fail)
    else:
        builder.pipe(use, setup=connections.connect, teardown=connections.close)
        builder.pipe(lambda item, _: item, name="other", setup=lambda: 1, teardown=fail)
    with caplog.at_level(logging.ERROR, "shmloader"):
        assert list(builder.add_sink().build(num_threads=1)) == list(range(9))
        wait_until(lambda: connections.are_closed() and caplog.records)
    assert "teardown of stage 'other' failed" in caplog.text
    assert "already gone" in caplog.text


@pytest.mark.parametrize(
    ("hooks", "options"), [((None, print), {}), ((dict, print), {"executor": "process"})]
)
def test_a_hook_that_would_not_be_called_is_told(hooks, options):
    with pytest.raises(ValueError, match="teardown needs setup"):
        build(use, *hooks, **options)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "raise ValueError('of the script')", "sys.exit(3)"])
def test_contexts_are_torn_down_at_the_interpreters_exit(end):
    program = Program(
        f"""
        import asyncio, sys
        from shmloader import PipelineBuilder

        async def connect():
            return "loop"

        async def close(context):
            await asyncio.sleep(0.01)
            print("closed", context, flush=True)

        async def soon(number, context):
            return number

        def close_here(context):
            print("closed", context, flush=True)

        builder = PipelineBuilder().add_source(range(10**9))
        builder.pipe(soon, setup=connect, teardown=close)
        builder.pipe(lambda number, _: number, setup=lambda: "thread", teardown=close_here)
        items = iter(builder.add_sink().build(num_threads=1))
        next(items)
        {end}
        """
    )
    done = program.finish()
    assert sorted(done.out.splitlines()) == ["closed loop", "closed thread"]
    if "raise" in end:
        assert done.err.rstrip().endswith("ValueError: of the script")
        assert "shmloader" not in done.err
    else:
        done.assert_quiet(3 if "exit" in end else 0)
