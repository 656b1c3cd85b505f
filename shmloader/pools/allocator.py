"""Gives freed memory back to the kernel where memory is short."""

import ctypes


def give_freed_memory_back() -> None:
    """Have glibc's ``malloc`` return free memory to the kernel; does nothing with another one."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
