"""The part of a pool that concerns slots, for pools that have none."""

from collections.abc import Sequence, Sized

from shmloader.pools.answers import Batch


class Slotless:
    """Implements the slot methods of :class:`~shmloader.pools.Pool` for batches without slots.

    The scheduler's slots are mere places in the window then.
    """

    ended_leases: Sized = ()
    wants_tidying = False

    def copy_out(self, slot_id: int, answer: Batch) -> object:  # noqa: ARG002 - no slots
        """Return the batch as its worker made it."""
        return answer.content

    def lend(self, slot_id: int, answer: Batch) -> object:
        """Return the batch as its worker made it."""
        return self.copy_out(slot_id, answer)

    def find_change(self, slot_id: int, answer: Batch) -> str:  # noqa: ARG002 - no slots
        """Return an empty string: nothing lies in between that could change a batch."""
        return ""

    def take_returns(self) -> Sequence[tuple[int, bool]]:
        """Return nothing."""
        return ()

    def lock(self, slot_id: int) -> None:
        """Do nothing, like the following methods."""

    def tidy(self, free_ids: list[int]) -> None:
        """Do nothing."""

    def poison(self, slot_id: int) -> None:
        """Do nothing."""

    def drop_slot(self, slot_id: int, worker_ids: list[int]) -> None:
        """Do nothing."""
