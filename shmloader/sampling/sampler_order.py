"""The order of a loader without a seed: what its samplers yield, drawn as torch draws it."""

import collections
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler

from shmloader.sampling.hooks import set_epoch_of
from shmloader.sampling.indices import PositionedIndices, array_batches, is_drawn
from shmloader.sampling.rng import (
    GLOBAL_GENERATORS,
    global_rng_state,
    with_global_rng_state,
)
from shmloader.sampling.sampler_state import (
    DRAWN_ELSEWHERE,
    DrawnEpoch,
    Order,
    SamplerState,
    describe,
    size_of_batches,
)
from shmloader.sampling.steps import only_next, restart_if_exhausted, too_few


class SamplerOrder(Order):
    """The index batches of torch's samplers or the user's, or of an iterable dataset.

    Args:
        index_sampler: The sampler, the batch sampler, or torch's endless sampler for an iterable
            dataset. torch's iterators iterate it.
        is_iterable: Whether the dataset is iterable. The workers then keep the position.
        seed: The seed of an iterable dataset's samples; None if there is none.
    """

    def __init__(
        self, index_sampler: Any, is_iterable: bool = False, seed: int | None = None
    ) -> None:
        super().__init__(index_sampler)
        self.index_sampler = index_sampler
        self._is_iterable, self._seed = is_iterable, seed

    def __len__(self) -> int:
        """Return the number of batches of an epoch: the sampler's length."""
        return len(self.index_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of samplers that count epochs."""
        set_epoch_of(self.index_sampler, epoch)

    def draw(self, drawing: Iterator[Any], *, as_arrays: bool) -> Iterator[Any]:
        """Return an iterator of the index batches that were not delivered; see :class:`Order`."""
        state = self.state()
        if self._is_iterable:
            # The base seed of a resumed epoch was drawn when the epoch first began. torch has drawn
            # another one for these workers, so set the generators back.
            state.restore_generators(self._epoch.saved)
            if self._seed is None:
                return drawing
            # The workers count the positions of the samples.
            number = self._epoch.number
            return (PositionedIndices(indices, number, 0) for indices in only_next(drawing))
        if as_arrays:
            drawing = array_batches(self.index_sampler, drawing) or drawing
        return EpochDraw(self, self._epoch, drawing, state)

    def dump(self) -> dict[str, Any]:
        """Return the state of the newest epoch, as plain values."""
        epoch = self._epoch
        if epoch.undrawn is not None:
            # If the process's global generators were used before the first batch is drawn, the
            # epoch would have another order.
            epoch.undrawn.draw_first()
        if not epoch.state:  # an iterable dataset
            return {**self.state().dump(has_started=False), "has_started": True}
        return epoch.dump(self.index_sampler)

    def dump_next(self) -> dict[str, Any]:
        """Return the state of the next epoch, as plain values.

        It has the states of those global generators from which that epoch may be drawn: its order,
        the base seed of its workers, and an iterable dataset's order in this process.
        """
        state = self.state()
        names = GLOBAL_GENERATORS if self._is_iterable else state.global_generators
        if not names and (state.draws_seed or self.generator is None):
            names = ("torch",)
        dumped = state.dump(has_started=False)
        if self._seed is None and names:
            dumped["global_generators"] = global_rng_state(names)
        return dumped

    def facts(self) -> dict[str, Any]:
        """Return the properties that a state and this loader must have in common."""
        sampler = self.index_sampler
        drops_last = type(sampler) is BatchSampler and sampler.drop_last
        return {
            "global_batch": size_of_batches(sampler),
            "order": None if self._is_iterable else describe(sampler, has_facts=True),
            "last_batch": "discard" if drops_last else "keep",
            "seed": self._seed,
        }


class EpochDraw(Iterator[Any]):
    """Draws the index batches of one epoch, from any batch on, and keeps its record up to date."""

    def __init__(
        self, order: SamplerOrder, epoch: DrawnEpoch, drawing: Iterator[Any], state: SamplerState
    ) -> None:
        self._order, self._epoch, self._state, self._drawing = order, epoch, state, drawing
        # The positions after the batches, without those that were delivered ahead of their turn.
        progress = epoch.progress
        self._positions: Iterator[int] = itertools.count(progress.start + 1)
        if progress.ahead:
            self._positions = progress.left_to_do(self._positions)
        self._items: Iterator[Any] | None = None
        self._error: Exception | None = None
        epoch.undrawn = self

    def __next__(self) -> Any:
        if self._items is None:
            self.draw_first()
        item = next(self._items)  # type: ignore[arg-type] # set by now
        epoch, position = self._epoch, next(self._positions)
        if position >= epoch.full_at:  # as add() does, in one call fewer
            epoch.forget_done(position)
        epoch.items[position] = item
        return item

    def draw_first(self) -> None:
        """Draw the first batch now, unless it is drawn already."""
        if self._items is not None:
            return
        if self._error is not None:
            raise self._error  # the sampler was drawn in part
        try:
            self._begin()
        except Exception as error:
            if self._items is None:
                self._error = error
            raise
        self._epoch.undrawn = None

    def _begin(self) -> None:
        """Draw up to the first batch that was not delivered, and that one as well."""
        epoch, state = self._epoch, self._state
        saved, items = epoch.saved, only_next(self._drawing)
        if is_drawn(self._drawing):
            epoch.state = {**state.dump(has_started=False), "has_started": True, **DRAWN_ELSEWHERE}
            self._items = items
            return
        if saved:
            state.restore_generators(saved)
        if saved and saved["has_started"]:
            epoch.state = saved
            with with_global_rng_state(saved.get("global_generators", {})):
                items = self._draw_one(items)
        else:
            epoch.state = state.dump(has_started=True)
            items = self._draw_one(items)
        self._items = epoch.progress.left_to_do(items)

    def _draw_one(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the batches from the position on, of which one is drawn."""
        epoch, state = self._epoch, self._state
        state.seed(epoch.state.get("seed"))
        try:
            if "state" in epoch.saved and state.restore_own(epoch.saved):
                epoch.state["state"] = epoch.saved["state"]
                items = restart_if_exhausted(functools.partial(iter, self._order.index_sampler))
            if epoch.state is epoch.saved:
                items = self._pass_over(items)
            self._items = items  # which may go on after an error
            return itertools.chain(list(itertools.islice(items, 1)), items)
        finally:
            state.seed(None)

    def _pass_over(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the batches from the position on.

        Those before are drawn. Raises ValueError if the last one of them is not the batch that was
        delivered.
        """
        epoch = self._epoch
        start, kind = epoch.progress.start, describe(self._order.index_sampler)
        before = enumerate(itertools.islice(items, start), 1)
        passed, last = collections.deque(itertools.chain([(0, None)], before), 1)[0]
        if passed < start:
            raise too_few(start, passed, kind)
        epoch.check_passed(last, kind)
        return items
