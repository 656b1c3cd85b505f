"""Fixtures of the process tests."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.process.support import Slots
from tests.simulated import SimulatedDevice, installed, pinning


@pytest.fixture
def slots() -> Slots:
    """The shared memory that a test makes."""
    return Slots()


@pytest.fixture
def sim() -> Iterator[SimulatedDevice]:
    """What ``device="sim"`` means; its rules are kept to."""
    with installed(SimulatedDevice(seed=1)) as device:
        yield device
    assert device.faults == []


@dataclass
class Kind:
    """One of the stages, and how to use it.

    Attributes:
        options: Of the loader.
        read: A batch's content, of tensors of the host.
        thread: The thread's name.
        ahead: Batches that may be ready; None for as many as there are tickets.
    """

    options: dict[str, Any]
    read: Callable[[Any], Any]
    thread: str
    ahead: int | None


@pytest.fixture(params=["pin", "device"])
def kind(request) -> Iterator[Kind]:
    """Either stage."""
    if request.param == "pin":
        with pinning():
            yield Kind({"pin_memory": True}, lambda batch: batch, "pt_data_pin", None)
    else:
        with installed(SimulatedDevice(seed=1)) as device:
            yield Kind({"device": "sim"}, device.to_host, "shmloader_device", 2)
        assert device.faults == []


@pytest.fixture(scope="session")
def _fonts() -> None:
    """matplotlib opens its fonts once, and keeps them open."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    figure.add_subplot().set_title("text")
    figure.savefig(io.BytesIO())
