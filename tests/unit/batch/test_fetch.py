"""Fetchers, bad samples, the batch maker, and what a watch publishes of samples in work."""

import asyncio
import contextvars
import functools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shmloader import sample_rng
from shmloader.batch.collator import Timer, bytes_of
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.batch.sample_watch import NO_SAMPLE, SampleWatch
from shmloader.errors import SampleTimeoutError
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


class Shown:
    """What was published: the last, and all of it."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int]] = []

    def __call__(self, number: int, deadline_ns: int) -> None:
        self.log.append((number, deadline_ns))

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.log]

    def left_s(self) -> float:
        return (self.log[-1][1] - time.monotonic_ns()) / 1e9


def watch_of(timeout_s=10.0) -> tuple[SampleWatch, Shown]:
    shown = Shown()
    watch = SampleWatch(timeout_s, shown)
    watch.begin()
    return watch, shown


def test_each_sample_in_work_is_shown_with_its_deadline():
    watch, shown = watch_of()
    left = []

    def get(index):
        left.append(shown.left_s())
        return index

    assert [watch.load(get, index) for index in (7, 8)] == [7, 8]
    assert shown.numbers == [0, NO_SAMPLE, 1, NO_SAMPLE]
    assert all(9 < one <= 10 for one in left)


def test_one_call_for_many_samples_has_as_many_times_the_limit():
    watch, shown = watch_of()
    left = []

    def get(indices):
        left.append(shown.left_s())
        return indices

    assert watch.load_list(get, [4, 5, 6]) == [4, 5, 6]
    assert 29 < left[0] <= 30
    assert shown.numbers == [0, NO_SAMPLE]


def test_what_a_resumed_stream_reads_again_has_numbers_of_its_own():
    watch, shown = watch_of()
    source = iter(range(10))
    watch.begin({1: "It hung."}, is_replay=True)
    assert [watch.load(next, source), watch.load(next, source)] == [0, 1]
    watch.begin({1: "It hung."})
    assert watch.load(next, source) == 2
    assert [number for number in shown.numbers if number != NO_SAMPLE] == [-2, -3, 0]
    watch.begin({-3: "It hung."}, is_replay=True)
    assert watch.load(next, source) == 3
    with pytest.raises(SampleTimeoutError):
        watch.load(next, source)


def test_of_samples_that_are_loaded_at_once_the_one_with_the_first_deadline_is_shown():
    watch, shown = watch_of()
    begun, may_end = ([threading.Event(), threading.Event()] for _ in range(2))

    def get(index):
        begun[index].set()
        assert may_end[index].wait(10)
        return index

    with ThreadPoolExecutor(2) as executor:
        loads = []
        for index in range(2):
            context = contextvars.copy_context()
            context.run(watch.begin_sample)
            loads.append(executor.submit(context.run, watch.load, get, index))
            assert begun[index].wait(10)
        for index in range(2):
            assert shown.numbers[-1] == index
            may_end[index].set()
            assert loads[index].result(10) == index
    assert shown.numbers[-1] == NO_SAMPLE


@pytest.mark.parametrize("is_async", [False, True])
def test_samples_that_are_loaded_at_once_keep_their_numbers(is_async):
    """Whatever thread or task takes a sample first: the same one raises in each try."""
    watch, shown = watch_of()

    async def get_later(index):
        await asyncio.sleep(0)
        return index

    get = functools.partial(watch.load, get_later if is_async else lambda index: index)
    fetcher = ConcurrentFetcher(3)
    try:
        for _ in range(50):
            watch.begin({4: "It hung."})
            results = fetcher.load(get, range(10, 20), [watch.begin_sample])
            failed = [one.index for one in results if one.error is not None]
            assert failed == [14]
            assert [one.value for one in results if one.error is None] == [
                *range(10, 14), *range(15, 20),
            ]  # fmt: skip
    finally:
        fetcher.close()
    assert shown.numbers[-1] == NO_SAMPLE
