"""What the order of a sampler depends on, as plain values.

A sampler, torch's or the user's, may draw from a generator of its own or from the process's global
generators, and may count its epochs. The state of a sampler has the states of all of these before
the epoch was drawn, so that another process can draw the same epoch again.

Guarantees:
    * Taking a state draws nothing and changes nothing, except when an epoch begins: then the seed
      of torch's RandomSampler is drawn here instead of there.
    * The process's global generators are not changed, except while a sampler that drew from them
      draws its epoch again, up to the first batch that was not delivered.
"""

import copy
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
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

from shmloader.interruptions import probe
from shmloader.messages import Unsaved
from shmloader.sampling.arguments import is_cut_for_ranks
from shmloader.sampling.hooks import ask_state, has_own_state, is_planned
from shmloader.sampling.indices import as_list
from shmloader.sampling.progress import Progress
from shmloader.sampling.rng import (
    GLOBAL_GENERATORS,
    dump_generator,
    global_rng_state,
    load_generator,
)
from shmloader.sampling.samplers import EpochSampler

# These draw from torch's global generator if they have no generator of their own.
_DRAWING = {SubsetRandomSampler, WeightedRandomSampler}

# torch's samplers, of which nothing is asked that users' samplers may have.
_TORCHS = {BatchSampler, RandomSampler, SequentialSampler, *_DRAWING}

# Of these, too, a state has all that their order depends on.
_SEQUENCES = {list, tuple, range, torch.Tensor, DistributedSampler}

_LONGEST_CHAIN = 8

_encode = json.JSONEncoder().encode

# How many items are kept at least.
FEW = 8

_REMEDY = (
    "Correct its state_dict(), or set state_dict = None in its class. A resumed loader then "
    "iterates the sampler again from the epoch's beginning."
)


def chain(index_sampler: object) -> list[Any]:
    """Return a sampler, its attribute ``sampler``, the ``sampler`` of that, and so on."""
    samplers: list[Any] = []
    while index_sampler is not None and len(samplers) < _LONGEST_CHAIN:
        samplers.append(index_sampler)
        get: Any = getattr if type(index_sampler) in _TORCHS else probe
        index_sampler = get(index_sampler, "sampler", None)
    return samplers


def describe(index_sampler: object, *, has_facts: bool = False) -> str:
    """Return the kind of a sampler, such as ``BatchSampler(RandomSampler)``.

    With ``has_facts``, what the order of one that is planned depends on follows.
    """
    samplers = chain(index_sampler)
    kinds = map(attrgetter("__name__"), map(type, samplers))
    text = "(".join(kinds) + ")" * (len(samplers) - 1)
    for each in samplers if has_facts else ():
        if is_planned(each):
            text += f": {each.facts}"
    return text


def is_known(sampler: object) -> bool:
    """Whether a sampler is torch's or ours. Its state then has all that its order depends on."""
    kind = type(sampler)
    return kind in _TORCHS or kind in _SEQUENCES or kind.__module__.startswith("shmloader.")


def size_of_batches(index_sampler: object) -> int | None:
    """Return the batch size of torch's or our batch samplers; None for any other."""
    has_size = type(index_sampler) is BatchSampler or is_known(index_sampler)
    return getattr(index_sampler, "batch_size", None) if has_size else None


# States ----------------------------------------------------------------------------------


