"""Checkpoints of samplers: what an epoch's order depends on, as plain values.

A sampler, torch's or the user's, may draw from a generator of its own or from the process's global
generators, and may count its epochs. A checkpoint has the state of all of these before the epoch
was drawn, so that another process can draw the same epoch again.

Guarantees:
    * Taking a checkpoint draws nothing and changes nothing, except when an epoch begins: then the
      seed of torch's RandomSampler is drawn here instead of there.
    * The process's global generators are not changed, except while a sampler that drew from them
      draws its epoch again, up to the first batch that was not delivered.
"""

import contextlib
import copy
import itertools
import logging
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shmloader.messages import Unsaved
from shmloader.probing import probe
from shmloader.sampling.own_state import ask_state, has_own_state
from shmloader.sampling.ranks import is_cut_for_ranks
from shmloader.sampling.rng import (
    GLOBAL_GENERATORS,
    dump_generator,
    global_rng_state,
    load_generator,
    with_global_rng_state,
)
from shmloader.sampling.rollover import CarryOver, RolloverBatchSampler
from shmloader.sampling.samplers import EpochSampler, IntervalSampler
from shmloader.sampling.seeded_samplers import (
    SeededRandomSampler,
    SeededSequentialSampler,
    SeededShardSampler,
)

# torch's samplers, of which nothing is asked that users' samplers may have.
_TORCHS = {
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
}

# These draw from torch's global generator if they have no generator of their own.
_DRAWING = {SubsetRandomSampler, WeightedRandomSampler}

# These draw nothing, or draw from a generator that they seed with their seed and the epoch.
_OWN = {
    BatchSampler,
    RolloverBatchSampler,
    SequentialSampler,
    DistributedSampler,
    IntervalSampler,
    SeededRandomSampler,
    SeededSequentialSampler,
    SeededShardSampler,
}
_OWN_SEQUENCES = {list, tuple, range, torch.Tensor}

_LONGEST_CHAIN = 8

_NAME = operator.attrgetter("__name__")

_log = logging.getLogger("shmloader")


def chain(index_sampler: object) -> list[Any]:
    """Return a sampler, its attribute ``sampler``, the ``sampler`` of that, and so on."""
    samplers: list[Any] = []
    while index_sampler is not None and len(samplers) < _LONGEST_CHAIN:
        samplers.append(index_sampler)
        if type(index_sampler) in _TORCHS:
            index_sampler = getattr(index_sampler, "sampler", None)
        else:
            index_sampler = probe(index_sampler, "sampler")
    return samplers


def describe(index_sampler: object) -> str:
    """Return the kind of a sampler, such as ``BatchSampler(RandomSampler)``."""
    kinds = [*map(type, chain(index_sampler))]
    return "(".join(map(_NAME, kinds)) + ")" * (len(kinds) - 1)


def is_known(sampler: object) -> bool:
    """Whether a sampler is torch's or ours. A checkpoint then has all that its order depends on."""
    kind = type(sampler)
    return (
        kind in _OWN
        or kind in _DRAWING
        or kind in _OWN_SEQUENCES
        or kind is RandomSampler
        or (isinstance(sampler, EpochSampler) and kind.__module__.startswith("shmloader."))
    )


def are_known(index_sampler: object) -> bool:
    """Whether the sampler and all that it draws from are known.

    An epoch then draws from the process's global generators at most for its first index.
    """
    return all(map(is_known, chain(index_sampler)))


def may_differ_between_ranks(index_sampler: object) -> bool:
    """Whether torch's or our sampler yields one rank's share.

    One rank may then save the state for all ranks, to which its own share does not matter.
    """
    others = [each for each in chain(index_sampler) if type(each) not in _TORCHS]
    return any(map(is_cut_for_ranks, others)) and all(map(is_known, others))


def log_redraw(index_sampler: object, position: int) -> None:
    """Log that a user's sampler draws the batches before the position again."""
    if position and not are_known(index_sampler):
        _log.info(
            "the epoch continues at batch %d: %s draws the %d batches before it again, and they "
            "are discarded",
            position,
            describe(index_sampler),
            position,
        )


def counts_epochs(sampler: object) -> bool:
    """Return whether a sampler, or the sampler in a batch sampler, has ``set_epoch``."""
    return any(callable(probe(each, "set_epoch")) for each in (sampler, probe(sampler, "sampler")))


def set_epoch_of(sampler: object, epoch: int) -> None:
    """Call ``set_epoch`` of a sampler, or of the sampler in a batch sampler, if there is one."""
    for each in (sampler, probe(sampler, "sampler")):
        set_epoch = probe(each, "set_epoch")
        if callable(set_epoch):
            set_epoch(epoch)
            return


