"""Checks that cost too much for every day, asked for by ``SHMLOADER_DEBUG=1``.

* A batch carries a checksum of its slot's used bytes from its worker to the main process: whoever
  writes into a slot after its batch was answered is found out.
* A slot is filled with a pattern when it becomes free: whoever looks at it without a lease sees
  nothing that could be taken for data.
"""

import ctypes
import functools
import os
import zlib

from shmloader.memory.slot import Slot

#: Fills free slots. As floats -2.6e36, as integers far below zero: no index, no pixel, no label.
POISON = 0xFB


@functools.cache
def is_debugging() -> bool:
    """Whether the checks are asked for. Read once, in the main process, which tells its workers."""
    return os.environ.get("SHMLOADER_DEBUG", "") not in ("", "0")


def checksum(slot: Slot, used_bytes: int) -> int:
    """Checksum of a slot's first bytes."""
    with memoryview(slot.mapping) as whole, whole[:used_bytes] as used:
        return zlib.crc32(used)


def poison(slot: Slot, used_bytes: int) -> None:
    """Overwrite a slot's first bytes."""
    ctypes.memset(slot.address, POISON, used_bytes)
