"""Several samples of a batch at once inside one worker: coroutines, or threads."""

import asyncio
import contextlib
import random
import signal
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, Subset

import shmloader
from shmloader import DataLoader
from shmloader.batch import concurrent_fetcher
from tests.process.support import Bad, Numbers

SOON_S = 20.0
WORKERS = [
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="processes"),
    pytest.param({"num_workers": 2, "thread_pool": True}, id="threads"),
    pytest.param({}, id="here"),
]


class Meeting(Dataset):
    """Samples that wait until as many are under way; gives how many there were at most."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.inside = self.most = 0

    def __len__(self) -> int:
        return 16

    async def __getitem__(self, index):
        self.inside += 1
        self.most = max(self.most, self.inside)
        deadline = time.monotonic() + SOON_S
        while self.most < self.parties and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.inside -= 1
        return self.most


class ThreadMeeting(Dataset):
    """The samples of a batch meet, in threads; forked workers have copies of the barriers."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.barriers = [threading.Barrier(parties) for _batch in range(2)]

    def __getitem__(self, index):
        # The very first sample of all says what the dataset is, and is loaded alone.
        if index % 8:
            self.barriers[index // 8].wait(SOON_S)
        return self.parties


@pytest.mark.parametrize("workers", WORKERS)
def test_as_many_coroutines_as_asked_for_are_under_way_and_no_more(workers):
    workers = workers | {"num_workers": min(1, workers.get("num_workers", 0))}
    with DataLoader(Meeting(5), batch_size=8, fetch_concurrency=5, **workers) as loader:
        batches = torch.cat(list(loader))
    assert len(batches) == 16
    assert batches.max() == 5


@pytest.mark.parametrize("workers", WORKERS)
def test_as_many_threads_as_asked_for_are_in_getitem(workers):
    # Of each batch, one does not wait, and four meet.
    dataset = Subset(ThreadMeeting(4), [0, 1, 2, 3, 4, 8, 9, 10, 11, 12])
    with DataLoader(dataset, batch_size=5, fetch_concurrency=4, **workers) as loader:
        assert [batch.tolist() for batch in loader] == [[4] * 5] * 2


class Squares(Numbers):
    def __getitem__(self, index):
        return torch.tensor(super().__getitem__(index) ** 2)


class AsyncSquares(Squares):
    async def __getitem__(self, index):
        await asyncio.sleep(0)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Squares, AsyncSquares])
def test_the_first_failure_in_order_is_raised_and_the_next_batch_comes(workers, kind):
    with DataLoader(kind(16, 2, 5), batch_size=8, fetch_concurrency=4, **workers) as loader:
        items = iter(loader)
        with pytest.raises(Bad, match="no 2"):
            next(items)
        assert next(items).tolist() == [index * index for index in range(8, 16)]


class Drawing(Dataset):
    def __len__(self) -> int:
        return 12

    def draw(self) -> float:
        return float(shmloader.sample_rng().random())

    def __getitem__(self, index):
        return index, self.draw()


class AsyncDrawing(Drawing):
    async def __getitem__(self, index):
        first = self.draw()
        await asyncio.sleep(0)
        assert shmloader.sample_rng().random() != first  # it goes on where it was
        return index, first


def draw_in_collate(samples):
    numbers = [number for _, number in samples]
    return [*numbers, float(shmloader.sample_rng().random())]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Drawing, AsyncDrawing])
@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_sample_rng_is_that_of_one_sample_after_the_other(workers, kind, concurrency):
    options = {"batch_size": 4, "seed": 3, "shuffle": True, "collate_fn": draw_in_collate}
    with DataLoader(Drawing(), **options) as loader:
        expected = list(loader)
    state = random.getstate()
    with DataLoader(kind(), fetch_concurrency=concurrency, **options, **workers) as loader:
        assert list(loader) == expected
    assert random.getstate() == state


