"""``worker_scope="host"`` with ``num_workers="auto"``: the first rank's cores are the number."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest

import shmloader.loader.dataloader as dataloader_module
from tests.process.host_loaders import Samples, contents, expected, loader, owner_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def auto(cores: int) -> Any:
    """A loader in a rank that may use so many cores."""
    dataloader_module.usable_cores = lambda _: cores
    return loader(Samples(), num_workers="auto")


def test_all_ranks_use_as_many_workers_as_the_first_one_has_cores(run):
    def epoch() -> Any:
        with auto(int(os.environ["RANK"]) + 2) as one:
            batches = [*one]
            return contents(batches), len(psutil.Process(owner_of(one)).children())

    (first, count), (second, same) = run.results(epoch, 2)
    assert [first, second] == [expected(rank)[0] for rank in range(2)]
    assert count == same
    assert count in (2, 3)


def test_a_rank_with_a_fixed_number_is_refused(run):
    def epoch() -> Any:
        is_auto = os.environ["RANK"] == "0"
        with auto(2) if is_auto else loader(Samples(), num_workers=2) as one:
            return contents(one)

    found = run.results(epoch, 2)
    (error,) = [each for each in found if isinstance(each, ValueError)]
    assert "num_workers (" in str(error)
    assert "auto" in str(error)