class SamplerState:
    """Takes and restores the state of one sampler. Used on the user's thread.

    Args:
        index_sampler: A sampler or a batch sampler; None for an order without one.
        generator: The loader's generator, from which torch draws the base seed of the workers for
            each epoch; None if it is not used.

    Attributes:
        global_generators: Names of the process's generators that an epoch may draw from.
        draws_seed: Whether an epoch draws a seed from torch's generator, and nothing else.
    """

    def __init__(self, index_sampler: object, generator: torch.Generator | None) -> None:
        self._is_known = True
        # The sampler that has a state of its own.
        self._stateful: Any = None
        generators = [] if generator is None else [generator]
        # These draw one seed from torch's global generator, and everything else from that seed.
        self._seeding: list[RandomSampler] = []
        self._counting: list[Any] = []
        draws = sets_generators = False
        for sampler in chain(index_sampler):
            if type(sampler) in _TORCHS:
                own = getattr(sampler, "generator", None)
            else:
                # What one of ours draws from, such as the sampler in a ShardedSampler, finds global
                # generators that depend only on that sampler's seed and epoch.
                sets_generators = sets_generators or isinstance(sampler, EpochSampler)
                own = probe(sampler, "generator")
                if callable(probe(sampler, "set_epoch")):
                    self._counting.append(sampler)
                if not is_known(sampler):
                    self._is_known = False
                    if self._stateful is None and has_own_state(sampler):
                        self._stateful = sampler
            if own is not None:
                if isinstance(own, torch.Generator) and own not in generators:
                    generators.append(own)
            elif not sets_generators:
                if type(sampler) is RandomSampler:
                    self._seeding.append(sampler)
                draws = draws or type(sampler) in _DRAWING
        self._generators = generators
        self.global_generators: tuple[str, ...] = ("torch",) if draws else ()
        if not self._is_known:  # it may draw from any, also one with a state
            self.global_generators, self._seeding = GLOBAL_GENERATORS, []
        self.draws_seed = bool(self._seeding)

    def dump(self, *, has_started: bool) -> dict[str, Any]:
        """Return the state, as plain values.

        Args:
            has_started: Whether an epoch begins now. Otherwise the states of the process's global
                generators are left out, since they may change before an epoch begins.
        """
        state: dict[str, Any] = {"has_started": has_started}
        if self._generators:
            state["generators"] = [dump_generator(generator) for generator in self._generators]
        if self._counting:
            epochs = [probe(sampler, "epoch") for sampler in self._counting]
            state["epochs"] = [epoch if isinstance(epoch, int) else None for epoch in epochs]
        if self._stateful is not None:
            own: object = ask_state(self._stateful, _REMEDY)
            state["unsaved" if isinstance(own, Unsaved) else "state"] = own
        if has_started and self._seeding:
            state["seed"] = int(torch.empty((), dtype=torch.int64).random_().item())
        if has_started and self.global_generators:
            state["global_generators"] = global_rng_state(self.global_generators)
        return state

    def seed(self, seed: int | None) -> None:
        """Let RandomSamplers begin with a seed; None for one that they draw themselves."""
        for sampler in self._seeding:
            sampler.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def restore(self, state: dict[str, Any]) -> None:
        """Make the next epoch begin as in the state; raise ValueError if it does not fit."""
        count = len(state.get("generators", ()))
        if count != len(self._generators) and self._is_known:
            raise ValueError(
                "the state does not fit this loader:\n- number of generators of the loader and its "
                f"samplers: {count} in the state, {len(self._generators)} in this loader.\n"
                "Give the arguments with which the state was saved."
            )
        self.restore_generators(state)
        self.restore_epochs(state)

    def restore_own(self, state: dict[str, Any]) -> bool:
        """Load the sampler's own state; return whether there is one."""
        if self._stateful is None or "state" not in state:
            return False
        self._stateful.load_state_dict(copy.deepcopy(state["state"]))
        return True

    def restore_generators(self, state: dict[str, Any]) -> None:
        """Set the generators of the samplers and of the loader."""
        for generator, text in zip(self._generators, state.get("generators", ()), strict=False):
            load_generator(generator, text)

    def restore_epochs(self, state: dict[str, Any]) -> None:
        """Set the epochs of the samplers that count them."""
        for sampler, epoch in zip(self._counting, state.get("epochs", ()), strict=False):
            if epoch is not None:
                sampler.set_epoch(epoch)


#: Entry of the state of an epoch from which other code has drawn batches first.
DRAWN_ELSEWHERE = {
    "unsaved": Unsaved(
        "the state of this epoch cannot be saved: other code, such as a toolkit, has drawn batches "
        "from the sampler before the loader did. Save the toolkit's state, or call state_dict() in "
        "the next epoch."
    )
}


