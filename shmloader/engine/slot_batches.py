"""Builds batches from slots, and frees the slots afterwards. Runs on the engine's thread."""

from shmloader.engine.scheduler import Scheduler, Ticket
from shmloader.engine.slots import FREE, LENT, RETIRED
from shmloader.engine.wording import describe_change
from shmloader.errors import InternalError, SharedMemoryError
from shmloader.pools import SlotPool
from shmloader.pools.answers import Batch


class SlotBatches:
    """Handles a pool's slots from a worker's answer to the end of the batch's lease.

    Args:
        pool: The pool whose batches come in slots.
        scheduler: Knows the state of each slot.
    """

    def __init__(self, pool: SlotPool, scheduler: Scheduler) -> None:
        self._pool = pool
        self._scheduler = scheduler

    def tidy(self) -> None:
        """Return unneeded memory of slots to the kernel, if the pool says that it is time."""
        if self._pool.wants_tidying:
            self._collect_returns()
            self._pool.tidy(self._scheduler.slots.free_ids)

    def build(self, ticket: Ticket, answer: Batch) -> object:
        """Return a ticket's batch: views of its slot, which is lent, or a copy.

        Raises:
            SharedMemoryError: If the slot cannot be mapped.
            InternalError: If the batch changed since its worker wrote it (``SHMLOADER_DEBUG=1``).
            Exception: What unpickling a part of the batch raises.
        """
        if self._pool.ended_leases:
            self._collect_returns()
        slot_id = ticket.slot_id
        if answer.check is not None:
            self._check(ticket, answer)
        if answer.lends and self._scheduler.may_lend:
            try:
                self._pool.lock(slot_id)
            except BaseException:
                self.free_slot(ticket, is_kept=answer.is_kept)
                raise
            self._scheduler.delivered(ticket, LENT)
            self._pool.counts.lent += 1
            return self._pool.lend(slot_id, answer)
        self._pool.counts.copied += answer.lends
        try:
            return self._pool.copy_out(slot_id, answer)
        finally:
            self.free_slot(ticket, is_kept=answer.is_kept)

    def _check(self, ticket: Ticket, answer: Batch) -> None:
        """Raise if a batch does not lie in its slot as its worker left it."""
        try:
            change = self._pool.find_change(ticket.slot_id, answer)
        except SharedMemoryError:
            self.free_slot(ticket, is_kept=answer.is_kept)
            raise
        if change:
            # What wrote to the slot may still be writing.
            self.free_slot(ticket, is_kept=True)
            raise InternalError(describe_change(ticket, self._pool.pid(ticket.worker_id), change))

    def free_slot(self, ticket: Ticket, *, is_kept: bool) -> None:
        """Free a ticket's slot, which is not lent; retire it if its worker still refers to it."""
        self._scheduler.delivered(ticket, RETIRED if is_kept else FREE)
        if is_kept:
            self.drop_retired()

    def _collect_returns(self) -> None:
        for slot_id, is_clean in self._pool.take_returns():
            self._scheduler.slot_returned(slot_id, clean=is_clean)
        self.drop_retired()

    def drop_retired(self) -> None:
        """Unmap the slots that were retired."""
        if self._scheduler.slots.retired:
            for dropped in self._scheduler.take_dropped_slots():
                self._pool.drop_slot(dropped.slot_id, dropped.worker_ids)
