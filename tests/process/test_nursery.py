"""The process that imports the program once, and forks the workers of spawn and forkserver."""

import re
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from shmloader import DataLoader
from tests.process.support import Done, run_program, wait_for_end

pytestmark = pytest.mark.slow

# A dataset that does something when it is pickled.
PROGRAM = """
import multiprocessing, os, signal, sys
import psutil
import torch.utils.data
from shmloader import DataLoader

def nurseries():
    children = psutil.Process().children()
    return [one.pid for one in children if "spawn_main" in " ".join(one.cmdline())]

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.lock = multiprocessing.get_context({method!r}).Lock()
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index, self.lock.acquire(block=False)
    def __getstate__(self):
        early = nurseries()
        print(len(early), flush=True)
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


# A closure is pickled by cloudpickle, after pickle has failed: what that had noted of descriptors
# is forgotten.
@pytest.mark.parametrize(
    ("method", "main", "times"),
    [
        ("spawn", READ, 1),
        ("forkserver", READ, 1),
        ("spawn", "data.function = lambda: 0; " + READ, 2),
    ],
)
def test_it_is_there_before_the_dataset_is_pickled(tmp_path, method, main, times) -> None:
    done = run(tmp_path, method=method, main=main)
    assert done.out.splitlines() == ["1"] * times + [ALL], done.err
    done.assert_quiet()


@pytest.mark.parametrize(
    "error", ["LookupError('mine')", "KeyboardInterrupt()", "TypeError('not to be pickled')"]
)
def test_where_pickling_fails_it_is_gone_and_the_next_loader_works(tmp_path, error) -> None:
    name, text = error.removesuffix(")").split("(")
    main = f"""
    import warnings
    warnings.simplefilter("ignore")
    Data.fails = True
    try:
        read(data)
    except {name} as caught:
        print(type(caught).__name__, str(caught).splitlines()[:1])
    assert not nurseries()
    Data.fails = False
    print(read(data))
    """
    done = run(tmp_path, f"if Data.fails: raise {error}", main=main)
    out = done.out.splitlines()
    assert f"{name} [{text}]" in out, done.err
    assert out[-1] == ALL
    done.assert_quiet()


def test_another_one_takes_the_place_of_one_that_dies(tmp_path) -> None:
    """It dies before there are workers, and while there are."""
    main = """
    with data.lock:
        loader = make(data, worker_restarts=2, num_workers=1, prefetch_factor=1)
        batches = iter(loader)
        found = [next(batches)]
        (pid,) = nurseries()
        for one in (pid, *(worker.pid for worker in batches._workers)):
            os.kill(one, signal.SIGKILL)
        print([*found, *batches], nurseries() != [pid])
    """
    then = """os.kill(early[0], signal.SIGKILL)
        os.waitid(os.P_PID, early[0], os.WEXITED | os.WNOWAIT)"""
    done = run(tmp_path, then, main=main)
    assert done.out.splitlines() == ["1", f"{ALL} True"], done.err


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_one_that_is_killed_while_it_imports_is_told_of_and_leaves_nothing(tmp_path, method):
    main = """
    from multiprocessing import resource_tracker
    resource_tracker.ensure_running()
    before = os.listdir("/proc/self/fd")
    try:
        iter(make(data))
    except RuntimeError as error:
        text = str(error)
    print(text)
    print(len(os.listdir("/proc/self/fd")) - len(before))
    """
    then = """import threading
        os.kill(early[0], signal.SIGSTOP)
        threading.Timer(0.5, os.kill, [early[0], signal.SIGKILL]).start()"""
    done = run(tmp_path, then, main=main, method=method)
    started, text, left = done.out.splitlines()
    assert re.match(r"DataLoader worker \(pid \d+\) is killed by signal: Killed\.", text), done.err
    assert (started, left) == ("1", "0")


def test_it_ends_with_the_main_process(tmp_path) -> None:
    """Even while it imports the program."""
    done = run(tmp_path, "print('pid', early[0], flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    assert done.code == -signal.SIGKILL
    wait_for_end(int(re.search(r"pid (\d+)", done.out).group(1)))


def test_loaders_share_it_and_it_goes_with_the_last_of_them(tmp_path) -> None:
    main = """
    with data.lock:
        one, other = make(data, num_workers=1), make(data, num_workers=1)
        print(len(list(one)), len(list(other)), len(list(one)), len(nurseries()))
        one.close()
        print(len(nurseries()))
        del other
        print(len(nurseries()))
    """
    done = run(tmp_path, main=main)
    assert done.out.splitlines() == ["1", "1", "1", "4 4 4 1", "1", "0"], done.err
    done.assert_quiet()


WORLD = """
import gc, multiprocessing, os, sys
from pathlib import Path
import torch.utils.data, shmloader
{first}

