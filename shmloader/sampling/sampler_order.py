"""The order of a loader without a seed: what its samplers yield, drawn as torch draws it."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from itertools import islice
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from shmloader.interruptions import is_interruption
from shmloader.sampling.drawing import (
    LastDrawn,
    check_same,
    iterate,
    only_next,
    pass_over,
    restart_if_exhausted,
    too_few,
    without_done,
)
from shmloader.sampling.indices import PositionedStreams, array_batches, is_drawn
from shmloader.sampling.own_state import has_own_state
from shmloader.sampling.progress import Progress
from shmloader.sampling.rng import GLOBAL_GENERATORS, global_rng_state
from shmloader.sampling.rollover import CarryOver, RolloverBatchSampler, carries_over
from shmloader.sampling.sampler_checkpoint import (
    DRAWN_ELSEWHERE,
    SamplerCheckpoint,
    describe,
    is_known,
    log_redraw,
    may_differ_between_ranks,
    own_entry,
    set_epoch_of,
    size_of_batches,
)
from shmloader.sampling.steps import Steps


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
        self,
        index_sampler: Any,
        *,
        is_iterable: bool = False,
        seed: int | None = None,
    ) -> None:
        self.index_sampler = index_sampler
        is_rollover = isinstance(index_sampler, RolloverBatchSampler)
        self.carry_over: CarryOver | None = index_sampler.carry_over if is_rollover else None
        self._is_iterable = is_iterable
        self._seed = seed
        self._progress = Progress()
        self._state: dict[str, Any] | None = None
        self._drawn: DrawnEpoch | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        carried = self.carry_over
        return {
            **self.__dict__,
            "carry_over": None if carried is None else carried.copy(),
            "_progress": Progress(),
            "_state": None,
            "_drawn": None,
        }

    def __len__(self) -> int:
        """Return the number of batches of an epoch: the sampler's length."""
        return len(self.index_sampler)

    def count_batches(self) -> int | None:
        """Return the number of batches of an epoch; None unless the samplers are torch's own.

        The length of a user's sampler may take long to compute, or draw random numbers.
        """
        sampler = self.index_sampler
        if type(sampler) in {BatchSampler, RolloverBatchSampler}:
            sampler = sampler.sampler
        if type(sampler) in {SequentialSampler, RandomSampler}:
            with contextlib.suppress(Exception):  # a dataset without a length
                return len(self.index_sampler)
        return None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of samplers that count epochs."""
        set_epoch_of(self.index_sampler, epoch)

    def named_epoch(self) -> None:
        """Return None: if other code sets a sampler's epoch, the sampler draws it by itself."""

    def begin(self, epoch: int, progress: Progress, state: dict[str, Any] | None = None) -> None:
        """Set the epoch that is drawn next; see :meth:`SeededOrder.begin`."""
        self._progress, self._state, self._drawn = progress, state, None
        if isinstance(self.index_sampler, PositionedStreams):
            self.index_sampler.epoch = epoch

    def draw(
        self, drawing: Iterator[Any], generator: torch.Generator | None, *, as_arrays: bool
    ) -> Iterator[Any]:
        """Return an iterator of the epoch's index batches that were not delivered yet.

        Args:
            drawing: An iterator of the index sampler.
            generator: The loader's generator.
            as_arrays: Whether the batches of torch's samplers may be ranges or arrays.
        """
        checkpoint = self.checkpoint(generator)
        if self._is_iterable:
            # The base seed of a resumed epoch was drawn when the epoch first began. torch has drawn
            # another one for these workers, so set the generators back.
            checkpoint.restore_generators(self._state or {})
            return drawing
        if as_arrays:
            drawing = array_batches(self.index_sampler, drawing) or drawing
        self._drawn = DrawnEpoch(self.index_sampler, self._progress, self._state)
        return EpochDraw(self._drawn, drawing, checkpoint, self.carry_over)

    def checkpoint(self, generator: torch.Generator | None = None) -> SamplerCheckpoint:
        """Return an object that takes and restores checkpoints of the next epoch."""
        return SamplerCheckpoint(self.index_sampler, self.carry_over, generator)

    def dump(self, generator: torch.Generator | None = None) -> dict[str, Any]:
        """Return the checkpoint of the newest epoch, as plain values."""
        if self._drawn is None:
            return {**self.checkpoint(generator).dump(is_begun=False), "is_begun": True}
        return self._drawn.dump()

    def dump_next(self, generator: torch.Generator | None) -> dict[str, Any]:
        """Return the checkpoint of the next epoch, as plain values.

        It has the states of those global generators from which that epoch may be drawn: its order,
        the base seed of its workers, and an iterable dataset's order in this process.
        """
        checkpoint = self.checkpoint(generator)
        state = checkpoint.dump(is_begun=False)
        names = GLOBAL_GENERATORS if self._is_iterable else checkpoint.global_generators
        if not names and (generator is None or checkpoint.draws_seed):
            names = ("torch",)
        if self._seed is None and names:
            state["global_generators"] = global_rng_state(names)
        return state

    def commit(self, position: int) -> None:
        """Carry over what the newest epoch leaves over, if the user is done with the epoch.

        Args:
            position: Number of batches that the user is done with.
        """
        if self._progress.is_ended:
            self._drawn = None
        if self.carry_over is not None:
            self.carry_over.commit(position, self.index_sampler)

    def facts(self) -> dict[str, Any]:
        """Return the properties that a state and this loader must have in common."""
        sampler, last_batch = self.index_sampler, "keep"
        if isinstance(sampler, PositionedStreams):
            sampler = sampler.items
        if type(sampler) is BatchSampler:
            last_batch = "discard" if sampler.drop_last else "keep"
        elif carries_over(sampler):
            last_batch = "rollover"
        return {
            "global_batch": size_of_batches(sampler),
            "order": None if self._is_iterable else describe(sampler),
            "last_batch": last_batch,
            "seed": self._seed,
        }

    def dump_progress(self, *, in_order: bool) -> dict[str, Any]:  # noqa: ARG002 - no ranks
        """Return how far the newest epoch has come, as plain values."""
        return self._progress.dump()

    def load_progress(self, state: dict[str, Any]) -> Progress:
        """Return the progress that :meth:`dump_progress` has saved."""
        return Progress.load(state)

    def check_progress(self, state: dict[str, Any]) -> None:
        """Do nothing: the end of the epoch is known only when the sampler is drawn."""


