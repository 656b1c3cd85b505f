"""The order of a loader with a seed, which depends only on the seed and the epoch's number.

The module is long because each of the order's three sources (a permutation, the user's sampler, the
user's batch sampler) is drawn, measured, described and resumed in it.
"""

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from shmloader.probing import probe
from shmloader.sampling.drawing import (
    LastDrawn,
    check_same,
    iterate,
    restart_if_exhausted,
    too_few,
    without_done,
)
from shmloader.sampling.indices import PositionedIndices
from shmloader.sampling.progress import EpochCounter, Progress
from shmloader.sampling.ranks import Ranks
from shmloader.sampling.rng import RngState
from shmloader.sampling.rollover import CarryOver
from shmloader.sampling.sampler_checkpoint import (
    DRAWN_ELSEWHERE,
    SamplerCheckpoint,
    are_known,
    describe,
    epoch_of,
    log_redraw,
    may_count_epochs,
    may_differ_between_ranks,
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


class SeededOrder(Sampler[list[Any]]):
    """Yields the steps of one rank: index lists, or lists of index lists.

    ``iter()`` begins the epoch :attr:`epoch`. If the epoch before it was not finished, nothing that
    it leaves over is carried over.

    Attributes:
        epoch: Number of the epoch that is iterated next.
        carry_over: What the next epoch begins with.

    Args:
        batch_size: Samples in a batch. None if each step is a whole item: a batch of the user's
            batch sampler, or an index that is not batched.
        num_shards: Number of batches in each step, which is then a list of them. 0 if a step is a
            single batch or an item of the batch sampler.
        cut: The rank's share of the global order, in samples, or in items without a batch size.
        last_batch: How the last global step is handled.
        seed: Seed, together with the epoch's number, of a shuffled order and of the random numbers
            that the user's sampler draws.
        length: If the order consists of the dataset's indices: the dataset's length, or an object
            with that length, which may grow.
        shuffle: Whether the dataset's indices are shuffled.
        items: The user's sampler or batch sampler if that yields the order; otherwise None.
        device_count: If not 0, each step of the batch sampler must be a list of at most this many
            index lists.
        may_shard: Whether the batch sampler may yield lists of index lists. Its steps are then
            checked. Otherwise they are passed on unchanged.
        is_positioned: Whether each step is wrapped in :class:`PositionedIndices`.
        ranks: The rank and the world size that replace those of ``cut``, if they may be found only
            later; otherwise None.
        carry_over: What the next epoch begins with; None for nothing.
        counter: Counter of the loader's epochs, if ``items`` may draw from the samplers that the
            loader made. Each further pass of such a sampler then has the order of a further epoch.
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
        device_count: int = 0,
        may_shard: bool = True,
        is_positioned: bool = False,
        ranks: Ranks | None = None,
        carry_over: CarryOver | None = None,
        counter: EpochCounter | None = None,
    ) -> None:
        self.epoch = 0
        self._batch_size = batch_size
        self._num_shards = num_shards
        self._cut = cut
        self._ranks = ranks
        self._last_batch = last_batch
        self._seed = seed
        self._length = length
        self._shuffle = shuffle
        self._items = items
        self._device_count = device_count
        self._may_shard = may_shard
        self._is_positioned = is_positioned
        # The epoch of the user's sampler when it was last set or read here, and the epoch that the
        # sampler may have reached if it counts by itself.
        self._known_epoch = self._counted_epoch = epoch_of(items)
        # The epoch that other code had set in the sampler before the newest epoch was set there.
        self._named: int | None = None
        self.carry_over = CarryOver() if carry_over is None else carry_over
        self._counter = counter
        self._progress = Progress()
        # The checkpoint of the newest epoch, once it is known, and the one that it began with.
        self._state: dict[str, Any] | None = None
        self._begun_from: dict[str, Any] | None = None
        self._steps: Steps | None = None
        self._last = LastDrawn(self._progress, None)

    @property
    def cut(self) -> Cut:
        """The rank's share of the global order.

        Raises:
            ValueError: If the ranks are not known yet.
        """
        if self._ranks is None:
            return self._cut
        return Cut(self._cut.share, *self._ranks.find())

    @property
    def index_sampler(self) -> "SeededOrder":
        """The sampler that torch's iterators iterate."""
        return self

    def __len__(self) -> int:
        """Return the number of steps of the running epoch, or of the next one.

        Raises:
            TypeError: If the user's sampler has no length.
        """
        count = self._item_count() + len(self.carry_over.samples) - self._progress.offset
        return count_steps(max(0, count), self.cut, self._last_batch)

    @property
    def is_sharded(self) -> bool:
        """Whether each step is a list of batches that this order cuts."""
        return self._num_shards > 0

    @property
    def takes_batches(self) -> bool:
        """Whether each step is an item of the user's sampler or batch sampler."""
        return self._batch_size is None and self._items is not None

    @property
    def may_give_lists(self) -> bool:
        """Whether a step may be a list of index lists. Otherwise, a list in a step is one index."""
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
            "_state": None,
            "_last": LastDrawn(Progress(), None),
            "_begun_from": None,
        }

    def __iter__(self) -> Iterator[Any]:
        """Begin the epoch, and return an iterator of its steps."""
        steps = self._steps = self._begin()
        drawing = self._shape(steps, self.epoch)
        if self._last_batch == "rollover":
            self.carry_over.begin(steps, drawing)
        return drawing

    def begin(self, epoch: int, progress: Progress, state: dict[str, Any] | None = None) -> None:
        """Set the epoch that is iterated next.

        Args:
            epoch: Number of the epoch.
            progress: The epoch's progress. The epoch continues at its position.
            state: What :meth:`dump` returned for the epoch; None for a new epoch.
        """
        self.epoch = epoch
        self._progress, self._state, self._begun_from = progress, state, state
        self._last = LastDrawn(progress, None if state is None else state.get("last_checksum"))
        self._named = None
        self._known_epoch = self._counted_epoch = epoch_of(self._items)

    def draw(
        self,
        drawing: Iterator[Any],
        generator: torch.Generator | None,  # noqa: ARG002 - the seed decides
        *,
        as_arrays: bool,
    ) -> Iterator[Any]:
        """Return ``drawing``; its steps are arrays if ``as_arrays`` and the order allow it.

        Args:
            drawing: The newest iterator of this order.
            generator: Not used.
            as_arrays: Whether steps may be ranges or arrays instead of lists. That applies only to
                an order of the dataset's indices without shards.
        """
        steps = self._steps
        if steps is not None and steps.drawn > self._progress.position:
            self._state = {**self.dump(), **DRAWN_ELSEWHERE}
        if isinstance(steps, OrderSteps) and not self._num_shards:
            steps.as_arrays = as_arrays
        return drawing

    def set_epoch(self, epoch: int) -> None:  # noqa: ARG002 - samplers are told when it begins
        """Ignore an epoch that other code set in the sampler before: the loader's was set later."""
        self._named = None
        self._known_epoch = self._counted_epoch = epoch_of(self._items)

    def expect_epoch(self, epoch: int) -> None:
        """Make :meth:`named_epoch` ignore this epoch and the one before it in the user's sampler.

        For an order that is made after earlier epochs of the sampler: a sampler that counts epochs
        by itself has reached ``epoch`` by now, and any other still has the last one that was set.
        """
        self._known_epoch, self._counted_epoch = max(0, epoch - 1), epoch

    def know_epochs_of(self, other: "SeededOrder") -> None:
        """Ignore those epochs of the user's sampler that another order of it ignores."""
        self._known_epoch, self._counted_epoch = other._known_epoch, other._counted_epoch

    def named_epoch(self) -> int | None:
        """Return the epoch that other code has set in the user's sampler; None if it set none.

        A sampler that counts epochs by itself adds one when it is iterated. That epoch does not
        count as set by other code.
        """
        now = epoch_of(self._items)
        return self._named if now in (None, self._known_epoch, self._counted_epoch) else now

    def facts(self) -> dict[str, Any]:
        """Return the properties that a state and this loader must have in common.

        They depend neither on the rank nor on how many ranks share a global step.
        """
        if self._items is None:
            kind = "shuffled" if self._shuffle else "in order"
        else:
            kind = describe(self._items)
        batch: int | str = self.cut.global_count
        if self.takes_batches:  # which ranks take in turns, however many ranks there are
            size, shards = size_of_batches(self._items), probe(self._items, "num_shards")
            batch = "any number of samples" if size is None else f"{size} samples"
            if isinstance(shards, int) and shards:
                batch = f"{batch} in each of {shards} shards"
        return {
            "global_batch": batch,
            "order": kind,
            "last_batch": self._last_batch,
            "seed": self._seed,
        }

    def check_progress(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a position after an epoch's end, or a state of other ranks alone.

        Args:
            state: A state of the loader.
        """
        cut, saved = self.cut, state.get("rank")
        if saved is not None and list(saved) != [cut.rank, cut.world_size]:
            rank, world_size = saved
            raise ValueError(
                f"the state does not fit this loader:\n- rank: {rank} of {world_size} ranks in the "
                f"state, {cut.rank} of {cut.world_size} in this loader. With in_order=False, each "
                "rank has a state of its own: load it on that rank of as many ranks, or save "
                "states with in_order=True."
            )
        if self._items is not None:
            return  # checked when the user's sampler is drawn
        # The number of steps of the rank with the most, since the state may be another rank's.
        carried = state["sampler"].get("carry_over", ())
        most = -(-(self._item_count() + len(carried)) // cut.global_count)
        if state["position"] > most:
            raise too_few(state["position"], most, "order")

    def dump_progress(self, *, in_order: bool) -> dict[str, Any]:
        """Return how far the newest epoch has come, as plain values for any number of ranks.

        Whole items of the user's sampler are counted singly, and otherwise global steps.

        Args:
            in_order: Whether steps are delivered in order. Otherwise, each of several ranks has
                delivered other steps, and the values are those of this rank alone.
        """
        cut, state = self.cut, self._progress.dump(self._count_done)
        if not in_order and (cut.world_size > 1 or ("ahead" in state and self.takes_batches)):
            state["rank"] = [cut.rank, cut.world_size]
        return state

    def _count_done(self, steps: int) -> int:
        """Return how many items are before a step, or how many steps, if these are counted."""
        if not self.takes_batches:
            return steps
        count = self._progress.offset + steps * self.cut.global_count
        total = self._steps.item_count if isinstance(self._steps, DrawnSteps) else None
        return count if total is None else min(count, total)

    def load_progress(self, state: dict[str, Any]) -> Progress:
        """Return the progress that :meth:`dump_progress` has saved, on these ranks."""
        size = self.cut.global_count if self.takes_batches else 1
        offset = state["position"] % size
        return Progress.load(state, lambda count: -(-(count - offset) // size), offset)

    def checkpoint(
        self,
        generator: torch.Generator | None = None,  # noqa: ARG002 - the seed decides
    ) -> SamplerCheckpoint:
        """Return an object that takes and restores checkpoints of the next epoch."""
        return SamplerCheckpoint(self._items, self.carry_over)

    def dump(
        self,
        generator: torch.Generator | None = None,  # noqa: ARG002 - the seed decides
    ) -> dict[str, Any]:
        """Return the checkpoint of the newest epoch, as plain values."""
        if self._state is None or not self._state["is_begun"]:
            self._state = {**self.checkpoint().dump(is_begun=False), "is_begun": True}
        is_any_rank = self._items is None or may_differ_between_ranks(self._items)
        return {**self._state, "last_checksum": None if is_any_rank else self._last.checksum()}

    def dump_next(
        self,
        generator: torch.Generator | None,  # noqa: ARG002 - the seed decides
    ) -> dict[str, Any]:
        """Return the checkpoint of the next epoch, as plain values."""
        return self.checkpoint().dump(is_begun=False)

    def commit(self, position: int) -> None:
        """Carry over what the newest epoch leaves over, if the user is done with the epoch.

        Args:
            position: Number of steps that the user is done with.
        """
        self.carry_over.commit(position, self)

    def repeats_in(self, number: int) -> int:
        """Return how many samples of step ``number`` (from 1) of the newest epoch are repeats."""
        steps = self._steps
        if steps is None or steps.repeats[0] != number:
            return 0
        return steps.repeats[1]

    # -------------------------------------------------------------------------------------

    def steps_of(self, epoch: int, start: int = 0) -> Steps:
        """Return the steps of this rank in an epoch of the dataset's indices.

        Args:
            epoch: Number of the epoch.
            start: Number of the first step that is returned.
        """
        carried = self.carry_over.samples
        order = order_of(self._item_count(), self._seed, epoch, shuffle=self._shuffle)
        if carried:
            order = Prefixed(carried, order)
        return OrderSteps(order, self.cut, self._last_batch, start)

    def sample_count(self) -> int:
        """Return the number of samples of this rank in the running epoch, or in the next one."""
        cut = self.cut
        count = self._item_count() + len(self.carry_over.samples)
        if self._last_batch == "keep":
            whole, left = divmod(count, cut.global_count)
            return whole * cut.share + cut.count(left)
        return count_steps(count, cut, self._last_batch) * cut.share

    def without_repeats(self) -> "SeededOrder":
        """Return a copy that has each sample once: none is repeated, and none is left out."""
        other = copy.copy(self)
        other._last_batch = "keep"
        return other

    def _begin(self) -> Steps:
        start, carried = self._progress.position, self.carry_over.samples
        if self._items is not None:
            return DrawnSteps(
                functools.partial(self._begin_items, self.epoch, start),
                self.cut,
                self._last_batch,
                carried,
                rng_state=RngState(self._seed, self.epoch),
                draws_first=are_known(self._items),
                weigh=_sample_count if self._batch_size is None and self._may_shard else _one,
                start=start,
                offset=self._progress.offset,
                check_passed=functools.partial(
                    check_same,
                    expected=(self._begun_from or {}).get("last_checksum"),
                    number=start - 1,
                    kind=describe(self._items),
                ),
            )
        return self.steps_of(self.epoch, start)

    def _begin_items(self, epoch: int, start: int) -> Iterator[Any]:
        """Begin an epoch of the user's sampler, and return its iterator.

        Called when the first item of the epoch is drawn.
        """
        assert self._items is not None
        self._named = self.named_epoch()  # set since iter(), for the next epoch
        checkpoint, begun_from = self.checkpoint(), self._begun_from
        if self._state is not None:
            checkpoint.restore_generators(self._state)
        if begun_from is not None:
            checkpoint.restore_own(begun_from)
        self.dump()  # before anything is drawn
        log_redraw(self._items, start)
        with contextlib.nullcontext() if self._counter is None else self._counter.telling():
            set_epoch_of(self._items, epoch)
        self._known_epoch = epoch_of(self._items)
        self._counted_epoch = self._known_epoch
        if self._counted_epoch is not None and may_count_epochs(self._items):
            self._counted_epoch += 1
        items = iterate(self._items)
        if self._counter is not None:
            items = self._counter.count_passes(items)
        if begun_from is None or "state" not in begun_from:
            return items
        return restart_if_exhausted(items, functools.partial(iterate, self._items))

    def _shape(self, steps: Steps, epoch: int) -> Iterator[Any]:
        """Return an iterator of the tickets' indices.

        It can be continued after an error of the user's sampler.
        """
        cut, offset, last = self.cut, self._progress.offset, self._last

        def shape(items: list[Any]) -> Any:
            number = steps.drawn - 1
            if isinstance(steps, DrawnSteps):
                last.add(number, steps.newest)
            try:
                step = self._form(items, number)
            except BaseException:
                steps.is_over = True  # what follows would be counted wrongly
                raise
            if not self._is_positioned:
                return step
            first = offset + number * cut.global_count + cut.rank * cut.share
            return PositionedIndices(step, epoch, first, is_whole=self._batch_size is None)

        return map(shape, without_done(steps, steps.drawn, self._progress.ahead))

    def _form(self, items: list[Any], number: int) -> Any:
        """Return the step that these items make. Steps are numbered from 0."""
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
