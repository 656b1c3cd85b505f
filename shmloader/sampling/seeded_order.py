"""The order of a loader with a seed, which depends only on the seed and the epoch's number."""

import functools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler

from shmloader.sampling.checks import whole_number
from shmloader.sampling.indices import PositionedIndices
from shmloader.sampling.progress import Progress
from shmloader.sampling.rng import RngState
from shmloader.sampling.rollover import CarryOver
from shmloader.sampling.sampler_checkpoint import (
    SamplerCheckpoint,
    are_known,
    describe,
    epoch_of,
    log_redraw,
    restart_if_exhausted,
    set_epoch_of,
    size_of_batches,
)
from shmloader.sampling.steps import (
    Cut,
    DrawnSteps,
    LastBatch,
    OrderSteps,
    Prefixed,
    Steps,
    is_sharded,
    order_of,
)
from shmloader.sampling.steps import step_count as count_steps

# Indices that SeededRandomSampler computes at a time.
_BLOCK = 8192


class SeededRandomSampler(RandomSampler):
    """The ``sampler`` of a shuffling loader that has a seed: the order that the loader delivers.

    The loader does not draw from it. It is for frameworks that read, wrap or iterate the samplers
    of a loader; iterating it does not affect the loader.

    Attributes:
        epoch: Number of the epoch that the next iteration yields: the loader's newest epoch, or
            the one set by ``set_epoch`` since then, which the loader delivers next.
        seed: The loader's seed.

    Args:
        data_source: The dataset; its length may grow.
        seed: The loader's seed.
    """

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is iterated, and delivered by the loader, next."""
        self.epoch = whole_number(epoch, "epoch", minimum=0)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the epoch."""
        length = len(self.data_source)
        order = order_of(length, self.seed, self.epoch, shuffle=True)
        for start in range(0, length, _BLOCK):
            yield from order.at(np.arange(start, min(start + _BLOCK, length))).tolist()