def private_mib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) // 1024

class World:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        gc.collect()  # writes to the page of each object that is not frozen
        me, parent = multiprocessing.current_process(), multiprocessing.parent_process()
        return {{
            "name": __name__, "main": sys.modules["__main__"] is sys.modules["__mp_main__"],
            "path": sys.path, "arguments": sys.argv, "folder": os.getcwd(), "is": me.daemon,
            "environment": dict(os.environ), "key": bytes(me.authkey), "parent": parent.pid,
            "lives": parent.is_alive(), "of": parent.name,
            "method": multiprocessing.get_start_method(),
            "stdin": sys.stdin.read(), "handlers": handlers(), "forked": os.getppid() != parent.pid,
            "is small": private_mib() < 18,
        }}

def handlers():
    import signal
    numbers = sorted(signal.valid_signals() - {{signal.SIGINT}})
    return [signal.getsignal(number) for number in numbers], signal.pthread_sigmask(0, [])

def world(kind, method):
    options = dict(batch_size=None, num_workers=1, multiprocessing_context=method)
    return list(kind(World(), collate_fn=dict, **options))[0]

def main():
    {main}

if __name__ == "__main__":
    main()
"""


def run_world(tmp_path, main: str, *, first: str = "") -> Done:
    source = WORLD.format(main=main, first=first)
    return run_program(source, tmp_path / "program.py", is_fresh=True, timeout_s=80)


# Measured: 9 MiB, 28 where a collection writes to all objects; 159 with a torch of its own.
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_have_what_those_of_torch_have_and_share_the_rest(tmp_path, method) -> None:
    main = f"""
    os.chdir("/")
    os.environ["SET_LATE"] = "it"
    sys.path.append("/nowhere")
    theirs = world(torch.utils.data.DataLoader, {method!r})
    for _ in range(2):
        ours = world(shmloader.DataLoader, {method!r})
        print({{name: one for name, one in ours.items() if one != theirs[name]}})
    """
    done = run_world(tmp_path, main)
    kinds = {"is small": True} | ({"forked": True} if method == "spawn" else {})
    lines = done.out.splitlines()
    assert len(lines) == 2, done.err
    for line in lines:
        assert eval(line) == kinds


def test_where_the_program_starts_threads_spawn_starts_each_worker_afresh(tmp_path) -> None:
    first = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    main = """
    for method in ("spawn", "forkserver", "spawn"):
        print(world(shmloader.DataLoader, method)["forked"])
    """
    done = run_world(tmp_path, main, first=first)
    assert done.out.split() == ["False", "True", "False"], done.err
    done.assert_quiet()


def test_where_the_user_s_class_starts_processes_it_does(tmp_path) -> None:
    main = """
    from multiprocessing.context import SpawnContext, SpawnProcess
    class Process(SpawnProcess):
        @staticmethod
        def _Popen(process):
            print("starts", flush=True)
            return SpawnProcess._Popen(process)
    context = SpawnContext()
    context.Process = Process
    globals()["Process"] = Process
    Process.__reduce__ = lambda self: (SpawnProcess.__new__, (SpawnProcess,), self.__dict__)
    print(world(shmloader.DataLoader, context)["forked"])
    """
    done = run_world(tmp_path, main)
    assert done.out.splitlines() == ["starts", "False"], done.err
    done.assert_quiet()


def test_a_program_that_cannot_be_imported_is_told_of(tmp_path) -> None:
    first = "if __name__ != '__main__': raise LookupError('in a worker')"
    main = """
    try:
        iter(shmloader.DataLoader([1], num_workers=1, multiprocessing_context="spawn"))
    except shmloader.WorkerDiedError as error:
        print(error)
    """
    done = run_world(tmp_path, main, first=first)
    assert re.fullmatch(
        r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code 1\. It imports the "
        r"program and forks the workers, and its output says why\.\n",
        done.out,
    )
    assert done.err.rstrip().endswith("LookupError: in a worker")


@pytest.mark.parametrize("name", ["calendar", "tqdm"])
def test_what_the_program_finds_elsewhere_its_workers_do(name, tmp_path) -> None:
    folder = tmp_path / "vendored"
    folder.mkdir()
    (folder / f"{name}.py").write_text("is_vendored = True\ndef __getattr__(name): return print")
    done = run_program(
        f"""
        import sys
        sys.path.insert(0, {str(folder)!r})
        import {name}
        from shmloader import DataLoader

        class Vendored:
            def __len__(self):
                return 1
            def __getitem__(self, index):
                import {name}
                return {name}.is_vendored is True

        if __name__ == "__main__":
            assert {name}.is_vendored is True
            print(list(DataLoader(
                Vendored(), batch_size=None, num_workers=1, multiprocessing_context="forkserver"
            )))
        """,
        tmp_path / "program.py",
        is_fresh=True,  # nothing of that name is imported yet
    )
    assert done.out == "[True]\n", done.err


class SeedsWhileUnpickled(Dataset):
    """As a module does that calls torch.manual_seed at its top."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.manual_seed(42)
        self.__dict__.update(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"some": 1}


