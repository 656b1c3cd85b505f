"""Short epochs without workers: what a loader costs that is used for a few batches."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import Dataset

from shmloader import DataLoader
from tests.process.support import run_program

pytestmark = pytest.mark.timeout(120)


class Task(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


def make(kind: Any = DataLoader) -> Any:
    return kind(Task(), batch_size=10, shuffle=True)


def take_first(loader: Any) -> None:
    next(iter(loader))


USES: dict[str, Callable[[Any], Any]] = {"an epoch": list, "the first batch": take_first}


def calls_of(function: Callable[[], Any]) -> int:
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    gc.disable()  # no finalizer of another test's objects counts
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


# Our calls are shorter than torch's, which calls its profiler for each batch.
@pytest.mark.parametrize(
    ("use", "epochs", "most"),
    [
        (list, 1, 2.0),
        (take_first, 1, 2.5),
        # Of a loader that has had 8 epochs: statistics sum up earlier ones from now on.
        (list, 8, 2.6),
        (take_first, 8, 3.6),
    ],
)
def test_epochs_take_few_more_calls_than_with_torch(use, epochs, most) -> None:
    theirs, ours = make(torch.utils.data.DataLoader), make()
    for loader in (theirs, ours) if epochs > 1 else ():
        for _ in range(epochs):
            list(loader)
    counts = [calls_of(lambda of=of: [use(of) for _ in range(epochs)]) for of in (theirs, ours)]
    assert counts[1] <= most * counts[0]


def test_making_a_loader_takes_few_more_calls_than_with_torch() -> None:
    theirs, ours = (
        calls_of(lambda kind=kind: make(kind)) for kind in (torch.utils.data.DataLoader, DataLoader)
    )
    assert ours <= 1.5 * theirs


# In a fresh process: what other tests set in classes makes their instances larger.
# By a clock of its own: how much durations vary decides how many of them statistics keep.
KEPT = """
import gc, itertools, random, time, tracemalloc
steps_ns = iter(lambda: steps.choice((10_000, 20_000, 30_000)), None)
steps, time.monotonic_ns = random.Random(1), itertools.accumulate(steps_ns).__next__
from tests.process.test_short_epochs import USES, make

def kept(count):
    loaders = [make() for _ in range(count)]
    for loader in loaders:
        for _ in range({epochs}):
            USES[{use!r}](loader)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]

kept(2)
tracemalloc.start()
print((kept(21) - kept(1)) / 20)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("epochs", "most"), [(1, 4 * 1024), (40, 12 * 1024)])
def test_a_loader_that_was_used_keeps_little_memory(use, epochs, most) -> None:
    done = run_program(KEPT.format(use=use, epochs=epochs))
    done.assert_quiet()
    assert float(done.out) <= most


USED = """
import sys, threading
from shmloader import DataLoader
from tests.process.test_short_epochs import make, take_first

opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
for use in (list, take_first):
    use(make())
print(opened, threading.active_count())
"""


def test_nothing_is_read_and_no_thread_is_started_until_somebody_asks() -> None:
    assert run_program(USED).out == "[] 1\n"
