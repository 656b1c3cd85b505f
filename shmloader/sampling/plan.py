"""What a loader draws in place of its sampler, where a step is more than a batch of its own."""

import functools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from shmloader.probing import probe
from shmloader.sampling.origin import (
    Origin,
    are_known,
    describe,
    not_over,
    size_of_batches,
    tell_passed_over,
)
from shmloader.sampling.positions import PositionedIndices
from shmloader.sampling.progress import Progress, is_all
from shmloader.sampling.rng import Streams
from shmloader.sampling.steps import Cut, DrawnSteps, OrderSteps, Rest, Steps, Tail, order_of
from shmloader.sampling.steps import step_count as count_steps


class StepPlan(Sampler[list[Any]]):
    """Index lists, or lists of index lists, one for each step of a rank.

    Iterating begins the epoch :attr:`epoch`; what an unfinished epoch before it would have left
    over counts as not drawn.

    Attributes:
        epoch: Number of the epoch that is iterated next.
        rest: What the last complete epoch has left over.

    Args:
        batch_size: Samples of a batch; None where whole batches are dealt.
        num_shards: Batches of a step; 0: a step is no list, but one batch, or what the batch
            sampler gives.
        cut: The rank's part of the global order, in samples, or in batches where these are dealt.
        tail: Of the last global step.
        seed: Of the order, with the epoch.
        length: Of the dataset, whose indices are the order; or what has it, and may grow.
        shuffle: Whether they are shuffled.
        items: A sampler, or a batch sampler, that gives the order in place of these.
        device_count: Most index lists of a step that a batch sampler gives, all of whose steps
            must be lists of such; 0 for any.
        may_shard: Whether what a batch sampler gives may be a list of index lists, and is looked
            at; else it is handed on as it is.
        is_placed: Whether each step is given as a :class:`PositionedIndices`.
    """

    def __init__(
        self,
        batch_size: int | None,
        num_shards: int,
        cut: Cut,
        tail: Tail,
        seed: int,
        *,
        length: int | Sized | None = None,
        shuffle: bool = False,
        items: Iterable[Any] | None = None,
        device_count: int = 0,
        may_shard: bool = True,
        is_placed: bool = False,
    ) -> None:
        self.epoch = 0
        self._batch_size = batch_size
        self._num_shards = num_shards
        self._cut = cut
        self._tail = tail
        self._seed = seed
        self._length = length
        self._shuffle = shuffle
        self._items = items
        self._device_count = device_count
        self._may_shard = may_shard
        self._is_placed = is_placed
        # What the sampler's own count of epochs is known to stand at.
        self._told = epoch_of(items)
        self.rest: list[Any] = []
        self._progress = Progress()
        self._given: frozenset[int] = frozenset()
        # What the newest epoch comes of, once that is known; and what it was begun with.
        self._found: dict[str, Any] | None = None
        self._loaded: dict[str, Any] | None = None
        self._steps: Steps | None = None
        self._drawing: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Steps of the epoch that runs, or of the next one if none does.

        Raises:
            TypeError: If the user's sampler has no length.
        """
        return count_steps(self._item_count() + len(self.rest), self._cut, self._tail)

    @property
    def is_sharded(self) -> bool:
        """Whether each step is cut into a list of batches."""
        return self._num_shards > 0

    @property
    def may_give_lists(self) -> bool:
        """Whether a step may be a list of index lists; else what looks so are indices."""
        return self.is_sharded or (self._may_shard and self._batch_size is None)

    @property
    def has_own_order(self) -> bool:
        """Whether no sampler of the user's gives the order."""
        return self._items is None

    def _item_count(self) -> int:
        if isinstance(self._length, int):
            return self._length
        return len(self._items if self._length is None else self._length)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but a running epoch, which stays with this plan: a copy begins its own."""
        return {
            **self.__dict__,
            "_steps": None,
            "_drawing": iter(()),
            "_progress": Progress(),
            "_given": frozenset(),
            "_found": None,
            "_loaded": None,
        }

    def __iter__(self) -> Iterator[Any]:
        """The steps of the epoch."""
        self._steps = self._begin()
        self._drawing = self._shape(self._steps, self.epoch, self._given)
        return self._drawing

    def begin(self, epoch: int, progress: Progress, found: dict[str, Any] | None = None) -> None:
        """Name the epoch that is iterated next.

        Args:
            epoch: Its number.
            progress: How far it has come: it goes on there.
            found: What :meth:`dump` gave of it; None for a new epoch.
        """
        self.epoch = epoch
        self._progress, self._given = progress, progress.ahead
        self._found = self._loaded = found

    def take_named_epoch(self) -> int | None:
        """The epoch that the user's sampler was told by others than us, since it was last asked.

        One more than we have told it is none: samplers may count by themselves.
        """
        told, now = self._told, epoch_of(self._items)
        self._told = now
        return None if now is None or told is None or now in (told, told + 1) else now

    def facts(self) -> dict[str, Any]:
        """What a state must have in common with this to go on here: on any number of ranks."""
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
            "tail": {"uneven": "keep"}.get(self._tail, self._tail),
            "seed": self._seed,
        }

    def check_position(self, position: int, rest: Sized) -> None:
        """Raise ValueError for a position past the end of an epoch, where that is known at once.

        Args:
            position: With how many steps the user is done.
            rest: What the epoch before had left over.
        """
        if self._items is not None:
            return  # the user's sampler is found to end too early
        # Of the rank that has the most steps: the state may be another rank's.
        most = -(-(self._item_count() + len(rest)) // self._cut.global_count)
        if position > most:
            raise ValueError(
                f"the state does not fit: it is of batch {position}, and an epoch has {most}"
            )

    @property
    def origin(self) -> Origin:
        """What the next epoch will come of, beside its number."""
        return Origin(self._items, self)

    def dump(self) -> dict[str, Any]:
        """What the epoch comes of that was begun last, as plain values."""
        if self._found is None or not self._found["begun"]:
            self._found = {**self.origin.dump(is_begun=False), "begun": True}
        return self._found

    def _begin(self) -> Steps:
        start = self._progress.position
        if self._items is not None:
            streams = Streams(self._seed, self.epoch)
            return DrawnSteps(
                functools.partial(self._begin_items, self.epoch, start),
                streams,
                are_known(self._items),
                self._cut,
                self._tail,
                self.rest,
                _sample_count if self._batch_size is None and self._may_shard else _one,
                start,
            )
        order = order_of(self._item_count(), self._seed, self.epoch, shuffle=self._shuffle)
        if self.rest:
            order = Rest(self.rest, order)
        return OrderSteps(order, self._cut, self._tail, start)

    def _begin_items(self, epoch: int, start: int) -> Iterator[Any]:
        """Iterate over a user's sampler, for the first index of an epoch."""
        assert self._items is not None
        origin, loaded = self.origin, self._loaded
        if self._found is not None:
            origin.restore_generators(self._found)
        if loaded is not None:
            origin.restore_own(loaded)
        self.dump()  # before anything is drawn
        tell_passed_over(self._items, start)
        set_epoch_of(self._items, epoch)
        self._told = epoch_of(self._items)
        items = iter(self._items)
        return items if loaded is None or "own" not in loaded else not_over(items, self._items)

    def _shape(self, steps: Steps, epoch: int, given: frozenset[int]) -> Iterator[Any]:
        cut = self._cut
        for items in steps:
            number = steps.drawn - 1
            if number in given:
                continue
            step = self._form(items, number)
            if self._is_placed:
                first = number * cut.global_count + cut.rank * cut.share
                step = PositionedIndices(step, epoch, first, is_whole=self._batch_size is None)
            yield step

    def _form(self, items: list[Any], number: int) -> Any:
        """Step ``number``, from 0, of these items."""
        size = self._batch_size
        if size is None:
            (step,) = items
            if self._may_shard:
                _check_step(step, number, self._device_count)
            return step
        if self._num_shards:
            return [items[at : at + size] for at in range(0, len(items), size)]
        return items

    def repeats_in(self, number: int) -> int:
        """How many samples of step ``number`` (from 1) of the newest epoch are repeats."""
        steps = self._steps
        if steps is None or steps.repeats[0] != number:
            return 0
        return steps.repeats[1]

    def begin_with(self, rest: Iterable[Any]) -> None:
        """Have the next epoch begin with this; what others have left counts no more."""
        self.rest = list(rest)
        if self._tail == "rollover":
            self._steps = None

    def settle(self, position: int) -> None:
        """Take over what an epoch has left, if the user is done with all its steps.

        Args:
            position: With how many that is.
        """
        steps = self._steps
        if steps is None or self._tail != "rollover" or position < steps.drawn:
            return
        if not steps.is_over and is_all(position, self):
            next(self._drawing, None)  # in-process, nobody has asked for the end
        if steps.is_over:
            self.rest, self._steps = steps.rest, None


def is_sharded(step: object) -> bool:
    """Whether a step is a list of index lists, judged by its first element."""
    if not isinstance(step, list | tuple) or not step:
        return False
    return isinstance(step[0], list | tuple)


def set_epoch_of(sampler: object, epoch: int) -> None:
    """Tell a sampler, or the one in a batch sampler, which epoch comes, if it counts epochs."""
    for told in (sampler, probe(sampler, "sampler")):
        set_epoch = probe(told, "set_epoch")
        if callable(set_epoch):
            set_epoch(epoch)
            return


def epoch_of(sampler: object) -> int | None:
    """The epoch that a sampler, or the one in a batch sampler, says it was told."""
    for told in (sampler, probe(sampler, "sampler")):
        if callable(probe(told, "set_epoch")):
            epoch = probe(told, "epoch")
            return epoch if type(epoch) is int and epoch >= 0 else None
    return None


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
                f"of {device_count} devices, but is {step!r}"
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