class Lists(Numbers):
    def __getitems__(self, indices):
        raise AssertionError


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", WORKERS)
def test_subsets_lists_and_single_samples(workers):
    options = {"fetch_concurrency": 3, **workers}
    with DataLoader(Subset(AsyncSquares(9), [3, 1, 2]), batch_size=3, **options) as loader:
        assert next(iter(loader)).tolist() == [9, 1, 4]
    with DataLoader(Lists(6), batch_size=6, **options) as loader:
        assert next(iter(loader)).tolist() == list(range(6))
    with DataLoader(AsyncSquares(3), batch_size=None, **options) as loader:
        assert [int(sample) for sample in loader] == [0, 1, 4]


def test_a_worker_keeps_its_loop_over_epochs():
    class SameLoop(Squares):
        loop = None

        async def __getitem__(self, index):
            self.loop = self.loop or asyncio.get_running_loop()
            return int(asyncio.get_running_loop() is self.loop)

    for workers in ({"multiprocessing_context": "fork"}, {"thread_pool": True}):
        loader = DataLoader(
            SameLoop(4), batch_size=4, num_workers=1, persistent_workers=True,
            fetch_concurrency=2, **workers,
        )  # fmt: skip
        with loader:
            assert [batch.tolist() for _ in range(2) for batch in loader] == [[1] * 4] * 2


def test_in_process_it_works_inside_of_a_running_loop():
    async def notebook():
        loader = DataLoader(AsyncSquares(4), batch_size=4, fetch_concurrency=2)
        return [batch.tolist() for batch in loader]

    assert asyncio.run(notebook()) == [[0, 1, 4, 9]]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("is_notebook", [False, True])
def test_a_ctrl_c_cancels_the_samples(is_notebook, on_error):
    ended = []

    class Endless(Squares):
        async def __getitem__(self, index):
            try:
                if index == 1:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                return await asyncio.get_running_loop().create_future()
            finally:
                ended.append(index)

    def load():
        options = {"batch_size": 4, "fetch_concurrency": 2, "on_error": on_error}
        with DataLoader(Endless(4), **options) as loader:
            list(loader)

    async def notebook():
        load()

    loop = asyncio.new_event_loop()  # asyncio.run() has a handler of its own
    with contextlib.closing(loop), pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(notebook()) if is_notebook else load()
    assert sorted(ended) == [0, 1]


def test_stop_iteration_of_a_sample_is_an_error():
    class Stops(Squares):
        def __getitem__(self, index):
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(DataLoader(Stops(4), fetch_concurrency=2))


def test_a_ctrl_c_waits_for_no_other_sample(monkeypatch):
    monkeypatch.setattr(concurrent_fetcher, "_JOIN_S", 0.2)
    count = 80
    stuck, let_go = threading.Barrier(count), threading.Event()

    class Interrupted(Squares):
        def __getitem__(self, index):
            if stuck.wait(SOON_S) == 0:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            let_go.wait(SOON_S)
            return index

    start = time.monotonic()
    loader = DataLoader(Interrupted(count), batch_size=count, fetch_concurrency=count)
    try:
        with pytest.raises(KeyboardInterrupt), loader:
            next(iter(loader))
        assert time.monotonic() - start < 10  # not 0.2 s for each helper, either
    finally:
        let_go.set()


def test_coroutines_without_fetch_concurrency_are_refused():
    with pytest.raises(ValueError, match="async def: give fetch_concurrency="):
        DataLoader(AsyncSquares(4), batch_size=2)


def await_all(samples):
    async def gather():
        return await asyncio.gather(*samples)

    return asyncio.run(gather())


@pytest.mark.parametrize("workers", WORKERS)
def test_a_collate_fn_may_await_its_samples_as_with_torch(workers):
    expected = list(TorchLoader(AsyncSquares(6, 4), 2, sampler=range(4), collate_fn=await_all))
    with DataLoader(AsyncSquares(6, 4), 2, collate_fn=await_all, **workers) as loader:
        batches = iter(loader)
        assert [next(batches), next(batches)] == expected
        with pytest.raises(Bad, match="no 4"):
            next(batches)


def test_a_stream_may_have_a_coroutine_function_for_single_records() -> None:
    class Stream(torch.utils.data.IterableDataset):
        async def __getitem__(self, index):
            raise NotImplementedError

        def __iter__(self):
            return iter(range(4))

    assert [batch.tolist() for batch in DataLoader(Stream(), batch_size=2)] == [[0, 1], [2, 3]]
