"""Tar shards, in webdataset's naming: neighbouring files of one base name are a sample.

An index says where the files of each sample lie. It is made from the headers of the archive alone,
which ``tarfile`` reads.
"""

import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shmloader.streams.files import open_file
from shmloader.streams.formats import IndexedFormat, between, reading, unreadable
from shmloader.streams.index import Arrays, arrays_of

# A base name, which ends at the first dot of the last part of the path; and an extension.
_NAME = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
# Files whose path begins with such a name are about the shard.
_META = re.compile(r"__[^/]*__(/|$)")


class TarFormat(IndexedFormat):
    """The format of tar shards, plain or compressed by gzip or zstd.

    A record is a dict: ``"__key__"`` is the base name, and each extension in lower case has the
    bytes of a file. ``a/1.jpg`` and ``a/1.seg.png`` make ``{"__key__": "a/1", "jpg": …, "seg.png":
    …}``. As webdataset does, it leaves out folders, links, files without an extension, and those
    whose path begins with a ``__name__``. Files of one base name that are not neighbours make
    several samples of one key. Unlike webdataset's, records have no ``"__url__"``. An archive
    without a block of zeros at its end was cut, and is an error.
    """

    def __repr__(self) -> str:
        return "open_tar"

    def read(self, path: str, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the samples of ascending numbers.

        Raises:
            ShardError: If the archive cannot be read or is damaged, or a sample has two files of
                one extension, before the first sample.
        """
        # Opened first: a cache may remove the shard while its index is made.
        with reading(path), open_file(path) as file:
            arrays = arrays_of(path, "tar", _make)
            keys, names = _split(arrays["keys"]), _split(arrays["names"])
            firsts, name_ids, offsets, sizes = (
                arrays[name].tolist() for name in ("firsts", "name_ids", "offsets", "sizes")
            )
            seek, read = file.seek, file.read
            for number in between(numbers, 0, len(firsts) - 1):
                sample: dict[str, Any] = {"__key__": keys[number]}
                for at in range(firsts[number], firsts[number + 1]):
                    seek(offsets[at])
                    sample[names[name_ids[at]]] = data = read(sizes[at])
                    if len(data) < sizes[at]:
                        end = offsets[at] + len(data)
                        raise unreadable(path, f"it ends at byte {end}", number)
                yield sample

    def count(self, path: str) -> int:
        """Return the number of samples, from the index."""
        with reading(path):
            return len(arrays_of(path, "tar", _make)["firsts"]) - 1


def _make(path: str) -> Arrays:
    """Return the arrays of the index of an archive.

    Raises:
        ShardError: If the archive is damaged.
    """
    keys, firsts = list[str](), list[int]()
    offsets, sizes, name_ids = list[int](), list[int](), list[int]()
    names = dict[str, int]()  # each extension, and its number
    name = ""
    with open_file(path) as file:
        try:
            archive: Any = tarfile.TarFile(fileobj=file, encoding="utf-8")
            while (member := archive.next()) is not None:
                archive.members.clear()
                name = member.name
                if member.issparse():
                    raise ValueError("which is sparse: pack it without --sparse")
                parts = _NAME.fullmatch(name)
                if not member.isreg() or parts is None or _META.match(name):
                    continue
                key, extension = parts[1], parts[2].lower()
                if not keys or key != keys[-1]:
                    keys.append(key)
                    firsts.append(len(offsets))
                number = names.setdefault(extension, len(names))
                if number in name_ids[firsts[-1] :]:
                    raise ValueError("there is another file of its name")
                name_ids.append(number)
                offsets.append(member.offset_data)
                sizes.append(member.size)
            # The end for tarfile is also a header that is damaged, or is not there.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise ValueError("neither a file nor a block of zeros follows")
        except (tarfile.TarError, ValueError) as error:
            where = f"at the file {name}" if name else "at its beginning"
            raise unreadable(path, f"{where}, {error}") from error
    return {
        "firsts": np.array([*firsts, len(offsets)], np.int64),
        "offsets": np.array(offsets, np.int64),
        "sizes": np.array(sizes, np.int64),
        "name_ids": np.array(name_ids, np.int32),
        "keys": _joined(keys),
        "names": _joined(list(names)),
    }


# Names have no NUL in archives.


def _joined(names: list[str]) -> "np.ndarray[Any, np.dtype[Any]]":
    return np.frombuffer("\0".join(names).encode("utf-8", "surrogateescape"), np.uint8)


def _split(array: "np.ndarray[Any, np.dtype[Any]]") -> list[str]:
    return array.tobytes().decode("utf-8", "surrogateescape").split("\0")


#: The format of tar shards.
open_tar = TarFormat()
