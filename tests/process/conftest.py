"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from shmloader import host
from tests.late import LateDevice, to_host
from tests.process.ranks import Run
from tests.process.support import Slots


@pytest.fixture
def slots() -> Slots:
    """The shared memory that a test makes."""
    return Slots()


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
def kind(request, late: LateDevice) -> Iterator[Kind]:
    """Either stage."""
    if request.param == "pin":
        yield Kind({"pin_memory": True}, lambda batch: batch, "pt_data_pin", None)
    else:
        yield Kind({"device": "late"}, to_host, "shmloader_device", 2)
    assert late.count("faults") == late.count("forks inside") == 0


@pytest.fixture
def run(monkeypatch) -> Iterator[Run]:
    # On a busy machine, a test may start its ranks long after each other.
    monkeypatch.setattr(host, "_TOGETHER_S", 1000.0)
    found = Run()
    yield found
    for rank in found.started:
        rank.end()
