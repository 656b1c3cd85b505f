"""Optional methods of users' datasets and samplers: states of their own, and epochs' numbers.

torch's loader asks no object for its state. Asking must therefore never break an epoch: a state
that cannot be taken becomes an :class:`~shmloader.messages.Unsaved`, which the loader's
``state_dict()`` raises.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from torch.utils.data import ChainDataset, ConcatDataset, Subset

from shmloader.interruptions import Caught, attempt, probe
from shmloader.messages import Unsaved

_T = TypeVar("_T")

# How much of an error's text is kept. It has to fit into a message.
_CAUSE_CHARACTERS = 1000

# States -----------------------------------------------------------------------------------


def has_own_state(thing: object) -> bool:
    """Whether an object has ``state_dict()`` and ``load_state_dict()`` for where it is.

    Methods of these names that need other arguments belong to another protocol: litdata's and
    MosaicML's ``StreamingDataset`` have such a ``state_dict``. The state of a ``torch.nn.Module``
    is its weights.
    """
    return has_state_methods(thing) and not isinstance(thing, torch.nn.Module)


def has_state_methods(thing: object) -> bool:
    """Whether an object has ``state_dict()`` and ``load_state_dict()``, also if it is a module."""
    load = probe(thing, "load_state_dict")
    if not callable(load):
        return False
    save = probe(thing, "state_dict")
    return callable(save) and _takes(save, 0) and _takes(load, 1)


def ask_state(thing: Any, remedy: str, keep: Callable[[Any], _T] = copy.deepcopy) -> _T | Unsaved:
    """Return an object's state, copied or pickled by ``keep``; ``Unsaved`` if that fails.

    ``remedy`` is a sentence that says what the user can do then.
    """
    if probe(thing, "shmloader_asks_for_a_name_that_nothing_has") is not None:
        cause = "it has an attribute of any name, so its state_dict() may be no method for this"
    else:
        kept = attempt(lambda: keep(thing.state_dict()))
        if not isinstance(kept, Caught):
            return kept
        cause = f"{type(kept.error).__name__}: {kept.error}"[:_CAUSE_CHARACTERS]
    return Unsaved(f"the state of {type(thing).__name__} cannot be saved: {cause}. {remedy}")


def _takes(method: Callable[..., object], count: int) -> bool:
    """Whether a method can be called with this number of positional arguments, and no others."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # as for some methods of extension modules
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


# Epochs of samplers -----------------------------------------------------------------------


def told_of_epochs(sampler: object) -> Any:
    """Return a sampler, or the sampler in a batch sampler, that has ``set_epoch``; else None."""
    for each in (sampler, probe(sampler, "sampler")):
        if callable(probe(each, "set_epoch")):
            return each
    return None


def set_epoch_of(sampler: object, epoch: int) -> None:
    """Call ``set_epoch`` of a sampler, or of the sampler in a batch sampler, if there is one."""
    told = told_of_epochs(sampler)
    if told is not None:
        told.set_epoch(epoch)


def epoch_of(sampler: object) -> int | None:
    """Return the ``epoch`` of a sampler that is told of epochs; None if it is no whole number."""
    epoch = probe(told_of_epochs(sampler), "epoch")
    return epoch if type(epoch) is int and epoch >= 0 else None


# Batches that are planned -----------------------------------------------------------------


def is_planned(sampler: object) -> TypeGuard[Any]:
    """Whether a sampler is a ``TokenBatches``, whose batches are planned."""
    # An object of a user's may have an attribute of any name.
    return getattr(type(sampler), "has_plan", False) is True


def check_planned(sampler: object, batch_sampler: object, dataset: Any) -> None:
    """Raise ValueError if planned batches have the lengths of another number of samples.

    Also if they are given as ``sampler``. Called with the arguments of a loader when it is
    constructed. A dataset may have no length.
    """
    if sampler is not None and any(map(is_planned, (sampler, probe(sampler, "sampler")))):
        raise ValueError(
            f"a {type(sampler).__name__} of batches yields lists of indices: give it as "
            "batch_sampler, not as sampler"
        )
    for each in (batch_sampler, probe(batch_sampler, "sampler")):
        if is_planned(each) and not isinstance(attempt(len, dataset), Caught):
            each.check_dataset(dataset)


# Epochs of datasets -----------------------------------------------------------------------


def set_dataset_epoch(dataset: Any, epoch: int) -> None:
    """Call ``set_epoch()`` of a dataset, or of those that a dataset of torch's wraps."""
    if callable(probe(dataset, "set_epoch")):
        with contextlib.suppress(NotImplementedError):  # a base class's stub
            dataset.set_epoch(epoch)
    elif type(dataset) is Subset:
        set_dataset_epoch(dataset.dataset, epoch)
    elif type(dataset) in (ConcatDataset, ChainDataset):
        for each in dataset.datasets:
            set_dataset_epoch(each, epoch)
