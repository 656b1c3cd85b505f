"""Seeds random number generators for each sample, with ``seed=``.

A sample's random numbers depend only on the loader's seed, the epoch and the sample's position.
This module runs where samples are loaded: in a worker process, in a worker thread, or in the main
process.

::

    PositionedIndices(indices, epoch, first) ──▶ SampleRng.at() ──▶ indices ──▶ the fetcher
                                                                                │ dataset[i]
                                          a digest of (seed, epoch, position) ◀─┘
                                            │ seeds random, numpy.random and torch for each sample
                                            └ seeds sample_rng(), where that is called

Seeds are computed in :mod:`shmloader.batch.seeds`.

What a seed costs (``benchmarks/seed_cost.py``; AMD EPYC virtual machine, Python 3.11):

=====================================  ==========================================================
a sample that runs the user's code     9 µs: 4.5 for ``random``, 2 for ``numpy.random``, 1.3 for
                                       torch, and the rest for the digest. About 25 µs after a
                                       transform of 80 µs, which displaces code and states from
                                       the processor's caches and then takes 10 µs more itself
a batch that runs the user's code in   18 µs, since the user's own generators are saved before
the main process                       its first sample and restored after its last
the samples of a dataset that runs no  nothing: no generator is saved, seeded or restored
code of the user's (``is_plain_data``)
any batch                              4 µs for its position in the epoch
collating by the user's function       as much as one sample
=====================================  ==========================================================

The first two are the price of ``random``, ``numpy.random`` and torch's generator. Each of these has
a state of 624 words, all of which depend on the seed, and none tells when it is used. So they are
seeded for all samples whose code may draw, even if the code then draws nothing. With
``thread_pool=True`` or ``fetch_concurrency``, where they are not seeded, a sample costs about 1 µs:
its digest is made only if it calls :func:`sample_rng`.

Guarantees:
    * The random numbers that one sample draws do not affect those of another.
    * A sample or batch that is loaded inside another (by a dataset that iterates a loader of its
      own) leaves the outer one's :func:`sample_rng` as it was. An in-process iterator also restores
      the global generators, if it has seeded them.

Assumes:
    * Where the global generators are seeded, one thread at a time uses them. Worker threads share
      them, so only :func:`sample_rng` is reproducible there.
"""

import contextlib
import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from shmloader.batch.seeds import Use, begin_digest, end_digest
from shmloader.sampling.indices import PositionedIndices
from shmloader.sampling.rng import GlobalState

_LARGEST_SEED = (1 << 63) - 1

# The seeds of random (its low and its high word), of numpy.random, and of torch.
_SEEDS = struct.Struct("<QQIQ")


def _seed_globals(digest: bytes) -> None:
    low, high, word, seed = _SEEDS.unpack_from(digest)
    random.seed(high << 64 | low)
    # One word: several take 7 µs more, half of what a sample may cost. torch uses no more than 32
    # bits either. Not torch.manual_seed, which also seeds every kind of device.
    np.random.seed(word)
    # Below 2**63, as torch's own seeds are: torch.initial_seed() has to fit a tensor of int64.
    torch.default_generator.manual_seed(seed & _LARGEST_SEED)


