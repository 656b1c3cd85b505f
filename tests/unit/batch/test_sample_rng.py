"""A sample's random numbers depend only on the seed, the epoch and the sample's position."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from shmloader import sample_rng
from shmloader.batch.collator import Collator, Timer
from shmloader.batch.fetch import FetchConfig, MapFetcher
from shmloader.batch.sample_rng import SampleRng, base_seed, seed_of_rank
from shmloader.batch.stream import StreamFetcher
from shmloader.sampling.indices import PositionedIndices
from shmloader.sampling.rng import kept


@pytest.fixture(autouse=True)
def streams_kept():
    """Restore the test process's own generators."""
    with kept():
        yield


def draws():
    """Draw from each generator a whole number that is the same in all versions of the libraries."""
    return (
        random.getrandbits(64),
        int(np.random.randint(2**31)),
        torch.default_generator.initial_seed(),
        int(sample_rng().bit_generator.random_raw()),
    )


class Drawing:
    """Draws as often as the index says."""

    def __getitem__(self, index):
        for _ in range(index % 3):
            random.random(), np.random.rand(), torch.rand(7), sample_rng().random()
        return draws()


class Stream(IterableDataset):
    def __init__(self, length=5):
        self.length = length
        self.opened = []

    def __iter__(self):
        self.opened.append(draws())
        return (draws() for _ in range(self.length))


def fetcher_of(streams, dataset, collate_fn=list):
    is_stream = isinstance(dataset, IterableDataset)
    config = FetchConfig(is_stream, auto_collation=True, drop_last=False)
    collate = Collator(collate_fn, Timer(), takes_list=True, rng=streams)
    if is_stream:
        return StreamFetcher(config, dataset, collate, streams)
    return MapFetcher(config, dataset, collate, rng=streams)


def load(placed, dataset=None, seed=7, collate_fn=list):
    streams = SampleRng(seed, is_iterable=isinstance(dataset, IterableDataset))
    fetcher = fetcher_of(streams, dataset or Drawing(), collate_fn)
    with streams.at(placed) as indices:
        return fetcher.fetch(indices)


# Of seed 7 and epoch 2: computed apart, by the digests that the module describes.
GOLDEN = {
    "seed of a rank": 40062857030981248189027118876438016068,
    "sample": (1749055396493426185, 2119517763, 4880269732488574534, 16982854875086818607),
    "second of a batch": (
        17640259679450919482,
        1228875218,
        1017374359168273526,
        9416457823498484398,
    ),
    "collate": (16772187723383845697, 38455686, 1787549171206083100, 18329299331045937611),
    "stream": (13590001989340893205, 1246290269, 1093730667311602243, 17999904436469843390),
    "stream sample": (4616547051183145968, 2009696299, 7171186647346198982, 1491529300511196620),
    "stream collate": (12997203939949785640, 1394760310, 2837679452280377242, 10088553080614701087),
    "base seed": 5942201244392584665,
}


def test_the_random_numbers_of_a_sample_never_change():
    """If these values change, no earlier run can be resumed exactly."""
    assert load(PositionedIndices([0], 2, 5)) == [GOLDEN["sample"]]
    assert load(PositionedIndices([0], 2, 5, is_whole=True)) == [GOLDEN["sample"]]
    assert load(PositionedIndices([0, 0], 2, 5, is_whole=True))[1] == GOLDEN["second of a batch"]
    assert load(PositionedIndices([0], 2, 5), collate_fn=lambda _: draws()) == GOLDEN["collate"]
    dataset = Stream()
    assert load(PositionedIndices([None], 2, 0), dataset) == [GOLDEN["stream sample"]]
    assert dataset.opened == [GOLDEN["stream"]]
    collated = load(PositionedIndices([None], 2, 0), Stream(), collate_fn=lambda _: draws())
    assert collated == GOLDEN["stream collate"]
    assert base_seed(7, 2) == GOLDEN["base seed"]
    assert seed_of_rank(7, 2) == GOLDEN["seed of a rank"]


def test_seed_epoch_position_and_use_each_give_other_random_numbers():
    seeds, epochs, firsts = [0, 1, 11, 2**70], [0, 1, 11, 2**70], [0, 1, 11, 110]
    seen = []
    for seed, epoch, first in itertools.product(seeds, epochs, firsts):
        placed = PositionedIndices([0], epoch, first)
        seen += load(placed, seed=seed)
        seen.append(load(placed, seed=seed, collate_fn=lambda _: draws()))
        seen.append(load(PositionedIndices([0, 0], epoch, first, is_whole=True), seed=seed)[1])
        seen.append(base_seed(seed, epoch))
    parts = {stream: {values[stream] for values in seen if isinstance(values, tuple)}
             for stream in range(4)}  # fmt: skip
    assert {len(part) for part in parts.values()} == {3 * 64}
    assert len({value for value in seen if isinstance(value, int)}) == 16


def test_seed_and_rank_each_give_another_seed():
    numbers = [0, 1, 11, 111, 2**70]
    seeds = {seed_of_rank(seed, rank) for seed in numbers for rank in numbers}
    assert len(seeds) == 25
    assert all(0 <= seed < 2**128 for seed in seeds)


def test_workers_and_positions_of_an_iterable_dataset_have_their_own_random_numbers():
    seen = []
    for worker_id in range(3):
        streams = SampleRng(7, worker_id, epoch=2, is_iterable=True)
        dataset = Stream()
        fetcher = fetcher_of(streams, dataset, lambda samples: [*samples, draws()])
        for _ in range(2):
            with streams.at(PositionedIndices([None] * 2, 2, 0)) as indices:
                seen += fetcher.fetch(indices)
        seen += dataset.opened
    assert len(set(seen)) == 3 * (2 * 3 + 1)


def test_a_normal_number_left_over_by_the_sample_before_is_forgotten():
    # The libraries make two at a time, and keep the second.
    def normals(index):
        values = random.gauss(0, 1), np.random.randn(), float(torch.randn(()))
        return values if index == 0 else None

    class Normals:
        __getitem__ = staticmethod(normals)

    assert (
        load(PositionedIndices([1, 0], 0, 0), Normals())[1]
        == load(PositionedIndices([0], 0, 1), Normals())[0]
    )


def test_iter_is_called_only_once_the_epoch_is_known():
    dataset = Stream()
    streams = SampleRng(7, is_iterable=True)
    fetcher = fetcher_of(streams, dataset)
    assert dataset.opened == []
    with streams.at(PositionedIndices([None], 2, 0)) as indices:
        fetcher.fetch(indices)
    known = Stream()
    fetcher_of(SampleRng(7, epoch=2, is_iterable=True), known)
    assert known.opened == dataset.opened


def test_a_stop_iteration_of_iter_does_not_silently_end_the_epoch():
    class Stopping(IterableDataset):
        def __iter__(self):
            raise StopIteration

    with pytest.raises(RuntimeError, match=r"iter\(dataset\) raised StopIteration"):
        load(PositionedIndices([None], 2, 0), Stopping())


def test_all_calls_in_one_sample_return_the_same_generator():
    class Twice:
        def __getitem__(self, index):
            first = sample_rng()
            first.random()
            return first, sample_rng(), sample_rng().random()

    def collate(samples):
        return samples, sample_rng()

    (one, other), of_batch = load(PositionedIndices([0, 0], 0, 0), Twice(), collate_fn=collate)
    assert one[0] is one[1]
    assert other[0] is other[1]
    assert len({id(one[0]), id(other[0]), id(of_batch)}) == 3
    assert type(one[0].bit_generator) is np.random.Philox
    assert one[2] != other[2]
