"""The order of a loader without a seed: what its samplers yield, drawn as torch draws it.

``SamplerOrder`` is the order; ``ResumableSampler`` draws one epoch of it and can be resumed.
"""

import collections
import contextlib
import copy
import itertools
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from shmloader.interruptions import is_interruption
from shmloader.sampling.indices import PositionedStreams, array_batches, as_list
from shmloader.sampling.progress import Progress
from shmloader.sampling.ranks import is_cut_for_ranks
from shmloader.sampling.rollover import CarryOver, RolloverBatchSampler, RolloverEpoch
from shmloader.sampling.sampler_checkpoint import (
    SamplerCheckpoint,
    are_known,
    chain,
    describe,
    has_own_state,
    is_known,
    log_redraw,
    own_state,
    set_epoch_of,
    size_of_batches,
)
from shmloader.sampling.user_iterators import only_next, restart_if_exhausted

# After how many batches a sampler's own state is taken: states may be large, and drawing the
# batches in between again costs little.
_OWN_STATE_EVERY = 1000


class SamplerOrder:
    """The index batches of torch's samplers or the user's, or of an iterable dataset.

    Args:
        index_sampler: The sampler, the batch sampler, or torch's endless sampler for an iterable
            dataset.
        is_iterable: Whether the dataset is iterable; its workers keep the position.
        batch_size: The loader's batch size; None with a batch sampler.
        last_batch: How the last batch is handled: "keep", "discard" or "rollover".
        seed: The seed of an iterable dataset's samples; None if there is none.

    Attributes:
        index_sampler: The sampler, which torch's iterators iterate.
    """

    def __init__(
        self,
        index_sampler: Any,
        *,
        is_iterable: bool = False,
        batch_size: int | None = None,
        last_batch: str = "keep",
        seed: int | None = None,
    ) -> None:
        self.index_sampler = index_sampler
        self._is_iterable = is_iterable
        self._batch_size = batch_size
        self._last_batch = last_batch
        self._seed = seed
        self._progress = Progress()
        self._state: dict[str, Any] | None = None
        self._drawn: ResumableSampler | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        return {**self.__dict__, "_progress": Progress(), "_state": None, "_drawn": None}

    def __len__(self) -> int:
        """Return the number of batches of an epoch: the sampler's length."""
        return len(self.index_sampler)

    @property
    def carry_over(self) -> CarryOver | None:
        """The samples that the next epoch begins with; None if epochs carry nothing over."""
        sampler = self.index_sampler
        return sampler.carry_over if isinstance(sampler, RolloverBatchSampler) else None

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
        """Return None: a sampler whose epoch other code has set draws that epoch by itself."""

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
            as_arrays: Whether the batches of torch's samplers may be arrays.
        """
        checkpoint = self.checkpoint(generator)
        if self._is_iterable:
            # The base seed drawn for these workers does not count, so restore the generators.
            checkpoint.restore_generators(self._state or {})
            return drawing
        if as_arrays:
            drawing = array_batches(self.index_sampler) or drawing
        self._drawn = ResumableSampler(
            self.index_sampler,
            drawing,
            self._progress,
            checkpoint,
            self.carry_over,
            self._state,
        )
        return self._drawn

    def checkpoint(self, generator: torch.Generator | None = None) -> SamplerCheckpoint:
        """Return what takes and restores checkpoints of the next epoch."""
        return SamplerCheckpoint(self.index_sampler, self.carry_over, generator)

    def dump(self, generator: torch.Generator | None = None) -> dict[str, Any]:
        """Return the checkpoint of the newest epoch, as plain values."""
        if self._drawn is None:
            return {**self.checkpoint(generator).dump(is_begun=False), "begun": True}
        return self._drawn.dump()

    def commit(self, position: int) -> None:
        """Carry over what the newest epoch leaves, if the user is done with it at ``position``."""
        if self.carry_over is not None:
            self.carry_over.commit(position, self.index_sampler)

    def facts(self) -> dict[str, Any]:
        """Return what a state and this loader must have in common."""
        sampler = self.index_sampler
        drops = type(sampler) is BatchSampler and sampler.drop_last
        return {
            "global_batch": self._batch_size or size_of_batches(sampler),
            "sampler": None if self._is_iterable else describe(sampler),
            "tail": "discard" if drops else self._last_batch,
            "seed": self._seed,
        }

    def check_position(self, position: int, carried: Any) -> None:
        """Do nothing: the end of the epoch is known only when the sampler is drawn."""


class ResumableSampler(Iterator[Any]):
    """Draws the index batches of one epoch, from any batch on. Used on the user's thread.

    Args:
        index_sampler: The sampler that the loader draws from.
        drawing: An iterator of it.
        progress: The epoch's progress; drawing begins at its position.
        checkpoint: Takes and restores checkpoints of the sampler.
        carry_over: Takes over what the epoch leaves over, if it leaves anything over.
        state: What :meth:`dump` returned for this epoch; None for a new epoch.
    """

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
        self._state = state
        self._number = self._begun_at = progress.position
        self._done_ahead = progress.ahead
        self._items: Iterator[Any] | None = None
        self._why_not_begun = ""
        # The batches drawn, from the one before the position on, with their numbers.
        self._drawn: collections.deque[tuple[int, Any]] = collections.deque()
        # The sampler, or its iterator, that has a state of its own; and states taken of it, each
        # with the number of batches drawn before.
        self._stateful: Any = None
        self._own_states: list[tuple[int, Any]] = []
        # Whether such a state determines the position within the epoch, since nothing around the
        # sampler buffers what it yields.
        self._tells_position = False
        self._last_checksum: int | None = None

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._begin_once()
        item = next(self._items)
        while self._number in self._done_ahead:
            self._number += 1
        drawn, last = self._drawn, self._progress.position - 1
        drawn.append((self._number, item))
        while drawn[0][0] < last:
            drawn.popleft()
        self._number += 1
        if self._tells_position and (self._number == 1 or self._number % _OWN_STATE_EVERY == 0):
            self._take_own_state()
        return item

    def dump(self) -> dict[str, Any]:
        """Return what the epoch's order depends on and how far the user is, as plain values."""
        if self._items is None:
            # Begin now: if the process's global generators were used before the first batch is
            # drawn, the epoch would be another one.
            items = self._begin_once()
            self._items = itertools.chain(list(islice(items, 1)), items)
        assert self._state is not None
        state = dict(self._state)
        if self._stateful is not None:
            number, own = next(
                each for each in reversed(self._own_states) if self._is_past(each[0])
            )
            state["own"], state["own_at"] = own, number
        state["last"] = self._checksum_of_last()
        return state

    # -------------------------------------------------------------------------------------

    def _begin_once(self) -> Iterator[Any]:
        """Begin. That cannot be repeated: once it has raised, each further call raises, too."""
        if self._why_not_begun:
            raise ValueError(
                f"the epoch could not be begun: {self._why_not_begun}. Begin a new one with "
                "iter(loader)"
            )
        try:
            return self._begin()
        except Exception as error:
            if not is_interruption(error):
                self._why_not_begun = f"{type(error).__name__}: {error}"
            raise

    def _begin(self) -> Iterator[Any]:
        """Return an iterator of the epoch's batches; if it is continued, the first one is drawn."""
        state = self._state
        self._stateful = self._find_stateful()
        self._tells_position = self._stateful is not None and (
            self._stateful is not self._checkpoint.stateful or self._is_only_batched()
        )
        if state is None or not state["begun"]:
            self._checkpoint.restore_generators(state or {})
            self._state = self._checkpoint.dump(is_begun=True)
            if self._stateful is not None:
                self._take_own_state()
            if state is not None and "own" in state:
                self._drawing = restart_if_exhausted(self._drawing, self._iterate)
            return self._drawing
        self._last_checksum = state.get("last")
        with self._checkpoint.drawing(state):
            items = self._continue(state)
            first = list(islice(items, 1))
        return self._without_done(first, items)

    def _iterate(self) -> Iterator[Any]:
        return self._registered(iter(self._index_sampler))

    def _registered(self, drawing: Iterator[Any]) -> Iterator[Any]:
        """Register an iterator with the carry-over, and return it for ``next()`` only."""
        if self._carry_over is not None and isinstance(drawing, RolloverEpoch):
            self._carry_over.begin(drawing, drawing)
        return only_next(drawing)

    def _without_done(self, first: list[Any], items: Iterator[Any]) -> Iterator[Any]:
        """Return the batches that were not delivered ahead of their turn."""
        batches, done_ahead = itertools.chain(first, items), self._done_ahead
        if not done_ahead:
            return batches
        numbers = itertools.count(self._progress.position)
        return filter(lambda _: next(numbers) not in done_ahead, batches)

    def _find_stateful(self) -> Any:
        """Return the iterator, or the sampler it draws from, that has a state of its own."""
        if has_own_state(self._iterator):
            return self._iterator
        if self._checkpoint.stateful is not None:
            return self._checkpoint.stateful
        outer = self._index_sampler
        if type(outer) is BatchSampler and not is_known(outer.sampler):
            # torch's batch sampler hides the iterator that it draws from, which may have a state.
            inner = iter(outer.sampler)
            self._drawing = iter(BatchSampler(only_next(inner), outer.batch_size, outer.drop_last))
            return inner if has_own_state(inner) else None
        return None

    def _is_only_batched(self) -> bool:
        """Whether only torch's batch samplers are around the sampler with a state."""
        around = itertools.takewhile(
            lambda each: each is not self._stateful, chain(self._index_sampler)
        )
        return all(type(each) is BatchSampler for each in around)

    def _continue(self, state: dict[str, Any]) -> Iterator[Any]:
        """Return an iterator of the batches from the position on, fast-forwarding if need be."""
        position, at = self._progress.position, 0
        if self._stateful is not None and "own" in state:
            at = state["own_at"]
            self._own_states.append((at, state["own"]))
            self._stateful.load_state_dict(copy.deepcopy(state["own"]))
            if self._stateful is self._checkpoint.stateful:
                self._drawing = self._iterate()  # the current iterator is older than the state
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

        None if the order is any other.
        """
        outer = self._index_sampler
        inner = outer.sampler if type(outer) is BatchSampler else outer
        if type(inner) is not SequentialSampler:
            return None
        if position > len(outer):
            raise self._too_few(position, len(outer))
        if inner is outer:
            return iter(range(position, len(outer)))
        indices = range(position * outer.batch_size, len(inner))
        return iter(BatchSampler(indices, outer.batch_size, outer.drop_last))

    def _fast_forward(self, count: int, position: int) -> None:
        """Draw ``count`` batches that were already delivered, and check the last one.

        Raises:
            ValueError: If there are fewer, or if the last one is not the same as before.
        """
        if not count:
            return
        passed = sum(1 for _ in islice(self._drawing, count - 1))
        last = list(islice(self._drawing, 1))
        kind = describe(self._index_sampler)
        if not last:
            raise self._too_few(position, passed)
        expected, actual = self._last_checksum, _checksum(last[0])
        if expected is not None and actual is not None and expected != actual:
            raise ValueError(
                f"the state does not fit this loader: the {kind} of this loader yields another "
                f"batch {position - 1} than that of the run whose state this is. Its order must be "
                "the same whenever it is iterated for the same epoch: seed it, or give it a "
                "generator=, a set_epoch(), or state_dict() and load_state_dict()"
            )

    def _too_few(self, position: int, count: int) -> ValueError:
        return ValueError(
            f"the state does not fit this loader: it was saved after {position} batches of an "
            f"epoch, and the {describe(self._index_sampler)} of this loader yields only {count}. "
            "Give the sampler, dataset and batch_size with which it was saved"
        )

    def _take_own_state(self) -> None:
        self._own_states.append((self._number, own_state(self._stateful)))
        # Of the states that the user is past, only the newest is needed.
        while len(self._own_states) > 1 and self._is_past(self._own_states[1][0]):
            del self._own_states[0]

    def _is_past(self, number: int) -> bool:
        """Whether the user is past a state that was taken after ``number`` batches.

        False for a state taken after the last batch: a sampler that has reached its end may already
        be in its next epoch.
        """
        return number < self._progress.position or not number

    def _checksum_of_last(self) -> int | None:
        """Return a checksum of the last batch that the user is done with.

        None for torch's and our samplers that yield one rank's share, since one rank may save the
        state for all ranks.
        """
        is_cut = any(map(is_cut_for_ranks, chain(self._index_sampler)))
        if is_cut and are_known(self._index_sampler):
            return None
        last = self._progress.position - 1
        for number, indices in self._drawn:
            if number == last:
                return _checksum(indices)
        return self._last_checksum if last + 1 == self._begun_at else None


def _checksum(indices: object) -> int | None:
    """Return a checksum of numbers and strings; None for anything else, whose text may change."""
    try:
        return zlib.crc32(json.dumps(as_list(indices)).encode())
    except (TypeError, ValueError):
        return None
