"""What is to import torch does so while the dataset is pickled: a worker, or the fork server."""

from __future__ import annotations

import re
import signal

import pytest

from shmloader.errors import LOADER_CLOSED
from tests.process.support import Done, run_program, wait_for_end

pytestmark = pytest.mark.timeout(90)

# A dataset that does something when it is pickled.
PROGRAM = """
import multiprocessing, os, signal, sys
from multiprocessing import forkserver
import torch.utils.data
from shmloader import DataLoader

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.lock = multiprocessing.get_context({method!r}).Lock()
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index, self.lock.acquire(block=False)
    def __getstate__(self):
        early = multiprocessing.active_children()
        print(len(early), forkserver._forkserver._forkserver_pid is not None, flush=True)
        {then}
        return self.__dict__

def tell(worker_id):
    print(worker_id, "has", os.environ.get("SET_LATE"), flush=True)

def make(data, **options):
    given = dict(num_workers=2, batch_size=None, multiprocessing_context={method!r}) | options
    return DataLoader(data, **given)

def read(data, **options):
    with data.lock:
        return list(make(data, **options))

def main():
    data = Data()
    {main}
    assert not multiprocessing.active_children()

if __name__ == "__main__":
    main()
"""

READ = "print(read(data))"
ALL = str([[index, False] for index in range(4)])


def run(tmp_path, then: str = "pass", *, main: str = READ, method: str = "spawn") -> Done:
    source = PROGRAM.format(then=then, main=main, method=method)
    return run_program(source, tmp_path / "program.py")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "seen"), [("spawn", "1 False"), ("forkserver", "0 True")])
def test_it_is_there_before_the_dataset_is_pickled(tmp_path, method, seen) -> None:
    done = run(tmp_path, method=method)
    assert done.out.splitlines() == [seen, ALL], done.err
    done.assert_quiet()


@pytest.mark.slow
def test_closures_and_each_worker_get_the_same(tmp_path) -> None:
    """By cloudpickle, after pickle has failed: what that had noted of descriptors is forgotten."""
    done = run(tmp_path, main="data.function = lambda: 0; " + READ)
    assert done.out.splitlines() == ["1 False", "1 False", ALL], done.err
    done.assert_quiet()


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", ["LookupError('mine')", "KeyboardInterrupt()", "TypeError('not to be pickled')"]
)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_where_pickling_fails_it_is_gone_and_the_next_loader_works(tmp_path, error, method) -> None:
    name, text = error.removesuffix(")").split("(")
    main = f"""
    import warnings
    warnings.simplefilter("ignore")
    Data.fails = True
    try:
        read(data)
    except {name} as caught:
        print(type(caught).__name__, str(caught).splitlines()[:1])
    assert not multiprocessing.active_children()
    Data.fails = False
    print(read(data))
    """
    done = run(tmp_path, f"if Data.fails: raise {error}", main=main, method=method)
    out = done.out.splitlines()
    assert f"{name} [{text}]" in out, done.err
    assert out[-1] == ALL
    done.assert_quiet()


KILLED = """
        if len(early) == 1:
            os.kill(early[0].pid, signal.SIGKILL)
            os.waitid(os.P_PID, early[0].pid, os.WEXITED | os.WNOWAIT)
"""


@pytest.mark.slow
def test_one_that_dies_meanwhile_is_told_of(tmp_path) -> None:
    main = """
    from shmloader import WorkerDiedError
    try:
        read(data)
    except WorkerDiedError as error:
        print(error)
    """
    done = run(tmp_path, KILLED, main=main)
    assert "killed by signal: Killed" in done.out, done.err
    done.assert_quiet()


def test_one_that_dies_meanwhile_is_replaced(tmp_path) -> None:
    done = run(tmp_path, KILLED, main="print(read(data, num_workers=1, worker_restarts=1))")
    assert done.out.splitlines() == ["1 False", ALL], done.err


@pytest.mark.slow
def test_it_ends_with_the_main_process(tmp_path) -> None:
    then = "print('pid', early[0].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    done = run(tmp_path, then)
    assert done.code == -signal.SIGKILL
    wait_for_end(int(re.search(r"pid (\d+)", done.out).group(1)))


@pytest.mark.slow
def test_what_pickling_sets_in_the_environment_all_have(tmp_path) -> None:
    then = "os.environ['SET_LATE'] = 'it'"
    done = run(tmp_path, then, main="print(read(data, worker_init_fn=tell))")
    assert sorted(done.out.splitlines()) == ["0 has it", "1 False", "1 has it", ALL], done.err
    done.assert_quiet()


@pytest.mark.slow
def test_where_it_can_be_sent_no_descriptors_they_are_inherited(tmp_path) -> None:
    """Those on their way to any process of a user are limited."""
    main = """
    from contextlib import ExitStack
    from tests.crowd import crowded
    with ExitStack() as stack:
        Data.begin = lambda: stack.enter_context(crowded())
        with data.lock:
            batches = iter(make(data))
            stack.close()
            print(list(batches))
        del batches
    """
    done = run(tmp_path, "Data.begin()", main=main)
    assert done.out.splitlines() == ["1 False", ALL], done.err
    done.assert_quiet()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_loader_that_is_closed_meanwhile_begins_no_epoch(tmp_path, method) -> None:
    main = """
    from shmloader import ClosedLoaderError
    Data.loader = make(data)
    try:
        iter(Data.loader)
    except ClosedLoaderError as error:
        print(error)
    """
    done = run(tmp_path, "Data.loader.close()", main=main, method=method)
    assert done.out.splitlines()[-1] == LOADER_CLOSED, done.err
    done.assert_quiet()


@pytest.mark.slow
def test_at_the_interpreter_s_exit_it_is_ended_once(tmp_path) -> None:
    main = """
    from multiprocessing import util
    from shmloader import ClosedLoaderError
    Data.exit = util._run_finalizers
    try:
        read(data)
    except ClosedLoaderError as error:
        print(error)
    """
    done = run(tmp_path, "Data.exit(100)", main=main)
    assert done.out.splitlines() == ["1 False", "the workers have been ended"], done.err
    done.assert_quiet()
