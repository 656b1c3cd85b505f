"""Estimates how many Python objects a dataset holds.

A forked worker shares its dataset's objects with its parent until it uses them. Using an object
changes its reference count, which lies in the object, and the kernel copies each page that is
written to.
"""

import collections
import copyreg
import random
import sys
import time
import types
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.interruptions import probe

#: The user is warned of a dataset with more objects than this.
MANY = 1_000_000

# Number of a container's items that are looked at.
_SAMPLES = 64

# How long and how deep the dataset is searched.
_LIMIT_S = 0.02
_DEEPEST = 6

_MISSING = object()

_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_OPAQUE = (np.ndarray, torch.Tensor, torch.nn.Module, types.ModuleType, type, types.FunctionType)


class ObjectCount(NamedTuple):
    """An estimate of the Python objects that a dataset holds.

    Attributes:
        objects: Number of objects.
        nbytes: Their memory in bytes.
    """

    objects: int
    nbytes: int


def attributes_of(value: object) -> dict[str, Any]:
    """Return an object's attributes by name, including those in slots; {} for a builtin."""
    # The names that pickle uses: from all base classes, with private ones mangled.
    slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    filled = ((name, probe(value, name, _MISSING)) for name in slots)
    attributes = {name: attribute for name, attribute in filled if attribute is not _MISSING}
    fields = probe(value, "__dict__")
    return {**attributes, **fields} if isinstance(fields, dict) else attributes


def estimate_objects(dataset: object) -> ObjectCount:
    """Estimate the number of objects that a dataset holds, in at most some 20 ms."""
    deadline = time.monotonic() + _LIMIT_S
    chooser, seen = random.Random(0), set[int]()

    def estimate(value: Any, depth: int) -> tuple[float, float]:
        """Return the number of objects in a value, itself included, and their bytes."""
        if isinstance(value, _OPAQUE) or id(value) in seen:
            return 0, 0
        count, nbytes = 1.0, float(sys.getsizeof(value, 0))
        if depth > _DEEPEST or time.monotonic() > deadline:
            return count, nbytes
        if isinstance(value, dict):
            columns: list[Any] = [value.keys(), value.values()]
        else:
            columns = [value] if isinstance(value, _CONTAINERS) else [attributes_of(value).values()]
        for items in columns:
            if not (length := len(items)):
                continue
            seen.add(id(value))
            some = list(islice(items, _SAMPLES))
            if isinstance(items, list | tuple) and length > _SAMPLES:
                # A random sample, so that a pattern in the items does not distort the estimate.
                some = [items[at] for at in chooser.sample(range(length), _SAMPLES)]
            distinct = {id(item): item for item in some}  # an object that recurs is counted once
            if length > len(some) and 2 * len(distinct) < len(some):
                count += len(distinct)
                continue
            for item in distinct.values():
                inside = estimate(item, depth + 1)
                count += inside[0] * length / len(some)
                nbytes += inside[1] * length / len(some)
        return count, nbytes

    return ObjectCount(*map(round, estimate(dataset, 0)))


def describe_many(count: ObjectCount, worker_count: int) -> str | None:
    """Return a warning about a dataset with many objects; None for any other."""
    if count.objects <= MANY:
        return None
    return (
        f"the dataset holds about {count.objects / 1e6:.1f} million Python objects "
        f"({count.nbytes / 1e6:,.0f} MB). Each of {worker_count} worker processes gets its own "
        "copy of those that it uses (page by page with fork, at once with spawn and forkserver), "
        f"up to {count.nbytes * worker_count / 1e6:,.0f} MB in all. If they lie in long lists or "
        "dicts, dataset = shmloader.share(dataset) keeps them in memory only once."
    )
