"""Cuts one global order into the steps of a rank.

An epoch is a sequence of *items*: indices of samples, or whole batches of a user's batch sampler.
A global step takes the next ``world_size * share`` items, and rank r gets the r-th run of ``share``
items, counted from 0. So the items of all ranks at a step, one rank after the other, are the same
sequence for any number of ranks, as long as the global step has the same length.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shmloader.grammar import counted
from shmloader.sampling.indices import IndexArray, Permutation
from shmloader.sampling.rng import RngState

#: What happens to items that do not fill the last global step: "keep" makes a shorter step of them,
#: "discard" leaves them out, and "pad" fills the step up from the epoch's start.
LastBatch = Literal["keep", "discard", "pad"]

# Positions of an order that are computed, or items of a sampler that are passed over, at a time: a
# few take as long as some thousand.
_BLOCK = 8192

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's share of each global step.

    Attributes:
        share: Number of items of a rank in a step.
        rank: The rank, from 0.
        world_size: Number of ranks.
    """

    share: int
    rank: int = 0
    world_size: int = 1

    @property
    def global_count(self) -> int:
        """Number of items in a global step."""
        return self.share * self.world_size

    def count(self, item_count: int) -> int:
        """Return how many items the rank has in a global step of ``item_count`` items."""
        return min(max(item_count - self.rank * self.share, 0), self.share)

    def step_count(self, item_count: int, last_batch: LastBatch) -> int:
        """Return the number of steps of the rank in an epoch of ``item_count`` items."""
        whole, left = divmod(item_count, self.global_count)
        has_more = left if last_batch == "pad" else last_batch == "keep" and self.count(left)
        return whole + bool(has_more)

    def own_count(self, item_count: int, last_batch: LastBatch) -> int:
        """Return the number of items of the rank in an epoch of ``item_count`` items."""
        whole, left = divmod(item_count, self.global_count)
        if last_batch == "keep":
            return whole * self.share + self.count(left)
        return self.step_count(item_count, last_batch) * self.share


class Steps(Iterator[Any]):
    """The steps of one epoch for one rank: lists of items.

    Attributes:
        cut: The rank's share of each global step.
        position: Number of items of all ranks in the steps so far, had they all been full.
        is_over: Whether all steps were drawn.
        repeats: The ``position`` after the step that is filled up (``"pad"``), and how many samples
            at its end are repeats from earlier in the epoch. (0, 0) while it is not known.
        newest: The last item that was drawn, for any rank; None if the order is computed.
        item_count: Number of items in the epoch; None while it is not known.
    """

    def __init__(self, cut: Cut, last_batch: LastBatch, start: int) -> None:
        self.position = start
        self.is_over = False
        self.repeats = (0, 0)
        self.newest: Any = None
        self.item_count: int | None = None
        self.cut, self._last_batch = cut, last_batch

    def __next__(self) -> Any:
        step = None if self.is_over else self._next()
        if step is None:
            self.is_over = True
            raise StopIteration
        self.position += self.cut.global_count
        return step

    def _next(self) -> Any:
        """Return the next step; None at the end."""
        raise NotImplementedError


