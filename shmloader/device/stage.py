"""A stage processes each batch between the engine and the user, on a thread of its own."""

import abc
from typing import Any


class StageBrokenError(RuntimeError):
    """The stage can process no further batch, so the iterator ends."""


class Stage(abc.ABC):
    """Processes each batch. The defaults suit a stage that needs only :meth:`run`.

    Attributes:
        ahead: Batches that may be ready and not yet taken; None for as many as there are tickets.
        name: The thread's name.
        kind: The stage's name in the statistics; one of
            :data:`~shmloader.insight.stats.PARTS`.
    """

    ahead: int | None
    name: str
    kind: str

    def start(self) -> None:  # noqa: B027 - a default
        """Prepare the stage's thread. Called on it."""

    @abc.abstractmethod
    def run(self, batch: Any) -> Any:
        """Process a batch. Called on the stage's thread."""

    def hand_over(self, result: Any) -> Any:
        """Make the user's batch of what :meth:`run` returned. Called on the user's thread."""
        return result

    def close(self) -> None:  # noqa: B027 - a default
        """Wait for work under way, and drop all batches. Called when no :meth:`run` is running."""
