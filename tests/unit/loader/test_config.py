"""The arguments of a loader as its iterators see them, and what its repr() shows."""

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from shmloader import DataLoader, ShardedDataLoader
from shmloader.loader.config import config_of
from shmloader.loader.options import MINIMUM_SLOT_BYTES

DATA = torch.arange(12)


def made(kind=DataLoader, **options):
    return config_of(kind(DATA, 2, **options))


@pytest.mark.parametrize(
    ("options", "window", "most"),
    [({}, 0, 0), ({"num_workers": 2}, 4, 4), ({"num_workers": 2, "prefetch_factor": 5}, 10, 10)],
)
def test_the_window_is_that_of_the_workers(options, window, most) -> None:
    found = made(**options)
    assert (found.window, found.most_window) == (window, most)


@pytest.mark.parametrize(
    ("workers", "ranks", "window"), [(64, 8, 17), (16, 4, 9), (4, 4, 3), (5, 2, 6), (4, 2, 4)]
)
def test_of_a_hosts_workers_a_rank_has_its_share_in_the_window_and_one_more_where_it_lacks_some(
    workers, ranks, window
) -> None:
    found = made(num_workers=workers)
    found.host_ranks = ranks
    assert found.window == window


def test_with_auto_the_window_grows_with_the_workers() -> None:
    found = made(num_workers="auto", seed=0)
    assert found.most_workers > found.num_workers
    assert found.window == 2 * found.num_workers
    assert found.most_window == 2 * found.most_workers


@pytest.mark.parametrize("num_workers", [2, "auto"])
def test_all_slots_together_stay_below_shm_size(num_workers) -> None:
    loader = DataLoader(DATA, 2, num_workers=num_workers, seed=0, shm_size="512MiB")
    found = config_of(loader)
    assert found.slot_bytes is not None
    assert found.slot_bytes * (found.most_window + found.lend_limit) <= 512 << 20


def test_an_shm_size_too_small_for_the_maximum_of_workers_raises_in_the_constructor() -> None:
    most = made(num_workers="auto", seed=0).most_window + 4
    with pytest.raises(ValueError, match=f"each of {most} slots"):
        DataLoader(DATA, num_workers="auto", seed=0, shm_size=most * MINIMUM_SLOT_BYTES - 1)


def test_a_batch_keeps_its_size_where_other_ranks_count_on_it() -> None:
    ranks = DistributedSampler(DATA, num_replicas=2, rank=0)
    assert made(sampler=ranks, on_error="skip").fetch.copies_good
    assert not made(on_error="skip").fetch.copies_good


def test_states_of_the_dataset_are_taken_where_they_are_saved() -> None:
    class Stateful(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index):
            return index

        def state_dict(self):
            return {}

        def load_state_dict(self, state) -> None:
            pass

    for options, interval in [({}, 1), ({"snapshot_every_n_steps": 0}, 0)]:
        found = config_of(DataLoader(Stateful(), **options))
        assert (found.saves_dataset, found.fetch.snapshot_every) == (interval > 0, interval)
    assert made().fetch.snapshot_every == 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Unfit(Dataset):
    def __len__(self) -> int:
        raise RuntimeError("the length is not known")

    def __repr__(self) -> str:
        raise RuntimeError("nor is what it is")


SHOWN = {
    "DataLoader(<Tensor of length 12>, batch_size=1, num_workers=0)": DataLoader(DATA),
    "DataLoader(<list of length 2>, batch_size=2, num_workers=1)": (
        DataLoader([1, 2], 2, True, num_workers=1)
    ),
    "DataLoader(<Stream>, batch_size=1, num_workers=0)": DataLoader(Stream()),
    "DataLoader(<Unfit>, batch_size=None, num_workers=0)": DataLoader(Unfit(), None),
    "ShardedDataLoader(<Tensor of length 12>, batch_size=2, num_workers=0)": ShardedDataLoader(
        DATA, 2
    ),
}


def test_a_loader_shows_its_dataset_batch_size_and_workers() -> None:
    for text, loader in SHOWN.items():
        assert repr(loader) == text


def test_a_loader_of_the_user_s_shows_even_if_its_constructor_raises() -> None:
    class Mine(DataLoader):
        def __init__(self) -> None:
            self.text = repr(self)
            super().__init__(DATA)

    loader = Mine()
    assert loader.text == "Mine(<NoneType>, batch_size=1, num_workers=0)"
    assert repr(loader) == "Mine(<Tensor of length 12>, batch_size=1, num_workers=0)"
