"""Streams: datasets in shards that are read from end to end, exact on any workers and ranks.

What is read, from below:

* ``cache`` brings a remote shard to this machine, by ``download``.
* *Formats* read the records of one shard, a file of this machine: ``tar``, ``jsonl`` and
  ``parquet``. ``index`` keeps the indexes of shards, ``files`` opens compressed ones. None of these
  knows a loader.
* A *reader* reads a fixed share of the shards through ``stages``, from ``records`` upwards, and
  groups the records into batches (``reader``, ``packed``). What users build (``stream``,
  ``shards``, ``mix``) describes its stages.
* The *order* of the batches goes in rounds over the readers (``rounds``, pure). A loader draws it
  (``order``), and its ranks tell one another where readers are (``board``).

A batch depends on the stream, the epoch, the reader and its number there, and on nothing else: any
worker can make it, from any earlier position of that reader. The state of a loader is the position
of each reader.
"""

from shmloader.streams.cache import ShardCache
from shmloader.streams.formats import Format, as_format
from shmloader.streams.hugging_face import from_hf
from shmloader.streams.jsonl import JsonlFormat, open_jsonl
from shmloader.streams.mix import mix
from shmloader.streams.parquet import ParquetFormat, open_parquet
from shmloader.streams.shards import Shards
from shmloader.streams.stream import Stream
from shmloader.streams.tar import TarFormat, open_tar

__all__ = [
    "Format", "JsonlFormat", "ParquetFormat", "ShardCache", "Shards",
    "Stream", "TarFormat", "as_format", "from_hf", "mix",
    "open_jsonl", "open_parquet", "open_tar",
]  # fmt: skip
