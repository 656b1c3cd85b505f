"""Tracks the dataset of a loader without workers, for the loader's state.

The loader keeps the checkpoint after the iterator is gone.
"""

import copy
import time
from types import SimpleNamespace
from typing import Any

from shmloader.batch.collator import bytes_of
from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.iterable_state import Saved, parts_of, read, save, save_dataset
from shmloader.batch.sample_rng import SeededIterator
from shmloader.engine.dataset_checkpoints import StateCost, dump_checkpoint
from shmloader.messages import Unsaved
from shmloader.sampling.own_state import has_own_state
from shmloader.sampling.rng import global_rng_state


class LocalCheckpoint:
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
        """Save the dataset's state: the next batch is about to be read."""
        began_ns = time.monotonic_ns()
        self._before = save_dataset(self._dataset, copy.deepcopy)
        self._times_ns = began_ns, time.monotonic_ns()
        self._is_reading = True

    def add_batch(self, _fetcher: Any, *, has_failed: bool) -> None:  # noqa: ARG002 - for streams
        """Count a batch that was delivered, or that raised.

        Args:
            has_failed: Whether an exception was raised in the batch's place.
        """
        self._given += 1
        self._is_reading = False
        began_ns, taken_ns = self._times_ns
        nbytes = bytes_of(self._before.state) if isinstance(self._before, Saved) else 0
        self._cost.add(nbytes, taken_ns - began_ns, time.monotonic_ns() - taken_ns)

    def mark(self) -> int:
        """Return the number of batches so far, for :meth:`go_back`."""
        return self._given

    def go_back(self, given: int) -> None:
        """Undo what was counted since the mark: at most one batch, which was not delivered."""
        self._is_reading |= self._given != given
        self._given = given

    def dump(self, _: object = None) -> dict[str, Any]:
        """Return what :meth:`DatasetCheckpoints.dump` returns.

        Raises:
            RuntimeError: If the state of the dataset cannot be taken or copied.
        """
        is_reading = self._is_reading
        saved = self._before if is_reading else save_dataset(self._dataset, copy.deepcopy)
        return _dumped(DatasetCheckpoint(self._given, at=self._given), saved)


class LocalStreamCheckpoint(LocalCheckpoint):
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
        self._sources = SimpleNamespace(dataset_iter=iterator, dataset=dataset, ended=fetcher.ended)
        self._draws = rng is not None
        self._asks = asks
        # Whether to save the generators' states before the next batch. They are saved before the
        # first one, since an order may be drawn with it, and where the epoch was resumed.
        self._saves_rng = checkpoint.rng is None and not checkpoint.given
        self._is_reading = False
        # The checkpoint before the newest batch.
        self._last = checkpoint
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
        """Save the generators' states if need be: the next batch is about to be read."""
        if self._saves_rng:
            self._checkpoint = self._with_rng()
            self._saves_rng = False
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

    def mark_rng(self) -> None:
        """Mark that the process's generators are not in the states that earlier batches left."""
        self._saves_rng = True

    def add_batch(self, fetcher: Any, *, has_failed: bool) -> None:
        """Count a batch; see the base class. ``fetcher`` has made it."""
        self._last = self._checkpoint
        fingerprint = fetcher.fingerprint
        self._checkpoint = self._checkpoint.after_batch(None, fingerprint, has_failed=has_failed)
        self._sources.ended = fetcher.ended
        self._is_reading = False

    def mark(self) -> int:
        """See the base class."""
        return self._checkpoint.given

    def go_back(self, given: int) -> None:
        """See the base class."""
        if self._checkpoint.given != given:
            self._is_reading = True
            self._checkpoint = self._last

    def dump(self, _: object = None) -> dict[str, Any]:
        """See the base class."""
        checkpoint = self._checkpoint
        if self._saves_rng:
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


def _dumped(checkpoint: DatasetCheckpoint, saved: Saved | Unsaved | None) -> dict[str, Any]:
    if isinstance(saved, Unsaved):
        raise RuntimeError(saved.text)
    return {
        "num_workers": 0,
        "next_worker": 0,
        "base_seed": None,
        "checkpoints": [dump_checkpoint(checkpoint, saved)],
    }