class _Current:
    """The sample that is being loaded, or the batch that is being collated.

    Attributes:
        begun: The begun digest that seeds its generator.
        numbers: The two numbers that complete the digest.
        rng: The generator; None until it is asked for.
    """

    __slots__ = ("begun", "numbers", "rng")

    def __init__(self, begun: "hashlib.blake2b", numbers: tuple[int, int]) -> None:
        self.begun = begun
        self.numbers = numbers
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
    started it: call this function before you start the thread, and pass the generator to it.

    Returns:
        A ``numpy.random.Generator`` over Philox.

    Raises:
        RuntimeError: If no loader with a seed is loading or collating a sample in this context.
    """
    current = _CURRENT.get()
    if current is None:
        raise RuntimeError(
            "sample_rng() works only while a loader with a seed loads a sample: give the loader "
            "seed=, and call this function in the dataset's __getitem__ (or in the iterator of an "
            "iterable dataset) or in collate_fn, on the same thread"
        )
    if current.rng is None:
        key = int.from_bytes(end_digest(current.begun, *current.numbers)[32:48], "little")
        current.rng = np.random.Generator(np.random.Philox(key=key))
    return current.rng


class SampleRng:
    """Seeds the generators of the samples that one fetcher loads. One thread at a time uses it.

    Attributes:
        draws_nothing: Whether loading samples runs no code of the user's, so none needs a seed.
        position: Number of the next sample of an iterable dataset, in the epoch and in this
            worker's stream, from 0. It is set from outside when the dataset is resumed.

    Args:
        seed: The loader's seed.
        worker_id: Number of the worker that loads; 0 in-process and in threads.
        epoch: Number of the epoch that begins, if it is known before the first ticket.
        sets_global: Whether the generators of ``random``, ``numpy.random`` and torch are seeded,
            too. False in threads, and where several samples are loaded at once.
        restores_global: Whether these generators are restored after each batch that has seeded
            them. True in the main process, where the user uses them, too.
    """

    def __init__(
        self,
        seed: int,
        worker_id: int = 0,
        *,
        epoch: int | None = None,
        sets_global: bool = True,
        restores_global: bool = False,
    ) -> None:
        self._seed = seed
        self._worker_id = worker_id
        self._epoch: int | None = None
        self._digests: list[hashlib.blake2b] = []
        if epoch is not None:
            self._begin_epoch(epoch)
        self._sets_global = sets_global
        self._restores_global = restores_global
        # The states of the process's own generators, while a sample's seed has replaced them.
        self._own: GlobalState | None = None
        self.draws_nothing = False
        self.position = 0
        self._positioned = PositionedIndices(None, 0, 0)
        # How many samples of the ticket were begun, and how many of these before the batch in work.
        self._count = 0
        self._batch_start = 0

    def at(self, positioned: PositionedIndices) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that sets the position of the samples loaded in its block.

        The block gets the plain indices.
        """
        return _Loading(self, positioned)

    def begin_ticket(self, positioned: PositionedIndices) -> None:
        """Set the position of the samples that are loaded next."""
        self._positioned = positioned
        if positioned.epoch != self._epoch:
            self._begin_epoch(positioned.epoch)
        self._count = self._batch_start = 0

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._digests = [begin_digest(use, self._seed, epoch) for use in Use]

    def load(self, get: Callable[[Any], Any], index: Any) -> Any:
        """Seed for the next sample of the ticket, and return ``get(index)``."""
        self.begin_sample()
        return get(index)

    def begin_sample(self) -> None:
        """Seed for the next sample of the ticket, unless it draws nothing."""
        number = self._count
        self._count += 1
        if not self.draws_nothing:
            self._set(Use.SAMPLE, *self._positioned.key(number))

    def begin_collate(self, _: object = None) -> None:
        """Seed for collating the samples that were begun since the last batch."""
        self._set(Use.COLLATE, *self._positioned.key(self._batch_start))

    def begin_default_collate(self, samples: Any) -> None:
        """Seed for torch's ``default_collate``, unless the samples are plain data."""
        if not self.draws_nothing:
            self.begin_collate(samples)

    def begin_stream_sample(self) -> None:
        """Seed for the next sample of an iterable dataset."""
        position = self.position
        self.position += 1
        self._count += 1
        self._set(Use.STREAM_SAMPLE, self._worker_id, position)

    @contextlib.contextmanager
    def opening_stream(self) -> Iterator[None]:
        """Seed for ``iter(dataset)``, which is called in this block."""
        before, own = _CURRENT.get(), self._own
        self._set(Use.STREAM, self._worker_id, 0)
        try:
            yield
        finally:
            _CURRENT.set(before)
            if own is None:
                self.restore_globals()

    @property
    def knows_epoch(self) -> bool:
        """Whether the epoch is known, so that ``iter(dataset)`` may be called."""
        return self._epoch is not None

    def begin_stream_collate(self, _: object = None) -> None:
        """Seed for collating samples of an iterable dataset."""
        self._set(Use.STREAM_COLLATE, self._worker_id, self.position - self._count)

    def end_batch(self, counted: int) -> None:
        """Note that a batch of the ticket is collated. A next one, of another shard, follows.

        Args:
            counted: How many of its samples :meth:`begin_sample` was not called for.
        """
        self._count += counted
        self._batch_start = self._count

    def _set(self, use: Use, first: int, second: int) -> None:
        begun = self._digests[use]
        _CURRENT.set(_Current(begun, (first, second)))
        if self._sets_global:
            if self._restores_global and self._own is None:
                self._own = GlobalState()
            _seed_globals(end_digest(begun, first, second))

    def restore_globals(self) -> None:
        """Restore the process's own generators, if samples have replaced their states."""
        own, self._own = self._own, None
        if own is not None:
            own.restore()


class _Loading:
    """The context manager that :meth:`SampleRng.at` returns; a generator would take longer."""

    __slots__ = ("_before", "_positioned", "_rng")

    def __init__(self, rng: SampleRng, positioned: PositionedIndices) -> None:
        self._rng = rng
        self._positioned = positioned

    def __enter__(self) -> Any:
        self._rng.begin_ticket(self._positioned)
        self._before = _CURRENT.set(None)
        return self._positioned.indices

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._before)
        self._rng.restore_globals()


class SeededIterator:
    """Iterates an iterable dataset, and seeds before each sample.

    :meth:`begin` calls ``iter(dataset)``: when this iterator is made if the epoch is known by then,
    otherwise before the first sample.

    Attributes:
        source: The dataset's own iterator; None until :meth:`begin`.
    """

    def __init__(self, rng: SampleRng, dataset: Any) -> None:
        self._rng, self._dataset = rng, dataset
        self.source: Iterator[Any] | None = None
        self._state: Any = None
        if rng.knows_epoch:
            self.begin()

    @property
    def position(self) -> int:
        """The number of samples that were asked for in the epoch, in this worker's stream."""
        return self._rng.position

    def resume(self, position: int, state: Any) -> None:
        """Continue after earlier samples.

        Args:
            position: How many samples were yielded before.
            state: The argument for the source's ``load_state_dict``; None to not call that.
        """
        self._rng.position = position
        self._state = state
        if self.source is not None:
            self._load_state(self.source)

    def _load_state(self, source: Any) -> None:
        state, self._state = self._state, None
        if state is not None:
            source.load_state_dict(state)

    def begin(self) -> None:
        """Call ``iter(dataset)``, with generators seeded for it.

        Raises:
            Exception: What ``iter(dataset)`` raises. A StopIteration, which would silently end the
                epoch, becomes a RuntimeError.
        """
        with self._rng.opening_stream():
            try:
                self.source = iter(self._dataset)
            except StopIteration as error:
                raise RuntimeError("iter(dataset) raised StopIteration") from error
            self._load_state(self.source)

    def __iter__(self) -> "SeededIterator":
        return self

    def __next__(self) -> Any:
        if self.source is None:
            self.begin()
        assert self.source is not None
        self._rng.begin_stream_sample()
        return next(self.source)
