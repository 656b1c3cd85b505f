"""Wrappers of datasets that seed random number generators before each sample."""

from collections.abc import Callable, Iterator
from typing import Any

from shmloader.batch.arrays import is_plain_data
from shmloader.batch.failures import OnError
from shmloader.batch.fetchers import one_by_one
from shmloader.batch.sample_rng import SampleRng


def seed_samples(
    rng: SampleRng,
    dataset: Any,
    collate_fn: Callable[[Any], Any],
    begin_collate: Callable[[Any], None] | None,
    *,
    is_iterable: bool,
    on_error: OnError = "raise",
    begins_samples: bool = True,
) -> tuple[Any, Callable[[Any], Any]]:
    """Return a dataset and a collate function for a fetcher. Both seed before the user's code.

    Args:
        rng: The generators of the samples.
        dataset: The dataset.
        collate_fn: Makes a batch of samples.
        begin_collate: Called with the samples before each call of ``collate_fn``:
            ``rng.begin_collate`` or ``rng.begin_default_collate``. With None, ``collate_fn`` itself
            calls one of them. For an iterable dataset, generators are always seeded instead.
        is_iterable: Whether the dataset is an iterable one.
        on_error: How bad samples are handled. A function of the user's may draw random numbers.
        begins_samples: Whether asking for a sample seeds its generators; otherwise the caller calls
            :meth:`SampleRng.begin_sample`.
    """
    if is_iterable:
        return SeededStream(rng, dataset), rng.wrap_stream_collate(collate_fn)
    rng.draws_nothing = begins_samples and not callable(on_error) and is_plain_data(dataset)
    # Samples that are skipped do not reach the collate function.
    counts_late = rng.draws_nothing and on_error == "raise"
    if begins_samples and not counts_late:
        dataset = SeededSamples(rng, dataset)
    return dataset, rng.wrap_collate(collate_fn, begin_collate, counts_samples=counts_late)


class SeededSamples:
    """A map-style dataset that seeds before each sample, or only counts it if it draws nothing.

    It has no ``__getitems__``, since one call of that would load many samples.
    """

    def __init__(self, rng: SampleRng, dataset: Any) -> None:
        self._rng = rng
        self._get = one_by_one(dataset)

    def __getitem__(self, index: Any) -> Any:
        self._rng.begin_sample()
        return self._get(index)


class SeededStream:
    """An iterable dataset that seeds before each sample."""

    def __init__(self, rng: SampleRng, dataset: Any) -> None:
        self._rng = rng
        self._dataset = dataset

    def __iter__(self) -> "SeededIterator":
        iterator = SeededIterator(self._rng, self._dataset)
        if self._rng.knows_epoch:
            iterator.begin()
        return iterator


class SeededIterator:
    """Iterates an iterable dataset, and seeds before each sample.

    :meth:`begin` calls ``iter(dataset)``: when this iterator is made if the epoch is known by then,
    otherwise before the first sample.

    Attributes:
        source: The dataset's own iterator; None until :meth:`begin`.
        dataset: The dataset.
    """

    def __init__(self, rng: SampleRng, dataset: Any) -> None:
        self._rng = rng
        self.dataset = dataset
        self.source: Iterator[Any] | None = None
        self._state: Any = None

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
        self._rng.begin_stream_sample()
        return next(self.source)