class DrawnEpoch:
    """What a state needs of an epoch that is drawn. It outlives the iterator that draws.

    Args:
        index_sampler: The sampler that the epoch is drawn from.
        progress: The epoch's progress.
        state: The checkpoint that the epoch continues from; None for a new epoch.

    Attributes:
        state: The checkpoint of the epoch, once it has begun.
        last: Knows a checksum of the last batch that the user is done with.
        undrawn: The epoch's iterator, until it has begun.
    """

    __slots__ = ("_index_sampler", "last", "progress", "state", "undrawn")

    def __init__(
        self, index_sampler: Any, progress: Progress, state: dict[str, Any] | None
    ) -> None:
        self._index_sampler, self.progress, self.state = index_sampler, progress, state
        before = state.get("last_checksum") if state is not None and state["is_begun"] else None
        self.last = LastDrawn(progress, before)
        self.undrawn: EpochDraw | None = None

    def dump(self) -> dict[str, Any]:
        """Return what the epoch's order depends on, as plain values."""
        if self.undrawn is not None:
            # If the process's global generators were used before the first batch is drawn, the
            # epoch would have another order.
            self.undrawn.draw_first()
        assert self.state is not None
        is_any_rank = may_differ_between_ranks(self._index_sampler)
        return {**self.state, "last_checksum": None if is_any_rank else self.last.checksum()}


