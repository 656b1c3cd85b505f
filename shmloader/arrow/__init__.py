"""Datasets in Arrow tables: their batches are read from the tables' buffers.

A Hugging Face ``datasets.Dataset`` needs nothing from here: any loader reads its columns from their
buffers, where these are numbers, lists of numbers, or texts without a format.

==============  ================================================================================
``ArrowTable``  a map-style dataset over Arrow, Feather and Parquet files, by pyarrow alone
``lengths``     the length of each list of a column, from its offsets alone
==============  ================================================================================

``finding`` finds the fields of a dataset (``hugging_face``, ``table``), of which ``fields`` makes
batches; ``rows`` says which rows a batch has. None of these imports pyarrow or ``datasets``.
``columns`` makes fields of columns, whose ``buffers`` it reads, and ``files`` opens files: these
import pyarrow, and are imported when a table is there.
"""

from shmloader.arrow.lengths import lengths
from shmloader.arrow.table import ArrowTable

__all__ = ["ArrowTable", "lengths"]
