"""Tracks how far the dataset of a loader without workers has come."""

import copy
import time
from typing import Any

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.iterable_state import Saved, parts_of, read, save, save_dataset
from shmloader.batch.sample_rng import SeededIterator
from shmloader.batch.timer import bytes_of
from shmloader.engine.dataset_checkpoints import dump_checkpoint
from shmloader.engine.state_cost import StateCost
from shmloader.messages import Unsaved
from shmloader.sampling.own_state import has_own_state
from shmloader.sampling.rng import global_rng_state


class DatasetHere:
    """Tracks the state of a map-style dataset in this process.

    The dataset's ``state_dict()`` is called when the loader's state is asked for, and before each
    batch. The state before the batch is used while the batch is being read, or if reading it was
    interrupted, since the dataset is then past what was delivered.

    Args:
        dataset: The dataset.
        cost: Warns if its states cost much.
    """

    def __init__(self, dataset: Any, cost: StateCost) -> None:
        self._dataset, self._cost = dataset, cost
        self._times_ns = 0, 0
        self._given = 0
        self._is_reading = False
        self._before: Saved | Unsaved | None = None

    def begin_batch(self) -> None:
        """Note that the next batch is about to be read."""
        began_ns = time.monotonic_ns()
        self._before = self._state()
        self._times_ns = began_ns, time.monotonic_ns()
        self._is_reading = True

    def _state(self) -> Saved | Unsaved | None:
        return save_dataset(self._dataset, copy.deepcopy)

    def note_batch(self, fingerprint: int | None, *, has_failed: bool, is_short: bool) -> None:
        """See :meth:`StreamHere.note_batch`."""
        del fingerprint, has_failed, is_short
        self._given += 1
        self._is_reading = False
        began_ns, taken_ns = self._times_ns
        nbytes = bytes_of(self._before.state) if isinstance(self._before, Saved) else 0
        batch_ns = time.monotonic_ns() - taken_ns
        self._cost.note(nbytes, taken_ns - began_ns, batch_ns, stacklevel=5)

    def mark(self) -> int:
        """See :meth:`StreamHere.mark`."""
        return self._given

    def go_back(self, given: int) -> None:
        """See :meth:`StreamHere.go_back`."""
        self._is_reading |= self._given != given
        self._given = given

    def dump(self, _: object = None) -> dict[str, Any]:
        """See :meth:`StreamHere.dump`."""
        saved = self._before if self._is_reading else self._state()
        return _dumped(DatasetCheckpoint(self._given, at=self._given), saved)


class StreamHere:
    """Keeps the checkpoint of an iterable dataset in this process.

    The ``state_dict()`` of the dataset or its iterator is called when the loader's state is asked
    for. While a batch is being read, or after reading it was interrupted, the dataset is past what
    was delivered. Then the state at the beginning is saved instead, and a resumed loader re-reads
    what was delivered since.

    Used on the thread that loads. Refers to the objects that have a state, but not to the loader,
    nor to an iterator that cannot be saved.

    Args:
        fetcher: The fetcher of the dataset, after ``iter(dataset)`` was called.
        checkpoint: Where the dataset is resumed.
        rng: States of the process's global generators at ``iter(dataset)``; None if samples do
            not depend on them.
        asks: Whether ``state_dict()`` of the dataset or its iterator is called.
    """

    def __init__(
        self,
        fetcher: Any,
        checkpoint: DatasetCheckpoint,
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
        # Whether to note the generators' states before the next batch. They are noted before the
        # first one, since an order may be drawn with it, and where the epoch was resumed.
        self._notes_rng = checkpoint.rng is None and not checkpoint.given
        self._is_reading = False
        # The checkpoint before the newest batch.
        self._before = checkpoint
        # The dataset's state from which batches are read again.
        self._start: Saved | Unsaved | None = None
        if checkpoint.snapshot is not None:
            self._start = read(checkpoint.snapshot)
        elif not checkpoint.given:
            # Needed only if reading a batch fails.
            self._start = self._state()
        self._checkpoint = checkpoint._replace(
            snapshot=None, rng=rng if checkpoint.rng is None else checkpoint.rng
        )

    def _state(self) -> Saved | Unsaved | None:
        return save(self._sources, copy.deepcopy) if self._asks else None

    def begin_batch(self) -> None:
        """Note that the next batch is about to be read."""
        if self._notes_rng:
            self._checkpoint = self._with_rng()
            self._notes_rng = False
        self._is_reading = True

    def _with_rng(self) -> DatasetCheckpoint:
        """Return the checkpoint with the generator states that the next batch is drawn from."""
        now = global_rng_state() if self._draws else None
        checkpoint = self._checkpoint
        if now is None or now == (
            checkpoint.rng_at[-1][1] if checkpoint.rng_at else checkpoint.rng
        ):
            return checkpoint
        return checkpoint._replace(rng_at=(*checkpoint.rng_at, (checkpoint.given, now)))

    def note_rng(self) -> None:
        """Note that the process's generators are not in the states that earlier batches left."""
        self._notes_rng = True

    def note_batch(self, fingerprint: int | None, *, has_failed: bool, is_short: bool) -> None:
        """Note that a batch was delivered, or raised.

        Args:
            fingerprint: The batch's fingerprint, if one was taken.
            has_failed: Whether an exception was raised in the batch's place.
            is_short: Whether the fetcher reached the stream's end with this batch.
        """
        self._before = self._checkpoint
        self._checkpoint = self._checkpoint.after_batch(None, fingerprint, has_failed=has_failed)
        self._sources.ended = is_short
        self._is_reading = False

    def mark(self) -> int:
        """Return the number of batches so far, for :meth:`go_back`."""
        return self._checkpoint.given

    def go_back(self, given: int) -> None:
        """Undo what was noted since the mark: at most one batch, which was not delivered."""
        if self._checkpoint.given != given:
            self._is_reading = True
            self._checkpoint = self._before

    def dump(self, _: object = None) -> dict[str, Any]:
        """Return what :meth:`DatasetCheckpoints.dump` returns.

        Raises:
            RuntimeError: If the state of the dataset cannot be taken or copied.
        """
        checkpoint = self._checkpoint
        if self._notes_rng:
            checkpoint = self._with_rng()
        saved = None if self._is_reading else self._state()
        if saved is None:
            return _dumped(checkpoint, self._start)
        # A dataset that draws its order again does so from the states before its first batch.
        rng_at = tuple(each for each in checkpoint.rng_at if each[0] == 0)
        return _dumped(
            DatasetCheckpoint(
                checkpoint.given, at=checkpoint.given, rng=checkpoint.rng, rng_at=rng_at
            ),
            saved,
        )


class _Sources:
    """The attributes of a fetcher that :func:`save` reads."""

    def __init__(self, dataset_iter: Any, dataset: Any, ended: bool) -> None:
        self.dataset_iter = dataset_iter
        self.dataset = dataset
        self.ended = ended


def _dumped(checkpoint: DatasetCheckpoint, saved: Saved | Unsaved | None) -> dict[str, Any]:
    if isinstance(saved, Unsaved):
        raise RuntimeError(saved.text)
    return {
        "num_workers": 0,
        "next_worker": 0,
        "base_seed": None,
        "checkpoints": [dump_checkpoint(checkpoint, saved)],
    }