@dataclass(slots=True, eq=False)
class DrawnEpoch:
    """What a state needs of an epoch that is drawn from a sampler. It outlives the iterator.

    Attributes:
        number: Number of the epoch.
        progress: The epoch's progress.
        saved: The state that the epoch continues from; empty for a new epoch.
        state: What the epoch's order depends on, once it has begun.
        undrawn: The iterator that draws the epoch, until it has begun.
        items: The items from the last one before the position on, and some earlier ones, by the
            position after them.
        full_at: The position from which on items that are done are forgotten.
    """

    number: int = 0
    progress: Progress = field(default_factory=Progress)
    saved: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    undrawn: Any = None
    items: dict[int, Any] = field(default_factory=dict)
    full_at: int = 0

    def add(self, position: int, item: Any) -> None:
        """Add an item that was drawn, and the position once it is done."""
        if position >= self.full_at:
            self.forget_done(position)
        self.items[position] = item

    def forget_done(self, position: int) -> None:
        """Forget the items before the last one that is done. Called from ``full_at`` on."""
        done = self.progress.position
        self.items = {at: each for at, each in self.items.items() if at >= done}
        self.full_at = position + (len(self.items) + FEW) * self.progress.unit

    def dump(self, index_sampler: object) -> dict[str, Any]:
        """Return the state, with a checksum of the last item that the user is done with, if known.

        Torch's or our samplers may yield one rank's share. One rank may then save the state for all
        ranks, to which its own share does not matter.
        """
        position, check = self.progress.position, None
        if position in self.items:
            check = _checksum(self.items[position])
        elif position == self.progress.start:
            check = self.saved.get("last_checksum")
        for sampler in chain(index_sampler):
            if type(sampler) not in _TORCHS and is_known(sampler) and is_cut_for_ranks(sampler):
                check = None
        return {**self.state, "last_checksum": check}

    def check_passed(self, last: object, kind: str) -> None:
        """Raise ValueError if a sampler yields another batch before the position than it did.

        Args:
            last: The last of what was delivered before, as it is drawn now.
            kind: What yields it, for the message.
        """
        expected = self.saved.get("last_checksum")
        if expected is not None and _checksum(last) not in (None, expected):
            raise ValueError(
                f"the state does not fit this loader: its {kind} yields another batch "
                f"{self.progress.start - 1} than in the run that saved the state. Its order must "
                "be the same whenever it is iterated for the same epoch. Seed it, or give it a "
                "generator=, a set_epoch(), or state_dict() and load_state_dict()."
            )


class Order:
    """The part that the two orders of a loader have in common. Used on the user's thread.

    Args:
        sampler: What is drawn: a sampler or a batch sampler; None if the order is computed.

    Attributes:
        generator: The loader's generator, which the loader sets and a seeded order does not use.
    """

    index_sampler: Any
    generator: torch.Generator | None = None

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._epoch = DrawnEpoch()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        return {**self.__dict__, "_epoch": DrawnEpoch()}

    def begin(self, number: int, progress: Progress, saved: dict[str, Any] | None = None) -> None:
        """Set the epoch that is iterated next, which continues at the progress's position."""
        self._epoch = DrawnEpoch(number, progress, saved or {})
        self._epoch.full_at = progress.start + (1 + FEW) * progress.unit

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers the number of the next epoch; most orders tell it when it begins."""

    def named_epoch(self) -> int | None:
        """Return the epoch that other code has set in the sampler, if the loader has to know it."""
        return None

    def draw(self, drawing: Iterator[Any], *, as_arrays: bool) -> Iterator[Any]:  # noqa: ARG002
        """Return an iterator of the epoch's index batches that were not delivered yet.

        Args:
            drawing: The newest iterator of the index sampler.
            as_arrays: Whether the batches of torch's samplers, and those of the dataset's indices
                without shards, may be ranges or arrays.
        """
        return drawing

    def forget_ended(self) -> None:
        """Forget the newest epoch if it has ended: a used loader keeps little memory."""
        if self._epoch.progress.is_ended and self._epoch.state:
            self._epoch = DrawnEpoch(progress=self._epoch.progress)

    def state(self) -> SamplerState:
        """Return an object that takes and restores states of the next epoch."""
        return SamplerState(self._sampler, self.generator)

    def dump_next(self) -> dict[str, Any]:
        """Return the state of the next epoch, as plain values."""
        return self.state().dump(has_started=False)

    def dump_progress(self, *, in_order: bool) -> dict[str, Any]:  # noqa: ARG002 - no ranks
        """Return how far the newest epoch has come, as plain values."""
        return self._epoch.progress.dump()

    def load_progress(self, state: dict[str, Any] | None) -> Progress:
        """Return a new progress, or that which :meth:`dump_progress` has saved."""
        return Progress.load(state)

    def check_progress(self, state: dict[str, Any]) -> None:
        """Raise ValueError for a position of no epoch of this order, as far as that is known."""


def _checksum(indices: object) -> int | None:
    """Return a checksum of numbers and strings; None for other objects, whose text may differ."""
    try:
        plain = indices if type(indices) is list else as_list(indices)
        return zlib.crc32(_encode(plain).encode())
    except (TypeError, ValueError):
        return None
