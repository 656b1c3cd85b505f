"""SHMLOADER_DEBUG=1: what changes in a slot is found out."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmloader import DataLoader, InternalError
from shmloader.memory.flat import is_debugging
from tests.process.support import Calls, run_program

pytestmark = pytest.mark.timeout(90)


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


ALL_KINDS = """
import dataclasses, numpy as np, torch, shmloader
from shmloader import DataLoader, InternalError
from torch.utils.data import IterableDataset, default_collate

@dataclasses.dataclass
class Answer:
    text: str
    tensor: torch.Tensor

def make(kinds, n):
    large = torch.full((40_000,), float(n))
    return {
        "tensor": lambda: large,
        "small": lambda: {"a": torch.tensor([n]), "b": n, "c": float(n)},
        "mixed": lambda: (large, n, np.full(7, n)),
        "many": lambda: [torch.tensor([n + k]) for k in range(300)],
        "ragged": lambda: torch.full((1 + 9_000 * (n % 5),), n),
        "object": lambda: Answer("x" * n, large),
        "strings": lambda: ["text" * 50, str(n)] * 100,
        "nothing": lambda: None,
        "sparse": lambda: torch.eye(50).mul(n).to_sparse(),
        "by hand": lambda: shmloader.empty((40_000,), torch.float32).fill_(n),
    }[kinds[n % len(kinds)]]()

PLAIN = ["tensor", "small", "mixed", "many", "ragged"]
ALL = [*PLAIN, "object", "strings", "nothing", "sparse", "by hand"]

class Data:
    def __init__(self, kinds):
        self.kinds = kinds
    def __len__(self):
        return 40
    def __getitem__(self, n):
        return make(self.kinds, n)

class Stream(Data, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(40))

class Failing(Data):
    def __getitem__(self, n):
        raise ValueError("broken" * 10_000)

def equal(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool((one.to_dense() == other.to_dense()).all())
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and equal(list(one.values()), list(other.values()))
    if dataclasses.is_dataclass(one):
        return equal(vars(one), vars(other))
    return one == other

def first(samples):
    return samples[0]

def check(dataset, collate):
    options = {"collate_fn": collate} if collate else {"batch_size": None}
    with DataLoader(dataset, num_workers=1, persistent_workers=True, **options) as loader:
        for n, batch in enumerate(loader):  # an epoch that is left early, dropping its batches
            if n == 25:
                break
        kept = list(loader)  # and one of which all is kept
        assert len(kept) == 40
        for n, batch in enumerate(kept):
            expected = make(dataset.kinds, n)
            if collate is default_collate:
                expected = default_collate([expected])
            elif collate is None:
                expected = torch.utils.data.default_convert(expected)
            assert equal(batch, expected), (n, batch, expected)

check(Data(ALL), first)
check(Stream(ALL), None)
check(Data(PLAIN), default_collate)
batches, failures = iter(DataLoader(Failing(ALL), num_workers=1)), 0
for _ in range(40):
    try:
        next(batches)
    except ValueError as error:
        failures += 1
print(failures)
"""


@pytest.mark.slow
def test_batches_of_all_kinds_pass_the_checks(monkeypatch) -> None:
    assert run(ALL_KINDS, monkeypatch) == "40\n"


@pytest.fixture
def debugging(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")
    is_debugging.cache_clear()
    yield
    is_debugging.cache_clear()


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
