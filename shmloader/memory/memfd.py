"""What all anonymous files of this package have in common."""

import fcntl
import sys

#: Name of the anonymous files, as /proc/<pid>/maps shows it.
MEMFD_NAME = "shmloader"

# Before Python 3.13, each mapping keeps a duplicate of the descriptor.
MAPPING_OPTIONS = {"trackfd": False} if sys.version_info >= (3, 13) else {}

# Seals of <linux/fcntl.h>. Python's fcntl module names them on Linux only.
ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)

SEALS = (
    getattr(fcntl, "F_SEAL_SEAL", 1) | getattr(fcntl, "F_SEAL_SHRINK", 2)
    | getattr(fcntl, "F_SEAL_GROW", 4)
)  # fmt: skip
