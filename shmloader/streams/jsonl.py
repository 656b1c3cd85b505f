"""JSON Lines shards: a record a line.

Reading from the beginning needs no index. To find record n, an index has where each line begins.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shmloader.streams.files import ShardFile, is_compressed, open_file
from shmloader.streams.formats import check_numbers, reading, unreadable
from shmloader.streams.index import Arrays, arrays_of

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_decode = json.JSONDecoder().decode


class JsonlFormat:
    """The format of JSON Lines shards, plain or compressed by gzip or zstd.

    A record is what ``json.loads`` makes of a line, in UTF-8. Lines of white space alone are no
    records.
    """

    seeks = True

    def __call__(self, path: str) -> Iterator[Any]:
        """Yield the records of a shard."""
        return self.records(path)

    def __repr__(self) -> str:
        return "open_jsonl"

    def records(self, path: str, start: int = 0) -> Iterator[Any]:
        """Yield the records in the order of the lines, from number ``start`` on.

        Raises:
            ShardError: If the file cannot be read; or if a line is no JSON, when it is reached.
        """
        with reading(path):
            number = 0
            with open_file(path) as file:
                if start and not is_compressed(path):
                    starts = self._starts(path)
                    number = min(start, len(starts) - 1)
                    file.seek(int(starts[number]))
                for line in file:
                    if line.isspace():
                        continue
                    if number >= start:
                        yield _record(path, number, line)
                    number += 1

    def count(self, path: str) -> int:
        """Return the number of records, from the index."""
        with reading(path):
            return len(self._starts(path)) - 1

    def at(self, path: str, numbers: Sequence[int]) -> list[Any]:
        """Return the records of these numbers, in the order of ``numbers``."""
        with reading(path):
            starts = self._starts(path)
            check_numbers(path, numbers, len(starts) - 1)
            found: dict[int, Any] = {}
            with ShardFile(path) as file:
                for number in sorted(set(numbers)):
                    begin, end = int(starts[number]), int(starts[number + 1])
                    # Lines without a record may follow.
                    line = file.read(begin, end - begin).partition(b"\n")[0]
                    found[number] = _record(path, number, line)
        return [found[number] for number in numbers]

    def _starts(self, path: str) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return where the line of each record begins, and where the file ends: int64."""
        return arrays_of(path, "jsonl", _make)["starts"]


def _record(path: str, number: int, line: bytes) -> Any:
    try:
        try:
            return _decode(str(line, "utf-8"))
        except ValueError:
            if not line.startswith(_BYTE_ORDER_MARK):
                raise
            return _decode(str(line, "utf-8-sig"))
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
