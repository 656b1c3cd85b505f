"""The main process ends, in every way; its workers end with it, and nobody says anything.

So it is with a pipeline in any state.
"""

import os
import signal
import textwrap
import time

import psutil
import pytest

from tests.late import reason_to_skip
from tests.process.support import Done, Program, wait_until

METHODS = ["fork", "spawn", "forkserver"]

HEAD = """
import contextlib, gc, logging, os, signal, sys, threading, time, torch
from shmloader import DataLoader, LoaderTimeoutError

class Data:
    def __init__(self, busy=None, length=1000):
        self.busy, self.length = busy, length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        if self.busy == "sleep" and index >= 4:
            time.sleep(60)
        if self.busy == "compute" and index >= 4:
            while True:
                sum(range(1000))
        if self.busy == "multiply":
            return torch.ones(160, 160) @ torch.ones(160, 160)
        if self.busy == "stuck":
            is_stuck.set()
            threading.Event().wait() if index % 2 else time.sleep(600)
        return torch.full((30000,), float(index))

def workers(method, busy=None, **options):
    loader = DataLoader(Data(busy), num_workers=2, multiprocessing_context=method, **options)
    batches = iter(loader)
    assert float(next(batches).mean()) == 0
    assert float(next(batches).mean()) == 1
    if busy:
        next(batches), next(batches)
    return loader, batches

kept = []

def in_thread(busy, method, **options):
    logging.disable()
    start = lambda: kept.extend(workers(method, busy, **options))
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
"""


def program(body: str, tmp_path, head: str = "") -> Program:
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    return Program(f"{HEAD}{head}\nif __name__ == '__main__':\n{lines}\n", tmp_path / "program.py")


def check_end(done: Done, code: int, error: str = "") -> None:
    """Check that it ended with this code, with this error's traceback and no other output."""
    assert done.err.count("Traceback") == bool(error), done.err
    assert done.err.strip().endswith(error)
    done.err = done.err if not error else ""
    done.assert_quiet(code)


