"""Fixtures of the process tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.late import LateDevice
from tests.process.ranks import Run
from tests.process.spawning import fork_as_spawned
from tests.process.support import Slots


@pytest.fixture
def slots() -> Slots:
    return Slots()


class Kind(NamedTuple):
    """One of the stages: the loader's options, and the name of its thread."""

    options: dict[str, Any]
    thread: str


KINDS = {
    "pin": Kind({"pin_memory": True}, "pt_data_pin"),
    "device": Kind({"device": "late"}, "shmloader_device"),
}


@pytest.fixture(params=KINDS)
def kind(request, late: LateDevice) -> Iterator[Kind]:
    yield KINDS[request.param]
    assert late.count("faults") == late.count("forks inside") == 0


@pytest.fixture
def run(tmp_path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path / "store")) as found:
        yield found


@pytest.fixture
def quick_spawn(request, monkeypatch) -> None:
    """Processes of "spawn" are forked, except in slow tests (:mod:`tests.process.spawning`)."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr("multiprocessing.util.spawnv_passfds", fork_as_spawned)
