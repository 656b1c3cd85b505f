"""Under spawn, as many workers get ready at a time as there are cores."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from shmloader.pools.startup_semaphore import StartupSemaphore, set_startup
from tests.process.support import Program, run_program

pytestmark = pytest.mark.timeout(90)

# What a worker does first of all is noted in a file, and what it does before it is ready.
PROGRAM = """
import os, signal, sys, time

LOG = sys.argv[0] + ".log"

def note(what):
    with open(LOG, "a") as log:
        log.write(what + "\\n")
    return open(LOG).read().count(what) == 1

if __name__ != "__main__":
    is_first = note("begins")
    if {at!r} == "dies" and is_first:
        os._exit(3)

import torch.utils.data
import shmloader.pools.starting
from shmloader import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return index
    def __setstate__(self, state):
        self.__dict__.update(state)
        if {at!r} in ("close", "kill"):
            time.sleep(1000)
        note("is ready")
        if {at!r} == "fails" and is_first:
            raise LookupError("this one")
    def __getstate__(self):
        return {{"it": "has a state"}}

def main():
    shmloader.pools.starting.usable_cores = lambda root: 1
    loader = DataLoader(
        Data(), num_workers=3, multiprocessing_context="spawn", collate_fn=list,
        worker_restarts=1 if {at!r} == "dies" else 0,
    )
    batches = iter(loader)
    assert len({{worker.pid for worker in batches._workers}}) == 3
    if {at!r} in ("close", "kill"):
        while not os.path.exists(LOG):
            time.sleep(0.01)
        if {at!r} == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return loader.close()
    while True:
        try:
            print(*next(batches))
        except StopIteration:
            break
        except LookupError:
            print("failed")

if __name__ == "__main__":
    import warnings
    warnings.simplefilter("ignore")
    main()
"""


def lines(path: Path) -> list[str]:
    return Path(f"{path}.log").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["well", "fails", "dies"])
def test_one_begins_when_the_one_before_is_ready_or_fails_or_dies(at, tmp_path) -> None:
    path = tmp_path / "program.py"
    done = run_program(PROGRAM.format(at=at), path)
    first = "failed" if at == "fails" else "0"
    fourth = "failed" if at == "fails" else "3"
    assert done.out.split() == [first, "1", "2", fourth, "4", "5"], done.err
    expected = ["begins", "is ready"] * 3
    assert lines(path) == (["begins", *expected] if at == "dies" else expected)
    assert done.code == 0


@pytest.mark.slow
@pytest.mark.parametrize("at", ["close", "kill"])
def test_those_that_wait_for_their_turn_end_with_the_loader_and_with_its_process(
    at, tmp_path
) -> None:
    path = tmp_path / "program.py"
    done = Program(PROGRAM.format(at=at), path).finish()
    assert lines(path) == ["begins"]
    done.assert_quiet(-signal.SIGKILL if at == "kill" else 0)


COLLECTOR = """
import gc
import torch.utils.data
from shmloader import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return [self.was_enabled, gc.isenabled()]
    def __setstate__(self, state):
        self.was_enabled = gc.isenabled()
    def __getstate__(self):
        return {{"it": "has a state"}}

if __name__ == "__main__":
    context = {method!r}
    print(*DataLoader(Data(), None, num_workers=1, multiprocessing_context=context))
    print(gc.isenabled())
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_there_is_no_collector_until_a_worker_is_ready(method, tmp_path) -> None:
    done = run_program(COLLECTOR.format(method=method), tmp_path / "program.py")
    assert done.out.splitlines() == ["[False, True] [False, True]", "True"], done.err
    assert done.code == 0


def test_a_name_waits_for_a_token_once_and_is_that_of_the_process(no_collector) -> None:
    turns = StartupSemaphore(1)
    os.set_blocking(turns._read.fileno(), False)  # what would wait raises

    def named() -> bytes:
        process = SimpleNamespace(name="Process-7")
        set_startup(process, turns)
        data = pickle.dumps(process.name)
        # The process itself is pickled after its name.
        assert pickle.loads(pickle.dumps(process.name)) == "Process-7"
        return data

    # The name blocks SIGINT on the thread that reads it.
    with contextlib.closing(turns), ThreadPoolExecutor(1) as reader:
        found = [reader.submit(pickle.loads, named()).result(20)]  # one of the first
        second = named()
        for _ in range(2):
            with pytest.raises(BlockingIOError):
                reader.submit(pickle.loads, second).result(20)
            turns.release()
            found.append(reader.submit(pickle.loads, second).result(20))
    assert found == ["Process-7"] * 3
    assert {type(name) for name in found} == {str}
    turns.close()  # once more


def test_a_worker_that_is_lost_while_another_thread_closes_needs_no_token():
    turns = StartupSemaphore(1)
    turns.close()
    turns.release()
