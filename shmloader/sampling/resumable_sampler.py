"""Draws one epoch's index batches from a loader's samplers, from any batch on."""

import copy
import itertools
from collections.abc import Iterator
from itertools import islice
from types import GeneratorType
from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

from shmloader.interruptions import is_interruption
from shmloader.messages import Unsaved
from shmloader.sampling.fast_forward import check_same, checksum, pass_over, too_few, without_done
from shmloader.sampling.own_state import has_own_state
from shmloader.sampling.progress import Progress
from shmloader.sampling.rollover import CarryOver
from shmloader.sampling.sampler_checkpoint import (
    BEGUN_ELSEWHERE,
    SamplerCheckpoint,
    chain,
    describe,
    is_known,
    log_redraw,
    may_differ_between_ranks,
    own_entry,
    take_own_state,
)
from shmloader.sampling.steps import Steps
from shmloader.sampling.user_iterators import has_begun, iterate, only_next, restart_if_exhausted

# After how many batches a sampler's own state is taken: states may be large, and drawing the
# batches in between again costs little.
_OWN_STATE_EVERY = 1000


class DrawnEpoch:
    """What a state needs of an epoch that is drawn. It outlives the iterator that draws.

    Args:
        index_sampler: The sampler that the epoch is drawn from.
        progress: The epoch's progress.
        state: The checkpoint that the epoch continues from; None for a new epoch.

    Attributes:
        state: The checkpoint of the epoch, once it has begun.
        own_states: States of the sampler or iterator that has a state of its own, each with the
            number of batches drawn before; None if nothing has one.
        drawn: The batches drawn, from the one before the position on, with their numbers.
        last_checksum: Checksum of the batch before the position at which the epoch continued.
        undrawn: The epoch's iterator, until it has begun.
    """

    __slots__ = (
        "_begun_at", "_index_sampler", "_progress", "drawn", "last_checksum", "own_states",
        "state", "undrawn",
    )  # fmt: skip

    def __init__(
        self, index_sampler: Any, progress: Progress, state: dict[str, Any] | None
    ) -> None:
        self._index_sampler, self._progress = index_sampler, progress
        self._begun_at = progress.position
        self.state = state
        self.own_states: list[tuple[int, Any]] | None = None
        self.drawn: list[tuple[int, Any]] = []
        self.last_checksum: int | None = None
        self.undrawn: ResumableSampler | None = None

    def dump(self) -> dict[str, Any]:
        """Return what the epoch's order depends on, as plain values.

        They include a checksum of the last batch that the user is done with.
        """
        if self.undrawn is not None:
            # If the process's global generators were used before the first batch is drawn, the
            # epoch would have another order.
            self.undrawn.draw_first()
        assert self.state is not None
        state = dict(self.state)
        if self.own_states is not None:
            number, own = next(each for each in reversed(self.own_states) if self._is_past(each[0]))
            state = {key: value for key, value in state.items() if key not in ("state", "unsaved")}
            state.update(own_entry(own), state_at=number)
        state["last_checksum"] = self._checksum_of_last()
        return state

    def add_own_state(self, number: int, own: object) -> None:
        """Add a state that was taken after ``number`` batches."""
        own_states = self.own_states = self.own_states or []
        if own_states and isinstance(own, Unsaved):
            return  # the epoch can be resumed from an earlier state
        own_states.append((number, own))
        # Of the states that the user is past, only the newest is needed.
        while len(own_states) > 1 and self._is_past(own_states[1][0]):
            del own_states[0]

    def _is_past(self, number: int) -> bool:
        """Whether the user is past a state that was taken after ``number`` batches.

        A state taken at the user's position does not count, unless it was taken before the first
        batch: after its last batch, a sampler may already be in its next epoch.
        """
        return number < self._progress.position or not number

    def _checksum_of_last(self) -> int | None:
        """Return a checksum of the last batch that the user is done with; None if not known."""
        if may_differ_between_ranks(self._index_sampler):
            return None
        last = self._progress.position - 1
        for number, indices in self.drawn:
            if number == last:
                return checksum(indices)
        return self.last_checksum if last + 1 == self._begun_at else None


