"""Datasets that lie in memory once, however many processes read them: :func:`share`."""

from shmloader.shared.mappings import SharedDict
from shmloader.shared.sequences import SharedList
from shmloader.shared.sharing import share

__all__ = ["SharedDict", "SharedList", "share"]
