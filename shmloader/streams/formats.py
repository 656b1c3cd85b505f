"""What a format is: how the records of a shard are read, counted and found again.

Streams read shards by two methods and know nothing else of a format. Its objects can be pickled,
hold no open file between calls, and may be used by several threads and processes at once.
"""

import bisect
import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from shmloader.errors import ShardError
from shmloader.streams.files import read_errors

#: The numbers of all records of any shard.
EVERY = range(sys.maxsize)


@runtime_checkable
class Format(Protocol):
    """Reads the shards of one format. ``path`` is always a file of this machine.

    Attributes:
        seeks: Whether :meth:`read` finds a record without reading those before it. A compressed
            file is read from its beginning all the same.
    """

    seeks: bool

    def read(self, path: str, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield the records of these numbers, which ascend, as far as the shard has them.

        To read on from record n to the end of the shard, the numbers are ``range(n, sys.maxsize)``.

        Raises:
            ShardError: If the shard or a record cannot be read. If it names a record, the next ones
                can be read. Any other error ends the shard.
        """

    def count(self, path: str) -> int:
        """Return the number of records, by an index or the metadata of the shard.

        Raises:
            ShardError: If the shard cannot be read.
        """


class IndexedFormat:
    """What the formats have in common that find a record by its number."""

    seeks = True
    read: Callable[[str, Sequence[int]], Iterator[Any]]

    def __call__(self, path: str) -> Iterator[Any]:
        """Yield the records of a shard."""
        return self.read(path, EVERY)


class CallableFormat:
    """The format of shards that a function of the user's opens.

    It can only read from the beginning, also to count. What the function raises keeps its type, and
    has a note with shard and record.

    Args:
        open: Takes the path of a shard, and returns its records: the same ones at every call.
    """

    seeks = False

    def __init__(self, open: Callable[[str], Iterable[Any]]) -> None:  # noqa: A002 - the user's word
        self._open = open

    def __repr__(self) -> str:
        return f"as_format({self._open!r})"

    def read(self, path: str, numbers: Sequence[int]) -> Generator[Any]:
        """Yield the records of these numbers. Those before and between them are dropped."""
        iterator: Any = None
        number, wanted = 0, iter(numbers)
        following = next(wanted, None)
        try:
            iterator = iter(self._open(path))
            for record in iterator:
                if number == following:
                    yield record
                    if (following := next(wanted, None)) is None:
                        return
                number += 1
        except Exception as error:
            error.add_note(f"This was raised at record {number} of shard {path}.")
            raise
        finally:
            if (close := getattr(iterator, "close", None)) is not None:
                close()

    def count(self, path: str) -> int:
        """Return the number of records; reads the shard."""
        return sum(1 for _ in self.read(path, EVERY))


def as_format(open: "Format | Callable[[str], Iterable[Any]]") -> Format:  # noqa: A002 - see there
    """Return a format: ``open`` itself if it is one, else one that calls it for each shard.

    Raises:
        TypeError: If ``open`` is neither a format nor callable.
    """
    if isinstance(open, Format):
        return open
    if not callable(open):
        raise TypeError(
            f"open should be a format such as open_tar, or a function of a path, but is {open!r}"
        )
    return CallableFormat(open)


def between(numbers: Sequence[int], first: int, end: int) -> Sequence[int]:
    """Return those of ascending numbers that are from ``first`` to before ``end``."""
    return numbers[bisect.bisect_left(numbers, first) : bisect.bisect_left(numbers, end)]


def unreadable(path: str, problem: object, record: int | None = None) -> ShardError:
    """Return the error about a shard, or about one of its records."""
    what = f"shard {path}" if record is None else f"record {record} of shard {path}"
    return ShardError(
        f"{what} cannot be read: {problem}. Repair or replace it, or leave it out with "
        "on_error='skip'",
        path,
        record,
    )


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Raise what a missing or damaged file raises in this block as an error about the shard."""
    try:
        yield
    except Exception as error:
        if isinstance(error, read_errors()):
            problem = isinstance(error, OSError) and error.strerror
            raise unreadable(path, problem or str(error).partition("\n")[0].rstrip(".")) from error
        raise
