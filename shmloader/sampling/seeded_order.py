"""The order of a loader with a seed, which depends only on the seed and the epoch's number."""

import contextlib
import copy
import functools
from collections.abc import Iterator, Sized
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch.utils.data import Sampler

from shmloader.sampling.arguments import Ranks
from shmloader.sampling.hooks import epoch_of, is_planned, set_epoch_of
from shmloader.sampling.indices import Permutation, PositionedIndices
from shmloader.sampling.progress import EpochCounter, Progress
from shmloader.sampling.rng import RngState
from shmloader.sampling.sampler_state import (
    DRAWN_ELSEWHERE,
    DrawnEpoch,
    Order,
    SamplerState,
    describe,
    size_of_batches,
)
from shmloader.sampling.steps import (
    Cut,
    DrawnSteps,
    LastBatch,
    OrderSteps,
    Steps,
    iterate,
    restart_if_exhausted,
    too_few,
)


def _is_wrong(batch: object) -> bool:
    """Whether a batch sampler's batch is empty, or a list of lists."""
    if isinstance(batch, Sized) and not len(batch):
        return True
    return isinstance(batch, list | tuple) and isinstance(batch[0], list)


@dataclass(eq=False)
class SeededOrder(Order, Sampler[PositionedIndices]):
    """Yields the index lists of one rank, with their positions.

    The position in an epoch counts the steps of all ranks together; if each step is a whole item of
    the user's sampler, it counts the items of all ranks, so that the epoch continues on any number
    of ranks.

    Attributes:
        known_epochs: The epochs that the user's sampler may have without other code having set one:
            those that the loader has set, and the next one, if the sampler counts by itself.

    Args:
        batch_size: Samples in a batch. None if each step is a whole item: a batch of the user's
            batch sampler, or an index that is not batched.
        last_batch: How the last global step is handled.
        seed: Seed, together with the epoch's number, of a shuffled order and of the random numbers
            that the user's sampler draws.
        length: If the order consists of the dataset's indices: the dataset's length, or an object
            with that length, which may grow.
        shuffle: Whether the dataset's indices are shuffled.
        items: The user's sampler or batch sampler if that yields the order; otherwise None.
        ranks: Finds the rank and the world size, of a loader that divides its order; else None.
        counter: Counter of the loader's epochs, if ``items`` may draw from the samplers that the
            loader made. Each further pass of such a sampler then has the order of a further epoch.
    """

    batch_size: int | None
    last_batch: LastBatch
    seed: int
    _: KW_ONLY
    length: int | Sized | None = None
    shuffle: bool = False
    items: Any = None
    ranks: Ranks | None = None
    counter: EpochCounter | None = None

    def __post_init__(self) -> None:
        super().__init__(self.items)
        self.known_epochs: tuple[int | None, ...] = (epoch_of(self.items),)
        # The epoch that other code had set there before the newest epoch was set.
        self._named: int | None = None
        self._steps: Steps | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        return {**super().__getstate__(), "_steps": None}

    @property
    def cut(self) -> Cut:
        """The rank's share of the global order, in samples, or in items without a batch size.

        Raises ValueError while the ranks are not known.
        """
        share = self.batch_size or 1
        return Cut(share) if self.ranks is None else Cut(share, *self.ranks.find())

    @property
    def index_sampler(self) -> "SeededOrder":
        """The sampler that torch's iterators iterate."""
        return self

    def __len__(self) -> int:
        """Return the number of steps of the running epoch, or of the next one."""
        # An epoch that continues on other ranks may begin within one of their steps.
        progress = self._epoch.progress
        offset = progress.start % progress.unit
        return self.cut.step_count(max(0, self._item_count() - offset), self.last_batch)

    @property
    def takes_batches(self) -> bool:
        """Whether each step is an item of the user's sampler or batch sampler."""
        return self.batch_size is None and self.items is not None

    @property
    def _divides_batches(self) -> bool:
        """Whether the batches of the user's batch sampler are divided among ranks."""
        return self.batch_size is None and self.ranks is not None

    @property
    def _size(self) -> int:
        """How many items the position counts as one."""
        return 1 if self.takes_batches else self.cut.global_count

    def _item_count(self) -> int:
        length = self.items if self.length is None else self.length
        return length if isinstance(length, int) else len(length)

    # Epochs ------------------------------------------------------------------------------

    def begin(self, number: int, progress: Progress, saved: dict[str, Any] | None = None) -> None:
        """Set the epoch that is iterated next; see :meth:`Order.begin`."""
        super().begin(number, progress, saved)
        self._steps = None
        self.set_epoch(number)

    def __iter__(self) -> Iterator[Any]:
        """Begin the epoch, and return an iterator of its steps."""
        steps = self._steps = self._begin_steps()
        # What belongs to this epoch, since another one may begin before it is drawn.
        shape = functools.partial(self._shape, steps, self._epoch)
        return map(shape, self._epoch.progress.left_to_do(steps))

    def draw(self, drawing: Iterator[Any], *, as_arrays: bool) -> Iterator[Any]:
        """Return ``drawing``, the newest iterator of this order; see :class:`Order`."""
        steps, epoch = self._steps, self._epoch
        if steps is not None and steps.position > epoch.progress.position * self._size:
            epoch.state = {**self.dump(), **DRAWN_ELSEWHERE}
        if isinstance(steps, OrderSteps):
            steps.as_arrays = as_arrays
        return drawing

    def steps_of(self, epoch: int, start: int = 0) -> OrderSteps:
        """Return this rank's steps of an epoch, after ``start`` samples of all ranks."""
        length = self._item_count()
        order = Permutation(length, self.seed, epoch) if self.shuffle else None
        return OrderSteps(length, order, self.cut, self.last_batch, start)

    def _begin_steps(self) -> Steps:
        items, drawn = self.items, self._epoch
        start = drawn.progress.position * self._size
        if items is None:
            return self.steps_of(drawn.number, start)
        return DrawnSteps(
            functools.partial(self._begin_items, drawn.number),
            self.cut,
            self.last_batch,
            start=start,
            rng_state=RngState(self.seed, drawn.number),
            check_passed=lambda last: drawn.check_passed(last, describe(items)),
            planned=items if is_planned(items) else None,
            **({"weigh": len} if self._divides_batches else {}),
        )

    def _begin_items(self, epoch: int) -> Iterator[Any]:
        """Begin an epoch of the user's sampler, when its first item is drawn."""
        self._named = self.named_epoch()  # set since iter(), for the next epoch
        state, saved = self.state(), self._epoch.saved
        state.restore_generators(saved)
        has_own = state.restore_own(saved)
        self.dump()  # before anything is drawn
        with contextlib.nullcontext() if self.counter is None else self.counter.telling():
            set_epoch_of(self.items, epoch)
        self.known_epochs = epoch, epoch + 1  # which it counts by itself
        return restart_if_exhausted(self._iterate) if has_own else self._iterate()

    def _iterate(self) -> Iterator[Any]:
        items = iterate(self.items)
        return items if self.counter is None else self.counter.count_passes(items)

    def _shape(self, steps: Steps, epoch: DrawnEpoch, items: list[Any]) -> PositionedIndices:
        """Return a ticket's indices."""
        cut, is_whole, step = steps.cut, self.batch_size is None, items
        first = steps.position - cut.global_count + cut.rank * cut.share
        if steps.newest is not None:
            epoch.add(steps.position // self._size, steps.newest)
        if is_whole:
            (step,) = items
            if self._divides_batches and _is_wrong(step):
                steps.is_over = True  # what follows would be counted wrongly
                raise ValueError(
                    "batch_sampler should yield lists of indices, none of them empty, but batch "
                    f"{first} is {step!r}. Each rank gets whole batches."
                )
        return PositionedIndices(step, epoch.number, first, is_whole=is_whole)

    # The epochs of the user's sampler ----------------------------------------------------

    def set_epoch(self, epoch: int) -> None:  # noqa: ARG002 - samplers are told when it begins
        """Ignore an epoch that other code set in the sampler before: the loader's was set later."""
        self.known_epochs, self._named = (epoch_of(self.items),), None

    def named_epoch(self) -> int | None:
        """Return the epoch that other code, not its own count, has set in the user's sampler."""
        now = epoch_of(self.items)
        return self._named if now in (None, *self.known_epochs) else now

    # States ------------------------------------------------------------------------------

    def state(self) -> SamplerState:
        """Return an object that takes and restores states; the loader's generator is not used."""
        return SamplerState(self.items, None)

    def dump(self) -> dict[str, Any]:
        """Return the state of the newest epoch, as plain values."""
        epoch = self._epoch
        if not epoch.state:
            own = {"state": epoch.saved["state"]} if "state" in epoch.saved else {}
            epoch.state = {**self.dump_next(), **own, "has_started": True}
        return epoch.dump(self.items)

    def facts(self) -> dict[str, Any]:
        """Return what a state and this loader must have in common, on any number of ranks."""
        kind = "shuffled" if self.shuffle else "in order"
        batch: int | str = self.cut.global_count
        if self.takes_batches:  # which ranks take in turns, however many ranks there are
            size = size_of_batches(self.items)
            batch = "any number of samples" if size is None else f"{size} samples"
        return {
            "global_batch": batch,
            "order": kind if self.items is None else describe(self.items, has_facts=True),
            "last_batch": self.last_batch,
            "seed": self.seed,
        }

    def check_progress(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a position after an epoch's end, or a state of other ranks alone."""
        cut, saved = self.cut, state.get("rank")
        if saved is not None and list(saved) != [cut.rank, cut.world_size]:
            rank, world_size = saved
            raise ValueError(
                f"the state does not fit this loader:\n- rank: {rank} of {world_size} ranks in the "
                f"state, {cut.rank} of {cut.world_size} in this loader. With in_order=False, each "
                "rank has a state of its own: load it on that rank of as many ranks, or save "
                "states with in_order=True."
            )
        if self.items is not None:
            return  # checked when the user's sampler is drawn
        # The number of steps of the rank with the most, since the state may be another rank's.
        most = -(-self._item_count() // cut.global_count)
        if state["position"] > most:
            raise too_few(state["position"], most, "order")

    def dump_progress(self, *, in_order: bool) -> dict[str, Any]:
        """Return how far the newest epoch has come, as plain values for any number of ranks.

        With ``in_order=False``, each of several ranks has delivered other steps, and the values are
        those of this rank alone.
        """
        cut, state = self.cut, self._epoch.progress.dump()
        count = None if self._steps is None else self._steps.item_count
        if count is not None and self.takes_batches:  # the last step of all ranks was short
            state["position"] = min(state["position"], count)
        if not in_order and (cut.world_size > 1 or ("ahead" in state and self.takes_batches)):
            state["rank"] = [cut.rank, cut.world_size]
        return state

    def load_progress(self, state: dict[str, Any] | None) -> Progress:
        """Return a new progress, or that which :meth:`dump_progress` has saved, on these ranks."""
        return Progress.load(state, self.cut.global_count if self.takes_batches else 1)

    # What a framework or the loader asks -------------------------------------------------

    def sample_count(self) -> int:
        """Return the number of samples of this rank in the running epoch, or in the next one."""
        return self.cut.own_count(self._item_count(), self.last_batch)

    def without_repeats(self) -> "SeededOrder":
        """Return a copy that has each sample once: none is repeated, and none is left out."""
        other = copy.copy(self)
        other.last_batch = "keep"
        return other

    def repeats_before(self, position: int) -> int:
        """Return how many samples of the newest epoch's step before a position are repeats."""
        steps = self._steps
        is_last = steps is not None and steps.repeats[0] == position * self._size
        return steps.repeats[1] if steps is not None and is_last else 0
