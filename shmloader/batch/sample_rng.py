"""Random numbers of each sample, which depend only on the loader's seed and the sample's position.

Runs where samples are loaded: in a worker process, in a worker thread, or in the main process.

::

    PositionedIndices(indices, epoch, first) ──▶ SampleRng.at() ──▶ indices ──▶ the fetcher
                                                                                │ dataset[i]
                                          a digest of (seed, epoch, position) ◀─┘
                                            │ seeds random, numpy.random and torch for each sample
                                            └ seeds sample_rng(), where that is called

Every value comes out of one hash, BLAKE2b, of numbers in decimal: what for, the seed, the epoch,
and two more (:class:`_Use` says which). So neither the number of workers, nor who loads a sample,
when, or once more, has any part in it.

A dataset that only hands out what it holds is left as it is, since nobody would see them.

Guarantees:
    * One sample's draws, however many, move no other sample's.
    * A sample, or a collate, inside of another (a dataset that iterates a loader of its own) leaves
      the outer one's :func:`sample_rng` as it was; an in-process iterator puts back the global
      streams as well.

Assumes: one thread at a time uses the global streams where they are set. Threads share them, so
there :func:`sample_rng` alone is right.
"""

import contextlib
import enum
import functools
import hashlib
import operator
import random
import struct
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.batch.plain_data import only_hands_out
from shmloader.probing import probe
from shmloader.sampling.indices import PositionedIndices

_DIGEST_BYTES = 64


class _Use(enum.IntEnum):
    """What a digest is for, and which two numbers follow the epoch. Kept for ever: see the tests.

    A sample of a map-style dataset has its position and 0; in a batch that a batch sampler made,
    the batch's number and its own in it. A batch has those of its first sample.
    """

    SAMPLE = 0
    COLLATE = 1
    #: Of an iterable dataset: the worker's number, and the sample's in its stream.
    STREAM_SAMPLE = 2
    STREAM_COLLATE = 3
    #: iter(dataset): the worker's number, and 0.
    STREAM = 4
    #: Of the workers, as torch has one: 0, and 0.
    BASE_SEED = 5


def _begin_digest(use: _Use, seed: int, epoch: int) -> "hashlib.blake2b":
    text = b"%d,%d,%d," % (use, seed, epoch)
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"shmloader sample")


def _end_digest(begun: "hashlib.blake2b", first: int, second: int) -> bytes:
    # A copy, since to begin one takes three times as long as the rest.
    whole = begun.copy()
    whole.update(b"%d,%d" % (first, second))
    return whole.digest()


def base_seed(seed: int, epoch: int) -> int:
    """What workers that start in this epoch are seeded from, in place of torch's draw."""
    digest = _end_digest(_begin_digest(_Use.BASE_SEED, seed, epoch), 0, 0)
    return int.from_bytes(digest[:8], "little") >> 1


def seed_of_rank(seed: int, rank: int) -> int:
    """Return what the samples of a rank depend on in place of ``seed``, 128 bits.

    For loaders whose positions are those in a rank's own share of the samples. Kept for ever, as
    the digests are.
    """
    digest = hashlib.blake2b(b"%d,%d" % (seed, rank), digest_size=16, person=b"shmloader rank")
    return int.from_bytes(digest.digest(), "little")


_LARGEST_SEED = (1 << 63) - 1

# Of random (its low word and its high one), of numpy.random, and of torch.
_SEEDS = struct.Struct("<QQIQ")


def _set_global_streams(digest: bytes) -> None:
    low, high, word, seed = _SEEDS.unpack_from(digest)
    random.seed(high << 64 | low)
    # Of one word: of several it takes 7 µs more, half of what a sample may cost. torch uses no more
    # than 32 bits either. Not torch.manual_seed, which asks every kind of device.
    np.random.seed(word)
    # Below 2**63, as torch's own seeds are: torch.initial_seed() has to fit a tensor of int64.
    torch.default_generator.manual_seed(seed & _LARGEST_SEED)


class _Moment:
    """A sample, or a collate, that runs: what its generator is made from, and that if it was."""

    __slots__ = ("digest", "rng")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.rng: np.random.Generator | None = None


# Of the context, not of the thread: tasks of one event loop may each load a sample, and what they
# call by asyncio.to_thread belongs to them.
_MOMENT: ContextVar[_Moment | None] = ContextVar("shmloader_sample", default=None)


