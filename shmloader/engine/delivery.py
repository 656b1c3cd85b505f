"""How exceptions are delivered, and the datasets' checkpoints after each batch.

Checkpoints are kept of an iterable dataset, whose iterators are called streams, and of a map-style
dataset that has a state of its own: one for each worker, or one without workers.

An epoch with workers has two sets of checkpoints. One follows the workers' answers, in
their records (:mod:`shmloader.engine.records`); a worker's replacement resumes from it. The other
is :class:`DatasetCheckpoints`: it follows what the user has received, and makes the loader's state.

With ``in_order``, batches are delivered round-robin over the workers, skipping those whose streams
have ended, however fast each worker is. So the checkpoints and the number of the next worker
determine how an epoch continues. A stream that had ended ends again.
"""

from collections.abc import Callable, Iterable
from typing import Any, Self

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.dataset_state import Saved, dump_in_main, read
from shmloader.messages import Unsaved


class Instead(Exception):  # noqa: N818 - never raised to the user
    """Carries an exception that ``next()`` is to raise in place of a batch.

    ``BatchIterator.__next__`` alone raises it to the user. Any other exception is an interruption.

    Attributes:
        error: The exception; a StopIteration at the epoch's end.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def not_an_end(error: BaseException, what: str) -> BaseException:
    """Return an exception of the user's code that does not silently end the epoch."""
    if not isinstance(error, StopIteration):
        return error
    explained = RuntimeError(f"{what} raised StopIteration")
    explained.__cause__ = error
    return explained


def unwrapped(function: Callable[..., object], *arguments: object) -> None:
    """Call a function, and raise the exception that an :class:`Instead` of it carries."""
    try:
        function(*arguments)
        return
    except Instead as instead:
        error = instead.error
    try:
        # Not in the except block, which would add the Instead as its context.
        raise error
    finally:
        del error  # breaks a reference cycle: the traceback holds this frame


class DatasetCheckpoints:
    """The checkpoints of all workers' datasets.

    Attributes:
        checkpoints: The checkpoints, by worker number.
        next_worker: The worker whose batch comes next; its stream may have ended.
        base_seed: The seed from which the workers were seeded when they started; None in-process.

    Args:
        checkpoints, next_worker, base_seed: See the attributes.
        worker_count: Number of workers, 0 if the only stream is in this process; None means the
            number of checkpoints.
    """

    def __init__(
        self,
        checkpoints: Iterable[Checkpoint],
        next_worker: int = 0,
        base_seed: int | None = None,
        worker_count: int | None = None,
    ) -> None:
        self.checkpoints, self.next_worker = tuple(checkpoints), next_worker
        self.base_seed = base_seed
        self._worker_count = len(self.checkpoints) if worker_count is None else worker_count

    def update(self, updates: Iterable[tuple[int, Checkpoint]]) -> None:
        """Replace checkpoints, in the order in which batches were handed over."""
        checkpoints = list(self.checkpoints)
        for worker_id, checkpoint in updates:
            checkpoints[worker_id] = checkpoint
            self.next_worker = (worker_id + 1) % len(checkpoints)
        self.checkpoints = tuple(checkpoints)

    def mark(self) -> tuple[tuple[Checkpoint, ...], int]:
        """Return the current position, for :meth:`go_back`."""
        return self.checkpoints, self.next_worker

    def go_back(self, mark: tuple[tuple[Checkpoint, ...], int]) -> None:
        """Undo what was updated since the mark, which did not reach the user."""
        self.checkpoints, self.next_worker = mark

    def end_epoch(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Replace all checkpoints by those with which the next epoch begins."""
        self.checkpoints, self.next_worker = tuple(checkpoints), 0

    def dump(
        self, save_first: Callable[[], Saved | Unsaved | None] = lambda: None
    ) -> dict[str, Any]:
        """Return all that is needed to resume, as a new dict of plain values and users' states.

        Args:
            save_first: Returns the state with which a worker's dataset began. It is called if a
                worker has not sent a state yet.

        Raises:
            RuntimeError: If the state of a dataset could not be taken or pickled.
            Exception: What unpickling the user's state raises.
        """
        for unsaved in (each.unsaved for each in self.checkpoints if each.unsaved is not None):
            raise RuntimeError(unsaved.text)
        first = save_first() if any(each.snapshot is None for each in self.checkpoints) else None
        dumped = []
        for each in self.checkpoints:
            saved = read(each.snapshot) or (first if isinstance(first, Saved) else None)
            snapshot = None if saved is None else {"at": each.at, **saved._asdict()}
            plain = {"given": each.given, "check": each.check, "rng": list(each.rng)}
            dumped.append({**plain, "snapshot": snapshot})
        return {
            "num_workers": self._worker_count,
            "next_worker": self.next_worker,
            "base_seed": self.base_seed,
            "checkpoints": dumped,
        }

    @classmethod
    def load(cls, state: dict[str, Any], worker_count: int) -> Self:
        """Return checkpoints from what :meth:`dump` returned, without references to it.

        Args:
            state: What :meth:`dump` returned.
            worker_count: Number of workers of the loader that is to resume; 0 in-process.

        Raises:
            ValueError: If the state was saved with another number of workers.
            Exception: What pickling the user's state raises.
        """
        count = state["num_workers"]
        if count != worker_count:
            why = "Each worker reads its own part of an IterableDataset"
            if any(each["snapshot"] is not None for each in state["checkpoints"]):
                why = "Each worker's dataset has a state of its own"
            raise ValueError(
                f"the state does not fit this loader:\n- num_workers: {count} in the state, "
                f"{worker_count} in this loader. {why}: set num_workers={count}, or start the "
                "epoch from the beginning."
            )
        loaded = []
        for each in state["checkpoints"]:
            at, snapshot = 0, None
            if each["snapshot"] is not None:
                fields = dict(each["snapshot"])
                at, snapshot = fields.pop("at"), dump_in_main(Saved(**fields))
            plain = each["given"], snapshot, at, each["check"], tuple(each["rng"])
            loaded.append(Checkpoint(*plain))
        return cls(loaded, state["next_worker"], state["base_seed"], worker_count)
