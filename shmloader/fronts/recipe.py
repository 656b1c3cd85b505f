"""What every iterator reads of its loader: how batches are made, seeded, and transformed."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from shmloader.engine.failures import FailureWatch
from shmloader.engine.stream_states import StreamStates
from shmloader.memory.collate import is_plain
from shmloader.options import Options
from shmloader.shared.counting import describe_many, estimate_objects
from shmloader.workers.array_datasets import may_be_columns
from shmloader.workers.fetch import FetchPlan
from shmloader.workers.sample_rng import base_seed


def begin_by_torch(iterator: Any, loader: Any) -> None:
    """Do what torch's base class does for a new iterator: it reads the loader, and draws a seed.

    An epoch that goes on had its seed drawn where it began. So torch's global generator is put
    back: whoever has restored it finds it where it was.
    """
    before = torch.get_rng_state() if loader._plan.goes_on and loader.generator is None else None
    _BaseDataLoaderIter.__init__(iterator, loader)
    if before is not None:
        torch.set_rng_state(before)


def plan_and_watch(
    iterator: _BaseDataLoaderIter, loader: Any
) -> tuple[FetchPlan, FailureWatch | None]:
    """How an iterator of this loader makes batches, and who notes the samples that fail."""
    is_iterable = iterator._dataset_kind == _DatasetKind.Iterable
    keep_size = loader.on_error == "skip" and loader._is_in_ranks
    plan = FetchPlan(
        is_iterable,
        iterator._auto_collation,
        iterator._drop_last,
        keep_size,
        loader._may_shard and loader._plan.order.may_give_lists,
        loader._sample_seed,
        _snapshot_interval(loader, is_iterable=is_iterable),
        bool(loader.persistent_workers),
        loader.fetch_concurrency,
    )
    if loader.on_error == "raise" or is_iterable:
        return plan, None
    watch = FailureWatch(
        loader.failures,
        loader.max_failures,
        keep_size=keep_size,
        replaces=callable(loader.on_error),
    )
    return plan, watch


def _snapshot_interval(loader: Any, *, is_iterable: bool) -> int:
    """After how many batches a worker takes its dataset's state; 0 for never.

    A map-style dataset cannot read again what it gave since: it is asked after every batch.
    """
    if is_iterable:
        return loader.snapshot_every_n_steps or 0
    return 1 if loader._saves_dataset else 0


def seed_of_workers(loader: Any, drawn: float) -> float:
    """What workers of an iterator that begins are seeded from: the loader's seed, or a draw."""
    if loader._sample_seed is None:
        return drawn
    return base_seed(loader._sample_seed, loader._plan.epoch)


def takes_arrays(iterator: _BaseDataLoaderIter, loader: Any) -> bool:
    """Whether batches of this loader's dataset are gathered, if it is nothing but arrays."""
    return (
        loader.on_error == "raise"
        and iterator._auto_collation
        and iterator._dataset_kind == _DatasetKind.Map
        and is_plain(loader.collate_fn)
        and may_be_columns(loader.dataset)
    )


def next_batch(iterator: Any, by_torch: Callable[[], Any]) -> Any:
    """What torch's ``__next__`` gives, by that only where it does more than ask: it takes longer.

    It warns of an iterable dataset that is longer than it said, and records for the profiler.

    Args:
        iterator: Whose batch.
        by_torch: Its base class's ``__next__``.
    """
    if iterator._IterableDataset_len_called is not None or _profiler_enabled():
        return by_torch()
    batch = iterator._next_data()
    iterator._num_yielded += 1
    return batch


def take_resumed(loader: Any) -> StreamStates | None:
    """Where the streams of an iterable dataset go on; the loader's next iterator begins anew."""
    resumed: StreamStates | None = loader._resume_streams
    loader._streams = loader._resume_streams = None
    return resumed


def warn_of_many_objects(loader: Any) -> None:
    """Say once what a dataset of very many Python objects comes to cost in worker processes."""
    if loader._has_counted_objects:
        return
    loader._has_counted_objects = True
    text = None
    with contextlib.suppress(Exception):  # of the user's objects: another thread changes them, say
        text = describe_many(estimate_objects(loader.dataset), loader.num_workers)
    if text is not None:
        warnings.warn(text, stacklevel=2)


def no_transform(batch: object) -> object:
    """The batch as it is."""
    return batch


def _guarded(transform: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """The user's transform, whose StopIteration must not end the epoch in silence."""
    if transform is None:
        return no_transform

    def guarded(batch: Any) -> Any:
        try:
            return transform(batch)
        except StopIteration as error:
            raise RuntimeError("the transform raised StopIteration") from error

    return guarded


def transform_here(options: Options) -> Callable[[Any], Any]:
    """What is done to a batch on the CPU, on the user's thread."""
    transform = options.transform
    if options.devices is None or transform is None:
        return _guarded(transform)

    def transform_each(step: Any) -> Any:
        return [transform(batch) for batch in step]

    return _guarded(transform_each)
