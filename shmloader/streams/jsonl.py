"""JSON Lines shards: a record a line. An index has where each line begins."""

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shmloader.streams.files import open_file
from shmloader.streams.formats import IndexedFormat, between, reading, unreadable
from shmloader.streams.index import Arrays, arrays_of

_decode = json.JSONDecoder().decode


class JsonlFormat(IndexedFormat):
    """The format of JSON Lines shards, plain or compressed by gzip or zstd.

    A record is what ``json.loads`` makes of a line, in UTF-8. Lines of white space alone are no
    records.
    """

    def __repr__(self) -> str:
        return "open_jsonl"

    def read(self, path: str, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield the records of ascending numbers.

        Raises:
            ShardError: If the file cannot be read; or if a line is no JSON, when it is reached.
        """
        # Opened first: a cache may remove the shard while its index is made.
        with reading(path), open_file(path) as file:
            starts = self._starts(path)
            for number in between(numbers, 0, len(starts) - 1):
                file.seek(int(starts[number]))
                yield _record(path, number, file.readline())

    def count(self, path: str) -> int:
        """Return the number of records, from the index."""
        with reading(path):
            return len(self._starts(path)) - 1

    def _starts(self, path: str) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return where the line of each record begins, and where the file ends: int64."""
        return arrays_of(path, "jsonl", _make)["starts"]


def _record(path: str, number: int, line: bytes) -> Any:
    try:
        return _decode(str(line.removeprefix(codecs.BOM_UTF8), "utf-8"))
    except (ValueError, RecursionError) as error:
        raise unreadable(path, f"it is no JSON ({error})", number) from error


def _make(path: str) -> Arrays:
    """Return the arrays of the index of a file."""
    starts, position = list[int](), 0
    with open_file(path) as file:
        for line in file:
            if not line.isspace():
                starts.append(position)
            position += len(line)
    return {"starts": np.array([*starts, position], np.int64)}


#: The format of JSON Lines shards.
open_jsonl = JsonlFormat()
