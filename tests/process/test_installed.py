"""`shmloader.install()`: torch's loaders on our engine, created before or after, of any class."""

import copy
import functools
import gc
import logging
import pickle
import queue
import signal
import threading
import weakref
from itertools import chain
from multiprocessing.context import SpawnContext
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterDataPipe, RandomSampler, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

import shmloader
from shmloader.loader.iterator import BatchIterator
from tests.process.support import Bad, Numbers, Streams

KINDS = {
    "in process": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    shmloader.uninstall()


class Subclass(TorchLoader):
    """A framework's own loader, with attributes of names that ours has, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seed, self.device, self._plan, self.epoch = "its own", "cuda:7", 3, -1
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        return super().__iter__()


def kind_of(iterator: object) -> str:
    return iterator._record.kind


def pairs(length: int = 32) -> TensorDataset:
    return TensorDataset(torch.arange(2 * length).float().view(length, 2))


def firsts(loader: Any) -> list[list[float]]:
    return [batch[0][:, 0].tolist() for batch in loader]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [TorchLoader, Subclass])
def test_a_loader_of_torchs_class_runs_on_our_engine_and_gives_the_same_batches(cls, kind):
    torch.manual_seed(5)
    loader = cls(pairs(), batch_size=8, shuffle=True, **KINDS[kind])
    expected = [firsts(loader), firsts(loader)]
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()
    with shmloader.installed() as report:
        torch.manual_seed(5)
        loader = cls(pairs(), batch_size=8, shuffle=True, **KINDS[kind])
        iterator = iter(loader)
        assert isinstance(iterator, BatchIterator)
        assert [firsts(iterator), firsts(loader)] == expected
    (row,) = report.loaders
    assert (row.engine, row.why, row.epochs) == ("shmloader", "", 2)
    assert (row.dataset, row.num_workers) == ("TensorDataset", loader.num_workers)
    assert row.loader == f"{cls.__module__}.{cls.__qualname__}"
    assert type(loader) is cls
    assert len(loader) == 4
    if cls is Subclass:  # whose attributes are not mistaken for ours
        found = loader.seed, loader.device, loader._plan, loader.epoch, loader.begun
        assert found == ("its own", "cuda:7", 3, -1, 2)


def test_a_loader_with_persistent_workers_changes_engines_at_its_next_epoch():
    loader = TorchLoader(pairs(), batch_size=8, **KINDS["persistent"])
    expected = firsts(loader)
    of_torch = loader._iterator
    assert isinstance(of_torch, _MultiProcessingDataLoaderIter)
    processes = of_torch._workers
    report = shmloader.install()
    assert firsts(loader) == expected
    ours = loader._iterator
    assert isinstance(ours, BatchIterator)
    assert not any(process.is_alive() for process in processes)
    workers = [process.pid for process in ours._workers]
    assert firsts(loader) == expected
    assert loader._iterator is ours
    assert [process.pid for process in ours._workers] == workers
    assert [one.epochs for one in report.loaders] == [2]
    del ours
    shmloader.uninstall()
    assert firsts(loader) == expected
    assert isinstance(loader._iterator, _MultiProcessingDataLoaderIter)
    loader._iterator._shutdown_workers()


def test_an_epoch_in_progress_outlives_uninstall():
    shmloader.install()
    loader = TorchLoader(pairs(), batch_size=8, **KINDS["persistent"])
    iterator = iter(loader)
    next(iterator)
    shmloader.uninstall()
    assert len(list(iterator)) == 3
    assert loader._iterator is iterator
    assert len(firsts(loader)) == 4
    assert loader._iterator is not iterator
    loader._iterator._shutdown_workers()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_is_freed_when_it_is_dropped_with_its_workers(kind):
    shmloader.install(seed=1)
    loader = TorchLoader(pairs(), batch_size=8, **KINDS[kind])
    iterator = iter(loader)
    next(iterator)
    refs = weakref.ref(loader), weakref.ref(iterator)
    processes = getattr(iterator, "_workers", [])
    del loader, iterator
    assert [ref() for ref in refs] == [None, None]
    for process in processes:
        process.join(10)


def test_attributes_that_change_between_epochs_are_read_at_each():
    shmloader.install()
    loader = TorchLoader(pairs(16), batch_size=8)
    firsts(loader)
    loader.collate_fn = len
    assert list(loader) == [8, 8]
    loader.num_workers, loader.prefetch_factor = 1, 2
    iterator = iter(loader)
    assert isinstance(iterator, BatchIterator)
    assert list(iterator) == [8, 8]
    loader._DataLoader__initialized = False  # as timm and Ultralytics do
    loader.batch_sampler = [[1, 2, 3], [4]]
    loader._DataLoader__initialized = True
    assert list(loader) == [3, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_are_torchs(kind):
    shmloader.install(seed=3)
    loader = TorchLoader(pairs(), batch_size=8, shuffle=True, **KINDS[kind])
    first = firsts(loader)
    if kind == "persistent":
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            pickle.dumps(loader)
        loader._iterator = None
    pickled = pickle.dumps(loader)
    assert b"shmloader." not in pickled
    for other in (copy.deepcopy(loader), pickle.loads(pickled)):
        assert type(other) is TorchLoader
        second = firsts(other)  # and it counts on from where the original was
        assert second != first
        assert sorted(chain.from_iterable(second)) == sorted(chain.from_iterable(first))


class OwnIterator(TorchLoader):
    def _get_iterator(self):
        return _SingleProcessDataLoaderIter(self)


class OwnIter(TorchLoader):
    def __iter__(self):
        return _SingleProcessDataLoaderIter(self)


class OwnSampler(TorchLoader):
    @property
    def _index_sampler(self):
        return [[1], [2]]


class Pipe(IterDataPipe):
    def __iter__(self):
        yield from range(4)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: OwnIterator(pairs()), "OwnIterator has its own _get_iterator"),
        (lambda: OwnIter(pairs()), None),
        (lambda: TorchLoader(Pipe()), "the dataset is a data pipe"),
    ],
    ids=["_get_iterator", "__iter__", "data pipe"],
)
def test_what_cannot_be_taken_over_runs_as_before_and_the_report_says_why(make, why):
    expected = list(make())
    with shmloader.installed() as report:
        iterator = iter(make())
        assert type(iterator) is _SingleProcessDataLoaderIter
        assert len(list(iterator)) == len(expected)
    assert [(row.engine, row.epochs, row.why) for row in report.loaders] == (
        [("torch", 1, why)] if why else []
    )
    assert (why or "no loader") in str(report)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_decides_itself_what_is_drawn_is_taken_over(kind):
    with shmloader.installed() as report:
        loader = OwnSampler(pairs(), **KINDS[kind])
        assert [firsts(loader), firsts(loader)] == [[[2.0], [4.0]]] * 2
    assert [row.engine for row in report.loaders] == ["shmloader"]


def test_an_iterator_hook_that_an_object_has_is_respected():
    loader = TorchLoader(pairs(), batch_size=8)
    loader._get_iterator = lambda: iter(["mine"])  # type: ignore[method-assign]
    with shmloader.installed():
        assert list(loader) == ["mine"]


def test_options_apply_to_loaders_that_know_nothing_of_them():
    with shmloader.installed(on_error="skip"):
        loader = TorchLoader(Numbers(8, 3), batch_size=4, num_workers=1)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [4, 5, 6, 7]]
    with pytest.raises(Bad):
        list(TorchLoader(Numbers(8, 3), batch_size=4))


def test_with_a_seed_each_epoch_has_an_order_of_its_own_as_with_our_loader():
    ours = shmloader.DataLoader(pairs(), batch_size=8, shuffle=True, seed=3)
    expected = [firsts(ours) for _ in range(3)]
    assert expected[0] != expected[1]
    for kind in KINDS.values():
        with shmloader.installed(seed=3):
            loader = TorchLoader(pairs(), batch_size=8, shuffle=True, **kind)
            assert [firsts(loader) for _ in range(3)] == expected
            loader._iterator = None


class Shuffler(RandomSampler):
    """A sampler with an epoch, as accelerate and Lightning set it."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(len(self.data_source), generator=generator).tolist())


def test_with_a_seed_the_epoch_that_a_framework_sets_in_the_sampler_is_kept():
    sampler = Shuffler(pairs())
    sampler.set_epoch(5)
    expected = list(sampler)
    with shmloader.installed(seed=3):
        loader = TorchLoader(pairs(), batch_size=32, sampler=sampler)
        (first,) = firsts(loader)
        assert [value / 2 for value in first] == expected
        assert sampler.epoch == 5
        firsts(loader)
        assert sampler.epoch == 6  # counted on, since no other code set it


def test_thread_pool_gives_threads_to_map_style_datasets_only():
    with shmloader.installed(thread_pool=True) as report:
        assert kind_of(iter(TorchLoader(pairs(), num_workers=1))) == "threads"
        stream = TorchLoader(Streams(lambda: iter(range(3))), batch_size=None, num_workers=1)
        iterator = iter(stream)
        assert kind_of(iterator) == "processes"
        assert list(iterator) == [0, 1, 2]
        assert kind_of(iter(TorchLoader(pairs()))) == "in-process"
    assert [one.why for one in report.loaders] == [
        "",
        "without thread_pool: it needs a map-style dataset",
        "without thread_pool: it needs num_workers > 0",
    ]


def test_a_seed_is_left_out_where_the_loader_has_a_generator():
    def batches():
        generator = torch.Generator().manual_seed(8)
        return firsts(TorchLoader(pairs(), batch_size=8, shuffle=True, generator=generator))

    expected = batches()
    with shmloader.installed(seed=3) as report:
        assert batches() == expected
    assert report.loaders[0].why == "without seed: the loader has a generator"


def test_what_is_left_out_of_a_loader_is_logged_as_a_warning_once(caplog):
    loader = TorchLoader(Streams(lambda: iter(range(3))), batch_size=None)
    with shmloader.installed(on_error="skip"):
        list(loader)
        list(loader)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "without on_error: it needs a map-style dataset" in record.getMessage()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"on_error": "ignore"}, ValueError, "on_error should be"),
        ({"worker_restarts": -1}, ValueError, "worker_restarts should be"),
        ({"thread_pool": True, "shm_size": "1GiB"}, ValueError, "cannot be combined with"),
        ({"seed": "1"}, TypeError, "seed should be"),
        ({"batch_size": 8}, TypeError, "unexpected arguments: batch_size"),
        ({"last_batch": "discard"}, TypeError, "unexpected arguments: last_batch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_options_are_checked_at_the_call_and_nothing_is_installed(options, error, text):
    before = TorchLoader.__iter__
    for call in (shmloader.install, shmloader.installed(**options).__enter__):
        with pytest.raises(error, match=text):
            call(**(options if call is shmloader.install else {}))
    assert TorchLoader.__iter__ is before


def test_a_block_inside_another_gives_way_to_the_outer_one():
    with shmloader.installed() as outer:
        with shmloader.installed(on_error="skip") as inner:
            assert len(list(TorchLoader(Numbers(3, 1)))) == 2
        with pytest.raises(Bad):
            list(TorchLoader(Numbers(3, 1)))
    assert [one.epochs for one in (*outer.loaders, *inner.loaders)] == [1, 1]
    assert type(iter(TorchLoader(pairs()))) is _SingleProcessDataLoaderIter


@pytest.mark.parametrize("decorate", [functools.wraps, lambda _: lambda wrapper: wrapper])
def test_code_that_wraps_our_method_still_works_after_uninstall(decorate, monkeypatch):
    shmloader.install()
    ours, calls = TorchLoader.__iter__, []

    @decorate(ours)
    def wrapper(self):
        calls.append(self)
        return ours(self)

    monkeypatch.setattr(TorchLoader, "__iter__", wrapper)
    assert isinstance(iter(TorchLoader(pairs())), BatchIterator)
    shmloader.uninstall()
    calls.clear()
    loader = TorchLoader(pairs())
    assert type(iter(loader)) is _SingleProcessDataLoaderIter
    assert calls == [loader]


def test_a_loader_inside_a_worker_runs_on_our_engine_too():
    def nested(_: object) -> str:
        return type(iter(TorchLoader(pairs()))).__name__

    with shmloader.installed():
        loader = TorchLoader([1], collate_fn=nested, num_workers=1)
        assert list(loader) == ["BatchIterator"]


class ThreadAsProcess(threading.Thread):
    """What takes the place of a process in MONAI's context."""

    pid, exitcode = 123456789, None

    def run(self) -> None:
        try:
            super().run()
        finally:
            torch.utils.data._utils.worker._worker_info = None


class PlainQueue(queue.Queue[Any]):
    def close(self) -> None: ...

    cancel_join_thread = close


class ThreadContext(SpawnContext):
    _name = "threads"
    Process: Any = ThreadAsProcess
    Queue: Any = PlainQueue


def test_under_install_a_loader_whose_processes_are_threads_runs_on_torch_s_engine():
    frozen, handler = gc.get_freeze_count(), signal.getsignal(signal.SIGINT)
    with shmloader.installed() as report:
        loader = TorchLoader(
            range(8), batch_size=4, num_workers=1, multiprocessing_context=ThreadContext()
        )
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (row,) = report.loaders
    assert row.engine == "torch"
    assert row.why == "its multiprocessing_context starts no processes"
    assert frozen - 1_000 <= gc.get_freeze_count() <= frozen  # some of these have ended since
    assert signal.getsignal(signal.SIGINT) is handler


def test_our_loader_refuses_a_context_whose_process_is_a_thread():
    text = "^multiprocessing_context should start processes; thread_pool=True loads on threads$"
    with pytest.raises(ValueError, match=text):
        shmloader.DataLoader(range(8), num_workers=1, multiprocessing_context=ThreadContext())
    loader = shmloader.DataLoader(range(8), num_workers=1)
    loader.multiprocessing_context = ThreadContext()
    with pytest.raises(ValueError, match=text):
        iter(loader)
