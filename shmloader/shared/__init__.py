"""Keeps a dataset in memory once, however many processes read it: :func:`share`."""

from shmloader.shared.containers import SharedDict, SharedList
from shmloader.shared.sharing import share

__all__ = ["SharedDict", "SharedList", "share"]
