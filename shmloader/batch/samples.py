"""How the samples of a map-style dataset are asked for."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Dataset, Subset

from shmloader.grammar import described_type
from shmloader.probing import probe

#: Returns the sample of an index, or the samples of indices.
Get = Callable[[Any], Any]

#: Called with a function of the dataset's and its argument. Returns what the function returns.
Load = Callable[[Get, Any], Any]

#: Loads one sample, and loads many. With None, each sample is loaded by itself, even if the dataset
#: has ``__getitems__``.
Wrapper = tuple[Load, Load | None]


def one_by_one(dataset: Any) -> Get:
    """Return a function that loads the sample of an index.

    It uses the dataset's ``__getitem__``, or ``__getitems__`` if the dataset has no
    ``__getitem__``. (torch's base ``__getitem__`` only raises.)
    """
    own = getattr(type(dataset), "__getitem__", None)
    if own in (None, Dataset.__getitem__) and bool(probe(dataset, "__getitems__")):
        return functools.partial(one_of, dataset.__getitems__)
    return functools.partial(operator.getitem, dataset)


def one_of(getitems: Get, index: Any) -> Any:
    """Load a sample by a call of ``__getitems__`` of its own.

    Raises:
        TypeError: If the result is not a list of one sample.
    """
    samples = getitems([index])
    if isinstance(samples, Mapping) or len(samples) != 1:
        raise TypeError(
            f"__getitems__ returned {described_type(samples)} for one index, and not a list of one "
            "sample"
        )
    return samples[0]


def list_loader(dataset: Any) -> Get | None:
    """Return a dataset's ``__getitems__``; None if it has none, or one that loads one by one.

    The ``__getitems__`` of torch's ``Subset`` loads samples one by one if the dataset in the subset
    has no ``__getitems__``.
    """
    getitems: Get | None = getattr(dataset, "__getitems__", None)
    if not getitems:
        return None
    inner = dataset
    while type(inner) is Subset and "__getitems__" not in vars(inner):
        inner = inner.dataset
    if inner is not dataset and not callable(getattr(inner, "__getitems__", None)):
        return None
    return getitems