KILLED = {
    "sleep": "in_thread('sleep', {method!r})",
    "compute": "in_thread('compute', {method!r})",
    "idle": "in_thread(None, {method!r})",
    "stopped": """
        in_thread('sleep', {method!r})
        os.kill(kept[1]._workers[1].pid, signal.SIGSTOP)""",
    "replaced": """
        in_thread('sleep', {method!r}, worker_restarts=1, timeout=1)
        lost = kept[1]._workers[0].pid
        os.kill(lost, signal.SIGKILL)
        while kept[1]._workers[0].pid == lost:
            with contextlib.suppress(LoaderTimeoutError):
                next(kept[1])""",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("busy", KILLED)
@pytest.mark.parametrize("method", METHODS)
def test_workers_end_when_the_main_process_is_killed(method, busy, tmp_path) -> None:
    """A thread that has ended began them."""
    if method == "spawn" and busy in ("idle", "replaced"):
        pytest.skip("as under forkserver, and starting takes long")
    body = textwrap.dedent(KILLED[busy]).format(method=method)
    running = program(f"{body}\nprint('ready', flush=True)\ntime.sleep(60)", tmp_path)
    assert running.read_line() == "ready"
    os.kill(running.pid, signal.SIGKILL)
    running.finish(left_s=2.5).assert_quiet(-signal.SIGKILL)


ENDS = {
    "os._exit": ("os._exit(5)", 5, ""),
    "sys.exit": ("sys.exit(6)", 6, ""),
    "the end of the program": ("pass", 0, ""),
    "an exception": ("raise ZeroDivisionError('of the user')", 1, "ZeroDivisionError: of the user"),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("busy", [None, "sleep"])
@pytest.mark.parametrize("end", ENDS)
def test_forked_workers_end_with(end, busy, tmp_path) -> None:
    statement, code, error = ENDS[end]
    running = program(f"loader, batches = workers('fork', {busy!r})\n{statement}", tmp_path)
    check_end(running.finish(), code, error)


ALIVE = {
    "persistent workers between epochs": """
        loader = DataLoader(Data(length=8), num_workers=2, persistent_workers=True)
        list(loader)""",
    "persistent workers in mid-epoch": """
        loader, batches = workers("fork", persistent_workers=True)""",
    "a reference cycle, never collected": """
        gc.disable()
        loader, batches = workers("fork")
        batches.itself = [batches]
        del batches, loader""",
    "a traceback": """
        def fail():
            loader, batches = workers("fork")
            raise ValueError
        try:
            fail()
        except ValueError as error:
            kept = error""",
    "a module of its own": """
        import types
        sys.modules["kept"] = types.ModuleType("kept")
        sys.modules["kept"].it = workers("fork")""",
    "a batch and no loader": """
        kept = next(iter(DataLoader(Data(), num_workers=2)))
        numpy_kept = kept.numpy()""",
    "a waiting daemon thread": """
        import threading
        from tests.process.support import stack_of, wait_until
        def go():
            loader, batches = workers("fork", "sleep")
            started.set()
            list(batches)
        started = threading.Event()
        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        started.wait()
        wait_until(lambda: "_receive_any" in stack_of(thread.ident))""",
    "a dead worker that nobody was told of": """
        loader, batches = workers("fork")
        os.kill(batches._workers[0].pid, signal.SIGKILL)""",
    "a stopped worker": """
        loader, batches = workers("fork")
        os.kill(batches._workers[0].pid, signal.SIGSTOP)""",
    "a worker that ignores SIGTERM": """
        def ignore(worker):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        loader, batches = workers("fork", "sleep", worker_init_fn=ignore)""",
    "a non-daemon thread that goes on loading": """
        import threading
        def go():
            total = sum(float(batch.mean()) for batch in DataLoader(Data(length=50), num_workers=2))
            assert total == 50 * 49 / 2, total
        threading.Thread(target=go).start()""",
    "threads": "kept = taken(5)",
    "threads whose batches are pinned": """
        pins = not reason_to_skip()
        late = switch_on() if pins else None
        kept = taken(5, pin_memory=pins)""",
    "persistent threads": "kept = taken(5, persistent_workers=True)",
    # The program's own thread keeps its batches: where a daemon thread frees a tensor at the exit,
    # torch's C++ code aborts the process, also without a loader.
    "threads in use": """
        loader, batches = taken(0)
        threading.Thread(target=kept.extend, args=(batches,), daemon=True).start()""",
    "threads in a cycle": """
        loader, batches = taken(5)
        batches.itself = batches
        del loader, batches""",
    "threads that are closed after they stand still": """
        loader, batches = taken(5)
        before_multiprocessing_s(loader.close)""",
    "stuck threads": """
        threads._PARK_S = 0.2
        kept = taken(0, Data("stuck"))
        is_stuck.wait()""",
    "stuck threads that were closed": """
        import shmloader.pools.thread
        threads._PARK_S = shmloader.pools.thread._JOIN_S = 0.2
        loader, batches = taken(0, Data("stuck"))
        is_stuck.wait()
        loader.close()""",
    "a next() of threads at the exit": """
        def use():
            try:
                while True:
                    next(batches)
            except ClosedLoaderError as error:
                assert "exiting, and the worker threads have stopped" in str(error)
        before_multiprocessing_s(use)
        loader, batches = taken(0)""",
    **{
        f"a stage, {name}": f"""
        switch_on()
        loader, batches = taken({count}, Data(), thread_pool=False, num_workers=2, {options})
        {end}"""
        for options in ("pin_memory=True", "device='late', device_prefetch=3")
        for name, count, end in (
            (f"{options[:3]}, at once", 0, "pass"),
            (f"{options[:3]}, sys.exit", 40, "sys.exit(0)"),
            (
                f"{options[:3]}, in use",
                40,
                "threading.Thread(target=kept.extend, args=(batches,), daemon=True).start()",
            ),
        )
    },
}

# What the threads and stages of these ends need.
TAKEN = """
import atexit, multiprocessing.util
from shmloader import ClosedLoaderError
from shmloader import threads
from tests.late import reason_to_skip, switch_on

threads._PARK_S = 60  # longer than the test waits
is_stuck = threading.Event()

def taken(count, dataset=None, **options):
    options = {"num_workers": 3, "thread_pool": True, **options}
    loader = DataLoader(dataset or Data("multiply", 100_000), batch_size=4, **options)
    batches = iter(loader)
    for _ in range(count):
        next(batches)
    return loader, batches

def before_multiprocessing_s(function):
    atexit.unregister(multiprocessing.util._exit_function)
    atexit.register(function)
    atexit.register(multiprocessing.util._exit_function)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ALIVE)
def test_the_interpreter_ends_quietly_with(what, tmp_path) -> None:
    body = textwrap.dedent(ALIVE[what])
    if "stage" in what and reason_to_skip():
        pytest.skip(reason_to_skip())
    head = TAKEN if "taken(" in body else ""
    program(body, tmp_path, head).finish(30).assert_quiet()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["idle", "sleep", "compute"])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_ctrl_c_ends_everything_with_one_traceback(method, when, tmp_path) -> None:
    busy = None if when == "idle" else when
    running = program(
        f"loader, batches = workers({method!r}, {busy!r}, persistent_workers=True)\n"
        "print('ready', flush=True)\n" + ("next(batches)" if busy else "time.sleep(60)"),
        tmp_path,
    )
    assert running.read_line() == "ready"
    os.killpg(running.pid, signal.SIGINT)
    check_end(running.finish(20), -signal.SIGINT, "KeyboardInterrupt")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_ctrl_c_while_workers_start_is_the_main_processs_alone(method, tmp_path) -> None:
    running = program(
        "print('ready', flush=True)\n"
        f"options = {{'num_workers': 2, 'multiprocessing_context': {method!r}}}\n"
        "batches = iter(DataLoader(Data(), **options))\n"
        "time.sleep(60)",
        tmp_path,
    )
    assert running.read_line() == "ready"
    main = psutil.Process(running.pid)
    wait_until(lambda: any("spawn_main" in " ".join(c.cmdline()) for c in main.children()))
    os.killpg(running.pid, signal.SIGINT)
    check_end(running.finish(30), -signal.SIGINT, "KeyboardInterrupt")


# Each builds `pipeline` of an endless source.
PIPELINES = {
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
PIPELINE_ENDS = {
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

PIPELINE_PROGRAM = """
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
    (shape, end)
    for shape in PIPELINES
    for end in PIPELINE_ENDS
    if shape not in STUCK or end != "in a function"
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "end"), CELLS)
def test_a_program_ends_quietly_with_a_pipeline(shape, end, tmp_path):
    text, code, words = PIPELINE_ENDS[end]
    source = PIPELINE_PROGRAM.format(shape=PIPELINES[shape], stuck=STUCK.get(shape, 0), end=text)
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
