"""What the tests of this folder ask of an accelerator: CUDA, or the late device for a trial.

``pytest tests/cuda`` runs on a CUDA device. ``pytest tests/cuda --accelerator=late`` runs the same
tests on the late device, so that a fault of theirs is found before there is a GPU.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shmloader import DataLoader
from tests.process.support import Calls, only

# Elements of int32: above 64 KiB, so a batch of one is lent, and read by the device.
LENGTH = 17_000
# A worker fills a slot again within a fraction of the first. The second is longer, so that memory
# which was given back too early is written over before it is read.
COPY_MS, READ_MS = 4.0, 10.0


def kind() -> str:
    """The type of the accelerator's devices, as torch names it."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found.type


@contextlib.contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Inside, a stream is the calling thread's current one."""
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class Cuda:
    """A CUDA device (or ROCm's, which torch calls the same).

    Attributes:
        batches: How many batches a long test takes.
        already_registered: What the driver says to a second registration of the same memory.
    """

    batches = 10_000
    already_registered = "ALREADY_REGISTERED"

    def __init__(self) -> None:
        torch.ones(1).pin_memory()
        torch.cuda._sleep(1_000_000)  # the first one loads the kernel
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        end.synchronize()
        self._cycles_per_ms = 10_000_000 / start.elapsed_time(end)

    def sleep(self, ms: float) -> None:
        """Keep the current stream busy for so many milliseconds."""
        torch.cuda._sleep(int(ms * self._cycles_per_ms))

    def capture(self, body: Callable[[], None]) -> str:
        """Capture a graph while ``body`` runs. Returns what broke the capture, or nothing."""
        static = torch.zeros(1000, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up, as torch's notes on graphs ask for
            static.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        static.zero_()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                static.add_(1)
                body()
                static.add_(1)
            graph.replay()
            found = static.unique().tolist()
        except RuntimeError as error:
            return str(error)
        return "" if found == [2] else f"the graph was to write 2 and wrote {found}"


class Late:
    """The late device. Its streams are late by themselves, so that it need not sleep.

    Args:
        device: The device, switched on.
    """

    batches = 300
    already_registered = "late error 712"

    def __init__(self, device: Any) -> None:
        self._device = device

    def sleep(self, ms: float) -> None:
        """Do nothing: all work is done when somebody waits."""

    def capture(self, body: Callable[[], None]) -> str:
        """Run ``body`` while a graph is captured. Returns what broke the capture, or nothing."""
        with self._device.capturing():
            body()
        breaks = self._device.count("capture breaks")
        return f"{breaks} calls would have ended the capture" if breaks else ""


def open_accelerator(name: str) -> Cuda | Late:
    """Open the device of a name, "cuda" or "late", in a program of its own."""
    if name == "cuda":
        return Cuda()
    from tests.late import switch_on  # it compiles a library

    return Late(switch_on())


def sample(index: int) -> torch.Tensor:
    return torch.full((LENGTH,), index, dtype=torch.int32)


def make(count: int, **options) -> DataLoader:
    options = {"num_workers": 2, "collate_fn": only, "device": kind(), **options}
    return DataLoader(Calls(sample, count), batch_size=1, **options)


def whole(count: int) -> list[tuple[int, int]]:
    return [(index, index) for index in range(count)]
