"""``TokenBatches``: batches of a token budget, planned from the samples' lengths alone.

Half of the module documents the arguments.
"""

import functools
from collections.abc import Callable, Iterator, Sized
from typing import Any, Literal

import numpy as np

from shmloader.grammar import warn_user
from shmloader.sampling.arguments import choice, flag, whole_number
from shmloader.sampling.balancing import cost_function, divide, tokens
from shmloader.sampling.packing import Numbers
from shmloader.sampling.pieces import CutDataset, Piece
from shmloader.sampling.plan_report import PlanReport, measure
from shmloader.sampling.sample_lengths import TOO_LONG, SampleLengths, TooLong, check_budget
from shmloader.sampling.samplers import EpochSampler
from shmloader.sampling.token_windows import EpochWindows, Packer

_LAYOUTS = ("packed", "padded")
_LAST_BATCHES = ("divide", "pad", "discard")


class TokenBatches(EpochSampler[list[int]]):
    """Batches of at most ``max_tokens`` tokens, full ones, and of similar cost on all ranks.

    With ``layout="packed"``, the lengths of a batch's samples add up to at most ``max_tokens``, for
    a collate that lays them end to end. With "padded", the longest one times their count is at most
    that, for a collate that pads. There is less padding than in batches of a fixed number
    of samples. No batch is too large for the memory, and ranks wait less for one another.

    The samples of an epoch are taken in a shuffled order, ``window`` at a time. Those of a window
    are packed by best-fit decreasing ("packed"), or sorted and cut ("padded"). So a batch has
    samples of one window, and batches of a larger window are fuller but less random. Log-normal
    lengths in windows of 10,000 fill 99.8 % of 16,384 tokens.

    **Ranks.** Give the plan as ``batch_sampler`` to a ``ShardedDataLoader``, or to a loader as
    ``ShardedSampler(plan)``. Rank r of W gets batches r, r + W, and so on, of an order that does
    not depend on W. With ``balance``, the batches of a step have similar costs if W divides 64.

    The batches that do not fill the last step of all ranks are divided, and each rank gets a part
    of them. So all ranks have equally many steps, and each sample comes once an epoch. If these
    batches have fewer samples than there are ranks, the epoch's first batches fill the step up.

    **Cost.** Nothing is loaded. A window of 10,000 samples takes some 2 ms, and is planned when its
    first batch is drawn. Resuming draws the batches before the position again: 0.3 s a million
    samples. ``len()`` counts the batches of all windows once an epoch: 0.2 s a million samples.
    With several measures, a million takes 8 s. The number of batches differs a little from
    epoch to epoch.

    Random numbers come from numpy's Philox, keyed by (seed, epoch, window).

    Attributes:
        max_tokens, layout, multiple_of, window, shuffle, seed, balance, too_long, last_batch: The
            arguments.
        lengths: The argument, as an integer array.
        number_count: How many samples there are; with ``too_long="split"``, how many pieces.
        dropped_count: How many samples are left out with ``too_long="drop"``.
        epoch: Number of the next epoch.

    Args:
        lengths: Tokens of each sample: a sequence, array, memory map or tensor of n ints, all at
            least 1. Of shape (n, k) if samples have several measures, such as text tokens and image
            patches. An array is not copied, and must not change.
        max_tokens: The budget of a batch, at least 1; a tuple of k budgets for k measures, each of
            which is kept.
        layout: "packed" or "padded".
        multiple_of: With "padded", what the longest sample is rounded up to, as the collate pads.
        window: How many samples are packed together, at least 1. The last window of fewer samples
            is spread over the others.
        shuffle: Whether each epoch has a random order. Otherwise windows follow the dataset; their
            batches are in the order of their first samples, or of costs with ``balance``.
        seed: Seed of the random numbers, from 0 to 2**64 - 1.
        balance: Cost of a sample, by which batches of similar cost are put side by side. "tokens":
            L, its tokens in all measures. "attention": ``a * L + L**2`` with a = 6 * 4096, for a
            transformer of width 4096. Or a function that gets lengths as an int64 array of shape
            (m,) or (m, k). It returns an array of m costs, none of them negative. With "padded", it
            gets the padded lengths. None for no balance.
        too_long: What happens to a sample that is longer than ``max_tokens``. "raise" refuses it.
            "drop" leaves it out, and a warning gives the number. "truncate" counts ``max_tokens``
            for it. "split" makes pieces of ``max_tokens`` and a shorter last one, which come as
            samples of their own, in any batches; for one measure only. For "truncate" and "split",
            give the loader ``plan.pieces_of(dataset)``, which cuts the samples. (A collate that
            cuts, such as ``Pad(max_length=)``, does for "truncate" as well.)
        last_batch: What happens to batches that do not fill the last step of all ranks. "divide"
            (the default) divides them among all ranks. "pad" adds batches from the start of the
            epoch. "discard" leaves them out.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a word or a number is wrong, or lengths and ``max_tokens`` differ in their
            measures. If a length is not a whole number, is below 1, or is above ``max_tokens``; the
            message has the first such index.
    """

    #: For :func:`shmloader.sampling.hooks.is_planned`.
    has_plan = True

    def __init__(
        self,
        lengths: object,
        max_tokens: int | tuple[int, ...],
        *,
        layout: Literal["packed", "padded"] = "packed",
        multiple_of: int | None = None,
        window: int = 10_000,
        shuffle: bool = True,
        seed: int = 0,
        balance: Literal["tokens", "attention"] | Callable[[Any], Any] | None = None,
        too_long: TooLong = "raise",
        last_batch: Literal["divide", "pad", "discard"] = "divide",
    ) -> None:
        super().__init__(seed)
        self.layout = choice(layout, "layout", _LAYOUTS)
        self.too_long = choice(too_long, "too_long", TOO_LONG)
        self.last_batch = choice(last_batch, "last_batch", _LAST_BATCHES)
        self.window = whole_number(window, "window", minimum=1)
        self.shuffle = flag(shuffle, "shuffle")
        self.multiple_of = multiple_of
        multiple = 1
        if multiple_of is not None:
            multiple = whole_number(multiple_of, "multiple_of", minimum=1)
            if layout == "packed":
                raise ValueError(
                    "multiple_of rounds up padded batches, and layout='packed' has none: "
                    "leave it out, or give layout='padded'"
                )
        budget = check_budget(max_tokens, multiple)
        self.max_tokens = max_tokens
        if too_long == "split" and len(budget) > 1:
            raise ValueError(
                f"too_long='split' cuts samples of one measure, but max_tokens has {len(budget)}: "
                "give too_long='raise', 'truncate' or 'drop'"
            )
        limits = tuple(each // multiple * multiple for each in budget)
        self._source = source = SampleLengths(lengths, limits, too_long)
        self.number_count, self.dropped_count = source.number_count, source.dropped_count
        self._limits = limits
        self.balance = balance
        self._packer = Packer(budget, layout == "padded", multiple, cost_function(balance))
        if self._packer.cost is not None:  # a function is tried
            self._packer.cost(self._source.take(np.arange(min(8, self.number_count)))[1])
        if self.dropped_count:
            warn_user(
                f"TokenBatches leaves out {self.dropped_count} of {len(self._source.lengths)} "
                f"samples, which are longer than max_tokens={max_tokens} (too_long='drop')"
            )
        # The epoch that was begun last, until it is exhausted.
        self._running: int | None = None
        # An epoch, and the number of its batches.
        self._counted: tuple[int, int] = -1, 0

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch."""
        return {**self.__dict__, "_running": None}

    @property
    def lengths(self) -> Any:
        """The lengths, as an integer array of shape (n,), or (n, k) for several measures."""
        return self._source.lengths if len(self._limits) > 1 else self._source.lengths[:, 0]

    # Epochs --------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; see :meth:`EpochSampler.set_epoch`."""
        super().set_epoch(epoch)
        self._running = None

    def __len__(self) -> int:
        """Return the number of batches of the running epoch, or of the next one if none is drawn.

        The first call for an epoch plans all its windows: 0.2 s for a million samples.
        """
        epoch = self.epoch if self._running is None else self._running
        if self._counted[0] != epoch:
            self._counted = epoch, self._plan(epoch).count_batches()
        return self._counted[1]

    def _draw(self, epoch: int) -> Iterator[list[int]]:
        self._running = epoch
        try:
            for window in self._plan(epoch):
                yield from window.batches()
        finally:  # also if the epoch is left
            if self._running == epoch:
                self._running = None

    def _plan(self, epoch: int) -> EpochWindows:
        key = (self.seed, epoch) if self.shuffle else None
        return EpochWindows(self._source, self._packer, self.window, key)

    # What orders and loaders ask -----------------------------------------------------------

    def divided(self, batches: list[list[int]], count: int) -> list[list[int]]:
        """Return batches for a last step of ``count``, of fewer; not so many if samples are few."""
        if self.last_batch != "divide":
            return batches
        numbers, lengths = self._source.take(np.concatenate(batches))
        costs = (self._packer.cost or tokens)(lengths)
        return divide(batches, dict(zip(numbers.tolist(), costs.tolist(), strict=True)), count)

    def check_dataset(self, dataset: Sized) -> None:
        """Raise ValueError if a dataset has another number of samples; loaders call this."""
        count = len(dataset)
        if count == self.number_count:
            return
        sample_count = len(self._source.lengths)
        if count == sample_count:
            raise ValueError(
                f"TokenBatches yields {self.number_count} pieces of {count} samples "
                "(too_long='split'): give the loader plan.pieces_of(dataset)"
            )
        raise ValueError(
            f"TokenBatches has the lengths of {sample_count} samples, but the dataset has {count}: "
            "give the lengths of this dataset, in its order"
        )

    @functools.cached_property
    def facts(self) -> str:
        """What the order depends on besides the epoch, as a short text; saved states have it."""
        multiple = f" by {self.multiple_of}" if self.multiple_of else ""
        balance = "a function" if callable(self.balance) else self.balance
        budget = self._packer.budget  # the same for an int, numpy's and a tuple of one
        max_tokens = budget if len(budget) > 1 else budget[0]
        return (
            f"{self.layout}{multiple}, max_tokens={max_tokens}, "
            f"window={self.window}, shuffle={self.shuffle}, seed={self.seed}, balance={balance}, "
            f"too_long={self.too_long}, {len(self._source.lengths)} lengths with checksum "
            f"{self._source.checksum:08x}"
        )

    # For users -----------------------------------------------------------------------------

    def piece(self, number: int) -> Piece:
        """Return which part of which sample a number stands for that this sampler yields.

        Args:
            number: A number from 0 to ``number_count`` - 1. It is the sample's index, unless
                ``too_long="split"`` has cut samples.
        """
        whole_number(number, "number", minimum=0, below=self.number_count)
        source, numbers = self._source, np.array([number])
        length = int(source.take(numbers)[1][:, 0].sum())
        later = number - len(source.lengths)
        if later < 0:
            return Piece(number, 0, length)
        start = int(source.starts[later])
        return Piece(int(source.owners[later]), start, start + length)

    def pieces_of(self, dataset: Any) -> Any:
        """Return the dataset with its long samples cut, for ``too_long="split"`` or "truncate".

        Args:
            dataset: The map-style dataset whose lengths these are.

        Returns:
            A map-style dataset of ``number_count`` samples, whose long ones are cut:
            :class:`~shmloader.sampling.pieces.CutDataset`. The dataset itself if none is too long.

        Raises:
            ValueError: If the dataset has another number of samples than there are lengths, or
                there are several measures.
        """
        source = self._source
        if len(dataset) != len(source.lengths):
            self.check_dataset(dataset)
        long = np.flatnonzero((source.lengths > np.array(self._limits)).any(axis=1))
        if not len(long) or self.too_long == "drop":
            return dataset
        if len(self._limits) > 1:
            raise ValueError("pieces_of() cuts samples of one measure, but max_tokens has several")
        lengths: Numbers = source.lengths[long, 0].astype(np.int64)
        return CutDataset(dataset, long, lengths, self._limits[0], source.owners, source.starts)

    def report(
        self,
        world_size: int = 1,
        *,
        cost: Literal["tokens", "attention"] | Callable[[Any], Any] | None = None,
        epoch: int | None = None,
    ) -> PlanReport:
        """Plan an epoch, without loading a sample, and return its figures.

        Args:
            world_size: Number of ranks, at least 1.
            cost: What to compare ranks by, as ``balance``; None for ``balance``, or else "tokens".
            epoch: Number of the epoch; None for the next one.
        """
        size = whole_number(world_size, "world_size", minimum=1)
        chosen = cost_function(cost) or self._packer.cost or tokens
        windows = self._plan(self.epoch if epoch is None else epoch)
        return measure(windows, self._packer, chosen, size)
