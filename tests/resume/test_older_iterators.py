"""Iterators that were made before a state was loaded deliver nothing that it counts as done."""

import pytest
import torch

import shmloader
from tests.resume.kinds import Squares


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(41))


WAYS = {
    "in process": {},
    "in process, by a seed": {"seed": 3},
    "workers": {"num_workers": 2},
    "workers, by a seed": {"num_workers": 2, "seed": 3},
    "workers in any order": {"num_workers": 2, "in_order": False},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "thread_pool": True},
    "ranks": {"rank": 0, "world_size": 2},
    "ranks with workers": {"rank": 0, "world_size": 2, "num_workers": 2},
    "a stream": {"dataset": Stream()},
    "a stream in a persistent worker": {
        "dataset": Stream(), "num_workers": 1, "persistent_workers": True,
    },
}  # fmt: skip


def make(way):
    options = {"dataset": Squares(), "batch_size": 4, **WAYS[way]}
    kind = shmloader.ShardedDataLoader if "rank" in options else shmloader.DataLoader
    return kind(**options)


def read(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.parametrize("way", WAYS)
def test_an_iterator_made_before_a_state_is_loaded_says_to_call_iter_again(way, taken):
    with make(way) as loader:
        whole = read(loader)
    with make(way) as loader:
        batches = iter(loader)
        given = read([next(batches), next(batches)])
        state = loader.state_dict()
    with make(way) as loader:
        older = iter(loader)
        for _ in range(taken):
            next(older)
        loader.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"call iter\(\) of the loader again"):
                next(older)
            assert loader.state_dict() == state
        assert sorted(given + read(loader)) == sorted(whole)
        assert len(read(loader)) == len(whole)


@pytest.mark.parametrize("way", ["in process", "persistent workers"])
def test_an_iterator_that_has_ended_stays_at_its_end(way):
    with make(way) as loader:
        state = loader.state_dict()
        ended = iter(loader)
        count = len(list(ended))
        loader.load_state_dict(state)
        assert next(ended, None) is None
        assert loader.state_dict() == state
        assert len(list(loader)) == count


def test_a_state_that_does_not_fit_leaves_the_iterator_as_it_was():
    loader = make("in process")
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match=r"size of a batch.*: 3 in the state"):
        loader.load_state_dict(shmloader.DataLoader(Squares(), 3).state_dict())
    assert len(list(batches)) == len(loader) - 1
