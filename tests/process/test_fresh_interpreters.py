"""spawn and forkserver: what reaches a worker that starts from nothing."""

from __future__ import annotations

import re

import pytest

from tests.process.support import run_program

pytestmark = pytest.mark.timeout(90)

LOCAL = """
import torch, shmloader
from dataclasses import dataclass
from shmloader import DataLoader
from torch.utils.data import get_worker_info

@dataclass
class Answer:
    text: str
    tensor: torch.Tensor

def main(method):
    scale = 3
    ready = []

    class Data:
        def __len__(self):
            return 4
        def __getitem__(self, index):
            if index == 3:
                raise Own(f"at {index}")
            return index * scale

    def collate(samples):
        return Answer(f"{ready} {samples}", torch.tensor(samples))

    loader = DataLoader(
        Data(), batch_size=1, num_workers=1, multiprocessing_context=method,
        collate_fn=lambda samples: collate(samples),
        worker_init_fn=lambda worker: ready.append(f"worker {worker}"),
    )
    batches = iter(loader)
    for index in range(3):
        answer = next(batches)
        assert type(answer) is Answer, type(answer)
        print(answer.text, answer.tensor.tolist())
    try:
        next(batches)
    except Own as error:
        print("Own", "at 3" in str(error))
    print(ready)

class Own(Exception):
    pass

if __name__ == "__main__":
    main({method!r})
"""

