"""Builds batches from slots, and frees the slots afterwards. Runs on the engine's thread."""

from shmloader.engine.scheduler import Scheduler, Ticket
from shmloader.engine.slots import FREE, LENT
from shmloader.engine.wording import describe_change
from shmloader.errors import InternalError, SharedMemoryError
from shmloader.memory.lease import checksum
from shmloader.pools import SlotPool
from shmloader.pools.answers import Batch
from shmloader.pools.slot_memory import TRIM_EVERY


class SlotBatches:
    """Handles a pool's slots from a worker's answer to the end of the batch's lease (I1).

    Args:
        pool: The pool whose batches come in slots.
        scheduler: Knows the state of each slot.
    """

    def __init__(self, pool: SlotPool, scheduler: Scheduler) -> None:
        self._pool = pool
        self._memory = pool.memory
        self._scheduler = scheduler
        self._slots = scheduler.slots

    def tidy(self) -> None:
        """Return unneeded memory of slots to the kernel, if memory is short or it is time."""
        memory = self._memory
        if memory.is_short or memory.batches >= TRIM_EVERY:
            self._collect_returns()
            memory.tidy(self._slots.free_ids)

    def build(self, ticket: Ticket, answer: Batch) -> object:
        """Return a ticket's batch: views of its slot, which is lent, or a copy.

        Raises:
            SharedMemoryError: If the slot cannot be mapped.
            InternalError: If the batch changed since its worker wrote it (``SHMLOADER_DEBUG=1``).
            Exception: What unpickling a part of the batch raises.
        """
        memory, slot_id = self._memory, ticket.slot_id
        if memory.ended:
            self._collect_returns()
        if answer.check is not None:
            self._check(ticket, answer)
        if answer.lends and self._scheduler.may_lend:
            try:
                slot = memory.lock(slot_id)
            except BaseException:
                self.free_slot(ticket)
                raise
            self._slots.move(slot_id, LENT)
            memory.counts.lent += 1
            return answer.content.read(slot, slot.lend(memory.ended.append))
        memory.counts.copied += answer.lends
        try:
            return answer.content.read(memory.mapped(slot_id), None)
        finally:
            self.free_slot(ticket)

    def _check(self, ticket: Ticket, answer: Batch) -> None:
        """Raise if a batch does not lie in its slot as its worker left it."""
        assert answer.check is not None
        nbytes, expected = answer.check
        try:
            found = checksum(self._memory.mapped(ticket.slot_id), nbytes)
        except SharedMemoryError:
            self.free_slot(ticket)
            raise
        if found != expected:
            self.free_slot(ticket)
            change = f"{nbytes} bytes: {expected:08x}, now {found:08x}"
            raise InternalError(describe_change(ticket, self._pool.pid(ticket.worker_id), change))

    def free_slot(self, ticket: Ticket) -> None:
        """Free a ticket's slot, which is not lent."""
        self._slots.move(ticket.slot_id, FREE)

    def _collect_returns(self) -> None:
        ended = self._memory.ended
        while ended:
            self._slots.move(ended.popleft().slot_id, FREE)
