"""What a sampler's epoch came of: enough to have it drawn again, in another process.

A sampler of torch's, or of a user's, draws from a generator, from the process's own random streams
or from none, and may count its epochs. That is written down before it draws, as plain values.

Guarantees:
    * Writing it down neither draws nor changes anything.
    * The process's own streams are left alone, but while a sampler that drew from them draws its
      epoch's first index again.
"""

import contextlib
import copy
import itertools
import logging
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

from shmloader.probing import probe
from shmloader.sampling.epochs import EpochSampler
from shmloader.sampling.interval import IntervalSampler
from shmloader.sampling.rng import (
    dump_generator,
    global_rng_state,
    load_generator,
    with_global_rng_state,
)
from shmloader.sampling.rollover import RolloverBatchSampler

# These draw from torch's global stream where they have no generator.
_DRAWING = {SubsetRandomSampler, WeightedRandomSampler}

# These draw from none, or from a generator of their own that depends on their epoch.
_OWN = {BatchSampler, RolloverBatchSampler, SequentialSampler, DistributedSampler, IntervalSampler}
_OWN_SEQUENCES = {list, tuple, range, torch.Tensor}

_LONGEST_CHAIN = 8

_log = logging.getLogger("shmloader")


def chain(index_sampler: object) -> list[Any]:
    """A sampler and those that it draws from, by torch's name for these."""
    found: list[Any] = []
    while index_sampler is not None and len(found) < _LONGEST_CHAIN:
        found.append(index_sampler)
        index_sampler = probe(index_sampler, "sampler")
    return found


def describe(index_sampler: object) -> str:
    """The kind of sampler, such as ``BatchSampler(RandomSampler)``."""
    names = [type(sampler).__name__ for sampler in chain(index_sampler)]
    return "(".join(names) + ")" * (len(names) - 1)


def is_known(sampler: object) -> bool:
    """Whether it is torch's or ours, and so draws its whole order from what is written down."""
    kind = type(sampler)
    return (
        kind in _OWN
        or kind in _DRAWING
        or kind in _OWN_SEQUENCES
        or kind is RandomSampler
        or (isinstance(sampler, EpochSampler) and kind.__module__.startswith("shmloader."))
    )


def are_known(index_sampler: object) -> bool:
    """Whether it is, and all that it draws from.

    An epoch then draws from the process's streams for its first index alone, if at all.
    """
    return all(map(is_known, chain(index_sampler)))


def tell_passed_over(index_sampler: object, position: int) -> None:
    """Say in the log that a user's sampler draws once more what it gave before the position."""
    if position and not are_known(index_sampler):
        _log.info(
            "the epoch goes on at batch %d: %s gives the %d before it once more, to nobody",
            position,
            describe(index_sampler),
            position,
        )


def size_of_batches(index_sampler: object) -> int | None:
    """How many samples a batch sampler of torch's or ours puts in a batch; None of any other."""
    return getattr(index_sampler, "batch_size", None) if is_known(index_sampler) else None


