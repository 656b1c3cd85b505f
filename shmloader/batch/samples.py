"""How the samples of a map-style dataset are asked for."""

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset

from shmloader.probing import probe

Get = Callable[[Any], Any]


def one_by_one(dataset: Any) -> Callable[[Any], Any]:
    """Return a function that loads the sample of an index.

    It uses the dataset's ``__getitem__``, or ``__getitems__`` if the dataset has no
    ``__getitem__``.
    """
    if _gives_lists_alone(dataset):
        return functools.partial(_get_by_list, dataset)
    return functools.partial(operator.getitem, dataset)


def _gives_lists_alone(dataset: Any) -> bool:
    """Whether a dataset has only ``__getitems__``; torch's base ``__getitem__`` only raises."""
    own = getattr(type(dataset), "__getitem__", None)
    return own in (None, Dataset.__getitem__) and bool(probe(dataset, "__getitems__"))


def _get_by_list(dataset: Any, index: Any) -> Any:
    (sample,) = dataset.__getitems__([index])
    return sample


def list_loader(dataset: Any) -> Any:
    """Return a dataset's ``__getitems__``; None if it has none, or one that loads one by one.

    The ``__getitems__`` of torch's ``Subset`` loads samples one by one if the dataset in the subset
    has no ``__getitems__``.
    """
    getitems = getattr(dataset, "__getitems__", None)
    if not getitems:
        return None
    inner = dataset
    while type(inner) is Subset and "__getitems__" not in vars(inner):
        inner = inner.dataset
    if inner is not dataset and not callable(getattr(inner, "__getitems__", None)):
        return None
    return getitems


class WrappedSamples:
    """A map-style dataset whose samples are loaded by a function.

    Args:
        dataset: The dataset.
        load: Called with a function of the dataset's, which returns the sample of an index, and an
            index. Returns the sample.
        load_list: The same for many indices. With None, each sample is loaded by itself, even if
            the dataset has ``__getitems__``.
    """

    def __init__(
        self,
        dataset: Any,
        load: Callable[[Get, Any], Any],
        load_list: Callable[[Get, Any], Any] | None = None,
    ) -> None:
        self._dataset, self._get = dataset, one_by_one(dataset)
        self._load, self._load_list = load, load_list

    def __getitem__(self, index: Any) -> Any:
        return self._load(self._get, index)

    @property
    def __getitems__(self) -> Any:
        """A function that loads a list of samples; None if :func:`list_loader` finds none."""
        if self._load_list is None:
            return None
        get = list_loader(self._dataset)
        return None if get is None else functools.partial(self._load_list, get)