def test_what_unpickling_does_to_the_random_streams_comes_before_the_seeds() -> None:
    drawn = []
    for loader_class in (DataLoader, TorchLoader):
        torch.manual_seed(7)
        loader = loader_class(
            SeedsWhileUnpickled(), num_workers=2, multiprocessing_context="forkserver"
        )
        drawn.append(torch.cat(list(loader)).flatten().tolist())
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4


COLLECTING = """
import gc
from shmloader import DataLoader

was_enabled = gc.isenabled()

class Data:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return was_enabled, gc.isenabled()

if __name__ == "__main__":
    print(list(DataLoader(Data(), batch_size=None, num_workers=1, multiprocessing_context="spawn")))
"""


def test_no_garbage_is_collected_while_it_imports_the_program(tmp_path) -> None:
    done = run_program(COLLECTING, tmp_path / "program.py")
    assert done.out.strip() == "[[False, True]]", done


LOADING = """
import os, pathlib, time
import torch.utils.data
from shmloader import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index
    def __getstate__(self):
        return os.path.dirname(__file__)
    def __setstate__(self, directory):
        file = pathlib.Path(directory, {name})
        file.touch(exist_ok=False)
        {then}

if __name__ == "__main__":
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    print(list(DataLoader(Data(), batch_size=None, num_workers=4, multiprocessing_context="spawn")))
"""


@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("'one'", "time.sleep(0.2); file.unlink()"),
        # They wait for each other, for no longer than it takes until all of them load at once.
        ("str(os.getpid())", "while len([*file.parent.glob('[0-9]*')]) < 4: time.sleep(0.01)"),
    ],
)
def test_as_many_workers_load_the_dataset_at_once_as_there_are_cores(tmp_path, name, then) -> None:
    source = LOADING.format(name=name, then=then)
    done = run_program(source, tmp_path / "program.py")
    assert done.out.strip() == str([*range(8)]), done.err
