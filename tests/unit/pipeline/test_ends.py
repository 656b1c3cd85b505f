"""How pipelines end: by stop, break, an error, as garbage, with the interpreter; whatever runs.

The autouse check of I8 sees to it that no thread is left.
"""

import asyncio
import gc
import os
import signal
import threading
import time
import weakref

import pytest

from shmloader import ClosedLoaderError, PipelineBuilder
from tests.process.support import stack_of, wait_until
from tests.unit.pipeline.support import SOON_S, Gate, chain, pipeline_threads

# Said: within 1 s. A busy machine adds to it; what must not be waited for here takes a minute.
END_S = 5.0


async def pass_on(number):
    return number


class Stuck:
    """An op that does not come back until it is let go."""

    def __init__(self) -> None:
        self.gate = Gate()

    def __call__(self, number):
        self.gate.pass_through()
        return number

    async def block_loop(self, number):
        self.gate.pass_through()  # a mistake of the user's: nothing else runs on the loop
        return number

    async def hold_on(self, number):
        self.gate._reached.release()
        while not self.gate._open.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue  # it does not let itself be cancelled

    def source(self):
        self.gate.pass_through()
        yield 1


@pytest.fixture(params=["op", "generator", "loop", "uncancellable", "source"])
def stuck(request):
    stuck = Stuck()
    if request.param == "source":

        class Source:
            def __iter__(self):
                return stuck.source()

        pipeline = chain(Source())
    else:
        op = {
            "op": stuck,
            "generator": lambda number: iter([stuck(number)]),
            "loop": stuck.block_loop,
            "uncancellable": stuck.hold_on,
        }[request.param]
        pipeline = chain(range(9), op)
    yield pipeline, stuck.gate
    stuck.gate.open()


@pytest.mark.sampled(1)
def test_stop_does_not_wait_for_what_is_stuck(stuck):
    pipeline, gate = stuck
    items = iter(pipeline)
    gate.wait_until_reached()
    start = time.monotonic()
    pipeline.stop()
    pipeline.stop()
    assert time.monotonic() - start < END_S
    with pytest.raises(ClosedLoaderError, match="it was stopped"):
        next(items)


def test_a_pipeline_may_be_garbage_while_an_op_is_stuck():
    stuck = Stuck()
    pipeline = chain(range(9), stuck)
    items = iter(pipeline)
    stuck.gate.wait_until_reached()
    reference = weakref.ref(pipeline)
    start = time.monotonic()
    del pipeline, items
    assert reference() is None
    assert time.monotonic() - start < END_S
    stuck.gate.open()


def test_a_break_ends_at_once_and_the_next_epoch_has_threads_of_its_own():
    gate = Gate()
    pipeline = chain(range(4), gate.at(1), num_threads=1)
    with pipeline.auto_stop():
        start = time.monotonic()
        for number in pipeline:
            assert number == 0
            gate.wait_until_reached()
            break
        assert time.monotonic() - start < END_S
        items = iter(pipeline)
        assert next(items) == 0  # though the only thread of the epoch before is stuck
        gate.open()
        assert list(items) == [1, 2, 3]


class Trainer:
    """As users write it: the pipeline belongs to an object, and calls its methods."""

    def __init__(self) -> None:
        self.pipeline = (
            PipelineBuilder()
            .add_source(range(10_000))
            .pipe(self.load, concurrency=2, output_order="input")
            .pipe(self.load_soon)
            .pipe(self.many)
            .add_sink()
            .build()
        )

    def load(self, number):
        return number

    async def load_soon(self, number):
        return number

    def many(self, number):
        yield number


def test_a_pipeline_in_a_cycle_with_its_ops_is_garbage_when_nobody_uses_it():
    trainer = Trainer()
    trainer.items = iter(trainer.pipeline)
    assert next(trainer.items) == 0
    reference = weakref.ref(trainer)
    del trainer
    # The threads come to rest first.
    wait_until(lambda: (gc.collect(), reference())[1] is None, SOON_S)


def test_what_is_in_flight_is_freed_when_an_epoch_is_left(no_collector):
    class Item:
        pass

    alive = weakref.WeakSet()

    class Source:
        def __iter__(self):
            while True:
                item = Item()
                alive.add(item)
                yield item

    builder = PipelineBuilder().add_source(Source())
    builder.pipe(lambda item: item, concurrency=2).pipe(lambda item: item, output_order="input")
    with builder.add_sink(1).build().auto_stop() as pipeline:
        for _ in pipeline:
            wait_until(lambda: len(alive) >= 8)
            break
        del _
        wait_until(lambda: not alive)


