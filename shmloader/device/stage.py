"""A stage processes each batch between the engine and the user, on a thread of its own."""

import abc
from typing import Any


class StageBrokenError(RuntimeError):
    """The stage can process no further batch, so the iterator ends."""


class Stage(abc.ABC):
    """Processes each batch. The defaults suit a stage whose :meth:`run` does all.

    Attributes:
        ahead: Batches that may be ready and not yet taken; None for as many as there are tickets.
        name: The thread's name.
        kind: Its name in the statistics; see :data:`~shmloader.insight.measurements.STAGES`.
    """

    ahead: int | None
    name: str
    kind: str

    def start(self) -> None:  # noqa: B027 - a default
        """Prepare the thread. Called on it."""

    @abc.abstractmethod
    def run(self, batch: Any) -> Any:
        """Process a batch. Called on the thread."""

    def hand_over(self, result: Any) -> Any:
        """Return the batch for the user out of what :meth:`run` returned. On the user's thread."""
        return result

    def close(self) -> None:  # noqa: B027 - a default
        """Wait for what is under way, and drop all batches. Called when the thread has ended."""


class PassThroughStage(Stage):
    """Leaves batches as the engine builds them."""

    # One batch is built while the user is busy with the one before. It counts as lent, so no more.
    ahead = 1
    name = "shmloader_engine"
    kind = "build"

    def run(self, batch: Any) -> Any:
        """Return the batch."""
        return batch
