"""Collate functions for samples of different lengths.

==================  ================================================================================
``Ragged``          a field of a batch whose samples are slices of one array
``RaggedBatch``     a batch of dicts, by columns
==================  ================================================================================
"""

from shmloader.collate.ragged import Ragged, RaggedBatch

__all__ = ["Ragged", "RaggedBatch"]
