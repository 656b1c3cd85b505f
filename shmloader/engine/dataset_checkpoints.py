"""Keeps the checkpoints of the datasets: one for each worker, or one in-process.

Checkpoints are kept of an iterable dataset, whose iterators are called streams, and of a map-style
dataset that has a state of its own.

An epoch with workers has two sets of checkpoints. One follows the workers' answers and is in the
workers' records (:mod:`shmloader.engine.dataset_progress`); a worker's replacement resumes from it.
The other is kept here. It follows the batches that the user has received, and the loader's state is
made from it. The user's thread updates it from the deliveries.

With ``in_order``, batches are handed over round-robin over the workers, skipping those whose
streams have ended, however fast each worker is. So the checkpoints and the number of the next
worker determine how an epoch continues.
"""

from collections.abc import Callable, Iterable
from typing import Any, Self

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.iterable_state import Saved, dump_for_workers, read
from shmloader.engine.dataset_progress import DatasetNote
from shmloader.messages import Unsaved
from shmloader.tracebacks import warn_user

_LARGE_BYTES = 1_000_000

# States may take this share of the time of batches. It is judged once the states have taken so long
# that it matters.
_SHARE, _LONG_NS = 0.1, 500_000_000


class DatasetCheckpoints:
    """The checkpoints of all workers' datasets.

    Attributes:
        checkpoints: The checkpoints, by worker number.
        next_worker: The worker whose batch comes next; its stream may have ended.
        base_seed: The seed from which the workers were seeded when they started; None in-process.

    Args:
        checkpoints: The initial checkpoints, by worker number.
        next_worker: The worker whose batch comes first.
        base_seed: The workers' base seed; None in-process.
        worker_count: Number of workers, 0 if the only stream is in this process; None means the
            number of checkpoints.
    """

    def __init__(
        self,
        checkpoints: Iterable[DatasetCheckpoint],
        next_worker: int = 0,
        base_seed: int | None = None,
        worker_count: int | None = None,
    ) -> None:
        self.checkpoints = tuple(checkpoints)
        self.next_worker = next_worker
        self.base_seed = base_seed
        self._worker_count = len(self.checkpoints) if worker_count is None else worker_count

    @classmethod
    def at_beginning(cls, worker_count: int, base_seed: int | None = None) -> Self:
        """Return checkpoints of streams that have not begun."""
        return cls([DatasetCheckpoint()] * worker_count, base_seed=base_seed)

    def note(self, notes: Iterable[DatasetNote]) -> None:
        """Update the checkpoints by notes, in the order in which batches were handed over."""
        checkpoints = list(self.checkpoints)
        for note in notes:
            worker_id = note.worker_id
            checkpoints[worker_id] = note.applied_to(checkpoints[worker_id])
            if note.next_epoch is None:
                self.next_worker = (worker_id + 1) % len(checkpoints)
        self.checkpoints = tuple(checkpoints)

    def mark(self) -> tuple[tuple[DatasetCheckpoint, ...], int]:
        """Return the current position, for :meth:`go_back`."""
        return self.checkpoints, self.next_worker

    def go_back(self, mark: tuple[tuple[DatasetCheckpoint, ...], int]) -> None:
        """Undo what was noted since the mark, which did not reach the user."""
        self.checkpoints, self.next_worker = mark

    def next_epoch(self, *, is_iterable: bool = True) -> "DatasetCheckpoints":
        """Return the next epoch's first checkpoints: each dataset continues from this epoch's end.

        Only persistent workers save their datasets at an epoch's end; others start afresh. A
        map-style dataset does not end, so its newest state is used.
        """
        checkpoints = [
            checkpoint.at_next_epoch()
            if is_iterable
            else DatasetCheckpoint(0, checkpoint.snapshot, unsaved=checkpoint.unsaved)
            for checkpoint in self.checkpoints
        ]
        return DatasetCheckpoints(checkpoints, 0, self.base_seed, self._worker_count)

    def dump(
        self, save_first: Callable[[], Saved | Unsaved | None] = lambda: None
    ) -> dict[str, Any]:
        """Return all that is needed to resume, as a new dict.

        It holds plain numbers, bools, texts and lists, except for ``state``, which is what the
        user's ``state_dict()`` returned.

        Args:
            save_first: Returns the state with which a worker's dataset began. It is called if a
                worker has not sent a state yet.

        Raises:
            RuntimeError: If the state of a dataset could not be taken or pickled.
            Exception: What unpickling the user's state raises.
        """
        for unsaved in (each.unsaved for each in self.checkpoints if each.unsaved is not None):
            raise RuntimeError(unsaved.text)
        snapshots = [each.snapshot for each in self.checkpoints]
        first = save_first() if None in snapshots else None
        begun = first if isinstance(first, Saved) else None
        return {
            "num_workers": self._worker_count,
            "next_worker": self.next_worker,
            "base_seed": self.base_seed,
            "checkpoints": [
                dump_checkpoint(checkpoint, begun if snapshot is None else read(snapshot))
                for checkpoint, snapshot in zip(self.checkpoints, snapshots, strict=True)
            ],
        }

    @classmethod
    def load(cls, state: dict[str, Any], worker_count: int) -> "DatasetCheckpoints":
        """Return checkpoints from what :meth:`dump` returned, without references to it.

        Args:
            state: What :meth:`dump` returned.
            worker_count: Number of workers of the loader that is to resume; 0 in-process.

        Raises:
            ValueError: If the state was saved with another number of workers.
            Exception: What pickling the user's state raises.
        """
        saved_count, saved = state["num_workers"], state["checkpoints"]
        if saved_count != worker_count:
            has_states = any(each["snapshot"] is not None for each in saved)
            why = (
                "The state has that of each worker's dataset"
                if has_states
                else "Each worker reads its own part of an IterableDataset"
            )
            raise ValueError(
                f"the state does not fit this loader:\n- num_workers: {saved_count} in the state, "
                f"{worker_count} in this loader. {why}: set num_workers={saved_count}, or start "
                "the epoch from the beginning."
            )
        checkpoints = map(_load_checkpoint, saved)
        return DatasetCheckpoints(
            checkpoints, state["next_worker"], state["base_seed"], worker_count
        )


