"""Notices when the user has dropped the last view of a lent slot.

A lease is a ctypes array over the slot. torch and numpy keep it alive for as long as any
storage or array made from it lives: slices, ``.numpy()``, ``.detach()``, DLPack capsules and
autograd's saved tensors included. It must not be an ndarray subclass: numpy replaces the
base of a view by the base's base, and the slot would come back while it is read.

What keeps the lease alive must be more than a storage's pointer, since torch can replace that
pointer while views of the old memory are still in use; see :func:`hold`.
"""

import collections
import ctypes
import weakref
from typing import Any, Final

from shmloader.memory.slot import Slot
from shmloader.process_state import PROCESS

# No count of forks.
_NEVER = -1


def hold(storage: Any, memory: object) -> None:
    """Keep memory alive for as long as a storage that began with it lives.

    Sharing a tensor with other processes (``share_memory_()``, a queue of
    ``torch.multiprocessing``) copies its storage and replaces the storage's pointer, which drops
    the only reference to the old memory. NumPy arrays, memoryviews and DLPack capsules made
    before that still point there. All of them keep the storage alive, so the storage has to
    keep the memory alive. torch preserves a storage's Python object, attributes included, for as
    long as the storage itself lives.

    Args:
        storage: The ``torch.UntypedStorage`` of a tensor that is handed to the user.
        memory: The lease, or the private memory that the batch was copied to.
    """
    storage._shmloader_memory = memory


class LeaseBook:
    """The leases of one engine's slots.

    Only the engine's thread calls the methods. Where a lease dies is anybody's guess (any
    thread, even inside the garbage collector), hence its callback only appends to a deque.

    Attributes:
        dead: Slots whose lease has died, and that :meth:`collect` has not returned yet.
    """

    def __init__(self) -> None:
        self.dead: Final[collections.deque[int]] = collections.deque()
        self._references: dict[int, tuple[weakref.ref[Any], int]] = {}

    def open(
        self, slot_id: int, slot: Slot, *, is_clean: bool = True
    ) -> "ctypes.Array[ctypes.c_char]":
        """Lend a slot.

        Args:
            slot_id: Its number.
            slot: The same, mapped.
            is_clean: False if somebody else will still look at the slot after the user.

        Returns:
            The lease. The caller keeps no reference to it.
        """
        lease = slot.array()
        dead = self.dead
        reference = weakref.ref(lease, lambda _: dead.append(slot_id))
        self._references[slot_id] = (reference, PROCESS.forks.count if is_clean else _NEVER)
        return lease

    def collect(self) -> list[tuple[int, bool]]:
        """Slots whose lease has died since the last call.

        Returns:
            Pairs (slot_id, is_clean). Not clean: the slot must never be filled again, since it
            was lent so, or since this process was forked meanwhile and the child may look at it.
        """
        returned = []
        while self.dead:
            slot_id = self.dead.popleft()
            _, forks = self._references.pop(slot_id)
            returned.append((slot_id, forks == PROCESS.forks.count))
        return returned
