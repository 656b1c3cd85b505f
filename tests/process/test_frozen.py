"""A forked worker's garbage collector leaves alone what the worker was forked with."""

from __future__ import annotations

import gc

from shmloader import DataLoader
from tests.process.support import Calls
from tests.process.test_share import private_bytes


class Grows:
    """Says how much memory of its own a full collection takes a worker."""

    def __init__(self, count: int) -> None:
        self.records = [[number] for number in range(count)]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[int, int]:
        before = private_bytes()
        gc.collect()
        return private_bytes() - before, gc.get_freeze_count()


def test_a_full_collection_in_a_worker_copies_nothing():
    dataset = Grows(300_000)  # 26 MB of lists
    with DataLoader(dataset, num_workers=1, multiprocessing_context="fork") as loader:
        ((grown, frozen),) = loader
    assert int(frozen) > 300_000
    assert int(grown) < 8 << 20
    assert gc.get_freeze_count() == 0


def test_what_the_user_has_frozen_stays_so():
    gc.freeze()
    count = gc.get_freeze_count()
    try:
        dataset = Calls(lambda _: gc.get_freeze_count(), 1)
        with DataLoader(dataset, num_workers=1, multiprocessing_context="fork") as loader:
            (frozen,) = loader
        assert int(frozen) <= count
        assert gc.get_freeze_count() >= count - 1_000  # some of these have ended since
    finally:
        gc.unfreeze()