def dump_checkpoint(checkpoint: DatasetCheckpoint, saved: Saved | None) -> dict[str, Any]:
    """Return a checkpoint as plain values.

    Args:
        checkpoint: The checkpoint.
        saved: The checkpoint's unpickled snapshot, or None if it has none.
    """
    return {
        "given": checkpoint.given,
        "has_ended": checkpoint.has_ended,
        "snapshot": None if saved is None else {"at": checkpoint.at, **saved._asdict()},
        "check": checkpoint.check,
        "failed": list(checkpoint.failed),
        "rng": checkpoint.rng,
        "rng_at": [list(each) for each in checkpoint.rng_at],
    }


def _load_checkpoint(stream: dict[str, Any]) -> DatasetCheckpoint:
    given, has_ended, saved = stream["given"], stream["has_ended"], stream["snapshot"]
    at, snapshot = given if has_ended else 0, None
    if saved is not None:
        fields = dict(saved)
        at = fields.pop("at")
        snapshot = dump_for_workers(Saved(**fields))
    return DatasetCheckpoint(
        given,
        snapshot,
        at,
        has_ended,
        stream["rng"],
        tuple((number, rng) for number, rng in stream["rng_at"]),
        stream["check"],
        tuple(stream["failed"]),
    )


class StateCost:
    """What the states of one loader's dataset cost. Warns once.

    Attributes:
        is_watched: Whether to warn: not if the user has set ``snapshot_every_n_steps``.
    """

    __slots__ = ("_batches_ns", "_has_warned", "_states_ns", "is_watched")

    def __init__(self) -> None:
        self.is_watched = True
        self._states_ns = self._batches_ns = 0
        self._has_warned = False

    def add(self, nbytes: int, state_ns: int, batch_ns: int) -> None:
        """Add a batch after which, or before which, a state was taken.

        Args:
            nbytes: Size of the state.
            state_ns: How long it took to take the state.
            batch_ns: How long it took to make the batch.
        """
        if self._has_warned or not self.is_watched:
            return
        self._states_ns += state_ns
        self._batches_ns += batch_ns
        is_slow = self._states_ns > max(_LONG_NS, _SHARE * self._batches_ns)
        if nbytes < _LARGE_BYTES and not is_slow:
            return
        self._has_warned = True
        cost = f"{nbytes / 1e6:.1f} MB with each batch"
        if nbytes < _LARGE_BYTES:
            share = self._states_ns / max(1, self._batches_ns)
            cost = f"{share:.2f} times as long as the batches take"
        warn_user(
            f"the loader saves the state of the dataset for each batch, which costs {cost}. Set "
            "snapshot_every_n_steps=0 if no state is needed. For an iterable dataset, 100 saves it "
            "rarely; 1 saves it for each batch without this warning.",
        )