class EpochDraw(Iterator[Any]):
    """Draws the index batches of one epoch, from any batch on. Used on the user's thread.

    Args:
        epoch: What a state needs of the epoch, which this object keeps up to date.
        drawing: An iterator of the index sampler: the user's own, which may have a state.
        checkpoint: Takes and restores checkpoints of the sampler.
        carry_over: Takes what the epoch leaves over; None if epochs carry nothing over.
    """

    __slots__ = (
        "_ahead", "_carry_over", "_checkpoint", "_epoch", "_index_sampler", "_items", "_iterator",
        "_number", "_why_not_begun",
    )  # fmt: skip

    def __init__(
        self,
        epoch: DrawnEpoch,
        drawing: Iterator[Any],
        checkpoint: SamplerCheckpoint,
        carry_over: CarryOver | None,
    ) -> None:
        self._epoch, self._index_sampler = epoch, epoch._index_sampler
        self._iterator, self._checkpoint, self._carry_over = drawing, checkpoint, carry_over
        self._number, self._ahead = epoch.progress.position, epoch.progress.ahead
        self._items: Iterator[Any] | None = None
        self._why_not_begun = ""
        epoch.undrawn = self
        self._registered(drawing)

    def __next__(self) -> Any:
        items = self._items
        if items is None:
            items = self._items = self._begin_once()
        item = next(items)
        while self._number in self._ahead:
            self._number += 1
        self._epoch.last.add(self._number, item)
        self._number += 1
        return item

    def draw_first(self) -> None:
        """Draw the first batch now, unless it is drawn already."""
        if self._items is None:
            items = self._begin_once()
            self._items = itertools.chain(list(islice(items, 1)), items)

    def _begin_once(self) -> Iterator[Any]:
        """Begin the epoch, and return an iterator of its batches.

        Raises:
            ValueError: If an earlier call failed with an exception other than an interruption.
        """
        if self._why_not_begun:
            raise ValueError(
                f"the epoch could not be begun: {self._why_not_begun}. Begin a new one with "
                "iter(loader)"
            )
        try:
            items = self._begin()
        except Exception as error:
            if not is_interruption(error):
                self._why_not_begun = f"{type(error).__name__}: {error}"
            raise
        self._epoch.undrawn = None
        return items

    def _begin(self) -> Iterator[Any]:
        """Return an iterator of the epoch's batches. For a continued epoch, draw the first one."""
        epoch, checkpoint, state = self._epoch, self._checkpoint, self._epoch.state
        if is_drawn(self._iterator):
            begun = {**checkpoint.dump(is_begun=False), "is_begun": True}
            epoch.state = {**begun, **DRAWN_ELSEWHERE}
            return only_next(self._iterator)
        stateful, drawing = self._find_stateful()
        if state is None or not state["is_begun"]:
            checkpoint.restore_generators(state or {})
            begun = checkpoint.dump(is_begun=True)
            if stateful is not checkpoint.stateful:
                begun.update(own_entry(stateful))
            epoch.state = begun
            if state is not None and "state" in state:
                drawing = restart_if_exhausted(drawing, self._iterate)
            return checkpoint.begin(begun, drawing)
        position = epoch.progress.position
        with checkpoint.drawing(state):
            items = self._continue(state, stateful, drawing)
            first = list(islice(items, 1))
        return without_done(itertools.chain(first, items), position, self._ahead)

    def _iterate(self) -> Iterator[Any]:
        return self._registered(iter(self._index_sampler))

    def _registered(self, drawing: Iterator[Any]) -> Iterator[Any]:
        """Register an iterator with the carry-over, and return it for ``next()`` only."""
        if self._carry_over is not None and isinstance(drawing, Steps):
            self._carry_over.begin(drawing, drawing)
        return only_next(drawing)

    def _find_stateful(self) -> tuple[Any, Iterator[Any]]:
        """Return the iterator or sampler with a state of its own, or None; and what draws."""
        iterator, outer = self._iterator, self._index_sampler
        stateful = self._checkpoint.stateful
        if not isinstance(iterator, GeneratorType) and has_own_state(iterator):
            stateful = iterator
        elif stateful is None and type(outer) is BatchSampler and not is_known(outer.sampler):
            # torch's batch sampler hides the iterator that it draws from, which may have a state.
            inner = iterate(outer.sampler)
            iterator = iter(BatchSampler(only_next(inner), outer.batch_size, outer.drop_last))
            stateful = inner if has_own_state(inner) else None
        return stateful, only_next(iterator)

    def _continue(
        self, state: dict[str, Any], stateful: Any, drawing: Iterator[Any]
    ) -> Iterator[Any]:
        """Return an iterator of the batches from the position on.

        Raises:
            ValueError: If there are fewer batches, or the last one before the position differs from
                that of the state.
        """
        position, kind = self._epoch.progress.position, describe(self._index_sampler)
        if stateful is not None and "state" in state:
            stateful.load_state_dict(copy.deepcopy(state["state"]))
            if stateful is self._checkpoint.stateful:
                drawing = self._iterate()  # the present iterator began before the load
            drawing = restart_if_exhausted(drawing, self._iterate)
        sequential = self._sequential_from(position)
        if sequential is not None:
            return sequential
        log_redraw(self._index_sampler, position)
        if position:
            last = pass_over(drawing, position, kind)
            check_same(last, state.get("last_checksum"), position - 1, kind)
        return drawing

    def _sequential_from(self, position: int) -> Iterator[Any] | None:
        """Return an iterator of torch's sequential order that begins at a position.

        None if the order is another one.
        """
        outer = self._index_sampler
        inner = outer.sampler if type(outer) is BatchSampler else outer
        if type(inner) is not SequentialSampler:
            return None
        if position > len(outer):
            raise too_few(position, len(outer), describe(outer))
        if inner is outer:
            return iter(range(position, len(outer)))
        indices = range(position * outer.batch_size, len(inner))
        return iter(BatchSampler(indices, outer.batch_size, outer.drop_last))
