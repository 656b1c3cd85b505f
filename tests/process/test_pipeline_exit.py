"""A program that ends with a pipeline in any state prints nothing of ours, and leaves nothing."""

import time

import pytest

from tests.process.support import Program

# Each builds `pipeline` of an endless source.
SHAPES = {
    "threads": "builder.pipe(abs, concurrency=3).pipe(each)",
    "stuck threads": "builder.pipe(stuck, concurrency=3)",
    "coroutines": "builder.pipe(soon, concurrency=8).pipe(each_soon)",
    "stuck coroutines": "builder.pipe(stuck_soon, concurrency=8)",
    "a blocked loop": "builder.pipe(block_loop, concurrency=2)",
    "a coroutine that resists": "builder.pipe(resist, concurrency=2)",
    "tasks of their own": "builder.pipe(begin_tasks, concurrency=4)",
    "processes": "builder.pipe(abs, executor='process', concurrency=2)",
    "stuck processes": "builder.pipe(stuck, executor='process', concurrency=2)",
    "a source that blocks": "PipelineBuilder().add_source(iter(block, 0)).pipe(abs)",
}
# Those that yield no items: how many calls are stuck in the end.
STUCK = {
    "stuck threads": 3,
    "stuck coroutines": 8,
    "a blocked loop": 1,
    "a coroutine that resists": 2,
    "stuck processes": 2,
    "a source that blocks": 1,
}

# Only the user's own words are on stderr.
ENDS = {
    "normally": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an exception": ("raise ValueError('of the script')", 1, "ValueError: of the script"),
    "in a function": ("leave(items)", 0, ""),
    "a cycle": ("cycle = [items, pipeline]; cycle.append(cycle)", 0, ""),
    "stopped": ("pipeline.stop()", 0, ""),
    "consumed by a daemon": (
        "threading.Thread(target=consume, args=[items], daemon=True).start()", 0, "",
    ),
}  # fmt: skip

PROGRAM = """
import asyncio, os, sys, threading, time
from queue import SimpleQueue
from shmloader import PipelineBuilder

has_begun, begins = os.pipe()  # forked workers have it, too

def begin():
    os.write(begins, b".")

def each(number):
    yield number

def stuck(number):
    begin()
    time.sleep(60)

async def soon(number):
    await asyncio.sleep(0)
    return number

async def each_soon(number):
    await asyncio.sleep(0)
    yield number

async def stuck_soon(number):
    begin()
    await asyncio.sleep(60)

async def block_loop(number):
    begin()
    time.sleep(60)

async def resist(number):
    begin()
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

def block():
    begin()
    return SimpleQueue().get()

async def begin_tasks(number):
    asyncio.create_task(asyncio.sleep(60))
    return number

def consume(items):
    for _ in items:
        pass

def leave(items):
    for _ in items:
        time.sleep(0.01)
        return

if __name__ == "__main__":
    builder = PipelineBuilder().add_source(range(10**9))
    builder = {shape}
    pipeline = builder.add_sink().build()
    items = iter(pipeline)
    for _ in range({stuck}):
        os.read(has_begun, 1)
    if not {stuck}:
        assert len([next(items) for _ in range(5)]) == 5
    print("the end", flush=True)
    {end}
"""


# In a function, those that yield no item would wait for one.
CELLS = [
    (shape, end) for shape in SHAPES for end in ENDS if shape not in STUCK or end != "in a function"
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "end"), CELLS)
def test_a_program_ends_quietly(shape, end, tmp_path):
    text, code, words = ENDS[end]
    source = PROGRAM.format(shape=SHAPES[shape], stuck=STUCK.get(shape, 0), end=text)
    program = Program(source, tmp_path / "program.py")
    assert program.read_line() == "the end"
    start = time.monotonic()
    done = program.finish()
    assert time.monotonic() - start < 20
    if words:
        assert done.err.splitlines()[-1] == words
        assert done.err.count("Traceback") == 1
        assert not [line for line in done.err.splitlines() if "shmloader" in line]
        assert (done.code, done.left) == (code, [])
    else:
        done.assert_quiet(code)


def test_a_program_that_never_iterates_its_pipeline_ends_quietly(tmp_path):
    source = """
        from shmloader import PipelineBuilder
        pipeline = PipelineBuilder().add_source(range(3)).pipe(str).add_sink().build()
    """
    Program(source, tmp_path / "program.py").finish().assert_quiet(0)
