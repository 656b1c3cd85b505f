"""Loader classes as trainers and toolkits write them, over any base class.

Each function takes the class of loaders: torch's, or shmloader's as with a changed import.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)


class Endlessly:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


def detection_trainer(base: Any) -> Any:
    """A YOLO trainer's loader: one endless iterator, which `reset` makes anew."""

    class EndlessLoader(base):
        # torch's workers leave files behind if they are ended while they send a tensor.
        ends_workers = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Endlessly(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

        def __del__(self) -> None:
            for worker in getattr(self.iterator, "_workers", ()):
                if self.ends_workers and worker.is_alive():
                    worker.terminate()
            if hasattr(self.iterator, "_shutdown_workers"):
                self.iterator._shutdown_workers()

        def reset(self) -> None:
            self.iterator = self._get_iterator()

    return EndlessLoader


def image_trainer(base: Any) -> Any:
    """timm's loader of many epochs, which unlocks the attributes of torch's class."""

    class ManyEpochs(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            if self.batch_sampler is None:
                self.sampler = Endlessly(self.sampler)
            else:
                self.batch_sampler = Endlessly(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            endless = self.sampler if self.batch_sampler is None else self.batch_sampler
            return len(endless.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return ManyEpochs


def speech_toolkit(base: Any) -> Any:
    """A loader whose position SpeechBrain saves; `patch_iterators` is needed to restore it."""

    class SavesPosition(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.skip_to: int | None = None
            self.kept: Any = None

        def __iter__(self) -> Any:
            self.kept = super().__iter__()
            return self.kept

        def save(self) -> int | None:
            return None if self.kept is None else self.kept._num_yielded

        def restore(self, position: int | None) -> None:
            self.skip_to = position

    return SavesPosition


def patch_iterators(monkeypatch: Any) -> None:
    """Make torch's iterators begin where their loader's `skip_to` says."""
    before = _BaseDataLoaderIter.__init__

    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        before(self, loader, *args, **kwargs)
        count = getattr(loader, "skip_to", None)
        if count is not None:
            for _ in range(count):
                next(self._sampler_iter)
            self._num_yielded = count
            loader.skip_to = None

    def _reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:  # __init__ has set these
            self._sampler_iter = iter(self._index_sampler)
            self._num_yielded = 0
            self._IterableDataset_len_called = loader._IterableDataset_len_called

    functools.update_wrapper(__init__, before)
    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", __init__)
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", _reset)


class Looped:
    def __init__(self, loader: Any, epoch_length: int) -> None:
        self.loader, self.epoch_length = loader, epoch_length
        self.step, self.iterator = 0, None

    def __iter__(self) -> Looped:
        if self.iterator is None:
            self.iterator = iter(self.loader)
        return self

    def __next__(self) -> Any:
        if self.step == self.epoch_length:
            self.step = 0
            raise StopIteration
        self.step += 1
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            return next(self.iterator)


class _Fake:
    """Has what torch's iterators read of a loader."""

    _IterableDataset_len_called = None
    _auto_collation, drop_last, generator, in_order = False, False, None, True
    prefetch_factor, pin_memory, pin_memory_device, timeout = 2, False, "", 0
    persistent_workers, worker_init_fn, multiprocessing_context = False, None, None
    _dataset_kind = _DatasetKind.Iterable
    _index_sampler = itertools.repeat(None)

    def __init__(self, owner: Any, num_workers: int) -> None:
        self.dataset, self.owner, self.num_workers = self, owner, num_workers

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        return batch

    def __iter__(self) -> Iterator[Any]:
        return self.owner.batches()


class FakeLoader:
    """A loader that uses torch's iterators, but not torch's loader, as fastai's does."""

    def __init__(self, dataset: Any, batch_size: int, num_workers: int = 0) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.fake = _Fake(self, num_workers)

    def batches(self) -> Iterator[Any]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        indices = [*range(len(self.dataset))]
        cut = [indices[at : at + self.batch_size] for at in indices[:: self.batch_size]]
        for batch in cut[number::count]:
            yield torch.tensor([int(self.dataset[index]) for index in batch])

    def __iter__(self) -> Iterator[Any]:
        has_workers = self.fake.num_workers > 0
        kind = _MultiProcessingDataLoaderIter if has_workers else _SingleProcessDataLoaderIter
        yield from kind(self.fake)


class _Stream(IterableDataset):
    def __init__(self, owner: FakeLoader) -> None:
        self.owner = owner

    def __iter__(self) -> Iterator[Any]:
        return self.owner.batches()


def notebook(base: Any) -> Any:
    """A loader of whole batches, made by another object, that asks for the iterator itself."""

    class MakesBatches(base):
        def __init__(self, dataset: Any, batch_size: int, **kwargs: Any) -> None:
            super().__init__(_Stream(FakeLoader(dataset, batch_size)), batch_size=None, **kwargs)

        def __iter__(self) -> Iterator[Any]:
            for batch in self._get_iterator():
                yield batch + 1000

    return MakesBatches


# Speech: the sampler in the worker -----------------------------------------------------------
