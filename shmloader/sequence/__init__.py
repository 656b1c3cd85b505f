"""Lazy sequences: an item is computed when it is accessed.

Each function takes objects with ``len()`` and ``[index]`` and returns another such object. Items
are computed when they are accessed, and not kept. Indices may be negative. A slice is a lazy
sequence as well. A lazy sequence can be pickled if the sequences and functions that it is made of
can be pickled. If computing an item raises, the exception gets a note for each lazy sequence
involved, with the index, and the file and line where that sequence was made.

``prefetch`` computes items ahead, on threads or in worker processes.
"""

from shmloader.sequence.lazy import batch, concatenate, cycle, gather, smap
from shmloader.sequence.prefetch import prefetch

__all__ = ["batch", "concatenate", "cycle", "gather", "prefetch", "smap"]
