"""A program that captures a graph while a loader registers memory and copies.

The workers wait at a gate until the capture has begun, and the capture goes on until the loader's
thread has registered slots and started copies. `main` prints what broke the capture, or nothing,
and then whether the batches are whole.
"""

import os
import warnings
from unittest import mock

import torch

from shmloader import DataLoader
from shmloader.device.backend import Backend, open_driver
from tests.cuda.accelerators import open_accelerator
from tests.process.support import Calls, Gate, wait_until

COUNT = 20
# Each batch is larger than the one before, so slots are locked anew.
REGISTRATIONS, COPIES = 6, 15

_GATE = Gate()


def sample(index: int) -> torch.Tensor:
    if index > 0:
        _GATE.pass_through()
    return torch.full((17_000 + 5_000 * index,), index, dtype=torch.int32)


def do_not_relax(driver: object) -> None:
    """Leave the threads' capture modes as they are: the careless policy."""
    mock.patch.object(type(driver), "relax_capture").start()
    mock.patch.object(type(driver), "restore_capture").start()


def main(name: str, *, is_careless: bool) -> None:
    """Capture a graph on the device of this name; see above."""
    accelerator = open_accelerator(name)
    driver = open_driver(name)
    assert not isinstance(driver, str)
    if is_careless:
        do_not_relax(driver)
        warnings.simplefilter("ignore")
    registered, copied = [], []
    register, copy = type(driver).register, Backend.copy

    def note_register(self, address, nbytes):
        refusal = register(self, address, nbytes)
        registered.append(refusal)
        return refusal

    def note_copy(self, tensor):
        copied.append(tensor.nbytes)
        return copy(self, tensor)

    mock.patch.object(type(driver), "register", note_register).start()
    mock.patch.object(Backend, "copy", note_copy).start()

    loader = DataLoader(
        Calls(sample, COUNT),
        None,
        num_workers=2,
        prefetch_factor=COUNT // 2,
        device_prefetch=COUNT,
        device=name,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    kept = [next(batches)]

    def body() -> None:
        before = len(registered), len(copied)
        _GATE.open(COUNT - 1)
        wait_until(lambda: len(copied) - before[1] >= COPIES, 20)
        if not is_careless:  # else the first is refused, and no further one is tried
            wait_until(lambda: len(registered) - before[0] >= REGISTRATIONS, 20)

    broken = accelerator.capture(body)
    refusals = sorted({refusal for refusal in registered if refusal})
    print(broken or " ".join(refusals) or "captured", flush=True)
    if is_careless:
        os._exit(0)  # a capture that broke leaves a state in which nothing is promised
    kept.extend(batches)
    found = [(int(batch.amin()), int(batch.amax())) for batch in kept]
    is_whole = found == [(index, index) for index in range(COUNT)]
    print("whole" if is_whole else f"wrong: {found}", flush=True)
    loader.close()
