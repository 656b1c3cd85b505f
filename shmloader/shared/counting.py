"""How many Python objects a dataset holds, looked at for a moment: each is a page that gets copied.

A forked worker has its dataset's objects for nothing, until it looks at them: that counts up their
reference counts, which lie in the objects, and the kernel copies each page that is written to.
"""

import collections
import random
import sys
import time
import types
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.shared.attributes import attributes_of

#: More objects than these are worth a word.
MANY = 1_000_000

# A container's items are judged by so many of them.
_SAMPLES = 64

_LOOK_S = 0.02
_DEEPEST = 6

_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_OPAQUE = (np.ndarray, torch.Tensor, torch.nn.Module, types.ModuleType, type, types.FunctionType)


class Held(NamedTuple):
    """What a dataset holds, about.

    Attributes:
        objects: How many.
        nbytes: Their memory.
    """

    objects: int
    nbytes: int


def estimate_objects(dataset: object) -> Held:
    """Estimate what a dataset holds, by a look of at most some 20 ms."""
    count, nbytes = _Look().at(dataset, 0)
    return Held(round(count), round(nbytes))


class _Look:
    def __init__(self) -> None:
        self._deadline = time.monotonic() + _LOOK_S
        self._seen: set[int] = set()
        self._draw = random.Random(0)

    def at(self, value: Any, depth: int) -> tuple[float, float]:
        """Objects in a value, itself one of them, and their bytes."""
        if isinstance(value, _OPAQUE) or id(value) in self._seen:
            return 0, 0
        nbytes = sys.getsizeof(value, 0)
        if depth > _DEEPEST or time.monotonic() > self._deadline:
            return 1, nbytes
        if isinstance(value, _CONTAINERS):
            self._seen.add(id(value))
            count, inner = self._in_container(value, depth + 1)
            return 1 + count, nbytes + inner
        fields = attributes_of(value)
        if not fields:
            return 1, nbytes
        self._seen.add(id(value))
        found = [self.at(inner, depth + 1) for inner in islice(fields.values(), MANY)]
        return 1 + sum(one for one, _ in found), nbytes + sum(size for _, size in found)

    def _in_container(self, items: Any, depth: int) -> tuple[float, float]:
        if isinstance(items, dict):
            keys = self._in_items(items.keys(), len(items), depth)
            values = self._in_items(items.values(), len(items), depth)
            return keys[0] + values[0], keys[1] + values[1]
        return self._in_items(items, len(items), depth)

    def _in_items(self, items: Iterable[Any], length: int, depth: int) -> tuple[float, float]:
        """Of some of the items, and so of all. One that is there many times counts once."""
        if isinstance(items, list | tuple):
            # At random: what comes round every so many items is not taken for all of them.
            places = (
                range(length) if length <= _SAMPLES else self._draw.sample(range(length), _SAMPLES)
            )
            some = [items[at] for at in places]
        else:
            some = list(islice(items, _SAMPLES))
        if not some:
            return 0, 0
        distinct = {id(item): item for item in some}
        if length > len(some) and 2 * len(distinct) < len(some):
            return len(distinct), 0
        found = [self.at(item, depth) for item in distinct.values()]
        scale = length / len(some)
        return sum(one for one, _ in found) * scale, sum(size for _, size in found) * scale


def describe_many(held: Held, worker_count: int) -> str | None:
    """What to tell the user of a dataset with many objects; None of another."""
    if held.objects <= MANY:
        return None
    return (
        f"the dataset holds about {held.objects / 1e6:.1f} million Python objects "
        f"({held.nbytes / 1e6:,.0f} MB), and each of {worker_count} worker processes comes to have "
        "a copy of what it looks at, page by page under fork, outright under spawn and forkserver: "
        f"up to {held.nbytes * worker_count / 1e6:,.0f} MB. Where these lie in long lists or "
        "dicts, dataset = shmloader.share(dataset) keeps them in memory once."
    )