def sample_rng() -> np.random.Generator:
    """The random numbers of the sample that is being loaded.

    They depend on the loader's ``seed``, the epoch and the sample's position in the global order
    alone, however the sample is loaded; in ``collate_fn``, on the first sample's position. For an
    iterable dataset: on the worker's number, and the sample's in that worker's stream.

    The same generator comes for as long as the sample lasts, and goes on where it was. With
    ``thread_pool=True`` these are the only numbers that a seed gives: ``random``, ``numpy.random``
    and torch have one stream for all threads. A thread of your own is not in the sample, unless
    ``asyncio.to_thread`` has started it: ask before, and hand the generator on.

    Returns:
        A ``numpy.random.Generator`` over Philox, made when it is asked for.

    Raises:
        RuntimeError: Where no sample of a loader with a seed is being loaded or collated.
    """
    moment = _MOMENT.get()
    if moment is None:
        raise RuntimeError(
            "sample_rng() is known only while a loader that has a seed loads a sample: give the "
            "loader seed=, and call this in the dataset's __getitem__ (or in the iterator of an "
            "iterable one) or in collate_fn, on the thread that these run on"
        )
    if moment.rng is None:
        key = int.from_bytes(moment.digest[32:48], "little")
        moment.rng = np.random.Generator(np.random.Philox(key=key))
    return moment.rng


class SampleRng:
    """Sets the streams of the samples that one fetcher loads. One thread at a time uses it.

    Attributes:
        position: Number of the sample that an iterable dataset is asked for next, in the epoch and
            this worker's stream, from 0. May be set: by whoever has the dataset go on elsewhere
            than at its beginning.

    Args:
        seed: The loader's.
        worker_id: Of the worker that loads; 0 in-process.
        epoch: The one that begins, where it is known before the first ticket.
        sets_global: Whether ``random``, ``numpy.random`` and torch are set, too: not in threads,
            nor where several samples are loaded at once.
    """

    def __init__(
        self,
        seed: int,
        worker_id: int = 0,
        *,
        epoch: int | None = None,
        sets_global: bool = True,
    ) -> None:
        self._seed = seed
        self._worker_id = worker_id
        self._epoch: int | None = None
        self._digests: list[hashlib.blake2b] = []
        if epoch is not None:
            self._begin_epoch(epoch)
        self._sets_global = sets_global
        self.position = 0
        self._placed = PositionedIndices(None, 0, 0)
        # Samples that the ticket has had, and those before the batch in work.
        self._count = 0
        self._batch_start = 0

    @contextlib.contextmanager
    def at(self, placed: PositionedIndices) -> Iterator[Any]:
        """Load a ticket inside of this; gives its indices."""
        self._placed = placed
        if placed.epoch != self._epoch:
            self._begin_epoch(placed.epoch)
        self._count = self._batch_start = 0
        before = _MOMENT.set(None)
        try:
            yield placed.indices
        finally:
            _MOMENT.reset(before)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._digests = [_begin_digest(use, self._seed, epoch) for use in _Use]

    def wrap(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        is_iterable: bool = False,
        may_fail: bool = True,
        begins_samples: bool = True,
        begins_collate: bool = True,
    ) -> tuple[Any, Callable[[Any], Any]]:
        """A dataset and a collate function for a fetcher, under whose calls the streams are set.

        Args:
            dataset: What to load from.
            collate_fn: Makes a batch of samples.
            is_iterable: Whether it is an iterable dataset.
            may_fail: Whether a bad sample runs code of the user's, or leaves a batch shorter.
            begins_samples: Whether a sample's streams are set when it is asked for; else whoever
                loads calls :meth:`begin_sample` itself.
            begins_collate: Whether a batch's streams are set when ``collate_fn`` is called; else
                that calls :meth:`begin_collate` itself, if anything of it may draw. Always for an
                iterable dataset.
        """
        if is_iterable:
            return _SeededStream(self, dataset), self._wrap_stream_collate(collate_fn)
        counts_samples = begins_samples and not may_fail and only_hands_out(dataset)
        if begins_samples and not counts_samples:
            dataset = _SeededSamples(self, dataset)
        return dataset, self._wrap_collate(
            collate_fn, begins=begins_collate, counts_samples=counts_samples
        )

    def begin_sample(self) -> None:
        """The next sample of the ticket."""
        key = self._placed.key(self._count)
        self._count += 1
        self._set(_Use.SAMPLE, *key)

    def begin_collate(self) -> None:
        """The batch of the samples that were begun since the last one."""
        self._set(_Use.COLLATE, *self._placed.key(self._batch_start))

    def begin_stream_sample(self) -> None:
        """The next sample of an iterable dataset."""
        position = self.position
        self.position += 1
        self._count += 1
        self._set(_Use.STREAM_SAMPLE, self._worker_id, position)

    @contextlib.contextmanager
    def opening_stream(self) -> Iterator[None]:
        """``iter(dataset)``, inside of this."""
        before = _MOMENT.get()
        self._set(_Use.STREAM, self._worker_id, 0)
        try:
            yield
        finally:
            _MOMENT.set(before)

    @property
    def knows_epoch(self) -> bool:
        """Whether a stream may be opened: else not before the first ticket."""
        return self._epoch is not None

    def _wrap_collate(
        self, collate_fn: Callable[[Any], Any], *, begins: bool, counts_samples: bool
    ) -> Callable[[Any], Any]:
        def collate(samples: Any) -> Any:
            if begins:
                self.begin_collate()
            # The one sample of a ticket without batches may have no length, and is its only one.
            if counts_samples and isinstance(samples, list):
                self._count += len(samples)
            batch = collate_fn(samples)
            self._batch_start = self._count  # a further batch of the step comes next
            return batch

        return collate

    def _wrap_stream_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def collate(samples: Any) -> Any:
            self._set(_Use.STREAM_COLLATE, self._worker_id, self.position - self._count)
            return collate_fn(samples)

        return collate

    def _set(self, use: _Use, first: int, second: int) -> None:
        digest = _end_digest(self._digests[use], first, second)
        _MOMENT.set(_Moment(digest))
        if self._sets_global:
            _set_global_streams(digest)


