"""The order of a loader without a seed: what its samplers yield, drawn as torch draws it."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from shmloader.sampling.hooks import set_epoch_of
from shmloader.sampling.indices import PositionedIndices, array_batches, is_drawn
from shmloader.sampling.progress import Progress
from shmloader.sampling.rng import GLOBAL_GENERATORS, global_rng_state
from shmloader.sampling.rollover import CarryOver, RolloverBatchSampler
from shmloader.sampling.sampler_state import (
    DRAWN_ELSEWHERE,
    DrawnEpoch,
    SamplerState,
    describe,
    size_of_batches,
)
from shmloader.sampling.steps import Steps, only_next, restart_if_exhausted, too_few

# Before the first epoch. Never changed.
_NO_EPOCH = DrawnEpoch(Progress())


class SamplerOrder:
    """The index batches of torch's samplers or the user's, or of an iterable dataset.

    Args:
        index_sampler: The sampler, the batch sampler, or torch's endless sampler for an iterable
            dataset.
        is_iterable: Whether the dataset is iterable. The workers then keep the position.
        seed: The seed of an iterable dataset's samples; None if there is none.

    Attributes:
        index_sampler: The sampler, which torch's iterators iterate.
        carry_over: The samples that the next epoch begins with; None if epochs carry nothing over.
    """

    def __init__(
        self, index_sampler: Any, is_iterable: bool = False, seed: int | None = None
    ) -> None:
        self.index_sampler = index_sampler
        is_rollover = isinstance(index_sampler, RolloverBatchSampler)
        self.carry_over: CarryOver | None = index_sampler.carry_over if is_rollover else None
        self._is_iterable, self._seed = is_iterable, seed
        self._epoch, self._number = _NO_EPOCH, 0

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        carried = self.carry_over
        own = {"_epoch": _NO_EPOCH, "_number": 0}
        return {**self.__dict__, **own, "carry_over": None if carried is None else carried.copy()}

    def __len__(self) -> int:
        """Return the number of batches of an epoch: the sampler's length."""
        return len(self.index_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of samplers that count epochs."""
        set_epoch_of(self.index_sampler, epoch)

    def named_epoch(self) -> None:
        """Return None: if other code sets a sampler's epoch, the sampler draws it by itself."""

    def begin(self, epoch: int, progress: Progress, saved: dict[str, Any] | None = None) -> None:
        """Set the epoch that is drawn next; see :meth:`SeededOrder.begin`."""
        self._epoch, self._number = DrawnEpoch(progress, saved), epoch

    def draw(
        self, drawing: Iterator[Any], generator: torch.Generator | None, *, as_arrays: bool
    ) -> Iterator[Any]:
        """Return an iterator of the epoch's index batches that were not delivered yet.

        Args:
            drawing: An iterator of the index sampler.
            generator: The loader's generator.
            as_arrays: Whether the batches of torch's samplers may be ranges or arrays.
        """
        state = self.state(generator)
        if self._is_iterable:
            # The base seed of a resumed epoch was drawn when the epoch first began. torch has drawn
            # another one for these workers, so set the generators back.
            state.restore_generators(self._epoch.saved)
            if self._seed is None:
                return drawing
            # The workers count the positions of the samples.
            number = self._number
            return (PositionedIndices(indices, number, 0) for indices in only_next(drawing))
        if as_arrays:
            drawing = array_batches(self.index_sampler, drawing) or drawing
        return EpochDraw(self._epoch, self.index_sampler, drawing, state, self.carry_over)

    def state(self, generator: torch.Generator | None = None) -> SamplerState:
        """Return an object that takes and restores states of the next epoch."""
        return SamplerState(self.index_sampler, self.carry_over, generator)

    def dump(self, generator: torch.Generator | None = None) -> dict[str, Any]:
        """Return the state of the newest epoch, as plain values."""
        epoch = self._epoch
        if epoch.undrawn is not None:
            # If the process's global generators were used before the first batch is drawn, the
            # epoch would have another order.
            epoch.undrawn.draw_first()
        if not epoch.state:  # an iterable dataset
            return {**self.state(generator).dump(has_started=False), "has_started": True}
        return epoch.dump(self.index_sampler)

    def dump_next(self, generator: torch.Generator | None) -> dict[str, Any]:
        """Return the state of the next epoch, as plain values.

        It has the states of those global generators from which that epoch may be drawn: its order,
        the base seed of its workers, and an iterable dataset's order in this process.
        """
        state = self.state(generator)
        names = GLOBAL_GENERATORS if self._is_iterable else state.global_generators
        if not names and (state.draws_seed or generator is None):
            names = ("torch",)
        dumped = state.dump(has_started=False)
        if self._seed is None and names:
            dumped["global_generators"] = global_rng_state(names)
        return dumped

    def commit(self) -> None:
        """Carry over what the newest epoch leaves over, if the user is done with the epoch."""
        progress = self._epoch.progress
        if self.carry_over is not None:
            self.carry_over.commit(progress, self.index_sampler)
        if progress.is_ended:
            self._epoch = DrawnEpoch(progress)  # a used loader keeps little memory

    def facts(self) -> dict[str, Any]:
        """Return the properties that a state and this loader must have in common."""
        sampler, last_batch = self.index_sampler, "keep"
        if self.carry_over is not None and sampler.drop_last:
            last_batch = "rollover"
        elif type(sampler) is BatchSampler and sampler.drop_last:
            last_batch = "discard"
        return {
            "global_batch": size_of_batches(sampler),
            "order": None if self._is_iterable else describe(sampler),
            "last_batch": last_batch,
            "seed": self._seed,
        }

    def dump_progress(self, *, in_order: bool) -> dict[str, Any]:  # noqa: ARG002 - no ranks
        """Return how far the newest epoch has come, as plain values."""
        return self._epoch.progress.dump()

    def load_progress(self, state: dict[str, Any] | None) -> Progress:
        """Return a new progress, or that which :meth:`dump_progress` has saved."""
        return Progress.load(state)

    def check_progress(self, state: dict[str, Any]) -> None:
        """Do nothing: the end of the epoch is known only when the sampler is drawn."""


class EpochDraw(Iterator[Any]):
    """Draws the index batches of one epoch, from any batch on. Used on the user's thread.

    Args:
        epoch: What a state needs of the epoch, which this object keeps up to date.
        index_sampler: The sampler.
        drawing: An iterator of it.
        state: Takes and restores its states.
        carry_over: Takes what the epoch leaves over; None if epochs carry nothing over.
    """

    def __init__(
        self,
        epoch: DrawnEpoch,
        index_sampler: Any,
        drawing: Iterator[Any],
        state: SamplerState,
        carry_over: CarryOver | None,
    ) -> None:
        self._epoch, self._index_sampler, self._state = epoch, index_sampler, state
        self._drawing, self._carry_over = drawing, carry_over
        # Numbers of the batches, to which those that were delivered ahead of their turn belong.
        progress = epoch.progress
        self._position: Iterator[int] = itertools.count(progress.start)
        if progress.ahead:
            self._position = progress.left_to_do(self._position)
        self._items: Iterator[Any] | None = None
        self._error: Exception | None = None
        epoch.undrawn = self
        if carry_over is not None:
            self._register(drawing)

    def __next__(self) -> Any:
        items = self._items
        if items is None:
            items = self._begin()
        item = next(items)
        self._epoch.add(next(self._position) + 1, item)
        return item

    def draw_first(self) -> None:
        """Draw the first batch now, unless it is drawn already."""
        if self._items is None:
            items = self._begin()
            self._items = itertools.chain(list(itertools.islice(items, 1)), items)

    def _begin(self) -> Iterator[Any]:
        """Begin the epoch, and return an iterator of its batches."""
        if self._error is not None:
            raise self._error  # the sampler was drawn in part
        try:
            self._items = self._begin_items()
        except Exception as error:
            self._error = error
            raise
        self._epoch.undrawn = None
        return self._items

    def _begin_items(self) -> Iterator[Any]:
        """Return an iterator of the batches from the position on."""
        epoch, state = self._epoch, self._state
        saved, drawing = epoch.saved, self._drawing
        if is_drawn(drawing):
            epoch.state = {**state.dump(has_started=False), "has_started": True, **DRAWN_ELSEWHERE}
            return only_next(drawing)
        if saved and saved["has_started"]:
            epoch.state = saved
            with state.drawing(saved):
                return self._pass_over(self._restored(drawing))
        if saved:
            state.restore_generators(saved)
        epoch.state = state.dump(has_started=True)
        return state.begin(epoch.state, self._restored(drawing))

    def _restored(self, drawing: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the sampler, after its own state was loaded if there is one."""
        epoch = self._epoch
        if not (epoch.saved and self._state.restore_own(epoch.saved)):
            return only_next(drawing)
        epoch.state["state"] = epoch.saved["state"]
        return restart_if_exhausted(self._iterate)

    def _pass_over(self, drawing: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the batches from the position on, of which one is drawn.

        Raises:
            ValueError: If there are fewer batches, or the last one before the position differs from
                that of the state.
        """
        epoch, passed, last = self._epoch, 0, None
        start, kind = epoch.progress.start, describe(self._index_sampler)
        for passed, last in enumerate(itertools.islice(drawing, start), 1):  # noqa: B007
            pass
        if passed < start:
            raise too_few(start, passed, kind)
        epoch.check_passed(last, kind)
        first = list(itertools.islice(drawing, 1))
        return epoch.progress.left_to_do(itertools.chain(first, drawing))

    def _iterate(self) -> Iterator[Any]:
        return self._register(iter(self._index_sampler))

    def _register(self, drawing: Iterator[Any]) -> Iterator[Any]:
        """Have the carry-over know the steps that are drawn, and return them."""
        if self._carry_over is not None and isinstance(drawing, Steps):
            self._carry_over.begin(drawing, self._index_sampler.batch_size)
        return drawing
