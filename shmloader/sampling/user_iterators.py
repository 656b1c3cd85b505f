"""How the iterators of users' samplers are drawn from."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def only_next(items: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that calls only ``next()`` of a user's iterator, as torch does.

    An iterator may begin anew when ``iter()`` of it is called, as Lightning's wrapper of batch
    samplers does for predictions. Loops, ``list()`` and the functions of ``itertools`` call it.
    """
    return map(next, itertools.repeat(items))


def iterate(sampler: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator of a user's sampler, as a generator would: an epoch does not end by it.

    Raises:
        RuntimeError: If ``iter()`` of the sampler raises StopIteration.
        BaseException: What else it raises.
    """
    try:
        return iter(sampler)
    except StopIteration as error:
        raise RuntimeError("iter() of the sampler raised StopIteration") from error


def restart_if_exhausted(
    items: Iterator[Any], restart: Callable[[], Iterator[Any]]
) -> Iterator[Any]:
    """Return another iterator of a sampler if ``items``, the first one, yields nothing.

    A sampler that reads its state when it is iterated, such as torchdata's
    StatefulDistributedSampler, may have been saved at the end of an epoch: then the first
    iterator is exhausted, and the next one yields the whole epoch.
    """
    rest = only_next(items)
    first = list(itertools.islice(rest, 1))
    return itertools.chain(first, rest) if first else restart()
