"""States that users' objects keep of themselves: samplers, datasets, and their iterators.

torch's loader asks no object for its state. Asking must therefore never break an epoch: a state
that cannot be taken becomes an :class:`~shmloader.messages.Unsaved`, which the loader's
``state_dict()`` raises.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shmloader.interruptions import is_interruption, probe
from shmloader.messages import Unsaved

_T = TypeVar("_T")

# How much of an error's text is kept. It has to fit into a message.
_CAUSE_CHARACTERS = 1000


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
    """Ask an object for its state.

    Args:
        thing: An object that has state methods.
        remedy: A sentence that says what the user can do if the state cannot be taken.
        keep: Copies or pickles the state.

    Returns:
        What ``keep`` returned; ``Unsaved`` if the state cannot be taken, copied or pickled.
    """
    try:
        if probe(thing, "shmloader_asks_for_a_name_that_nothing_has") is not None:
            cause = "it has an attribute of any name, so its state_dict() may be no method for this"
        else:
            return keep(thing.state_dict())
    except Exception as error:
        if is_interruption(error):
            raise
        cause = f"{type(error).__name__}: {error}"[:_CAUSE_CHARACTERS]
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
