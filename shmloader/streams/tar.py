"""Tar shards, in webdataset's naming: neighbouring files of one base name are a sample.

An index says where the files of each sample lie, so that a shard is read by one call a mebibyte and
one slice a file. It is made from the headers of the archive alone. ``headers`` reads these, not
``tarfile``, which takes a damaged header for the end of the archive.
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from shmloader.grammar import counted
from shmloader.streams.files import ReadAhead, ShardFile, is_compressed, open_file
from shmloader.streams.formats import check_numbers, reading, unreadable
from shmloader.streams.headers import DamagedArchiveError, files_of
from shmloader.streams.index import Arrays, arrays_of

# So many bytes are read by one call, if files have fewer than ``_LARGE_BYTES`` on average. Larger
# ones are read one by one, since copying them out of what was read takes longer than a call.
_READ_BYTES, _LARGE_BYTES = 1 << 20, 8 << 10

# A base name, which ends at the first dot of the last part of the path; and an extension.
_NAME = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
# Files whose path begins with such a name are about the shard.
_META = re.compile(r"__[^/]*__(/|$)")


class TarFormat:
    """The format of tar shards, plain or compressed by gzip or zstd.

    A record is a dict: ``"__key__"`` is the base name, and each extension in lower case has the
    bytes of a file. ``a/1.jpg`` and ``a/1.seg.png`` make ``{"__key__": "a/1", "jpg": …, "seg.png":
    …}``. As webdataset does, it leaves out folders, links, files without an extension, and those
    whose path begins with a ``__name__``. Files of one base name that are not neighbours make
    several samples of one key. Unlike webdataset's, records have no ``"__url__"``. An archive that
    was cut between two files reads as if it ended there.
    """

    seeks = True

    def __call__(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard."""
        return self.records(path)

    def __repr__(self) -> str:
        return "open_tar"

    def records(self, path: str, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the samples in the order of the archive, from number ``start`` on.

        Raises:
            ShardError: If the archive cannot be read or is damaged, before the first sample. If a
                sample has two files of one extension, when it is reached.
        """
        with reading(path):
            index = _Index(path)
            with ShardFile(path) as file:
                while start < index.count:
                    stop = index.end_of_read(start)
                    file.ahead.reach(index.place(start))
                    yield from index.read(file, start, stop)
                    start = stop

    def count(self, path: str) -> int:
        """Return the number of samples, from the index.

        Raises:
            ShardError: Also if a sample has two files of one extension.
        """
        with reading(path):
            index = _Index(path)
            index.check(*index.twice)
            return index.count

    def at(self, path: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples of these numbers, in the order of ``numbers``."""
        with reading(path):
            index = _Index(path)
            check_numbers(path, numbers, index.count)
            found: dict[int, dict[str, Any]] = {}
            with ShardFile(path) as file:
                for number in sorted(set(numbers)):
                    (found[number],) = index.read(file, number, number + 1)
        return [found[number] for number in numbers]


class _Index:
    """Where the files of each sample lie in an archive.

    Attributes:
        count: Number of samples.
        twice: Numbers of the samples with two files of one extension, and the name of one of these.

    Args:
        path: The archive.
    """

    def __init__(self, path: str) -> None:
        arrays = arrays_of(path, "tar", _make)
        self._path, self.count = path, len(arrays["firsts"]) - 1
        self._firsts, self._offsets, self._sizes = (
            arrays["firsts"], arrays["offsets"], arrays["sizes"]
        )  # fmt: skip
        self._keys, self._names = _split(arrays["keys"]), _split(arrays["names"])
        self._name_ids = arrays["name_ids"]
        self.twice = dict[int, str]()
        if "twice" in arrays and len(arrays["twice"]):
            names = _split(arrays["twice_names"])
            self.twice.update(zip(arrays["twice"].tolist(), names, strict=True))
        self._ends = (self._offsets + self._sizes)[self._firsts[1:] - 1]

    def place(self, number: int) -> int:
        """Return where the files of a sample begin in the archive."""
        return int(self._offsets[self._firsts[number]])

    def end_of_read(self, start: int) -> int:
        """Return the number after the last sample that is read with sample ``start``."""
        end = self.place(start) + _READ_BYTES
        stop = max(start + 1, int(np.searchsorted(self._ends, end, side="right")))
        return min((number for number in self.twice if start < number < stop), default=stop)

    def check(self, *numbers: int) -> None:
        """Raise a ShardError about the first of these samples that has two files of a name."""
        for number in numbers:
            if number in self.twice:
                raise unreadable(self._path, f"it has two files {self.twice[number]}", number)

    def read(self, file: ShardFile, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Yield the samples from number ``start`` to before ``stop``."""
        self.check(start)
        firsts = self._firsts[start : stop + 1]
        first, last = int(firsts[0]), int(firsts[-1])
        names, name_ids = self._names, self._name_ids[first:last].tolist()
        keys, pieces = self._keys[start:stop], self._pieces(file, start, stop, first, last)
        if last - first == stop - start and len(set(name_ids)) == 1:
            name = names[name_ids[0]]
            for key, data in zip(keys, pieces, strict=True):
                yield {"__key__": key, name: data}
            return
        files = zip(name_ids, pieces, strict=True)
        for key, count in zip(keys, np.diff(firsts).tolist(), strict=True):
            sample: dict[str, Any] = {"__key__": key}
            for number, data in islice(files, count):
                sample[names[number]] = data
            yield sample

    def _pieces(
        self, file: ShardFile, start: int, stop: int, first: int, last: int
    ) -> Iterator[bytes]:
        """Yield the bytes of the files of samples: large ones are read one by one."""
        begin, end = int(self._offsets[first]), int(self._ends[stop - 1])
        offsets, sizes = self._offsets[first:last].tolist(), self._sizes[first:last].tolist()
        if end - begin > _LARGE_BYTES * (last - first):
            for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True), first):
                data = file.read(offset, size)
                if len(data) < size:
                    sample = int(np.searchsorted(self._firsts, number, side="right")) - 1
                    raise unreadable(self._path, f"it ends at byte {offset + len(data)}", sample)
                yield data
            return
        data = file.read(begin, end - begin)
        if len(data) < end - begin:
            raise unreadable(self._path, f"it ends at byte {begin + len(data)}", start)
        for offset, size in zip(offsets, sizes, strict=True):
            yield data[offset - begin : offset - begin + size]


def _make(path: str) -> Arrays:
    """Return the arrays of the index of an archive.

    Raises:
        ShardError: If the archive is damaged.
    """
    keys, firsts = list[str](), list[int]()
    offsets, sizes, name_ids = list[int](), list[int](), list[int]()
    names = dict[str, int]()  # each extension, and its number
    twice = dict[int, str]()
    try:
        with open_file(path) as file:
            size = None if is_compressed(path) else os.fstat(file.fileno()).st_size
            ahead = ReadAhead(None if size is None else file.fileno())
            for name, offset, nbytes in files_of(file, size):
                ahead.reach(offset)
                parts = _NAME.fullmatch(name)
                if parts is None or _META.match(name):
                    continue
                key, extension = parts[1], parts[2].lower()
                if not keys or key != keys[-1]:
                    keys.append(key)
                    firsts.append(len(offsets))
                number = names.setdefault(extension, len(names))
                if number in name_ids[firsts[-1] :]:
                    twice.setdefault(len(keys) - 1, name)
                name_ids.append(number)
                offsets.append(offset)
                sizes.append(nbytes)
    except DamagedArchiveError as error:
        raise unreadable(path, f"after {counted(len(keys), 'sample')}, {error}") from error
    return {
        "firsts": np.array([*firsts, len(offsets)], np.int64),
        "offsets": np.array(offsets, np.int64),
        "sizes": np.array(sizes, np.int64),
        "name_ids": np.array(name_ids, np.int32),
        "keys": _joined(keys),
        "names": _joined(list(names)),
        "twice": np.array(list(twice), np.int64),
        "twice_names": _joined(list(twice.values())),
    }


# Names have no NUL in archives.


def _joined(names: list[str]) -> "np.ndarray[Any, np.dtype[Any]]":
    return np.frombuffer("\0".join(names).encode("utf-8", "surrogateescape"), np.uint8)


def _split(array: "np.ndarray[Any, np.dtype[Any]]") -> list[str]:
    return array.tobytes().decode("utf-8", "surrogateescape").split("\0")


#: The format of tar shards.
open_tar = TarFormat()
