"""Builds batches from slots, and frees the slots afterwards. Runs on the engine's thread."""

from shmloader.engine.scheduler import Ticket
from shmloader.engine.slots import SlotTable
from shmloader.engine.wording import describe_change
from shmloader.errors import InternalError, SharedMemoryError
from shmloader.memory.layout import checksum
from shmloader.pools import SlotPool
from shmloader.pools.answers import Batch
from shmloader.pools.slot_memory import TRIM_EVERY


class SlotBatches:
    """Handles a pool's slots from a worker's answer to the end of the batch's lease (I1).

    Attributes:
        memory: The slots' memory.

    Args:
        pool: The pool whose batches come in slots.
        slots: The states of its slots.
        lend_limit: The most slots lent at once (I4, I5).
    """

    def __init__(self, pool: SlotPool, slots: SlotTable, lend_limit: int) -> None:
        self._pool = pool
        self.memory = pool.memory
        self._slots = slots
        self._lend_limit = lend_limit

    def tidy(self) -> None:
        """Return unneeded memory of slots to the kernel, if memory is short or it is time."""
        memory = self.memory
        if memory.is_short or memory.batches >= TRIM_EVERY:
            while memory.ended:
                self._slots.free(memory.ended.popleft().slot_id)
            memory.tidy(self._slots.free_ids)

    def build(self, ticket: Ticket, answer: Batch) -> object:
        """Return a ticket's batch: views of its slot, which is lent, or a copy.

        Raises:
            SharedMemoryError: If the slot cannot be mapped.
            InternalError: If the batch changed since its worker wrote it (``SHMLOADER_DEBUG=1``).
            Exception: What unpickling a part of the batch raises.
        """
        memory, slots, slot_id = self.memory, self._slots, ticket.slot_id
        ended = memory.ended
        while ended:
            slots.free(ended.popleft().slot_id)
        if answer.check is not None:
            self._check(ticket, answer)
        if answer.lends and slots.lent_count < self._lend_limit:
            slot = memory.slots[slot_id]
            if memory.locks_pages or slot.nbytes < slot.touched_bytes:
                try:
                    slot = memory.lock(slot_id)
                except BaseException:
                    slots.free(slot_id)
                    raise
            slots.lend(slot_id)
            memory.counts.lent += 1
            return answer.content.read(slot, slot.lend(ended.append))
        memory.counts.copied += answer.lends
        try:
            return answer.content.read(memory.mapped(slot_id), None)
        finally:
            slots.free(slot_id)

    def _check(self, ticket: Ticket, answer: Batch) -> None:
        """Raise if a batch does not lie in its slot as its worker left it."""
        assert answer.check is not None
        nbytes, expected = answer.check
        try:
            found = checksum(self.memory.mapped(ticket.slot_id), nbytes)
        except SharedMemoryError:
            self._slots.free(ticket.slot_id)
            raise
        if found != expected:
            self._slots.free(ticket.slot_id)
            change = f"{nbytes} bytes: {expected:08x}, now {found:08x}"
            raise InternalError(describe_change(ticket, self._pool.pid(ticket.worker_id), change))
