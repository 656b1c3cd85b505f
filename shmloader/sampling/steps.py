"""Cuts one global order into the steps of a rank.

An epoch is a sequence of *items*: indices of samples, or whole batches of a user's batch sampler.
A global step takes the next ``world_size * share`` items, and rank r gets the r-th run of ``share``
items, counted from 0. So the items of all ranks at a step, one rank after the other, are the same
sequence for any number of ranks, as long as the global step has the same length.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from shmloader.sampling.drawing import only_next, too_few
from shmloader.sampling.indices import IndexArray
from shmloader.sampling.permutation import Permutation
from shmloader.sampling.rng import RngState

#: What happens to items that do not fill the last global step: "keep" makes a shorter step of them,
#: "discard" leaves them out, "rollover" puts them first in the next epoch, and "pad" fills the step
#: up from the epoch's start.
LastBatch = Literal["keep", "discard", "rollover", "pad"]

# Positions of an order that are computed at a time: a few take as long as some thousand.
_BLOCK = 8192


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's share of each global step.

    Attributes:
        share: Number of items of a rank in a step, over all its shards.
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


class Order(Protocol):
    """The items of one epoch, with random access."""

    length: int

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices at these positions."""


class Sequential:
    """The numbers from 0 to ``length - 1``, in order."""

    def __init__(self, length: int) -> None:
        self.length = length

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions themselves."""
        return positions


class Prefixed:
    """An order with indices before it that the previous epoch left over."""

    def __init__(self, first: list[int], then: Order) -> None:
        self._first = np.array(first, dtype=np.int64)
        self._then = then
        self.length = len(first) + then.length

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices at these positions."""
        count = len(self._first)
        indices = np.empty_like(positions)
        is_first = positions < count
        indices[is_first] = self._first[positions[is_first]]
        indices[~is_first] = self._then.at(positions[~is_first] - count)
        return indices


class Steps(Iterator[list[Any]]):
    """The steps of one epoch for one rank: lists of items.

    Attributes:
        drawn: Number of steps that were yielded or passed over.
        is_over: Whether all steps were drawn.
        repeats: Number of a step, from 1, and how many samples at its end are repeats from earlier
            in the epoch (``"pad"``). (0, 0) while no such step is known.
        left_over: With ``"rollover"``: items for the next epoch, once this one is over.

    Args:
        last_batch: How the last global step is handled.
        start: Number of the first step that is yielded, from 0.
    """

    def __init__(self, last_batch: LastBatch, start: int = 0) -> None:
        self.drawn = start
        self.is_over = False
        self.repeats = (0, 0)
        self.left_over: list[Any] = []
        self._last_batch = last_batch

    def __next__(self) -> list[Any]:
        step = None if self.is_over else self._next()
        if step is not None:
            self.drawn += 1
            return step
        if self._last_batch == "rollover" and not self.is_over:
            self.left_over = self._rest()
        self.is_over = True
        raise StopIteration

    def _next(self) -> list[Any] | None:
        """Return the next step; None at the end."""
        raise NotImplementedError

    def _rest(self) -> list[Any]:
        """Return the items after the last whole step. Called at the end."""
        raise NotImplementedError


def step_count(item_count: int, cut: Cut, last_batch: LastBatch) -> int:
    """Return the number of steps of a rank in an epoch of ``item_count`` items."""
    whole, left = divmod(item_count, cut.global_count)
    if last_batch == "pad":
        return whole + (left > 0)
    if last_batch == "keep":
        return whole + (cut.count(left) > 0)
    return whole