def epoch_of(sampler: object) -> int | None:
    """Return the ``epoch`` of a sampler, or of the sampler in a batch sampler.

    None if it has no ``epoch`` that is an int, or no ``set_epoch``.
    """
    told = _told_of_epochs(sampler)
    return None if told is None else told[1]


def may_count_epochs(sampler: object) -> bool:
    """Whether iterating a sampler may change its ``epoch``. Iterating torch's does not."""
    told = _told_of_epochs(sampler)
    return told is not None and probe(type(told[0]), "__iter__") is not DistributedSampler.__iter__


def _told_of_epochs(sampler: object) -> tuple[Any, int] | None:
    """Return the sampler whose epoch can be set, and that epoch; None if there is none."""
    for each in (sampler, probe(sampler, "sampler")):
        epoch = probe(each, "epoch")
        if callable(probe(each, "set_epoch")) and type(epoch) is int and epoch >= 0:
            return each, epoch
    return None


def size_of_batches(index_sampler: object) -> int | None:
    """Return the batch size of torch's or our batch samplers; None for any other."""
    is_ours = type(index_sampler) in _TORCHS or is_known(index_sampler)
    return getattr(index_sampler, "batch_size", None) if is_ours else None


class SamplerCheckpoint:
    """Takes and restores checkpoints of one sampler. Used on the user's thread.

    Args:
        index_sampler: A sampler or a batch sampler; None for an order without one.
        carry_over: The samples that the next epoch begins with; None if epochs carry nothing over.
        generator: The loader's generator, from which torch draws the base seed of the workers for
            each epoch.

    Attributes:
        global_generators: Names of the process's generators that an epoch may draw from.
        draws_seed: Whether an epoch draws a seed from torch's generator, and nothing else.
        stateful: The sampler in the chain that has a state of its own, or None.
    """

    __slots__ = (
        "_carry_over", "_counting", "_generators", "_is_known", "_loaders_generator", "_seeding",
        "draws_seed", "global_generators", "stateful",
    )  # fmt: skip

    def __init__(
        self,
        index_sampler: object,
        carry_over: CarryOver | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        samplers = chain(index_sampler)
        self._is_known = True
        self._carry_over = carry_over
        self._generators: list[torch.Generator] = []
        # These draw one seed from torch's global generator, and everything else from that seed.
        self._seeding: list[RandomSampler] = []
        # The samplers that count epochs.
        self._counting: list[Any] = []
        draws = sets_generators = False
        for sampler in samplers:
            if type(sampler) in _TORCHS:
                own = getattr(sampler, "generator", None)
            else:
                self._is_known = self._is_known and is_known(sampler)
                # What one of ours draws from, such as the sampler in a ShardedSampler, finds global
                # generators that depend only on that sampler's seed and epoch.
                sets_generators = sets_generators or isinstance(sampler, EpochSampler)
                own = probe(sampler, "generator")
                if callable(probe(sampler, "set_epoch")):
                    self._counting.append(sampler)
            if own is None and not sets_generators:
                if type(sampler) is RandomSampler:
                    self._seeding.append(sampler)
                draws = draws or type(sampler) in _DRAWING
            elif isinstance(own, torch.Generator) and own not in self._generators:
                self._generators.append(own)
        # If a sampler's generator is the loader's as well, it is saved only once.
        self._loaders_generator = None if generator in self._generators else generator
        self.stateful: Any = None
        self.global_generators: tuple[str, ...] = ()
        if not self._is_known:
            self._seeding = []
            self.stateful = next(
                (each for each in samplers if not is_known(each) and has_own_state(each)), None
            )
            # One with a state may draw from them, too: what it has drawn is in no early state.
            self.global_generators = GLOBAL_GENERATORS
        elif draws:
            self.global_generators = ("torch",)
        self.draws_seed = bool(self._seeding)

    def dump(self, *, is_begun: bool) -> dict[str, Any]:
        """Take a checkpoint, as plain values.

        Args:
            is_begun: Whether an epoch begins now, by :meth:`begin`. Otherwise the states of the
                process's global generators are left out, since they may change before an epoch
                begins.
        """
        state: dict[str, Any] = {"is_begun": is_begun}
        if self._generators:
            state["generators"] = [dump_generator(generator) for generator in self._generators]
        if self._loaders_generator is not None:
            state["generator"] = dump_generator(self._loaders_generator)
        if self._counting:
            epochs = [probe(sampler, "epoch") for sampler in self._counting]
            if any(isinstance(epoch, int) for epoch in epochs):
                state["epochs"] = [epoch if isinstance(epoch, int) else None for epoch in epochs]
        if self._carry_over is not None:
            state["carry_over"] = list(self._carry_over.samples)
        if self.stateful is not None:
            state.update(own_entry(self.stateful))
        if is_begun and self._seeding:
            state["seed"] = int(torch.empty((), dtype=torch.int64).random_().item())
        if is_begun and self.global_generators:
            state["global_generators"] = global_rng_state(self.global_generators)
        return state

    def begin(self, state: dict[str, Any], drawing: Iterator[Any]) -> Iterator[Any]:
        """Begin to draw the epoch of a checkpoint that was just taken.

        Args:
            state: The checkpoint.
            drawing: Yields the epoch's batches, and has not begun.
        """
        if "seed" not in state:
            return drawing
        _seed(self._seeding, state["seed"])
        try:
            return itertools.chain(list(itertools.islice(drawing, 1)), drawing)
        finally:
            _unseed(self._seeding)

    def restore(self, state: dict[str, Any]) -> None:
        """Make the next epoch begin as at the checkpoint, except for global generators.

        For an epoch that had begun, :meth:`drawing` restores these while the epoch is drawn again.

        Raises:
            ValueError: If the checkpoint does not fit, or cannot be read.
        """
        count = len(state.get("generators", ()))
        if count != len(self._generators) and self._is_known:
            raise ValueError(
                "the state does not fit this loader:\n- number of generators that order the "
                f"samples: {count} in the state, {len(self._generators)} in this loader. "
                + (
                    "Give a generator= to the loader or to its sampler."
                    if count
                    else "Give no generator=."
                )
            )
        if "generator" in state and self._loaders_generator is None:
            raise ValueError(
                "the state does not fit this loader:\n- generator: one in the state, None in this "
                "loader. Give generator=, whose state is then set."
            )
        self.restore_generators(state)
        self.restore_epochs(state)
        if self._carry_over is not None:
            self._carry_over.replace(state.get("carry_over", ()))
        if not state["is_begun"]:
            self.restore_own(state)

    def restore_own(self, state: dict[str, Any]) -> None:
        """Load the sampler's own state, if it has one."""
        if self.stateful is not None and "state" in state:
            self.stateful.load_state_dict(copy.deepcopy(state["state"]))

    def restore_generators(self, state: dict[str, Any]) -> None:
        """Set the generators of the samplers and of the loader."""
        for generator, text in zip(self._generators, state.get("generators", ()), strict=False):
            load_generator(generator, text)
        if self._loaders_generator is not None and "generator" in state:
            load_generator(self._loaders_generator, state["generator"])

    def restore_epochs(self, state: dict[str, Any]) -> None:
        """Set the epochs of the samplers that count them."""
        for sampler, epoch in zip(self._counting, state.get("epochs", ()), strict=False):
            if epoch is not None:
                sampler.set_epoch(epoch)

    @contextlib.contextmanager
    def drawing(self, state: dict[str, Any]) -> Iterator[None]:
        """Set the generators to their states at the epoch's first index, for a ``with`` block.

        After the block, the global generators have the process's own states again.
        """
        self.restore_generators(state)
        with contextlib.ExitStack() as stack:
            if "seed" in state and self._seeding:
                stack.callback(_unseed, self._seeding)
                _seed(self._seeding, state["seed"])
            if "global_generators" in state:
                stack.enter_context(with_global_rng_state(state["global_generators"]))
            yield


def _seed(samplers: list[RandomSampler], seed: int) -> None:
    """Give RandomSamplers generators with this seed, with which they begin to draw."""
    for sampler in samplers:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(seed)


def _unseed(samplers: list[RandomSampler]) -> None:
    for sampler in samplers:
        sampler.generator = None


def own_entry(sampler: object) -> dict[str, object]:
    """Return the entry of a checkpoint for a sampler's own state, or for why there is none."""
    own: object = ask_state(
        sampler,
        "Correct its state_dict(), or set state_dict = None in its class: the sampler is then "
        "iterated again from the epoch's beginning when the loader is resumed",
    )
    return {"unsaved" if isinstance(own, Unsaved) else "state": own}


#: Entry of a checkpoint of an epoch from which other code has drawn batches first.
DRAWN_ELSEWHERE = {
    "unsaved": Unsaved(
        "the state of this epoch cannot be saved: other code has drawn batches from the sampler "
        "before the loader did, as toolkits do to resume, so the position is not known. Save the "
        "toolkit's state, or call state_dict() in the next epoch."
    )
}
