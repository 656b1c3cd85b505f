"""The fetchers, bad samples, StopIteration of a map-style dataset, and the batch maker."""

import threading
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shmloader import sample_rng
from shmloader.batch.collator import Timer, bytes_of
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.sampling.indices import PositionedIndices
from tests.process.support import Bad


def test_bytes_of_a_batch_are_those_of_tensors_and_arrays_in_containers():
    batch = {"a": torch.zeros(10), "b": [np.zeros(3), (torch.zeros(2, dtype=torch.int8), "text")]}
    assert bytes_of(batch) == 40 + 24 + 2
    assert bytes_of("text") == bytes_of([]) == 0


def test_bytes_of_a_batch_of_many_objects_are_not_looked_for_everywhere():
    looked = []

    class Sample(list):
        def __iter__(self):
            looked.append(self)
            return super().__iter__()

    part = np.zeros(2)
    assert bytes_of([Sample([part, "text"]) for _ in range(100)]) == 100 * part.nbytes
    looked.clear()
    bytes_of([Sample([part, "text"]) for _ in range(100_000)])
    assert len(looked) < 2_000


class Keyed:
    """Returns ``[key]``, and raises for bad keys."""

    def __init__(self, *bad):
        self.bad = bad
        self.asked = []

    def __getitem__(self, key):
        self.asked.append(key)
        if key in self.bad:
            raise Bad(f"no {key}")
        return [key]


class Listed(Keyed):
    """Does the same by lists of keys, too."""

    def __getitems__(self, keys):
        return [self[key] for key in keys]


def tolerant(dataset, *, copies_good=False, collate=list):
    config = FetchConfig(
        is_iterable=False, auto_collation=True, drop_last=False, copies_good=copies_good
    )
    return BatchMaker(config, dataset, collate, "skip", where="somewhere", timer=Timer()).fetcher


def counts(fetcher):
    report = fetcher.pop_report()
    indices = [bad.index for bad in report.newest]
    assert report.failed_count == len(indices)
    return report.sample_count, indices


def test_samples_that_cannot_be_collated_are_named_by_their_indices_though_one_was_skipped():
    class Growing(Keyed):
        def __getitem__(self, key):
            return torch.zeros(super().__getitem__(key))

    with pytest.raises(RuntimeError) as raised:
        tolerant(Growing(1), collate=default_collate).fetch([1, 3, 4])
    (note,) = raised.value.__notes__
    assert "of shape [3] for index 3; a float32 Tensor of shape [4] for index 4." in note


def test_a_good_sample_that_cannot_be_copied_is_repeated_as_it_is():
    class Locks(Keyed):
        def __getitem__(self, key):
            super().__getitem__(key)
            return threading.Lock()

    one, two = tolerant(Locks(1), copies_good=True).fetch([0, 1])
    assert one is two


def test_getitems_is_called_once_and_for_single_samples_only_if_it_fails():
    dataset = Listed(5)
    fetcher = tolerant(dataset)
    fetcher.fetch((0, 1))
    assert dataset.asked == [0, 1]
    assert fetcher.fetch((4, 5, 6)) == [[4], [6]]
    assert dataset.asked == [0, 1, 4, 5, 4, 5, 6]
    assert counts(fetcher) == (5, [5])


def test_a_batch_that_fails_only_as_a_whole_is_complete_at_the_second_try():
    class Flaky(Listed):
        def __getitems__(self, keys):
            if len(keys) > 1:
                raise Bad("too many at once")
            return super().__getitems__(keys)

    fetcher = tolerant(Flaky())
    assert fetcher.fetch([1, 2]) == [[1], [2]]
    assert counts(fetcher) == (2, [])


@pytest.mark.parametrize("kind", [Listed, Keyed])
def test_indices_from_an_iterator_are_also_tried_again(kind):
    fetcher = tolerant(kind(1))
    assert fetcher.fetch(iter([0, 1, 2])) == [[0], [2]]


def test_a_bad_sample_is_not_kept_alive():
    class Held(list):
        pass

    class Holding(Keyed):
        def __getitem__(self, key):
            self.last = weakref.ref(local := Held([key]))
            super().__getitem__(key)
            return local

    dataset = Holding(1)
    fetcher = tolerant(dataset)
    fetcher.fetch([0, 1])
    assert dataset.last() is None


class OwnList(list):
    """A list that may run code of the user's."""


def test_a_bad_sample_of_plain_data_does_not_shift_the_random_numbers_of_collate():
    def collate(samples):
        return samples, int(sample_rng().integers(1 << 30))

    def batches(dataset):
        plan = FetchConfig(is_iterable=False, auto_collation=True, drop_last=False, seed=1)
        maker = BatchMaker(
            plan, dataset, collate, "skip", where="here", timer=Timer(), restores_rngs=True
        )
        return maker.make(PositionedIndices([0, 99, 1], 0, 0))

    plain = batches(list(range(9)))
    assert plain[0] == [0, 1]
    assert plain == batches(OwnList(range(9)))
