"""Datasets in shards, which are read from end to end.

``formats`` says what a format is. ``tar``, ``jsonl`` and ``columns`` are formats: of archives,
lines, and Parquet and Arrow. ``index`` keeps the indexes of shards, and ``files`` opens compressed
files. For these, each shard is a file of this machine: ``cache`` brings it here, by ``download``.
"""

from shmloader.streams.cache import Lease, ShardCache
from shmloader.streams.columns import ArrowFormat, ParquetFormat, open_arrow, open_parquet
from shmloader.streams.fingerprint import fingerprint
from shmloader.streams.formats import Format, as_format
from shmloader.streams.jsonl import JsonlFormat, open_jsonl
from shmloader.streams.tar import TarFormat, open_tar

__all__ = [
    "ArrowFormat", "Format", "JsonlFormat", "Lease", "ParquetFormat", "ShardCache", "TarFormat",
    "as_format", "fingerprint", "open_arrow", "open_jsonl", "open_parquet", "open_tar",
]  # fmt: skip
