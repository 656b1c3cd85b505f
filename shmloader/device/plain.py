"""No stage at all: the engine has a thread of its own, and batches come as it builds them."""

from typing import Any

#: Batches that are built and not taken: the next one, while the user is busy with the one before.
#: It counts as lent, hence no more than one.
_AHEAD = 1


class PlainStage:
    """Does nothing; see :class:`shmloader.device.thread.Stage`."""

    name = "shmloader_engine"
    kind = "build"
    ahead: int | None = _AHEAD

    def start(self) -> None:
        """Nothing to begin."""

    def run(self, batch: object) -> Any:
        """The batch itself."""
        return batch

    def hand_over(self, result: Any) -> object:
        """The batch itself."""
        return result

    def close(self) -> None:
        """Nothing is under way."""
