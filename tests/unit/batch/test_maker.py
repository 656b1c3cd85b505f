"""The batch maker: the same batches for the same ticket, wherever it is."""

import random

import pytest
import torch
from torch.utils.data import default_collate

from shmloader import sample_rng
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.fetchers import EmptyBatchError
from shmloader.batch.maker import BatchMaker
from shmloader.batch.timer import Timer
from shmloader.insight.measurements import WorkTimes
from shmloader.sampling.indices import PositionedIndices


class Squares(torch.utils.data.Dataset):
    def __getitem__(self, index):
        if index == 13:
            raise LookupError("13")
        return index * index


class Draws(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index, random.random(), int(sample_rng().integers(1 << 30))


def make_maker(dataset, on_error="raise", seed=None, **options):
    plan = FetchConfig(is_iterable=False, auto_collation=True, drop_last=False, seed=seed)
    return BatchMaker(plan, dataset, list, on_error, where="here", timer=Timer(), **options)


def test_a_batch_is_what_collate_makes_of_the_samples():
    assert make_maker(Squares()).make([2, 3]) == [4, 9]


def test_an_error_of_the_dataset_is_raised_and_nothing_is_reported():
    maker = make_maker(Squares())
    with pytest.raises(LookupError, match="13"):
        maker.make([2, 13])
    assert maker.take_report() is None


def test_bad_samples_are_skipped_and_reported_once():
    maker = make_maker(Squares(), on_error="skip")
    assert maker.make([2, 13, 3]) == [4, 9]
    report = maker.take_report()
    assert (report.sample_count, report.failed_count) == (3, 1)
    assert report.newest[0].index == 13
    assert maker.take_report().failed_count == 0
    with pytest.raises(EmptyBatchError):
        maker.make([13])


def test_samples_draw_by_their_position_whatever_was_made_before():
    ticket = PositionedIndices([5, 6], 0, 8)
    first = make_maker(Draws(), seed=1).make(ticket)
    other = make_maker(Draws(), seed=1)
    other.make(PositionedIndices([0, 1], 0, 0))
    assert other.make(ticket) == first
    assert make_maker(Draws(), seed=2).make(ticket) != first


@pytest.mark.parametrize("restores", [False, True])
def test_the_global_generators_are_put_back_where_they_are_the_users(restores):
    maker = make_maker(Draws(), seed=1, restores_rngs=restores)
    before = random.getstate(), torch.get_rng_state().tolist()
    maker.make(PositionedIndices([5, 6], 0, 8))
    after = random.getstate(), torch.get_rng_state().tolist()
    assert (after == before) == restores
    random.setstate(before[0])
    torch.set_rng_state(torch.tensor(before[1], dtype=torch.uint8))


class OwnList(list):
    """A list that may run code of the user's."""


def replacing(index, error):
    return index


@pytest.mark.parametrize(
    ("dataset", "on_error", "is_seeded"),
    [
        (list(range(9)), "raise", False),
        (list(range(9)), "skip", False),
        (list(range(9)), replacing, True),  # the user's function may draw
        (Draws(), "skip", True),
        (OwnList(range(9)), "raise", True),
    ],
)
def test_generators_are_seeded_only_where_code_of_the_users_may_run(dataset, on_error, is_seeded):
    plan = FetchConfig(is_iterable=False, auto_collation=True, drop_last=False, seed=1)
    maker = BatchMaker(plan, dataset, default_collate, on_error, where="here", timer=Timer())
    before = random.getstate(), torch.get_rng_state()
    maker.make(PositionedIndices([5, 6], 0, 8))
    after = random.getstate()
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    assert (after != before[0]) == is_seeded


def test_a_bad_sample_of_plain_data_does_not_shift_the_random_numbers_of_collate():
    def collate(samples):
        return samples, int(sample_rng().integers(1 << 30))

    def batches(dataset):
        plan = FetchConfig(
            is_iterable=False, auto_collation=True, drop_last=False, seed=1, may_shard=True
        )
        maker = BatchMaker(
            plan, dataset, collate, "skip", where="here", timer=Timer(), restores_rngs=True
        )
        return maker.make(PositionedIndices([[0, 99, 1], [2, 3]], 0, 0))

    plain = batches(list(range(9)))
    assert [samples for samples, _ in plain] == [[0, 1], [2, 3]]
    assert plain == batches(OwnList(range(9)))


def test_the_fetcher_loads_from_what_watches_the_samples():
    seen = []

    class Watched:
        def __init__(self, dataset):
            self.dataset = dataset

        def __getitem__(self, index):
            seen.append(index)
            return self.dataset[index]

    assert make_maker(Squares(), watch_samples=Watched).make([2, 3]) == [4, 9]
    assert seen == [2, 3]


def test_the_time_of_loading_and_of_collating_is_taken():
    maker = make_maker(Squares())
    maker.timer.begin()
    maker.make([2, 3])
    times = WorkTimes(*maker.timer.read())
    assert times.sample_count == 2
    assert times.fetch_ns > 0  # until make() returned; 0 where that is not noted
