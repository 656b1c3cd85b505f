"""spawn and forkserver: what reaches a worker that starts from nothing, and what it waits for."""

import multiprocessing
import re
import threading
from typing import Any

import psutil
import pytest
import torch

from shmloader import DataLoader
from tests.process.support import Numbers, descriptor_count, run_program

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


class Shared:
    def __init__(self, context: Any) -> None:
        self.lock, self.event = context.Lock(), context.Event()
        self.value, self.queue = context.Value("i", 0), context.SimpleQueue()
        self.tensor = torch.zeros(10).share_memory_()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        assert self.event.is_set()
        with self.lock:
            self.value.value += 1
            self.queue.put(index)
        self.tensor[index] = index
        return index


@pytest.mark.slow
@pytest.mark.parametrize("collate", [list, lambda samples: samples], ids=["pickle", "cloudpickle"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_shared_things_reach_a_worker(method, collate) -> None:
    context = multiprocessing.get_context(method)
    data = Shared(context)
    data.event.set()
    with DataLoader(
        data, num_workers=2, multiprocessing_context=context, collate_fn=collate
    ) as loader:
        assert list(loader) == [[n] for n in range(8)]
    assert data.value.value == 8
    assert data.tensor.tolist() == [*range(8), 0, 0]
    assert sorted(data.queue.get() for _ in range(8)) == list(range(8))
    data.queue.close()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.filterwarnings("ignore:.*pickle")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_dataset_that_cannot_be_pickled_at_all_leaves_nothing(method) -> None:
    before, children = descriptor_count(), psutil.Process().children()
    dataset = Numbers(5)
    dataset.parts = [1, {"lock": threading.Lock()}]
    with pytest.raises(TypeError) as caught:
        iter(DataLoader(dataset, num_workers=1, multiprocessing_context=method))
    said = str(caught.value)
    assert said.startswith("cannot pickle '_thread.lock' object\ndataset.parts (of type list) ")
    assert f"sent to worker processes that are started by '{method}'. Open it in the worker" in said
    assert type(caught.value.__cause__) is TypeError
    del caught
    assert descriptor_count() == before
    assert psutil.Process().children() == children


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_program_without_the_main_guard_is_told_so(method, tmp_path) -> None:
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
    assert done.err.count("Traceback") == 2
    before, _, said = done.err.strip().partition("shmloader.WorkerDiedError: DataLoader worker ")
    assert "if __name__ == '__main__':" in before
    assert re.sub("[0-9]+", "N", said) == (
        "(pid N) exited unexpectedly with exit code N. It imports the program and forks the "
        "workers, and its output says why."
    )


# A worker has nothing to do for longer than that: the first waits for the dataset, and all
# wait between the epochs.
PROGRAM = """
import socket, time
import torch.utils.data
from shmloader import DataLoader

{module}

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index
    def __getstate__(self):
        time.sleep(2 * {seconds})
        return self.__dict__

def main():
    {main}
    loader = DataLoader(
        Data(), num_workers=2, batch_size=None, persistent_workers=True,
        multiprocessing_context={method!r},
    )
    for _ in range(2):
        print(list(loader))
        time.sleep(2 * {seconds})
    loader.close()

if __name__ == "__main__":
    main()
"""
SECONDS = 0.05
SET = f"socket.setdefaulttimeout({SECONDS})"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("where", ["module", "main"])
def test_workers_wait_for_as_long_as_it_takes(tmp_path, method, where):
    places = {"module": "", "main": "pass", where: SET}
    source = PROGRAM.format(**places, seconds=SECONDS, method=method)
    done = run_program(source, tmp_path / "program.py")
    assert done.out.splitlines() == ["[0, 1, 2, 3]"] * 2, done.err
    done.assert_quiet()
