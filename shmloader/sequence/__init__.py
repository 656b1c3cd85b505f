"""Sequences that are made when they are looked at.

Each function takes anything with ``len()`` and ``[index]`` and gives another such thing. Nothing is
computed before an item is asked for, and nothing is kept. Indices may be negative; a slice gives a
sequence that is as lazy. All can be pickled, if what they are made of can. Where an item fails, its
exception has a note for each sequence that it went through: which item, and where that sequence was
made.

``prefetch`` computes items ahead, on threads or worker processes; the others are a few lines each.
"""

from shmloader.sequence.lazy import batch, concatenate, cycle, gather, smap
from shmloader.sequence.prefetch import prefetch

__all__ = ["batch", "concatenate", "cycle", "gather", "prefetch", "smap"]
