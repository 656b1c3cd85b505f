"""Lazy sequences: an item is computed when it is accessed.

Each function takes objects with ``len()`` and ``[index]`` and returns another such object. Items
are computed when they are accessed, and not kept. Indices may be negative; a slice is a lazy
sequence as well. A lazy sequence can be pickled if what it is made of can. If computing an item
raises, the exception gets a note for each sequence involved, with the index and where that sequence
was made.

``prefetch`` computes items ahead, on threads or in worker processes.
"""

from shmloader.sequence.lazy import batch, concatenate, cycle, gather, smap
from shmloader.sequence.prefetch import prefetch

__all__ = ["batch", "concatenate", "cycle", "gather", "prefetch", "smap"]
