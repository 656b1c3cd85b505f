"""Seeds random number generators for workers, and for each sample, with ``seed=``.

A sample's random numbers depend only on the loader's seed, the epoch and the sample's position,
which comes with the ticket (:class:`~shmloader.sampling.indices.PositionedIndices`). All seeds come
from one hash, BLAKE2b, of five decimal numbers: the use, the loader's seed, the epoch, and two more
(see :class:`Use`). So a seed does not depend on the number of workers, or on when, where and how
often a sample is loaded.

A sample takes 9 µs more (``benchmarks/seed_cost.py``), since the three generators have states of
624 words that depend on the seed, and none tells when it is used. With ``thread_pool=True`` or
``fetch_concurrency``, where they are not seeded, it takes 1 µs.

Guarantees:
    * The random numbers that one sample draws do not affect those of another.
    * A sample or batch that is loaded inside another (by a dataset that iterates a loader of its
      own) leaves the outer one's :func:`sample_rng` as it was. An in-process iterator also restores
      the global generators, if it has seeded them.

Assumes:
    * Where the global generators are seeded, one thread at a time uses them.
"""

import contextlib
import enum
import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state

from shmloader.sampling.indices import PositionedIndices
from shmloader.sampling.rng import GlobalState

_DIGEST_BYTES = 64

_LARGEST_SEED = (1 << 63) - 1

# The seeds of random (its low and its high word), of numpy.random, and of torch.
_SEEDS = struct.Struct("<QQIQ")


# Seeds ------------------------------------------------------------------------------------


class Use(enum.IntEnum):
    """What a digest is for. The comments say which two numbers follow the epoch in its text.

    The values of the members never change between versions.
    """

    #: A sample of a map-style dataset: its position and 0. If a batch sampler made the batch: the
    #: number of the batch, and the number of the sample in the batch.
    SAMPLE = 0
    #: Collating a batch of a map-style dataset: the two numbers of its first sample.
    COLLATE = 1
    #: A sample of an iterable dataset: the number of the worker, and the number of the sample in
    #: the worker's stream.
    STREAM_SAMPLE = 2
    #: Collating a batch of an iterable dataset: the two numbers of its first sample.
    STREAM_COLLATE = 3
    #: ``iter(dataset)``: the number of the worker, and 0.
    STREAM = 4
    #: The workers' base seed, in place of torch's: 0 and 0.
    BASE_SEED = 5
    #: A record of a stream of shards: the pass over the shards and the number of the shard, as one
    #: number, and the number of the record in the shard.
    RECORD = 6


def _begin_digest(use: Use, seed: int, epoch: int) -> "hashlib.blake2b":
    """Return the part of a digest that all samples of an epoch have in common."""
    text = b"%d,%d,%d," % (use, seed, epoch)
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"shmloader sample")


def _end_digest(start: "hashlib.blake2b", first: int, second: int) -> bytes:
    """Complete a digest with two more numbers. Returns its 64 bytes."""
    # A copy, since beginning a digest takes three times as long as the rest.
    whole = start.copy()
    whole.update(b"%d,%d" % (first, second))
    return whole.digest()


def base_seed(seed: int, epoch: int) -> int:
    """Return the base seed of the workers that start in this epoch. torch would draw one."""
    digest = _end_digest(_begin_digest(Use.BASE_SEED, seed, epoch), 0, 0)
    return int.from_bytes(digest[:8], "little") >> 1


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed ``random``, ``torch`` and ``numpy.random`` of this process, as torch does in a worker.

    Returns the worker's seed, as ``get_worker_info().seed`` shows it.
    """
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(_generate_state(base_seed, worker_id))
    return seed


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed of 128 bits that replaces ``seed`` for the samples of one rank.

    It is for loaders that count positions within the rank's own share of the samples. Like the
    digests, the result never changes between versions.
    """
    digest = hashlib.blake2b(b"%d,%d" % (seed, rank), digest_size=16, person=b"shmloader rank")
    return int.from_bytes(digest.digest(), "little")


def _seed_globals(digest: bytes) -> None:
    low, high, word, seed = _SEEDS.unpack_from(digest)
    random.seed(high << 64 | low)
    # One word: several take 7 µs more, half of what a sample may cost. torch uses no more than 32
    # bits either. Not torch.manual_seed, which also seeds every kind of device.
    np.random.seed(word)
    # Below 2**63, as torch's own seeds are: torch.initial_seed() has to fit a tensor of int64.
    torch.default_generator.manual_seed(seed & _LARGEST_SEED)


# Generators of samples --------------------------------------------------------------------


class _Current:
    """The sample that is being loaded, or the batch that is being collated."""

    __slots__ = ("digest", "numbers", "rng")

    def __init__(self, digest: "hashlib.blake2b", numbers: tuple[int, int]) -> None:
        self.digest, self.numbers = digest, numbers
        self.rng: np.random.Generator | None = None


# One for each context, not for each thread: each task of one event loop may load a sample, and a
# function that the task calls by asyncio.to_thread belongs to the same sample.
_CURRENT: ContextVar[_Current | None] = ContextVar("shmloader_sample", default=None)