class OrderSteps(Steps):
    """Steps of the indices below ``length``, of which a rank computes only its own share.

    Without a permutation, the indices ascend.

    Attributes:
        as_arrays: Whether the steps are ranges or :class:`IndexArray` instead of lists. To be set
            before the first step is drawn.
    """

    def __init__(
        self,
        length: int,
        permutation: Permutation | None,
        cut: Cut,
        last_batch: LastBatch,
        start: int = 0,
    ) -> None:
        super().__init__(cut, last_batch, start)
        self._length, self._permutation = length, permutation
        self._end = cut.step_count(length, last_batch) * cut.global_count
        self.as_arrays = False
        self._block: list[Any] = []

    def _next(self) -> Any:
        if self.position >= self._end:
            return None
        if not self._block:
            self._block = self._compute()
        return self._block.pop()

    def _compute(self) -> list[Any]:
        """Return a block of steps from the position on, in reverse order."""
        cut, length, size = self.cut, self._length, self.cut.global_count
        stop = min(self._end, self.position + max(1, _BLOCK // cut.share) * size)
        starts = np.arange(self.position, stop, size) + cut.rank * cut.share
        positions = starts[:, None] + np.arange(cut.share)
        # Positions beyond the end wrap around to the epoch's start.
        indices = positions % length
        if self._permutation is not None:
            indices = self._permutation.at(indices)
        steps = list(indices) if self.as_arrays else indices.tolist()
        missing = cut.share - cut.count(length - self._end + size) if stop == self._end else 0
        if missing and self._last_batch == "keep":
            steps[-1] = steps[-1][:-missing]
        elif missing:
            self.repeats = self._end, missing
        return [self._as_array(step) for step in steps[::-1]] if self.as_arrays else steps[::-1]

    def _as_array(self, step: _Numbers) -> range | IndexArray:
        first, last = int(step[0]), int(step[-1])
        if self._permutation is None and last - first == len(step) - 1:
            return range(first, last + 1)
        return IndexArray(step)


class DrawnSteps(Steps):
    """Steps of what a user's sampler yields: every rank draws all items and keeps its share.

    Args:
        draw: Function that returns an iterator of the sampler.
        cut: The rank's share of each global step.
        last_batch: How the last global step is handled.
        start: Number of items before the first step, which are drawn and discarded.
        rng_state: State of the global generators while the sampler draws; None for the process's
            own.
        weigh: Function that returns the number of samples in an item.
        planned: The sampler if its batches are planned, see ``hooks.is_planned``; otherwise None.
        check_passed: Called with the last item that was discarded.
    """

    def __init__(
        self,
        draw: Callable[[], Iterator[Any]],
        cut: Cut,
        last_batch: LastBatch,
        *,
        start: int = 0,
        rng_state: RngState | None = None,
        weigh: Callable[[Any], int] = lambda _: 1,
        planned: Any = None,
        check_passed: Callable[[Any], None] = lambda _: None,
    ) -> None:
        super().__init__(cut, last_batch, start)
        self._draw, self._rng_state = draw, rng_state
        self._planned = planned
        self._weigh, self._check_passed = weigh, check_passed
        self._items: Iterator[Any] | None = None
        # Items that were drawn, and belong to no step yet.
        self._waiting: list[Any] = []
        self._to_pass, self._drawn_count = start, 0
        # The epoch's first items, with which the last step is filled up.
        self._beginning: list[Any] = []

    def _next(self) -> Any:
        cut = self.cut
        if self._to_pass:
            self._pass_over()
        items = self._take(cut.global_count)
        missing = cut.global_count - len(items)
        own_count = cut.count(len(items))
        if missing:
            self.item_count = self._drawn_count
            if not items or self._last_batch == "discard":
                return None
            if self._last_batch == "pad":
                if self._planned is not None:
                    items = self._planned.divided(items, cut.global_count)
                    own_count = cut.count(len(items))
                items += islice(cycle(self._beginning), cut.global_count - len(items))
            elif not own_count:
                return None
        step = items[cut.rank * cut.share :][: cut.share]
        if missing:
            repeated = sum(map(self._weigh, step[own_count:]))
            self.repeats = self.position + cut.global_count, repeated
        return step

    def _pass_over(self) -> None:
        """Draw and discard the items before the first step, or raise ValueError."""
        size = self.cut.global_count
        while self._to_pass:
            count = len(self._take(min(self._to_pass, _BLOCK)))
            self._to_pass -= count
            if not count and self._to_pass >= size:
                counts = self.position, self._drawn_count
                before, found = (-(-each // self.cut.share) for each in counts)
                raise too_few(before, found, "sampler")
            if not count:  # the last step that was delivered was short
                self._to_pass = 0
        self._check_passed(self.newest)

    def _take(self, count: int) -> list[Any]:
        """Draw and return the next items of all ranks; fewer at the end."""
        # The sampler may go on after an error of its own, so what was drawn waits.
        waiting, wanted = self._waiting, count - len(self._waiting)
        if wanted > 0 or self._items is None:
            rng_state = self._rng_state
            with contextlib.nullcontext() if rng_state is None else rng_state.used():
                if self._items is None:
                    self._items = only_next(self._draw())
                waiting.extend(islice(self._items, max(0, wanted)))
        taken, self._waiting = waiting[:count], waiting[count:]
        self._drawn_count += len(taken)
        self.newest = taken[-1] if taken else self.newest
        if self._last_batch == "pad":
            self._beginning += taken[: self.cut.global_count - len(self._beginning)]
        return taken


# Users' samplers --------------------------------------------------------------------------


def only_next(items: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that calls only ``next()`` of a user's iterator, as torch does.

    An iterator may begin again when ``iter()`` is called on it, as that of Lightning's wrapper of
    batch samplers does for predictions. Loops, ``list()`` and the functions of ``itertools`` call
    ``iter()``.
    """
    return map(next, repeat(items))


def iterate(sampler: Iterable[Any]) -> Iterator[Any]:
    """Return a sampler's iterator; a StopIteration, which would end the epoch, becomes an error."""
    try:
        return iter(sampler)
    except StopIteration as error:
        raise RuntimeError("iter() of the sampler raised StopIteration") from error


def restart_if_exhausted(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return a sampler's first iterator, or a new iterator if the first one is exhausted.

    A sampler that reads its state when it is iterated, such as torchdata's
    StatefulDistributedSampler, may have been saved at the end of an epoch: its first iterator
    yields nothing.
    """
    rest = only_next(begin())
    first = list(islice(rest, 1))
    return chain(first, rest) if first else only_next(begin())


def too_few(position: int, count: int, source: str) -> ValueError:
    """Return the error for a state whose position, in batches, is beyond the epoch's end."""
    return ValueError(
        "the state does not fit this loader: it was saved after "
        f"{counted(position, 'batch', 'batches')} of an epoch, and the {source} of this loader "
        f"yields only {count}. Give the sampler, dataset and batch_size with which it was saved"
    )
