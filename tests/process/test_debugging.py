"""SHMLOADER_DEBUG=1: what changes in a slot is found out."""

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import shmloader
from shmloader import DataLoader, InternalError
from shmloader.memory.flat import is_debugging
from tests.parity.compare import assert_same
from tests.process.support import Calls, only, run_program


def run(source: str, monkeypatch: pytest.MonkeyPatch, *, value: str | None = "1") -> str:
    if value is None:
        monkeypatch.delenv("SHMLOADER_DEBUG", raising=False)
    else:
        monkeypatch.setenv("SHMLOADER_DEBUG", value)
    done = run_program(source)
    done.assert_quiet()
    return done.out


WRONGS = """
import ctypes, os, threading, torch, shmloader
from shmloader import DataLoader, InternalError
from shmloader.errors import InternalError

go, written = threading.Event(), threading.Event()
read_end, write_end = os.pipe()

class Data:
    def __len__(self):
        return 5
    def __getitem__(self, index):
        if index == 2:
            # Batch 1 is answered: its thread may go on.
            go.set()
            assert written.wait(20)
            os.write(write_end, b"x")
        return index

def collate(samples):
    out = shmloader.empty((50_000,), torch.float32)
    out.fill_(samples[0])
    if samples[0] == 1:
        def write_late(address=out[-1:].data_ptr()):
            assert go.wait(20)
            ctypes.c_float.from_address(address).value = 99
            written.set()
        threading.Thread(target=write_late, daemon=True).start()
    return out

batches = iter(DataLoader(Data(), batch_size=1, num_workers=1, prefetch_factor=3,
                          collate_fn=collate))
assert os.read(read_end, 1) == b"x"
for index in range(5):
    try:
        batch = next(batches)
        print(index, float(batch[0]), float(batch[-1]))
        del batch
    except InternalError as error:
        print(index, error)
"""


@pytest.mark.slow
def test_a_late_writer_is_found_out(monkeypatch) -> None:
    lines = run(WRONGS, monkeypatch).splitlines()
    assert lines[0] == "0 0.0 0.0"
    assert lines[1].startswith("1 SHMLOADER_DEBUG: batch 1 (index 1) changed in slot 1 after ")
    assert "worker 0 (pid " in lines[1]
    assert "checksum of its 200000 bytes" in lines[1]
    assert lines[2:] == ["2 2.0 2.0", "3 3.0 3.0", "4 4.0 4.0"]


@pytest.mark.slow
def test_without_the_variable_nothing_is_checked(monkeypatch) -> None:
    lines = run(WRONGS, monkeypatch, value=None).splitlines()
    assert lines == ["0 0.0 0.0", "1 1.0 99.0", "2 2.0 2.0", "3 3.0 3.0", "4 4.0 4.0"]


@pytest.fixture
def debugging(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")
    is_debugging.cache_clear()
    yield
    is_debugging.cache_clear()


def large(index: int) -> torch.Tensor:
    return torch.full((40_000,), float(index))


KINDS: list[Any] = [
    large,
    lambda index: {"a": torch.tensor([index]), "b": index, "c": float(index)},
    lambda index: (large(index), index, np.full(7, index)),
    lambda index: [torch.tensor([index + other]) for other in range(300)],
    lambda index: ["text" * 50, str(index)] * 100,
    lambda index: torch.eye(50).mul(index).to_sparse(),
    lambda index: shmloader.empty((40_000,), torch.float32).fill_(index),
    lambda index: None,
]


def mixed(index: int) -> Any:
    return KINDS[index % len(KINDS)](index)


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize(("make", "collate"), [(mixed, only), *((one, None) for one in KINDS[:5])])
def test_batches_of_all_kinds_pass_the_checks(make, collate) -> None:
    """An epoch that is left, whose batches are dropped, and one whose batches are kept."""
    expected = list(DataLoader(Calls(make, 40), collate_fn=collate))
    options = {"collate_fn": collate, "persistent_workers": True, "num_workers": 1}
    with DataLoader(Calls(make, 40), **options) as loader:
        assert_same(list(itertools.islice(loader, 25)), expected[:25])
        assert_same(list(loader), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_main_process_decides_for_its_workers(method, debugging, monkeypatch) -> None:
    loader = DataLoader(
        Calls(torch.zeros, 3), sampler=[(16,)] * 3, batch_size=None, num_workers=1,
        multiprocessing_context=method,
    )  # fmt: skip
    assert is_debugging()
    monkeypatch.setenv("SHMLOADER_DEBUG", "0")
    batches = iter(loader)
    checks = []
    answered = batches._engine.answered

    def note(seq: int, epoch: int, worker_id: int, answer: Any) -> None:
        checks.append(answer.check)
        answered(seq, epoch, worker_id, answer)

    batches._engine.answered = note
    list(batches)
    assert checks == [(64, zlib.crc32(bytes(64)))] * 3


def test_a_batch_that_changed_is_an_error_and_costs_no_slot(debugging, monkeypatch, slots) -> None:
    monkeypatch.setattr("shmloader.engine.engine.checksum", lambda *_: 0x1234)
    batches = iter(DataLoader(Calls(lambda n: n, 30), num_workers=1))
    told = []
    for _ in range(30):
        with pytest.raises(InternalError, match=r"changed in slot \d+ .*, now 00001234\)") as error:
            next(batches)
        told.append(str(error.value))
    slots_told = {text.split("changed in slot ")[1].split()[0] for text in told}
    assert len(slots_told) <= 6
    assert len(slots.maps()) <= 6
    with pytest.raises(StopIteration):
        next(batches)
