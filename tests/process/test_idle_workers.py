"""More workers than an epoch has batches: those without a batch are not started."""

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from shmloader import DataLoader
from shmloader.loader import dataloader
from shmloader.pools.starting import OwnWorkers
from tests.process.support import Calls, Streams

pytestmark = pytest.mark.timeout(120)


def facts(index: int) -> list[int]:
    """The sample's index, its worker, the number of workers, and what depends on their seeds."""
    info = get_worker_info()
    assert info is not None
    return [index, info.id, info.num_workers, info.seed, int(torch.randint(1 << 40, ()))]


def loader_of(batches: int, **options: Any) -> DataLoader:
    return DataLoader(Calls(facts, 2 * batches), batch_size=2, **options)


def run(loader: Any) -> tuple[int, list[Any]]:
    """How many workers an epoch began with, and its batches."""
    batches = iter(loader)
    count = len(batches._workers)
    return count, list(itertools.chain(batches))  # list() alone asks for the length


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}])
def test_workers_without_a_batch_are_not_started_and_batches_are_torchs(options) -> None:
    dataset = Calls(facts, 6)
    ours = DataLoader(dataset, 2, num_workers=5, **options)
    torchs = torch.utils.data.DataLoader(dataset, 2, num_workers=5, **options)
    for _ in range(2):
        torch.manual_seed(3)
        count, found = run(ours)
        torch.manual_seed(3)
        assert (count, str(found)) == (3, str(list(torchs)))


def test_with_a_seed_any_of_the_started_workers_takes_a_batch() -> None:
    with loader_of(3, num_workers=7, seed=0) as loader:
        count, batches = run(loader)
    assert count == 3
    assert [batch[0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    assert batches[0][2].tolist() == [7, 7]


def test_all_workers_start_where_a_later_one_may_have_work() -> None:
    with loader_of(2, num_workers=4, persistent_workers=True) as loader:
        assert run(loader)[0] == 4
    with DataLoader(Streams(lambda: iter([facts(0)])), num_workers=3) as loader:
        count, batches = run(loader)
    assert (count, [batch[1].item() for batch in batches]) == (3, [0, 1, 2])
    with loader_of(4, num_workers=4) as loader:
        assert run(loader)[0] == 4


class Unknown(list):
    """A batch sampler of the user's, whose length is not asked for."""

    def __len__(self):
        raise AssertionError


def test_a_sampler_of_the_users_is_not_asked_for_its_length() -> None:
    with DataLoader(Calls(facts, 2), batch_sampler=Unknown([[0], [1]]), num_workers=3) as loader:
        assert run(loader)[0] == 3


def test_an_epoch_longer_than_its_length_starts_the_workers_that_it_needs(monkeypatch) -> None:
    monkeypatch.setattr(dataloader, "start_count", lambda *_: 1)
    with loader_of(12, num_workers=4) as loader:
        count, batches = run(loader)
        assert (count, loader.stats().restarts) == (1, 0)
    assert [batch[0][0].item() for batch in batches] == [*range(0, 24, 2)]
    assert [batch[1][0].item() for batch in batches] == [0, 1, 2, 3] * 3


def test_a_worker_that_cannot_be_started_later_is_an_error(monkeypatch) -> None:
    start = OwnWorkers.start

    def fail(self, worker_id: int) -> Any:
        if worker_id == 2:
            raise OSError(11, "none left")
        return start(self, worker_id)

    monkeypatch.setattr(dataloader, "start_count", lambda *_: 1)
    monkeypatch.setattr(OwnWorkers, "start", fail)
    with loader_of(12, num_workers=4) as loader, pytest.raises(OSError, match="none left"):
        run(loader)


def test_many_workers_without_a_batch_are_warned_of_once() -> None:
    with loader_of(2, num_workers=18) as loader:
        with pytest.warns(UserWarning, match="num_workers=18, but an epoch has 2 batches: 16 "):
            assert run(loader)[0] == 2
        run(loader)  # a second one would be an error
    with loader_of(2, num_workers=17) as loader:
        run(loader)
