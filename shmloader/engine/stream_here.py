"""Where the dataset of a loader without workers is."""

import copy
from collections.abc import Callable
from typing import Any

from shmloader.batch.iterable_state import (
    IterableCheckpoint,
    Saved,
    parts_of,
    read,
    save,
    save_dataset,
)
from shmloader.batch.sample_rng import SeededIterator
from shmloader.engine.iterable_checkpoints import dump_checkpoint
from shmloader.interruptions import is_interruption
from shmloader.sampling.rng import global_rng_state
from shmloader.sampling.sampler_checkpoint import has_own_state


class DatasetHere:
    """The state of a map-style dataset in this process.

    It is asked for when the loader's is, and before each batch: while that is read, or if reading
    it is interrupted, the dataset is past what was delivered.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._given = 0
        self._is_reading = False
        self._before: Saved | None = None

    def begin_batch(self) -> None:
        """The next batch is about to be read."""
        self._before = _state_or_none(self._state)
        self._is_reading = True

    def _state(self) -> Saved | None:
        return copy.deepcopy(save_dataset(self._dataset))

    def gave(self, fingerprint: int | None, *, has_failed: bool, is_short: bool) -> None:
        """See :meth:`StreamHere.gave`."""
        del fingerprint, has_failed, is_short
        self._given += 1
        self._is_reading = False

    def mark(self) -> int:
        """See :meth:`StreamHere.mark`."""
        return self._given

    def go_back(self, given: int) -> None:
        """See :meth:`StreamHere.go_back`."""
        self._is_reading |= self._given != given
        self._given = given

    def end(self) -> None:
        """The epoch has ended."""

    def dump(self) -> dict[str, Any]:
        """See :meth:`StreamHere.dump`."""
        saved = self._before if self._is_reading else self._state()
        return _dumped(IterableCheckpoint(self._given, at=self._given), saved)


class StreamHere:
    """The checkpoint of an iterable dataset in this process.

    A state of its own is asked for when the loader's is. While a batch is being read, and after
    that was interrupted, the dataset is past what was delivered: then the state at the beginning
    counts, and what was delivered since is to be read again.

    Used on the thread that loads. Holds what has a state, not the loader, nor an iterator that
    cannot be saved.

    Args:
        fetcher: torch's, of the dataset, which was iterated.
        checkpoint: Where it goes on.
        rng: States of the process's global generators at ``iter(dataset)``; None if samples do
            not depend on them.
        asks: Whether the dataset, or its iterator, is asked for a state of its own.
    """

    def __init__(
        self,
        fetcher: Any,
        checkpoint: IterableCheckpoint,
        rng: dict[str, Any] | None,
        *,
        asks: bool = True,
    ) -> None:
        iterator, dataset, _ = parts_of(fetcher)
        if isinstance(fetcher.dataset_iter, SeededIterator):
            iterator = fetcher.dataset_iter
        elif not has_own_state(iterator):
            iterator = None
        self._sources = _Sources(iterator, dataset, fetcher.ended)
        self._draws = rng is not None
        self._asks = asks
        # Whether the states before the next batch are to be noted: before the first one, since an
        # order may be drawn with it, and where the epoch was resumed.
        self._notes_rng = checkpoint.rng is None and not checkpoint.given
        self._is_reading = False
        # The checkpoint before the newest batch.
        self._before = checkpoint
        # What is read again goes on from here.
        self._start: Saved | None = None
        if checkpoint.snapshot is not None:
            self._start = read(checkpoint.snapshot)
        elif not checkpoint.given:
            # Not needed unless the reading of a batch fails.
            self._start = _state_or_none(self._state)
        self._checkpoint = checkpoint._replace(
            snapshot=None, rng=rng if checkpoint.rng is None else checkpoint.rng
        )

    def _state(self) -> Saved | None:
        return copy.deepcopy(save(self._sources)) if self._asks else None

    def begin_batch(self) -> None:
        """The next batch is about to be read."""
        if self._notes_rng:
            self._checkpoint = self._with_rng()
            self._notes_rng = False
        self._is_reading = True

    def _with_rng(self) -> IterableCheckpoint:
        """Return the checkpoint with the generator states that the next batch is drawn from."""
        now = global_rng_state() if self._draws else None
        checkpoint = self._checkpoint
        if now is None or now == (
            checkpoint.rng_at[-1][1] if checkpoint.rng_at else checkpoint.rng
        ):
            return checkpoint
        return checkpoint._replace(rng_at=(*checkpoint.rng_at, (checkpoint.given, now)))

    def note_rng(self) -> None:
        """The process's generators are others than those that earlier batches left behind."""
        self._notes_rng = True

    def gave(self, fingerprint: int | None, *, has_failed: bool, is_short: bool) -> None:
        """A batch was delivered, or raised.

        Args:
            fingerprint: Of the batch, if one was taken.
            has_failed: Whether it raised.
            is_short: Whether torch's fetcher has seen the stream's end with it.
        """
        self._before = self._checkpoint
        self._checkpoint = self._checkpoint.gave(None, fingerprint, has_failed=has_failed)
        self._sources.ended = is_short
        self._is_reading = False

    def mark(self) -> int:
        """What :meth:`go_back` takes."""
        return self._checkpoint.given

    def go_back(self, given: int) -> None:
        """Take back what was noted since the mark, one batch at most: it was not delivered."""
        if self._checkpoint.given != given:
            self._is_reading = True
            self._checkpoint = self._before

    def end(self) -> None:
        """The epoch has ended."""
        self._checkpoint = self._checkpoint._replace(has_ended=True)

    def dump(self) -> dict[str, Any]:
        """As :meth:`IterableCheckpoints.dump`.

        Raises:
            Exception: What the user's ``state_dict()`` raises, or copying its state.
        """
        checkpoint = self._checkpoint
        if checkpoint.has_ended:
            saved = save_dataset(self._sources.dataset) if self._asks else None
            ended = IterableCheckpoint(checkpoint.given, at=checkpoint.given, has_ended=True)
            return _dumped(ended, copy.deepcopy(saved))
        if self._notes_rng:
            checkpoint = self._with_rng()
        saved = None if self._is_reading else self._state()
        if saved is None:
            return _dumped(checkpoint, self._start)
        # What draws its order again does so from the states before its first batch.
        rng_at = tuple(each for each in checkpoint.rng_at if each[0] == 0)
        return _dumped(
            IterableCheckpoint(
                checkpoint.given, at=checkpoint.given, rng=checkpoint.rng, rng_at=rng_at
            ),
            saved,
        )


def _state_or_none(ask: Callable[[], Saved | None]) -> Saved | None:
    """A dataset's own state, where a user may never ask for the loader's."""
    try:
        return ask()
    except Exception as error:
        if is_interruption(error):
            raise
        return None


class _Sources:
    """What :func:`save` looks at of a fetcher."""

    def __init__(self, dataset_iter: Any, dataset: Any, ended: bool) -> None:
        self.dataset_iter = dataset_iter
        self.dataset = dataset
        self.ended = ended


def _dumped(checkpoint: IterableCheckpoint, saved: Saved | None) -> dict[str, Any]:
    return {
        "num_workers": 0,
        "next_worker": 0,
        "base_seed": None,
        "streams": [dump_checkpoint(checkpoint, saved)],
    }