class OrderSteps(Steps):
    """Steps of an order with random access, so that a rank computes only its own share.

    Attributes:
        as_arrays: Whether the steps are ranges or :class:`IndexArray` instead of lists. To be set
            before the first step is drawn.
    """

    def __init__(self, order: Order, cut: Cut, last_batch: LastBatch, start: int = 0) -> None:
        super().__init__(last_batch, start)
        self._order = order
        self._cut = cut
        self._count = step_count(order.length, cut, last_batch)
        self.as_arrays = False
        self._block: list[Any] = []

    def _next(self) -> Any:
        if self.drawn >= self._count:
            return None
        if not self._block:
            self._block = self._compute(self.drawn)
        return self._block.pop()

    def _rest(self) -> list[int]:
        start = self._count * self._cut.global_count
        rest: list[int] = self._order.at(np.arange(start, self._order.length)).tolist()
        return rest

    def _compute(self, first: int) -> list[Any]:
        """Return a block of steps that begins with step ``first``, in reverse order."""
        cut, length = self._cut, self._order.length
        stop = min(self._count, first + max(1, _BLOCK // cut.share))
        starts = np.arange(first, stop, dtype=np.int64) * cut.global_count + cut.rank * cut.share
        positions = starts[:, None] + np.arange(cut.share, dtype=np.int64)
        last_count = length - (self._count - 1) * cut.global_count
        missing = cut.share - cut.count(last_count) if stop == self._count else 0
        # Positions beyond the end wrap around to the epoch's start.
        indices = self._order.at(positions % length)
        steps = list(indices) if self.as_arrays else indices.tolist()
        if missing and self._last_batch == "keep":
            steps[-1] = steps[-1][:-missing]
        elif missing:
            self.repeats = (self._count, missing)
        if self.as_arrays:
            steps = [self._without_list(step) for step in steps]
        return steps[::-1]

    def _without_list(self, step: npt.NDArray[np.int64]) -> range | IndexArray:
        first, last = int(step[0]), int(step[-1])
        if type(self._order) is Sequential and last - first == len(step) - 1:
            return range(first, last + 1)
        return IndexArray(step)


class DrawnSteps(Steps):
    """Steps of what a user's sampler yields: every rank draws all items and keeps its share.

    Args:
        draw: Function that returns an iterator of the sampler.
        cut: The rank's share of each global step.
        last_batch: How the last global step is handled.
        first: Items that come before those of the sampler.
        rng_state: State of the global generators while the sampler draws; None for the process's
            own.
        draws_first: Whether the sampler draws from the global generators for its first item only.
        weigh: Function that returns the number of samples in an item.
        start: Number of the first step that is yielded; earlier steps are drawn and discarded.
        offset: Number of items before step 0, which are drawn and discarded, too.
        check_passed: Called with the last item that was discarded.

    Attributes:
        item_count: Number of items in the epoch, once the last one is drawn; else None.
        newest: The last item that was drawn, for any rank.
    """

    def __init__(
        self,
        draw: Callable[[], Iterator[Any]],
        cut: Cut,
        last_batch: LastBatch,
        first: Iterable[Any] = (),
        *,
        rng_state: RngState | None = None,
        draws_first: bool = False,
        weigh: Callable[[Any], int] = lambda _: 1,
        start: int = 0,
        offset: int = 0,
        check_passed: Callable[[Any], None] = lambda _: None,
    ) -> None:
        super().__init__(last_batch, start)
        self.newest: Any = None
        self._check_passed = check_passed
        self.item_count: int | None = None
        self._items_drawn = 0
        self._to_pass = self._before = offset + start * cut.global_count
        self._draw = draw
        self._rng_state = rng_state
        self._draws_first = draws_first
        # Whether the sampler has yielded its first item.
        self._has_begun = False
        self._cut = cut
        self._weigh = weigh
        self._items: Iterator[Any] | None = None
        # Items of ``first`` that were not yielded yet.
        self._waiting = list(first)
        # The epoch's first items, with which the last step is filled up.
        self._beginning: list[Any] = []
        # Items that do not fill the last step, and are not yielded.
        self._unfinished: list[Any] = []

    def _pass_over(self) -> None:
        """Draw the items before the first step that this object yields, and discard them.

        Raises:
            ValueError: If the sampler yields too few items for these steps.
        """
        cut = self._cut
        while self._to_pass:
            items = self._draw_items(min(self._to_pass, cut.global_count))
            self._keep_beginning(items)
            self._to_pass -= len(items)
            if not items and self._to_pass >= cut.global_count:
                before, found = (
                    -(-count // cut.share) for count in (self._before, self._items_drawn)
                )
                raise too_few(before, found, "sampler")
            if not items:  # the last step that was delivered was short
                self._to_pass = 0
        self._check_passed(self.newest)

    def _keep_beginning(self, items: list[Any]) -> None:
        if self._last_batch == "pad" and len(self._beginning) < self._cut.global_count:
            self._beginning += items[: self._cut.global_count - len(self._beginning)]

    def _next(self) -> list[Any] | None:
        cut = self._cut
        if self._to_pass:
            with self._random_numbers():
                self._pass_over()
        items = self._take(cut.global_count)
        self._keep_beginning(items)
        missing = cut.global_count - len(items)
        if missing == 0:
            return items[cut.rank * cut.share :][: cut.share]
        self.item_count = self._items_drawn
        if not items or self._last_batch in {"discard", "rollover"}:
            self._unfinished = items
            return None
        own_count = cut.count(len(items))
        if self._last_batch == "pad":
            beginning = self._beginning
            items += [beginning[number % len(beginning)] for number in range(missing)]
        elif own_count == 0:
            return None
        step = items[cut.rank * cut.share :][: cut.share]
        self.repeats = (self.drawn + 1, sum(map(self._weigh, step[own_count:])))
        return step

    def _take(self, count: int) -> list[Any]:
        # Exchanging the generators' states takes 40 µs, and more after a training step.
        if self._has_begun and self._draws_first:
            return self._draw_items(count)
        with self._random_numbers():
            return self._draw_items(count)

    def _random_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that sets the generators from which the sampler draws."""
        return contextlib.nullcontext() if self._rng_state is None else self._rng_state.used()

    def _rest(self) -> list[Any]:
        return self._unfinished

    def _draw_items(self, count: int) -> list[Any]:
        if self._items is None:
            self._items = only_next(self._draw())
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        waited = len(taken)
        try:
            taken.extend(islice(self._items, count - waited))
        except BaseException:
            # The sampler may go on after an error of its own, so keep the items already taken.
            self._waiting = taken + self._waiting
            raise
        self._has_begun = self._has_begun or len(taken) > waited
        self._items_drawn += len(taken)
        self.newest = taken[-1] if taken else self.newest
        return taken


def order_of(length: int, *key: int, shuffle: bool) -> Order:
    """Return the order of an epoch over the indices from 0 to ``length - 1``.

    Args:
        length: Number of indices.
        key: Seed and epoch, which determine a shuffled order.
        shuffle: Whether the order is shuffled.
    """
    return Permutation(length, *key) if shuffle else Sequential(length)


def is_sharded(step: object) -> bool:
    """Whether a step is a list of index lists, judged by its first element."""
    if not isinstance(step, list | tuple) or not step:
        return False
    return isinstance(step[0], list | tuple)
