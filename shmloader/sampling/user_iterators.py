"""Functions that draw from users' samplers and their iterators."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import GeneratorType
from typing import Any


def only_next(items: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that calls only ``next()`` of a user's iterator, as torch does.

    An iterator may begin again when ``iter()`` is called on it, as that of Lightning's wrapper of
    batch samplers does for predictions. Loops, ``list()`` and the functions of ``itertools`` call
    ``iter()``.
    """
    return map(next, itertools.repeat(items))


def iterate(sampler: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator of a user's sampler.

    If ``iter()`` of the sampler raises StopIteration, that becomes a RuntimeError, as in a
    generator. Otherwise it would silently end the epoch.

    Raises:
        RuntimeError: If ``iter()`` of the sampler raises StopIteration.
        BaseException: Any other exception of ``iter()``, unchanged.
    """
    try:
        return iter(sampler)
    except StopIteration as error:
        raise RuntimeError("iter() of the sampler raised StopIteration") from error


def restart_if_exhausted(
    items: Iterator[Any], restart: Callable[[], Iterator[Any]]
) -> Iterator[Any]:
    """Return ``items``, a sampler's first iterator, or a new iterator if ``items`` is exhausted.

    A sampler that reads its state when it is iterated, such as torchdata's
    StatefulDistributedSampler, may have been saved at the end of an epoch. Then its first iterator
    yields nothing, and the next one yields the whole epoch.

    Args:
        items: The first iterator. One item is drawn from it now.
        restart: Function that returns a new iterator of the sampler.
    """
    rest = only_next(items)
    first = list(itertools.islice(rest, 1))
    return itertools.chain(first, rest) if first else restart()


def has_begun(items: Iterator[Any]) -> bool:
    """Whether something was drawn from a generator; False for iterators of other types.

    torch's samplers are generators. Toolkits draw from them to resume.
    """
    return isinstance(items, GeneratorType) and (items.gi_suspended or items.gi_frame is None)
