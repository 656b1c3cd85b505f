"""The headers of a tar archive: which files it has, and where their bytes lie.

Reads the formats of ustar, GNU and pax as POSIX and the manual of GNU tar describe them: a header
of 512 bytes before each member, and long names in a member of their own before that of the file.
"""

from collections.abc import Iterator
from typing import IO

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_SKIPPED_BYTES = 1 << 20

_CHECKSUM = slice(148, 156)
_IS_NEGATIVE = (127).__lt__  # as signed bytes, which some old programs have summed up

# Kinds of members. Those of kinds that are not here have data, which is passed over.
_REGULAR = b"0\x007"  # 7 is a contiguous file, which no system distinguishes any more
_WITHOUT_DATA = b"123456"  # links, devices, folders and pipes
_LONG_NAME, _SPARSE = b"L", b"S"
_ABOUT_NEXT_FILE = b"LxX"

# The keys of pax that matter: where the file's name and size are, and whether it has holes.
_PATH, _SIZE, _HOLES = b"path", b"size", b"GNU.sparse"


class DamagedArchiveError(Exception):
    """An archive that cannot be read to its end. Never reaches the user."""


def files_of(file: IO[bytes], size: int | None) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each regular file, where its bytes begin, and how many there are.

    Args:
        file: The archive, decompressed, at its beginning.
        size: Number of bytes of ``file``; None if it cannot seek.

    Raises:
        DamagedArchiveError: If a header is damaged, or the archive ends in the middle of a file.
    """
    position = 0  # of the next header
    fields = dict[bytes, bytes]()  # what was said about the next file
    while (header := file.read(_BLOCK)) and header != _ZEROS:
        kind, begin, nbytes = header[156:157], position + _BLOCK, _size_of(header, position)
        if kind in _ABOUT_NEXT_FILE:
            position = begin + _padded(nbytes)
            data = file.read(position - begin)[:nbytes]
            if len(data) < nbytes:
                raise DamagedArchiveError(f"it ends in the middle of the header at byte {begin}")
            fields |= {_PATH: data.rstrip(b"\0")} if kind == _LONG_NAME else _pax_fields(data)
            continue
        nbytes, name = int(fields.get(_SIZE, nbytes)), fields.get(_PATH) or _short_name(header)
        is_folder = kind == b"\0" and name.endswith(b"/")
        if kind in _WITHOUT_DATA or is_folder:
            nbytes = 0
        if kind == _SPARSE or _HOLES in fields:
            raise DamagedArchiveError(f"{_text(name)} is a sparse file; pack it without --sparse")
        end, position = begin + nbytes, begin + _padded(nbytes)
        if (_skip(file, position - begin) + begin if size is None else size) < end:
            raise DamagedArchiveError(f"it ends in the middle of the file {_text(name)}")
        if size is not None:
            file.seek(position)
        if kind in _REGULAR and not is_folder:
            yield _text(name), begin, nbytes
        fields = {}


def _padded(nbytes: int) -> int:
    """Return how many bytes the data of a member take."""
    return -(-nbytes // _BLOCK) * _BLOCK


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _short_name(header: bytes) -> bytes:
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix else name


def _number(field: bytes) -> int:
    """Return a number of a header: octal digits, or bytes where those do not suffice.

    Raises:
        ValueError: If it is neither.
    """
    if field[0] == 0x80:  # noqa: PLR2004 - GNU's mark of a number in bytes
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def _size_of(header: bytes, position: int) -> int:
    """Return the size that a header has for its member, after its checksum was compared.

    Raises:
        DamagedArchiveError: If the header is damaged.
    """
    try:
        # The sum takes its own eight bytes as spaces.
        found = sum(header) - sum(header[_CHECKSUM]) + sum(b"        ")
        difference = found - _number(header[_CHECKSUM])
        nbytes = _number(header[124:136])
        if nbytes >= 0 and (not difference or difference == 256 * sum(map(_IS_NEGATIVE, header))):
            return nbytes
    except (IndexError, ValueError):
        pass
    raise DamagedArchiveError(f"at byte {position} is no header of a tar archive")


def _pax_fields(data: bytes) -> dict[bytes, bytes]:
    """Return the fields that matter. Each is its length, a space, key=value and a newline."""
    fields = dict[bytes, bytes]()
    if _PATH not in data and _SIZE not in data and _HOLES not in data:
        return fields
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            raise DamagedArchiveError("a pax header is damaged")
        key, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        data = data[int(length) :]
        if key == _SIZE and not value.isdigit():
            raise DamagedArchiveError("a pax header is damaged")
        if key.startswith(_HOLES):
            fields[_HOLES] = value
        elif key in (_PATH, _SIZE):
            fields[key] = value
    return fields


def _skip(file: IO[bytes], nbytes: int) -> int:
    """Read and drop bytes. Returns how many there were."""
    left = nbytes
    while left and (data := file.read(min(left, _SKIPPED_BYTES))):
        left -= len(data)
    return nbytes - left