class ResumableSampler(Iterator[Any]):
    """Draws the index batches of one epoch, from any batch on. Used on the user's thread.

    Args:
        index_sampler: The sampler that the loader draws from.
        drawing: An iterator of ``index_sampler``.
        progress: The epoch's progress; drawing begins at its position.
        checkpoint: Takes and restores checkpoints of the sampler.
        carry_over: Takes what the epoch leaves over; None if epochs carry nothing over.
        state: What :meth:`DrawnEpoch.dump` returned for this epoch; None for a new epoch.

    Attributes:
        epoch: What a state needs of the epoch.
    """

    __slots__ = (
        "_carry_over", "_checkpoint", "_done_ahead", "_drawing", "_index_sampler", "_items",
        "_iterator", "_number", "_progress", "_stateful", "_tells_position", "_why_not_begun",
        "epoch",
    )  # fmt: skip

    def __init__(
        self,
        index_sampler: Any,
        drawing: Iterator[Any],
        progress: Progress,
        checkpoint: SamplerCheckpoint,
        carry_over: CarryOver | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._index_sampler = index_sampler
        self._carry_over = carry_over
        # The user's own iterator: it may have a state.
        self._iterator = drawing
        self._drawing = self._registered(drawing)
        self._progress = progress
        self._checkpoint = checkpoint
        self._number = progress.position
        self._done_ahead = progress.ahead
        self._items: Iterator[Any] | None = None
        self._why_not_begun = ""
        # The sampler or iterator that has a state of its own.
        self._stateful: Any = None
        # Whether such a state determines the position within the epoch. It does if nothing around
        # the sampler buffers what the sampler yields.
        self._tells_position = False
        self.epoch = DrawnEpoch(index_sampler, progress, state)
        self.epoch.undrawn = self

    def __next__(self) -> Any:
        items = self._items
        if items is None:
            items = self._items = self._begin_once()
        item = next(items)
        while self._number in self._done_ahead:
            self._number += 1
        drawn, last = self.epoch.drawn, self._progress.position - 1
        drawn.append((self._number, item))
        while drawn[0][0] < last:
            del drawn[0]
        self._number += 1
        if self._tells_position and (self._number == 1 or self._number % _OWN_STATE_EVERY == 0):
            self._take_own_state()
        return item

    def draw_first(self) -> None:
        """Draw the first batch now, unless it is drawn already."""
        if self._items is None:
            items = self._begin_once()
            self._items = itertools.chain(list(islice(items, 1)), items)

    # -------------------------------------------------------------------------------------

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
        self.epoch.undrawn = None
        return items

    def _begin(self) -> Iterator[Any]:
        """Return an iterator of the epoch's batches. For a continued epoch, draw the first one."""
        state = self.epoch.state
        self._stateful = self._find_stateful()
        self._tells_position = self._stateful is not None and (
            self._stateful is not self._checkpoint.stateful or self._is_only_batched()
        )
        if has_begun(self._iterator):
            dumped = self._checkpoint.dump(is_begun=False)
            self.epoch.state = {**dumped, "is_begun": True, **BEGUN_ELSEWHERE}
            return self._drawing
        if state is None or not state["is_begun"]:
            self._checkpoint.restore_generators(state or {})
            begun = self._checkpoint.dump(is_begun=True, draws_seed=not self._has_drawn())
            self.epoch.state = begun
            if self._stateful is not None:
                self._take_own_state()
            if state is not None and "state" in state:
                self._drawing = restart_if_exhausted(self._drawing, self._iterate)
            return self._checkpoint.begin(begun, self._drawing)
        self.epoch.last_checksum = state.get("last_checksum")
        with self._checkpoint.drawing(state):
            items = self._continue(state)
            first = list(islice(items, 1))
        position = self._progress.position
        return without_done(itertools.chain(first, items), position, self._done_ahead)

    def _has_drawn(self) -> bool:
        """Whether the sampler's iterator was used before it came here, as toolkits do to resume."""
        return isinstance(self._iterator, GeneratorType) and (self._iterator.gi_suspended)

    def _iterate(self) -> Iterator[Any]:
        return self._registered(iter(self._index_sampler))

    def _registered(self, drawing: Iterator[Any]) -> Iterator[Any]:
        """Register an iterator with the carry-over, and return it for ``next()`` only."""
        if self._carry_over is not None and isinstance(drawing, Steps):
            self._carry_over.begin(drawing, drawing)
        return only_next(drawing)

    def _find_stateful(self) -> Any:
        """Return the iterator or sampler that has a state of its own; None if there is none."""
        is_generator = isinstance(self._iterator, GeneratorType)
        if not is_generator and has_own_state(self._iterator):
            return self._iterator
        if self._checkpoint.stateful is not None:
            return self._checkpoint.stateful
        outer = self._index_sampler
        if type(outer) is BatchSampler and not is_known(outer.sampler):
            # torch's batch sampler hides the iterator that it draws from, which may have a state.
            inner = iterate(outer.sampler)
            self._drawing = iter(BatchSampler(only_next(inner), outer.batch_size, outer.drop_last))
            return inner if has_own_state(inner) else None
        return None

    def _is_only_batched(self) -> bool:
        """Whether the sampler with a state is wrapped in nothing but torch's batch samplers."""
        around = itertools.takewhile(
            lambda each: each is not self._stateful, chain(self._index_sampler)
        )
        return all(type(each) is BatchSampler for each in around)

    def _continue(self, state: dict[str, Any]) -> Iterator[Any]:
        """Return an iterator of the batches from the position on, fast-forwarding if need be."""
        position, at = self._progress.position, 0
        if self._stateful is not None and "state" in state:
            at = state["state_at"]
            self.epoch.add_own_state(at, state["state"])
            self._stateful.load_state_dict(copy.deepcopy(state["state"]))
            if self._stateful is self._checkpoint.stateful:
                self._drawing = self._iterate()  # the current iterator began before the load
            if not at:
                self._drawing = restart_if_exhausted(self._drawing, self._iterate)
            if not self._tells_position:
                log_redraw(self._index_sampler, position)
        elif (sequential := self._sequential_from(position)) is not None:
            return sequential
        else:
            log_redraw(self._index_sampler, position)
        self._fast_forward(position - at, position)
        return self._drawing

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

    def _fast_forward(self, count: int, position: int) -> None:
        """Draw ``count`` batches that were already delivered, and check the last one.

        Raises:
            ValueError: If there are fewer batches, or the last one differs from that of the state.
        """
        if not count:
            return
        kind = describe(self._index_sampler)
        last = pass_over(self._drawing, count, position, kind)
        check_same(last, self.epoch.last_checksum, position - 1, kind)

    def _take_own_state(self) -> None:
        self.epoch.add_own_state(self._number, take_own_state(self._stateful))
