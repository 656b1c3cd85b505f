"""Computes how long a slot's file may be, and says what to do where that is too short."""

import mmap
import os
import resource
import sys

from shmloader.memory.limits import soft_limit

_MIB = 1 << 20

# The longest file of a slot where the user set no cap.
_MOST_BYTES = 1 << 37


def uncapped_slot_bytes() -> int:
    """Return the length of a slot's file where the user set no cap: all memory of the machine."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _MOST_BYTES)


def longest_file() -> int:
    """Return the length of the longest file that this process may make (``ulimit -f``)."""
    limit = soft_limit(resource.RLIMIT_FSIZE)
    return sys.maxsize if limit is None else limit


def describe_most(
    most_bytes: int, needed_bytes: int | None = None, slot_count: int | None = None
) -> str:
    """Return what keeps a slot from having more than ``most_bytes``, and the remedy.

    Args:
        most_bytes: Maximum length of the slot.
        needed_bytes: Length that is needed; None if that is not known.
        slot_count: Number of slots among which ``shm_size`` is divided; None if that is not known.
    """
    if most_bytes == whole_pages(longest_file(), up=False):
        return "the longest file allowed here (`ulimit -f`): raise that limit"
    if most_bytes == whole_pages(uncapped_slot_bytes()):
        return "all the memory of this machine"
    text = (
        "raise shm_size, which is divided equally among prefetch_factor * num_workers slots and "
        "those that may be lent"
    )
    if needed_bytes is None or slot_count is None:
        return text
    enough = describe_shm_size(slot_count, needed_bytes)
    return f"{text}, {slot_count} in all: {enough} suffices for this"


def describe_shm_size(slot_count: int, slot_bytes: int) -> str:
    """Return the least ``shm_size`` in MiB whose equal shares are at least ``slot_bytes``."""
    return f"shm_size='{-(-slot_count * whole_pages(slot_bytes) // _MIB)}MiB'"


def whole_pages(nbytes: int, *, up: bool = True) -> int:
    """Round up, or down, to a multiple of the page size."""
    return (nbytes + (mmap.PAGESIZE - 1) * up) // mmap.PAGESIZE * mmap.PAGESIZE
