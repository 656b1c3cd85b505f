"""What a watch publishes of the samples in work, and where it raises."""

import asyncio
import contextvars
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.sample_watch import NO_SAMPLE, SampleWatch
from shmloader.errors import SampleTimeoutError


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
