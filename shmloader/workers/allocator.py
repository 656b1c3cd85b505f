"""What a worker process does with the memory that its samples leave.

A batch's samples are freed at once, when it lies in its slot, and the next batch needs as much.
glibc gives what is free at the end of its heap back to the kernel by then, and each page has to be
cleared and mapped again: a page fault for every 4 KiB, some 5 % of the CPU time where a sample is
a photograph of 150 kB, decoded.
"""

import ctypes
import os

# Free memory at the heap's end that is kept: of a batch, which the next one needs.
_KEPT_BYTES = 256 * 1024**2
# What is longer comes straight from the kernel, and goes back there. The most that glibc takes, to
# which it would come by itself as it sees such memory freed.
_MAPPED_BYTES = 32 * 1024**2

# The names of glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def give_freed_memory_back() -> None:
    """Have ``malloc`` give the kernel what is free now, where memory is short."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def keep_freed_memory() -> None:
    """Have this process's ``malloc`` keep what is freed, for what is asked for next.

    Nothing where the user has set one of these limits, or the C library is not glibc.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in tunables:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
