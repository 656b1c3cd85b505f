"""Collate functions for samples of different lengths, such as texts.

Each takes a list of samples and returns a batch, which it writes into the batch's shared memory in
one pass (:func:`shmloader.empty`). Without a loader, and in torch's own, the batch is the same.
They can be pickled. Samples are tensors, arrays, or lists of ints, which become int64.

==================  ================================================================================
``Pad``             one tensor, as wide as the longest sample
``Pack``            one row of all tokens, with what variable-length attention reads
``Jagged``          a nested tensor of torch's, in its jagged layout
``Stack``           samples of one shape, as torch's ``default_collate`` stacks them
``AsList``          a list of the samples
``Fields``          another function for each field of samples that are dicts or tuples
``Ragged``          a field whose samples are slices of one array, for a dataset to return
``RaggedBatch``     a batch of dicts by fields, for a dataset to return
==================  ================================================================================

Modules: ``sequences`` reads samples and writes them where they belong in the batch; ``pad``,
``pack`` and ``fields`` have the functions, and ``ragged`` the fields.
"""

from shmloader.collate.fields import AsList, Fields, Stack
from shmloader.collate.pack import Pack
from shmloader.collate.pad import Jagged, Pad
from shmloader.collate.ragged import Ragged, RaggedBatch

_FUNCTIONS = (AsList, Fields, Jagged, Pack, Pad, Stack)


def takes_fields(collate_fn: object) -> bool:
    """Whether a function is one of these, and of no subclass, so that it takes a RaggedBatch."""
    return type(collate_fn) in _FUNCTIONS


__all__ = ["AsList", "Fields", "Jagged", "Pack", "Pad", "Ragged", "RaggedBatch", "Stack"]