class Origin:
    """What the epochs of one sampler come of.

    Args:
        index_sampler: What a loader draws: a sampler or a batch sampler; None for an order of ours.
        carrier: Has the ``rest`` that the epoch before has left over, if anything does.
        generator: The loader's, which the workers' base seed is drawn from at each epoch.

    Attributes:
        streams: The process's streams that an epoch may come of, by name.
        stateful: Which of the samplers has a state of its own; None if none has.
    """

    def __init__(
        self,
        index_sampler: object,
        carrier: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._chain = chain(index_sampler)
        self._is_known = are_known(index_sampler)
        self._carrier = carrier
        if isinstance(index_sampler, RolloverBatchSampler):
            self._carrier = index_sampler
        self._generators: list[torch.Generator] = []
        for sampler in self._chain:
            own = probe(sampler, "generator")
            if isinstance(own, torch.Generator) and own not in self._generators:
                self._generators.append(own)
        # A sampler's own may be the loader's, and is saved once.
        self._loaders = None if generator in self._generators else generator
        self._counting = [
            sampler for sampler in self._chain if callable(probe(sampler, "set_epoch"))
        ]
        # It asks the process for a seed, and draws the rest from that.
        self._seeding = [
            sampler
            for sampler in self._chain
            if type(sampler) is RandomSampler and sampler.generator is None
        ]
        self.stateful: Any = next(
            (each for each in self._chain if not is_known(each) and has_own_state(each)), None
        )
        draws = any(
            type(sampler) in _DRAWING and sampler.generator is None for sampler in self._chain
        )
        self.streams: tuple[str, ...] = ("torch",) if draws else ()
        if not self._is_known:
            self.streams, self._seeding = ("torch", "numpy", "python"), []
        if self.stateful is not None:
            self.streams = ()

    def dump(self, *, is_begun: bool) -> dict[str, Any]:
        """Write it down.

        Args:
            is_begun: Whether an epoch begins at this moment: else what it will draw from the
                process's streams is not known.
        """
        found: dict[str, Any] = {"begun": is_begun}
        if self._generators:
            found["generators"] = [dump_generator(generator) for generator in self._generators]
        if self._loaders is not None:
            found["generator"] = dump_generator(self._loaders)
        epochs = [probe(sampler, "epoch") for sampler in self._counting]
        if any(isinstance(epoch, int) for epoch in epochs):
            found["epochs"] = [epoch if isinstance(epoch, int) else None for epoch in epochs]
        if self._carrier is not None:
            found["rest"] = list(self._carrier.rest)
        if self.stateful is not None:
            found["own"] = own_state(self.stateful)
        if is_begun and self._seeding:
            found["seed"] = _next_seed()
        if is_begun and self.streams:
            found["streams"] = global_rng_state(self.streams)
        return found

    def restore(self, found: dict[str, Any]) -> None:
        """Have the next epoch begin as it did; but for the process's streams.

        What is written down of an epoch that has begun is restored once more when it is drawn.

        Raises:
            ValueError: If it does not fit, or cannot be read.
        """
        count = len(found.get("generators", ()))
        if count != len(self._generators) and self._is_known:
            raise ValueError(
                "the state does not fit this loader (generators of its samplers: "
                f"{count} found, {len(self._generators)} expected)"
            )
        if "generator" in found and self._loaders is None:
            raise ValueError(
                "the state does not fit this loader: it contains the state of the loader's "
                "generator, and this loader has none (generator=)"
            )
        self.restore_generators(found)
        self.restore_epochs(found)
        if self._carrier is not None:
            self._carrier.begin_with(found.get("rest", ()))
        if not found["begun"]:
            self.restore_own(found)

    def restore_own(self, found: dict[str, Any]) -> None:
        """Give the sampler its own state back, if it has one."""
        if self.stateful is not None and "own" in found:
            self.stateful.load_state_dict(copy.deepcopy(found["own"]))

    def restore_generators(self, found: dict[str, Any]) -> None:
        """Set the samplers' generators, and the loader's."""
        for generator, state in zip(self._generators, found.get("generators", ()), strict=False):
            load_generator(generator, state)
        if self._loaders is not None and "generator" in found:
            load_generator(self._loaders, found["generator"])

    def restore_epochs(self, found: dict[str, Any]) -> None:
        """Have the samplers count from there."""
        for sampler, epoch in zip(self._counting, found.get("epochs", ()), strict=False):
            if epoch is not None:
                sampler.set_epoch(epoch)

    @contextlib.contextmanager
    def drawing(self, found: dict[str, Any]) -> Iterator[None]:
        """Set what an epoch's first index is drawn from; the process's streams are put back."""
        self.restore_generators(found)
        with contextlib.ExitStack() as stack:
            if "seed" in found and self._seeding:
                stack.enter_context(_seeded(self._seeding, found["seed"]))
            if "streams" in found:
                stack.enter_context(with_global_rng_state(found["streams"]))
            yield


def _next_seed() -> int:
    """What a RandomSampler without a generator is going to ask torch's global stream for."""
    before = torch.get_rng_state()
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    torch.set_rng_state(before)
    return seed


@contextlib.contextmanager
def _seeded(samplers: list[RandomSampler], seed: int) -> Iterator[None]:
    """Lend RandomSamplers a generator with this seed: they look for one at their first index."""
    for sampler in samplers:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(seed)
    try:
        yield
    finally:
        for sampler in samplers:
            sampler.generator = None


def own_state(sampler: Any) -> Any:
    """A sampler's own state, copied."""
    return copy.deepcopy(sampler.state_dict())


def not_over(items: Iterator[Any], sampler: Any) -> Iterator[Any]:
    """What a sampler gives that was set to the beginning of an epoch.

    One that looks at its state when it is iterated, as torchdata's StatefulDistributedSampler,
    has the end of the epoch before for that: so it gives nothing, and all when iterated again.
    """
    first = list(itertools.islice(items, 1))
    return itertools.chain(first, items) if first else iter(sampler)


def has_own_state(sampler: object) -> bool:
    """Whether it can save its state, and go on from it."""
    return all(callable(probe(sampler, name)) for name in ("state_dict", "load_state_dict"))
