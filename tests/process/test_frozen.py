"""A forked worker's garbage collector leaves alone what the worker was forked with."""

from __future__ import annotations

import gc

from shmloader import DataLoader
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


def worker_s_collection() -> tuple[int, int]:
    """What a full collection takes a worker with 26 MB of lists, and how much it has frozen."""
    dataset = Grows(300_000)
    with DataLoader(dataset, num_workers=1, multiprocessing_context="fork") as loader:
        ((grown, frozen),) = loader
    return int(grown), int(frozen)


def test_a_full_collection_in_a_worker_copies_nothing():
    before = gc.get_freeze_count()
    grown, frozen = worker_s_collection()
    assert frozen > 300_000
    assert grown < 8 << 20
    assert gc.get_freeze_count() == before


def test_what_was_frozen_before_stays_so_and_the_rest_is_frozen_too():
    gc.freeze()  # Python 3.12 begins with objects that are
    count = gc.get_freeze_count()
    try:
        grown, frozen = worker_s_collection()
        assert frozen > 300_000
        assert grown < 8 << 20
        assert count - 1_000 <= gc.get_freeze_count() <= count  # some of these have ended since
    finally:
        gc.unfreeze()
