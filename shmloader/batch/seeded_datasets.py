"""Wrappers of datasets that seed random number generators before each sample."""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from shmloader.batch.fetchers import SwitchingDataset, one_by_one

if TYPE_CHECKING:
    from shmloader.batch.sample_rng import SampleRng  # that module imports this one


class BegunSamples(SwitchingDataset):
    """A map-style dataset that seeds before each sample, or only counts it if it draws nothing.

    It has no ``__getitems__``, since one call of that would load many samples.
    """

    def __init__(self, rng: "SampleRng", dataset: Any) -> None:
        self._rng = rng
        self._dataset = dataset

    def for_batch(self) -> Any:
        """Return the dataset itself if its samples draw no random numbers, otherwise this one."""
        return self._dataset if self._rng.may_step_aside() else self

    @functools.cached_property
    def _get(self) -> Callable[[Any], Any]:
        return one_by_one(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        self._rng.begin_sample()
        return self._get(index)


class SeededStream:
    """An iterable dataset that seeds before each sample."""

    def __init__(self, rng: "SampleRng", dataset: Any) -> None:
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

    def __init__(self, rng: "SampleRng", dataset: Any) -> None:
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
