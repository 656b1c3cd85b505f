"""Which engine runs under each framework, and whether its batches are torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from tests.frameworks.scenarios import SCENARIOS, Seen
from tests.frameworks.support import assert_equal, engines, seed_everything

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

WORKERS = [0, 2]


def run(name: str, cls: Any, workers: int, folder: Path) -> tuple[Seen, set[str]]:
    """What the framework's step saw, and the engines of the iterators."""
    seed_everything()
    with engines() as found:
        seen = SCENARIOS[name].run(cls, workers, folder)
    return seen, found


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_batches_are_those_of_torch_on_either_engine(name, workers, tmp_path):
    theirs, on = run(name, TorchLoader, workers, tmp_path)
    assert on == {"torch"}
    with shmloader.installed() as report:
        ours, on = run(name, TorchLoader, workers, tmp_path)
    assert {row.engine for row in report.loaders} == on
    assert_equal(ours, theirs)
    print(name, workers, "install", on)
    if SCENARIOS[name].takes_class:
        ours, on = run(name, shmloader.DataLoader, workers, tmp_path)
        assert_equal(ours, theirs)
        print(name, workers, "class", on)
