"""Tests of this folder need a CUDA device; without one they are skipped, and say so.

With ``--accelerator=late`` they run on the late device instead.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shmloader.device.backend import Backend
from tests.cuda.accelerators import COPY_MS, READ_MS, Cuda, Late

_HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accelerator", default="cuda", help="cuda, or late for a trial")


def _name(config: pytest.Config) -> str:
    # Where other folders are collected first, this file is read too late to add an option.
    return str(config.getoption("--accelerator", default="cuda"))


def _reason_to_skip(name: str) -> str:
    if name == "late":
        from tests.late import compile_library, reason_to_skip

        reason = reason_to_skip()
        if not reason:
            with contextlib.suppress(RuntimeError):  # the tests tell it
                compile_library()  # now, since the time of each test is limited
        return reason
    if name != "cuda":
        return f"these tests are for CUDA devices, and not for {name}"
    if not torch.backends.cuda.is_built():
        return "needs a GPU, and this torch was built without CUDA"
    return "" if torch.cuda.is_available() else "needs a GPU, and torch finds none here"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if _HERE in item.path.parents]
    reason = _reason_to_skip(_name(config)) if ours else ""
    for item in ours:
        item.add_marker(pytest.mark.cuda)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _context() -> Cuda | None:
    """The driver's threads and descriptors are there before the first test looks (I8)."""
    if not torch.cuda.is_available():
        return None
    device = Cuda()
    matrix = torch.ones(100, 100, device="cuda")
    assert float((matrix @ matrix).amax()) == 100
    assert device.capture(lambda: None) == ""
    return device


@pytest.fixture
def accelerator(request: pytest.FixtureRequest, _context: Cuda | None) -> Iterator[Cuda | Late]:
    """The accelerator of the tests of this folder."""
    if _name(request.config) == "late":
        device = request.getfixturevalue("late")
        yield Late(device)
        assert device.count("faults") == 0
    else:
        assert _context is not None
        yield _context


@pytest.fixture
def ends_of(accelerator):
    """The least and the greatest number of each batch, found on the device; batches are dropped.

    Each batch is copied on the device and dropped before that is done; the copies are looked at
    later. The function takes the batches, their count, how long the stream sleeps before it reads
    one that is to be read late, and every how many one is.
    """

    def find(batches, count, *, sleep_ms=READ_MS, slow_every=0) -> list[tuple[int, int]]:
        found, copies = [], []
        place = 0
        for batch in batches:
            if slow_every and place % slow_every == 0:
                accelerator.sleep(sleep_ms)
            copies.append(batch.clone())
            del batch
            place += 1  # noqa: SIM113 - enumerate() holds each batch until the next one is there
            if len(copies) == 100:
                found += [torch.stack((copied.amin(), copied.amax())) for copied in copies]
                copies.clear()
        found += [torch.stack((copied.amin(), copied.amax())) for copied in copies]
        ends = [(least, greatest) for least, greatest in torch.stack(found).tolist()]
        assert len(ends) == count
        return ends

    return find


@pytest.fixture
def copies_are_late(accelerator, monkeypatch) -> None:
    """The loader's stream sleeps before each copy: what it reads then must still be there."""
    copy = Backend.copy

    def sleep_and_copy(self, tensor):
        accelerator.sleep(COPY_MS)
        return copy(self, tensor)

    monkeypatch.setattr(Backend, "copy", sleep_and_copy)


@pytest.fixture
def for_cuda_alone(accelerator) -> None:
    if not isinstance(accelerator, Cuda) or torch.version.hip is not None:
        pytest.skip("the driver's own functions, and errors, which the late device does not have")