def sample_rng() -> np.random.Generator:
    """Return the random number generator of the sample that is being loaded.

    The generator's numbers depend only on the loader's ``seed``, the epoch, and the sample's
    position in the global order. In ``collate_fn`` the position is that of the batch's first
    sample. For an iterable dataset, the worker's number and the sample's number in that worker's
    stream take the place of the position.

    All calls for one sample return the same generator. With ``thread_pool=True``, a seed affects
    this generator only, since all threads share the generators of ``random``, ``numpy.random`` and
    torch. A thread that you start does not belong to the sample, unless ``asyncio.to_thread``
    started it. Call this function before you start the thread, and pass the generator to it.

    Returns:
        A ``numpy.random.Generator`` over Philox.

    Raises:
        RuntimeError: If no loader with a seed is loading or collating a sample in this context.
    """
    current = _CURRENT.get()
    if current is None:
        raise RuntimeError(
            "sample_rng() works only while a loader with a seed loads a sample. Give the loader "
            "seed=, and call it in __getitem__, __iter__ or collate_fn, on the same thread."
        )
    if current.rng is None:
        key = int.from_bytes(_end_digest(current.digest, *current.numbers)[32:48], "little")
        current.rng = np.random.Generator(np.random.Philox(key=key))
    return current.rng


class SampleRng:
    """Seeds the generators of the samples that one fetcher loads. One thread at a time uses it.

    Attributes:
        epoch: Number of the epoch; None until it is known.
        position: Number of the next sample of an iterable dataset, in the epoch and in this
            worker's stream, from 0. It is set from outside when the dataset is resumed.

    Args:
        seed: The loader's seed.
        worker_id: Number of the worker that loads; 0 in-process and in threads.
        epoch: Number of the epoch that begins, if it is known before the first ticket.
        is_iterable: Whether the dataset is iterable.
        sets_global: Whether the generators of ``random``, ``numpy.random`` and torch are seeded,
            too.
        restores_global: Whether these generators are restored after each batch that has seeded
            them.
        draws_nothing: Whether loading samples runs no code of the user's, so that none needs a
            seed (``is_plain_data``).
    """

    def __init__(
        self,
        seed: int,
        worker_id: int = 0,
        *,
        epoch: int | None = None,
        is_iterable: bool = False,
        sets_global: bool = True,
        restores_global: bool = False,
        draws_nothing: bool = False,
    ) -> None:
        self._seed, self._worker_id, self._is_iterable = seed, worker_id, is_iterable
        self.epoch: int | None = None
        self._digests: list[hashlib.blake2b] = []
        if epoch is not None:
            self._begin_epoch(epoch)
        self._sets_global, self._restores_global = sets_global, restores_global
        self._draws_nothing = draws_nothing
        # The states of the process's own generators, while a sample's seed has replaced them.
        self._own: GlobalState | None = None
        self.position = 0
        self._positioned = PositionedIndices(None, 0, 0)
        # How many samples of the ticket were begun, and how many of these before the batch in work.
        self._count = 0

    @contextlib.contextmanager
    def at(self, positioned: PositionedIndices) -> Iterator[Any]:
        """Set the position of the samples that are loaded in a block, which gets the indices."""
        self._positioned = positioned
        if positioned.epoch != self.epoch:
            self._begin_epoch(positioned.epoch)
        self._count = 0
        before = _CURRENT.set(None)
        try:
            yield positioned.indices
        finally:
            _CURRENT.reset(before)
            self._restore_globals()

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._digests = [_begin_digest(use, self._seed, epoch) for use in Use]

    def load(self, get: Callable[[Any], Any], index: Any) -> Any:
        """Seed for the next sample of the ticket, and return ``get(index)``."""
        self.begin_sample()
        return get(index)

    def begin_sample(self) -> None:
        """Seed for the next sample of the ticket, unless it draws nothing."""
        number = self._count
        self._count += 1
        if not self._draws_nothing:
            self.seed(Use.SAMPLE, *self._positioned.key(number))

    def begin_stream_sample(self) -> None:
        """Seed for the next sample of an iterable dataset."""
        position = self.position
        self.position += 1
        self._count += 1
        self.seed(Use.STREAM_SAMPLE, self._worker_id, position)

    @contextlib.contextmanager
    def opening_stream(self) -> Iterator[None]:
        """Seed for ``iter(dataset)``, which is called in this block."""
        before, own = _CURRENT.get(), self._own
        self.seed(Use.STREAM, self._worker_id, 0)
        try:
            yield
        finally:
            _CURRENT.set(before)
            if own is None:
                self._restore_globals()

    def begin_collate(self) -> None:
        """Seed for collating the samples of the ticket."""
        if self._is_iterable:
            self.seed(Use.STREAM_COLLATE, self._worker_id, self.position - self._count)
        else:
            self.seed(Use.COLLATE, *self._positioned.key(0))

    def seed(self, use: Use, first: int, second: int) -> None:
        """Seed for what two numbers name; see :class:`Use`."""
        digest = self._digests[use]
        _CURRENT.set(_Current(digest, (first, second)))
        if self._sets_global:
            if self._restores_global and self._own is None:
                self._own = GlobalState()
            _seed_globals(_end_digest(digest, first, second))

    def _restore_globals(self) -> None:
        """Restore the process's own generators, if samples have replaced their states."""
        own, self._own = self._own, None
        if own is not None:
            own.restore()