def test_coroutines_are_cancelled_and_generators_closed(no_collector):
    noted, given = [], []

    async def waits(number):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            noted.append("cancelled")
            raise

    async def gives(number):
        try:
            while True:
                given.append(number)
                yield number
        finally:
            noted.append("async closed")

    def gives_here(number):
        try:
            while True:
                given.append(number)
                yield number
        finally:
            noted.append("closed")

    for op, word in [(gives, "async closed"), (gives_here, "closed")]:
        with chain(range(3), op, sink=1).auto_stop() as pipeline:
            items = iter(pipeline)
            assert next(items) == 0
            wait_until(lambda: len(given) == 3)  # one was taken, one is in the sink, one waits
        wait_until(lambda word=word: noted == [word])
        noted.clear()
        given.clear()
    builder = PipelineBuilder().add_source(range(3)).pipe(waits, concurrency=2)
    with pytest.raises(TimeoutError):
        list(builder.add_sink().build(timeout=0.1))
    assert noted == ["cancelled", "cancelled"]


def test_a_task_that_an_op_has_begun_and_left_is_cancelled():
    tasks, noted = [], []

    async def wait():
        try:
            await asyncio.sleep(3600)
        finally:
            noted.append("over")

    async def op(number):
        tasks.append(asyncio.create_task(wait()))
        await asyncio.sleep(0)
        return number

    assert list(chain(range(2), op)) == [0, 1]
    wait_until(lambda: noted == ["over", "over"])


def test_a_waiting_consumer_is_told_when_another_thread_stops():
    stuck = Stuck()
    pipeline = chain(range(3), stuck)
    items = iter(pipeline)
    timer = threading.Thread(target=lambda: (stuck.gate.wait_until_reached(), pipeline.stop()))
    timer.start()
    with pytest.raises(ClosedLoaderError, match="pipeline"):
        next(items)
    timer.join(SOON_S)
    stuck.gate.open()


def test_a_ctrl_c_while_the_consumer_waits_ends_the_epoch_with_its_state():
    stuck = Stuck()
    pipeline = chain(range(3), lambda number: stuck(number) if number else number)
    main = threading.main_thread().ident

    def interrupt():
        stuck.gate.wait_until_reached()
        wait_until(lambda: {"take", "wait"} <= set(stack_of(main)))
        signal.pthread_kill(main, signal.SIGINT)

    with pipeline.auto_stop():
        items = iter(pipeline)
        assert next(items) == 0
        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            next(items)
        other.join(SOON_S)
        stuck.gate.open()
        with pytest.raises(ClosedLoaderError, match="interrupted by KeyboardInterrupt"):
            next(items)
        pipeline.load_state_dict(pipeline.state_dict())
        assert list(pipeline) == [1, 2]


@pytest.mark.parametrize("name", ["shmloader_loop", "shmloader_pipe_1", "shmloader_source_0"])
def test_an_interruption_while_a_thread_starts_leaves_no_thread(name, monkeypatch):
    builder = PipelineBuilder().add_source(range(3)).pipe(abs, concurrency=2).pipe(pass_on)
    pipeline = builder.add_sink().build(num_threads=2)
    start = threading.Thread.start

    def start_and_raise(thread):
        start(thread)
        if thread.name == name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_raise)
        with pytest.raises(KeyboardInterrupt):
            iter(pipeline)
    assert not pipeline_threads()
    assert sorted(pipeline) == [0, 1, 2]


def test_a_second_stop_ends_what_an_interrupted_one_has_left(monkeypatch):
    pipeline = chain(range(3), pass_on, abs)
    items = iter(pipeline)

    def interrupted(loop, function):
        raise RuntimeError("of a signal handler")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", interrupted)
        with pytest.raises(RuntimeError, match="of a signal handler"):
            pipeline.stop()
    pipeline.stop()
    del items
    assert not pipeline_threads()


def test_a_forked_child_is_told_that_the_pipeline_is_not_its_own():
    pipeline = chain(range(9))
    with pipeline.auto_stop():
        items = iter(pipeline)
        assert next(items) == 0
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                next(items)
            except ClosedLoaderError:
                del items
                pipeline.stop()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert list(items) == list(range(1, 9))