class SeededOrder(Sampler[list[Any]]):
    """Index lists, or lists of index lists, one for each step of a rank.

    Iterating begins the epoch :attr:`epoch`. What an unfinished epoch before it would have left
    over is not carried over.

    Attributes:
        epoch: Number of the epoch that is iterated next.
        carry_over: What the next epoch begins with.

    Args:
        batch_size: Samples in a batch; None where whole batches are dealt to the ranks.
        num_shards: Batches in a step that is a list; 0 if a step is a single batch or whatever the
            batch sampler yields.
        cut: The rank's share of the global order, in samples, or in batches where these are dealt.
        last_batch: How the last global step is handled.
        seed: Seed of the order, together with the epoch.
        length: Length of the dataset, whose indices are the order, or an object with that length,
            which may grow.
        shuffle: Whether the indices are shuffled.
        items: A sampler or a batch sampler that yields the order instead.
        own_sampler: The loader's own sampler; frameworks may read it and set its epoch.
        device_count: Maximum number of index lists in a step of the batch sampler, whose steps must
            then all be lists of index lists; 0 if there is no such rule.
        may_shard: Whether the batch sampler may yield lists of index lists, which are checked;
            otherwise what it yields is passed on unchanged.
        is_positioned: Whether each step is wrapped in :class:`PositionedIndices`.
    """

    def __init__(
        self,
        batch_size: int | None,
        num_shards: int,
        cut: Cut,
        last_batch: LastBatch,
        seed: int,
        *,
        length: int | Sized | None = None,
        shuffle: bool = False,
        items: Iterable[Any] | None = None,
        own_sampler: SeededRandomSampler | None = None,
        device_count: int = 0,
        may_shard: bool = True,
        is_positioned: bool = False,
    ) -> None:
        self.epoch = 0
        self._batch_size = batch_size
        self._num_shards = num_shards
        self._cut = cut
        self._last_batch = last_batch
        self._seed = seed
        self._length = length
        self._shuffle = shuffle
        self._items = items
        self.own_sampler = own_sampler
        self._device_count = device_count
        self._may_shard = may_shard
        self._is_positioned = is_positioned
        # The epoch of the sampler when it was last set or read here.
        self._known_epoch = epoch_of(self._counting)
        self.carry_over = CarryOver()
        self._progress = Progress()
        self._done_ahead: frozenset[int] = frozenset()
        # The checkpoint of the newest epoch, once it is known, and the one that it began with.
        self._state: dict[str, Any] | None = None
        self._begun_from: dict[str, Any] | None = None
        self._steps: Steps | None = None

    @property
    def _counting(self) -> Iterable[Any] | None:
        """The sampler whose epoch other code may set."""
        return self.own_sampler if self._items is None else self._items

    @property
    def index_sampler(self) -> "SeededOrder":
        """The sampler that torch's iterators iterate."""
        return self

    def __len__(self) -> int:
        """Return the number of steps of the running epoch, or of the next one.

        Raises:
            TypeError: If the user's sampler has no length.
        """
        return count_steps(
            self._item_count() + len(self.carry_over.samples), self._cut, self._last_batch
        )

    @property
    def is_sharded(self) -> bool:
        """Whether each step is cut into a list of batches."""
        return self._num_shards > 0

    @property
    def may_give_lists(self) -> bool:
        """Whether a step may be a list of index lists; otherwise lists in it are indices."""
        return self.is_sharded or (self._may_shard and self._batch_size is None)

    def count_batches(self) -> int | None:
        """Return the number of steps of an epoch; None if it depends on a user's sampler."""
        return len(self) if self._items is None else None

    def _item_count(self) -> int:
        if isinstance(self._length, int):
            return self._length
        return len(self._items if self._length is None else self._length)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        return {
            **self.__dict__,
            "carry_over": self.carry_over.copy(),
            "_steps": None,
            "_progress": Progress(),
            "_done_ahead": frozenset(),
            "_state": None,
            "_begun_from": None,
        }

    def copy(self, own_sampler: SeededRandomSampler | None) -> "SeededOrder":
        """Return a copy with another ``own_sampler``, in which no epoch runs."""
        other = SeededOrder.__new__(SeededOrder)
        other.__dict__.update(self.__getstate__() | {"own_sampler": own_sampler})
        return other

    def __iter__(self) -> Iterator[Any]:
        """Begin the epoch, and return an iterator of its steps."""
        steps = self._steps = self._begin()
        drawing = self._shape(steps, self.epoch, self._done_ahead)
        if self._last_batch == "rollover":
            self.carry_over.begin(steps, drawing)
        return drawing

    def begin(self, epoch: int, progress: Progress, state: dict[str, Any] | None = None) -> None:
        """Set the epoch that is iterated next.

        Args:
            epoch: Number of the epoch.
            progress: The epoch's progress, at whose position it continues.
            state: What :meth:`dump` returned for the epoch; None for a new epoch.
        """
        self.epoch = epoch
        self._progress, self._done_ahead = progress, progress.ahead
        self._state = self._begun_from = state
        if self.own_sampler is not None:
            self.own_sampler.epoch = self._known_epoch = epoch

    def draw(
        self,
        drawing: Iterator[Any],
        generator: torch.Generator | None,  # noqa: ARG002 - the seed decides
        *,
        as_arrays: bool,
    ) -> Iterator[Any]:
        """Return ``drawing``, which ``iter()`` of this order returned.

        Args:
            drawing: The newest iterator of this order, from which nothing was drawn yet.
            generator: Not used.
            as_arrays: Whether index batches of an order of ours may be arrays or ranges.
        """
        if isinstance(self._steps, OrderSteps) and not self._num_shards:
            self._steps.as_arrays = as_arrays
        return drawing

    def set_epoch(self, epoch: int) -> None:  # noqa: ARG002 - samplers are told when it begins
        """Forget an epoch that other code set in the sampler, since the loader's was set later."""
        self.take_named_epoch()

    def take_named_epoch(self) -> int | None:
        """Return the epoch that other code has set in the sampler since the last call, if any.

        An epoch that is one more than the last known one does not count, since samplers may count
        epochs by themselves.
        """
        before, now = self._known_epoch, epoch_of(self._counting)
        self._known_epoch = now
        return None if now is None or before is None or now in (before, before + 1) else now

    def facts(self) -> dict[str, Any]:
        """Return what a state and this loader must have in common, on any number of ranks."""
        if self._items is None:
            kind = "shuffled" if self._shuffle else "in order"
        else:
            kind = describe(self._items)
        is_dealt = self._batch_size is None and self._items is not None
        batch: int | str = self._cut.global_count
        if is_dealt:
            size = size_of_batches(self._items)
            batch = f"{batch} whole" + ("" if size is None else f" of {size}")
        return {
            "global_batch": batch,
            "sampler": kind,
            "tail": self._last_batch,
            "seed": self._seed,
        }

    def check_position(self, position: int, carried: Sized) -> None:
        """Raise ValueError for a position after the end of an epoch, if that is known.

        Args:
            position: Number of steps that the user is done with.
            carried: The items that the previous epoch left over.
        """
        if self._items is not None:
            return  # checked when the user's sampler is drawn
        # The steps of the rank that has the most, since the state may be another rank's.
        most = -(-(self._item_count() + len(carried)) // self._cut.global_count)
        if position > most:
            raise ValueError(
                f"the state does not fit: it was taken at batch {position}, and an epoch has {most}"
            )

    def checkpoint(
        self,
        generator: torch.Generator | None = None,  # noqa: ARG002 - the seed decides
    ) -> SamplerCheckpoint:
        """Return what takes and restores checkpoints of the next epoch."""
        return SamplerCheckpoint(self._items, self.carry_over)

    def dump(
        self,
        generator: torch.Generator | None = None,  # noqa: ARG002 - the seed decides
    ) -> dict[str, Any]:
        """Return the checkpoint of the newest epoch, as plain values."""
        if self._state is None or not self._state["begun"]:
            self._state = {**self.checkpoint().dump(is_begun=False), "begun": True}
        return self._state

    def commit(self, position: int) -> None:
        """Carry over what the newest epoch leaves, if the user is done with ``position`` steps."""
        self.carry_over.commit(position, self)

    def repeats_in(self, number: int) -> int:
        """Return how many samples of step ``number`` (from 1) of the newest epoch are repeats."""
        steps = self._steps
        if steps is None or steps.repeats[0] != number:
            return 0
        return steps.repeats[1]

    # -------------------------------------------------------------------------------------

    def _begin(self) -> Steps:
        start, carried = self._progress.position, self.carry_over.samples
        if self._items is not None:
            return DrawnSteps(
                functools.partial(self._begin_items, self.epoch, start),
                RngState(self._seed, self.epoch),
                are_known(self._items),
                self._cut,
                self._last_batch,
                carried,
                _sample_count if self._batch_size is None and self._may_shard else _one,
                start,
            )
        order = order_of(self._item_count(), self._seed, self.epoch, shuffle=self._shuffle)
        if carried:
            order = Prefixed(carried, order)
        return OrderSteps(order, self._cut, self._last_batch, start)

    def _begin_items(self, epoch: int, start: int) -> Iterator[Any]:
        """Return an iterator of the user's sampler. Called for the first index of an epoch."""
        assert self._items is not None
        checkpoint, begun_from = self.checkpoint(), self._begun_from
        if self._state is not None:
            checkpoint.restore_generators(self._state)
        if begun_from is not None:
            checkpoint.restore_own(begun_from)
        self.dump()  # before anything is drawn
        log_redraw(self._items, start)
        set_epoch_of(self._items, epoch)
        self._known_epoch = epoch_of(self._items)
        items = iter(self._items)
        if begun_from is None or "own" not in begun_from:
            return items
        return restart_if_exhausted(items, self._items.__iter__)

    def _shape(self, steps: Steps, epoch: int, done_ahead: frozenset[int]) -> Iterator[Any]:
        cut = self._cut
        for items in steps:
            number = steps.drawn - 1
            if number in done_ahead:
                continue
            step = self._form(items, number)
            if self._is_positioned:
                first = number * cut.global_count + cut.rank * cut.share
                step = PositionedIndices(step, epoch, first, is_whole=self._batch_size is None)
            yield step

    def _form(self, items: list[Any], number: int) -> Any:
        """Return step ``number``, counted from 0, made of these items."""
        size = self._batch_size
        if size is None:
            (step,) = items
            if self._may_shard:
                _check_step(step, number, self._device_count)
            return step
        if self._num_shards:
            return [items[at : at + size] for at in range(0, len(items), size)]
        return items


def _one(_: object) -> int:
    return 1


def _sample_count(step: Any) -> int:
    return sum(map(len, step)) if is_sharded(step) else len(step)


def _check_step(step: Any, number: int, device_count: int) -> None:
    """Raise ValueError where a step of the user's batch sampler cannot be loaded as it is."""
    if isinstance(step, Sized) and len(step) == 0:
        raise ValueError(f"step {number} of the batch sampler is empty: {step!r}")
    if not is_sharded(step):
        if device_count:
            raise ValueError(
                f"step {number} of the batch sampler should be a list of index lists, one for each "
                f"of the {device_count} devices, but is {step!r}"
            )
        return
    if 0 < device_count < len(step):
        raise ValueError(
            f"step {number} of the batch sampler has {len(step)} index lists, and there are "
            f"{device_count} devices"
        )
    for shard, indices in enumerate(step):
        if not isinstance(indices, Sized) or is_sharded(indices):
            raise ValueError(
                f"step {number} of the batch sampler is a list of index lists, but its shard "
                f"{shard} is {indices!r}"
            )
        if len(indices) == 0:
            raise ValueError(f"step {number} of the batch sampler has an empty shard: {shard}")