EXPECTED = [
    "['worker 0'] [0] [0]",
    "['worker 0'] [3] [3]",
    "['worker 0'] [6] [6]",
    "Own True",
    "[]",
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", ["a file", "-c", "stdin"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_local_things_reach_a_worker_of_a_program_from(method, source, tmp_path) -> None:
    text = LOCAL.replace("{method!r}", repr(method))
    path = tmp_path / "program.py" if source == "a file" else None
    done = run_program(text, path, stdin=source == "stdin")
    assert done.out.splitlines() == EXPECTED, done.err
    done.assert_quiet()


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_shared_things_reach_a_worker(method, wrapped, tmp_path) -> None:
    """A lock, a queue, a value and a shared tensor; by pickle, and by cloudpickle."""
    done = run_program(
        f"""
        import multiprocessing, torch
        from shmloader import DataLoader

        class Data:
            def __init__(self, context):
                self.lock = context.Lock()
                self.value = context.Value("i", 0)
                self.queue = context.SimpleQueue()
                self.event = context.Event()
                self.shared = torch.zeros(10).share_memory_()
            def __len__(self):
                return 8
            def __getitem__(self, index):
                assert self.event.is_set()
                with self.lock:
                    self.value.value += 1
                    self.queue.put(index)
                self.shared[index] = index
                return index

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            data = Data(context)
            data.event.set()
            collate = (lambda samples: samples) if {wrapped} else list
            loader = DataLoader(
                data, num_workers=2, multiprocessing_context=context, collate_fn=collate
            )
            print(list(loader))
            print(data.value.value, data.shared.tolist())
            print(sorted(data.queue.get() for _ in range(8)))
        """,
        tmp_path / "program.py",
    )
    done.assert_quiet()
    assert done.out.splitlines() == [
        str([[n] for n in range(8)]),
        f"8 {[*map(float, range(8)), 0.0, 0.0]}",
        str(list(range(8))),
    ]


@pytest.mark.slow
def test_two_views_of_one_shared_tensor_reach_a_spawned_worker_where_torch_can(tmp_path) -> None:
    done = run_program(
        """
        import torch
        import shmloader

        class Data:
            def __init__(self):
                base = torch.arange(10.).share_memory_()
                self.low, self.high = base[:5], base[5:]
            def __len__(self):
                return 5
            def __getitem__(self, index):
                return self.low[index] + self.high[index]

        if __name__ == "__main__":
            seen = []
            for kind in (torch.utils.data.DataLoader, shmloader.DataLoader):
                try:
                    loader = kind(Data(), num_workers=1, multiprocessing_context="spawn")
                    seen.append([float(batch) for batch in loader])
                except Exception as error:
                    seen.append(repr(error))
            print(seen[1] == [5., 7., 9., 11., 13.] or seen[0] == seen[1], seen)
        """,
        tmp_path / "program.py",
    )
    assert done.out.startswith("True"), done
    assert done.left == []


@pytest.mark.slow
def test_a_dataset_that_cannot_be_pickled_at_all_leaves_nothing(tmp_path) -> None:
    done = run_program(
        """
        import gc, os, sys, threading, warnings
        import psutil
        from shmloader import DataLoader

        class Part:
            def __init__(self):
                self.lock = threading.Lock()

        class Data:
            def __init__(self):
                self.parts = [1, Part()]
            def __len__(self):
                return 5
            def __getitem__(self, index):
                return index

        if __name__ == "__main__":
            warnings.simplefilter("ignore")
            gc.disable()
            # What stays: the resource tracker.
            list(DataLoader([1], num_workers=1, multiprocessing_context="forkserver"))
            theirs = psutil.Process().children()
            assert len(theirs) == 1
            for method in ("spawn", "forkserver"):
                before = len(os.listdir("/proc/self/fd"))
                try:
                    iter(DataLoader(Data(), num_workers=1, multiprocessing_context=method))
                except TypeError as error:
                    print(*str(error).splitlines(), sep="|")
                    print(type(error.__cause__), error.__cause__)
                left = [one for one in psutil.Process().children() if one not in theirs]
                print(len(os.listdir("/proc/self/fd")) - before, left)
        """,
        tmp_path / "program.py",
    )
    done.assert_quiet()
    lines = done.out.splitlines()
    for method in ("spawn", "forkserver"):
        said, cause, left = [lines.pop(0) for _ in range(3)]
        assert said == (
            "cannot pickle '_thread.lock' object|"
            "dataset.parts[1].lock (of type _thread.lock) cannot be pickled, so it cannot be sent "
            f"to worker processes that are started by '{method}'. Open it in the worker: set it to "
            "None in __init__, and create it when it is first used, or in worker_init_fn "
            "(torch.utils.data.get_worker_info().dataset is the worker's own copy)."
        )
        assert cause == "<class 'TypeError'> cannot pickle '_thread.lock' object"
        assert left == "0 []"


_UNGUARDED = """
An attempt has been made to start a new process before the current process has finished its \
bootstrapping phase. A process that is started by 'spawn' or 'forkserver' imports the program's \
main file, and this file starts workers as soon as it is imported. Put that part of it under a \
main guard:

if __name__ == "__main__":
    for batch in loader:
        ...
""".strip()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_program_without_the_main_guard_is_told_so_once(method, tmp_path) -> None:
    done = run_program(
        f"""
        from shmloader import DataLoader
        loader = DataLoader([1, 2, 3], num_workers=3, multiprocessing_context="{method}")
        for batch in loader:
            pass
        """,
        tmp_path / "program.py",
    )
    assert done.code == 1
    assert done.left == []
    assert done.err.count("Traceback") == 1
    before, _, said = done.err.strip().partition("shmloader.WorkerDiedError: DataLoader worker ")
    assert "for batch in loader:" in before
    assert re.sub("[0-9]+", "N", said, count=1) == f"(pid N) exited unexpectedly. {_UNGUARDED}"


@pytest.mark.slow
def test_another_process_without_the_main_guard_raises_the_same_text(tmp_path) -> None:
    done = run_program(
        """
        import multiprocessing
        from shmloader import DataLoader

        loader = DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="spawn")
        if __name__ == "__mp_main__":
            try:
                next(iter(loader))
            except RuntimeError as error:
                print(type(error).__name__, str(error).strip())
        else:
            process = multiprocessing.get_context("spawn").Process(target=print, args=["done"])
            process.start()
            process.join()
        """,
        tmp_path / "program.py",
    )
    done.assert_quiet()
    assert done.out == f"RuntimeError {_UNGUARDED}\ndone\n"


@pytest.mark.slow
def test_a_guarded_program_that_makes_its_loader_outside_works(tmp_path) -> None:
    done = run_program(
        """
        from shmloader import DataLoader

        loader = DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="spawn")
        if __name__ == "__main__":
            print([batch.item() for batch in loader])
        """,
        tmp_path / "program.py",
    )
    done.assert_quiet()
    assert done.out == "[1, 2, 3]\n"


@pytest.mark.slow
def test_a_class_under_the_guard_is_told_where_to_go(tmp_path) -> None:
    done = run_program(
        """
        from shmloader import DataLoader

        if __name__ == "__main__":
            class Data:
                def __len__(self):
                    return 3
                def __getitem__(self, index):
                    return index

            try:
                next(iter(DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")))
            except AttributeError as error:
                print(error.__notes__[-1])
        """,
        tmp_path / "program.py",
    )
    done.assert_quiet()
    assert done.out == (
        "The worker has imported the program's main file, but classes and functions under its main "
        "guard are not defined there. Define what the dataset uses above the guard, or in a module "
        "of its own.\n"
    )
