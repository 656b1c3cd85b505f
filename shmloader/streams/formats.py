"""What a format is: how the records of a shard are read, counted and found again.

Streams read shards by three methods and know nothing else of a format. Its objects can be pickled,
hold no open file between calls, and may be used by several threads and processes at once.
"""

import abc
import collections
import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from shmloader.errors import ShardError
from shmloader.grammar import counted
from shmloader.streams.files import is_compressed, read_errors


@runtime_checkable
class Format(Protocol):
    """Reads the shards of one format. ``path`` is always a file of this machine.

    Attributes:
        seeks: Whether :meth:`records` and :meth:`at` find a record without reading those before
            it. A compressed file is read from its beginning all the same (:func:`can_seek`).
    """

    seeks: bool

    def records(self, path: str, start: int = 0) -> Iterator[Any]:
        """Yield the records in the order of the file, from number ``start`` on.

        Raises:
            ShardError: If the shard or a record cannot be read. If it names a record,
                ``records(path, record + 1)`` goes on after that. Any other error ends the shard.
        """

    def count(self, path: str) -> int:
        """Return the number of records, by an index or the metadata of the shard.

        Raises:
            ShardError: If the shard cannot be read.
        """

    def at(self, path: str, numbers: Sequence[int]) -> list[Any]:
        """Return the records of these numbers, in the order of ``numbers``.

        Raises:
            ShardError: If one of them cannot be read, or the shard has no record of that number.
        """


class IndexedFormat(Format):
    """What the formats have in common that find a record by its number."""

    seeks = True

    def __call__(self, path: str) -> Iterator[Any]:
        """Yield the records of a shard."""
        return self.records(path)

    def at(self, path: str, numbers: Sequence[int]) -> list[Any]:
        """Return the records of these numbers, in the order of ``numbers``."""
        wanted = sorted(set(numbers))
        with reading(path):
            found = dict(zip(wanted, self._at(path, wanted), strict=True))
        return [found[number] for number in numbers]

    @abc.abstractmethod
    def _at(self, path: str, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield the records of ascending numbers, once the numbers are checked."""


class CallableFormat:
    """The format of shards that a function of the user's opens.

    It can only read from the beginning: :meth:`at` and the first :meth:`count` of a shard each read
    the shard again. What the function raises keeps its type, and has a note with shard and record.

    Args:
        open: Takes the path of a shard, and returns its records: the same ones at every call.
    """

    seeks = False

    def __init__(self, open: Callable[[str], Iterable[Any]]) -> None:  # noqa: A002 - the user's word
        self._open = open
        # The number of records of each shard that was read to its end.
        self._counts: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"as_format({self._open!r})"

    def records(self, path: str, start: int = 0) -> Generator[Any]:
        """Yield the records from number ``start`` on. Those before it are read and dropped."""
        iterator: Any = None
        number = 0
        try:
            iterator = iter(self._open(path))
            for record in iterator:
                if number >= start:
                    yield record
                number += 1
            self._counts[path] = number
        except Exception as error:
            error.add_note(f"This was raised at record {number} of shard {path}.")
            raise
        finally:
            if (close := getattr(iterator, "close", None)) is not None:
                close()

    def count(self, path: str) -> int:
        """Return the number of records; reads the shard if it was never read to its end."""
        if path not in self._counts:
            collections.deque(self.records(path), maxlen=0)
        return self._counts[path]

    def at(self, path: str, numbers: Sequence[int]) -> list[Any]:
        """Return the records of these numbers; reads the shard up to the last of them."""
        wanted = set(numbers)
        with contextlib.closing(self.records(path)) as records:
            first = itertools.islice(records, max(wanted, default=-1) + 1)
            found = {number: record for number, record in enumerate(first) if number in wanted}
        if wanted - found.keys():
            check_numbers(path, numbers, self.count(path))
        return [found[number] for number in numbers]


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


def can_seek(format: Format, path: str) -> bool:  # noqa: A002 - the word of this module
    """Return whether records of this shard are found without reading those before them."""
    return format.seeks and not is_compressed(path)


def check_numbers(path: str, numbers: Sequence[int], count: int) -> None:
    """Check that a shard of ``count`` records has the records of these numbers."""
    for number in numbers:
        if not 0 <= number < count:
            raise ShardError(
                f"shard {path} has {counted(count, 'record')}, but record {number} was asked for. "
                "Has it changed since its records were counted?",
                path,
                number,
            )


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
