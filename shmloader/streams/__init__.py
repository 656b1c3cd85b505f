"""Datasets in shards, which are read from end to end.

``formats`` says what a format is; ``tar`` and ``jsonl`` are formats, whose indexes ``index`` keeps
and whose files ``files`` opens. Each shard is a file of this machine.
"""

from shmloader.streams.formats import Format, as_format
from shmloader.streams.jsonl import JsonlFormat, open_jsonl
from shmloader.streams.tar import TarFormat, open_tar

__all__ = ["Format", "JsonlFormat", "TarFormat", "as_format", "open_jsonl", "open_tar"]
