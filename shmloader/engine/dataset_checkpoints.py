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
from reprlib import repr as _short
from typing import Any, Self

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.iterable_state import Saved, dump_for_workers, read
from shmloader.engine.dataset_progress import DatasetNote
from shmloader.interruptions import is_interruption
from shmloader.messages import Unsaved
from shmloader.sampling.rng import kept, set_global_rng_state


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
    def load(cls, state: object, worker_count: int) -> "DatasetCheckpoints":
        """Return checkpoints from what :meth:`dump` returned, without references to it.

        Args:
            state: What :meth:`dump` returned.
            worker_count: Number of workers of the loader that is to resume; 0 in-process.

        Raises:
            ValueError: If the state was saved with another number of workers, or is damaged.
            Exception: What pickling the user's state raises.
        """
        if not isinstance(state, dict) or not isinstance(state.get("checkpoints"), list):
            raise ValueError(
                "the state is damaged: what it contains of the workers' datasets is "
                f"{_short(state)}"
            )
        saved_count, saved = state.get("num_workers"), state["checkpoints"]
        if type(saved_count) is int and saved_count != worker_count:
            has_states = any("snapshot" in each for each in saved if isinstance(each, dict))
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
        next_worker, base_seed = state.get("next_worker"), state.get("base_seed")
        if (
            saved_count != worker_count
            or len(saved) != max(1, worker_count)
            or type(next_worker) is not int
            or next_worker not in range(len(saved))
            or not (_is_count(base_seed) if worker_count else base_seed is None)
        ):
            raise ValueError(
                f"the state is damaged: it has {len(saved)} checkpoints of datasets, the next "
                f"of worker {_short(next_worker)}, base seed {_short(base_seed)}, "
                f"num_workers={_short(saved_count)}"
            )
        return DatasetCheckpoints(
            map(_load_checkpoint, saved), next_worker, base_seed, worker_count
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def dump_checkpoint(checkpoint: DatasetCheckpoint, saved: Saved | None) -> dict[str, Any]:
    """Return a checkpoint as plain values.

    Args:
        checkpoint: The checkpoint.
        saved: The checkpoint's unpickled snapshot, or None if it has none.
    """
    stream: dict[str, Any] = {"given": checkpoint.given, "has_ended": checkpoint.has_ended}
    if saved is not None:
        stream["snapshot"] = {"at": checkpoint.at, **saved._asdict()}
    if checkpoint.skip:
        stream["check"] = checkpoint.check
    if checkpoint.failed:
        stream["failed"] = list(checkpoint.failed)
    if checkpoint.rng is not None:
        stream["rng"] = dict(checkpoint.rng)
    if checkpoint.rng_at:
        stream["rng_at"] = [[number, dict(rng)] for number, rng in checkpoint.rng_at]
    return stream


def _load_checkpoint(stream: Any) -> DatasetCheckpoint:
    try:
        given, has_ended = stream["given"], stream["has_ended"]
        fields = None if stream.get("snapshot") is None else dict(stream["snapshot"])
        at = (given if has_ended else 0) if fields is None else fields.pop("at")
        saved = None if fields is None else Saved(**fields)
        check, failed = stream.get("check", 0), stream.get("failed", [])
        rng, rng_at = (
            stream.get("rng"),
            [(number, each) for number, each in stream.get("rng_at", [])],
        )
        is_sound = (
            all(map(_is_count, (given, at, check, *failed, *(number for number, _ in rng_at))))
            and type(has_ended) is bool
            and at <= given
            and (saved is None or saved.of in ("iterator", "dataset"))
            and all(number < given for number in failed)
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if is_interruption(error):
            raise
        raise ValueError(
            f"the state is damaged: a worker's dataset cannot be read: {_short(error)}"
        ) from error
    if not is_sound:
        raise ValueError(
            f"the state is damaged: a worker's dataset gave {_short(given)} batches, its "
            f"state is after {_short(at)}, has_ended={_short(has_ended)}, check={_short(check)}, "
            f"failed={_short(failed)}"
        )
    for each in (rng, *(each for _, each in rng_at)):
        if each is not None:
            with kept():
                set_global_rng_state(each)  # raises if the state is damaged
    snapshot = None if saved is None else dump_for_workers(saved)
    return DatasetCheckpoint(
        given, snapshot, at, has_ended, rng, tuple(rng_at), check, tuple(failed)
    )
