"""Functions that all iterators share: they initialize as torch does, seed, and transform."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmloader.batch.seeds import base_seed
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.sampling.plan import EpochPlan


def begin_by_torch(iterator: Any, loader: Any, plan: EpochPlan) -> None:
    """Initialize an iterator by torch's base class, which reads the loader and draws a seed.

    The seed of a resumed epoch was drawn when the epoch first began. So torch's global generator is
    set back afterwards: a user may have restored its state, and that must not change.
    """
    iterator._order = plan.newest
    before = torch.get_rng_state() if plan.is_continued and plan.generator is None else None
    _BaseDataLoaderIter.__init__(iterator, loader.as_torch_sees_it)
    if before is not None:
        torch.set_rng_state(before)


def seed_of_workers(config: LoaderConfig, plan: EpochPlan, drawn: float) -> float:
    """Return the base seed of an iterator's workers: from ``seed=``, or else torch's ``drawn``."""
    if config.fetch.seed is None:
        return drawn
    assert plan.epoch is not None
    return base_seed(config.fetch.seed, plan.epoch)


def warn_of_many_objects(config: LoaderConfig, parts: LoaderParts) -> None:
    """Warn once of the memory that a dataset of very many Python objects takes in workers."""
    if parts.has_counted_objects:
        return
    parts.has_counted_objects = True
    from shmloader.shared.counting import describe_many, estimate_objects  # noqa: PLC0415

    text = None
    with contextlib.suppress(Exception):  # for example if another thread changes the objects
        text = describe_many(estimate_objects(config.dataset), config.num_workers)
    if text is not None:
        warnings.warn(text, stacklevel=2)


def no_transform(batch: object) -> object:
    """Return the batch unchanged."""
    return batch


def transform_here(config: LoaderConfig) -> Callable[[Any], Any]:
    """Return the function that transforms a batch on the CPU, on the user's thread.

    A StopIteration of the user's transform must not silently end the epoch.
    """
    transform, has_steps = config.device_transform, config.has_steps
    if transform is None:
        return no_transform

    def transformed(batch: Any) -> Any:
        try:
            return [transform(each) for each in batch] if has_steps else transform(batch)
        except StopIteration as error:
            raise RuntimeError("the device_transform raised StopIteration") from error

    return transformed