class _SeededSamples:
    """A map-style dataset, one sample at a time: ``__getitems__`` would draw for many."""

    def __init__(self, streams: SampleRng, dataset: Any) -> None:
        self._streams = streams
        self._dataset = dataset

    @functools.cached_property
    def _get(self) -> Callable[[Any], Any]:
        return one_by_one(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        self._streams.begin_sample()
        return self._get(index)


def one_by_one(dataset: Any) -> Callable[[Any], Any]:
    """What gives one sample of a map-style dataset, whichever of its two methods it has."""
    if _gives_lists_alone(dataset):
        return functools.partial(_get_by_list, dataset)
    return functools.partial(operator.getitem, dataset)


def _gives_lists_alone(dataset: Any) -> bool:
    """Whether a dataset has no ``__getitem__``; torch's base class has one that raises."""
    own = getattr(type(dataset), "__getitem__", None)
    return own in (None, Dataset.__getitem__) and bool(probe(dataset, "__getitems__"))


def _get_by_list(dataset: Any, index: Any) -> Any:
    (sample,) = dataset.__getitems__([index])
    return sample


class _SeededStream:
    """An iterable dataset."""

    def __init__(self, streams: SampleRng, dataset: Any) -> None:
        self._streams = streams
        self._dataset = dataset

    def __iter__(self) -> "SeededIterator":
        iterator = SeededIterator(self._streams, self._dataset)
        if self._streams.knows_epoch:
            iterator.begin()
        return iterator


class SeededIterator:
    """An iterable dataset's samples. ``iter(dataset)`` is called once the epoch is known.

    Attributes:
        source: The dataset's own iterator; None until :meth:`begin`.
        dataset: It.
    """

    def __init__(self, streams: SampleRng, dataset: Any) -> None:
        self._streams = streams
        self.dataset = dataset
        self.source: Iterator[Any] | None = None
        self._state: Any = None

    @property
    def position(self) -> int:
        """Samples that were given in the epoch."""
        return self._streams.position

    def go_on(self, position: int, state: Any) -> None:
        """Go on after so many samples.

        Args:
            position: How many.
            state: For the source's ``load_state_dict``; None if there is nothing for it.
        """
        self._streams.position = position
        self._state = state
        if self.source is not None:
            self._load_state(self.source)

    def _load_state(self, source: Any) -> None:
        state, self._state = self._state, None
        if state is not None:
            source.load_state_dict(state)

    def begin(self) -> None:
        """Call ``iter(dataset)``, under streams of its own.

        Raises:
            Exception: What that raises; a StopIteration, which would end the epoch in silence, as
                RuntimeError.
        """
        with self._streams.opening_stream():
            try:
                self.source = iter(self.dataset)
            except StopIteration as error:
                raise RuntimeError("iter(dataset) raised StopIteration") from error
            self._load_state(self.source)

    def __iter__(self) -> "SeededIterator":
        return self

    def __next__(self) -> Any:
        if self.source is None:
            self.begin()
        assert self.source is not None
        self._streams.begin_stream_sample()
        return next(self.source)


def loading(streams: SampleRng | None, indices: Any) -> contextlib.AbstractContextManager[Any]:
    """Load a ticket inside of this; gives its indices, whether it is placed or not."""
    return contextlib.nullcontext(indices) if streams is None else streams.at(indices)
