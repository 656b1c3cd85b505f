"""Carries failed samples from a worker to the main process, and names samples in texts.

Only plain values cross, so that neither a key nor an exception class of the user's can make an
answer unreadable. Failed samples are noted where they are loaded
(:class:`shmloader.batch.tolerant_fetcher.TolerantFetcher`), and are read in the main process when
their batch is delivered.
"""

import contextlib
import pickle
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from shmloader.batch.remote_error import RemoteError, cut_text
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.sampling.indices import without_position

#: How a sample that fails is handled. A function gets the sample's index and the exception, and
#: returns another sample.
OnError = Literal["raise", "skip"] | Callable[[Any, Exception], Any]

#: How many failures are listed. They are the newest ones; older ones are only counted.
LISTED = 100

# How many characters of a failed sample's traceback are kept, half of them from its end.
_TRACEBACK_CHARACTERS = 4000

# A key whose pickle has more bytes than this is listed by its text, cut to so many characters.
_INDEX_BYTES = 4 * 1024
_INDEX_CHARACTERS = 200

# The limits of traceback, exception's text and key where only a short message can be sent.
_SHORT_TRACEBACK_CHARACTERS = 500
_SHORT_MESSAGE_CHARACTERS = 200
_SHORT_BYTES = 512

# The most indices that a text lists.
_SHOWN = 8


def describe_bad_index(index: object) -> str:
    """Return the note for a sample that was loaded by its index."""
    return f"The sample of index {describe_index(index)} failed."


def describe_bad_replacement(index: object) -> str:
    """Return the note for an exception that ``on_error`` raised."""
    return f"It was raised by on_error for the sample of index {describe_index(index)}."


def describe_bad_list(indices: object) -> str:
    """Return the note for samples that were loaded together."""
    return f"One call of __getitems__ for {describe_indices(indices)} failed."


def describe_bad_number(number: int, *, is_resumed: bool, is_here: bool) -> str:
    """Return the note for a sample of an iterable dataset.

    Args:
        number: How many samples the iterator had yielded before.
        is_resumed: Whether the dataset had loaded a state.
        is_here: Whether this is the main process rather than a worker.
    """
    where = "" if is_here else " in this worker"
    since = "its state was loaded" if is_resumed else "the epoch began"
    return f"The dataset's iterator failed at sample {number}, counted from 0{where} since {since}."


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be loaded.

    Attributes:
        index: The sample's key; the key's text if the key could not be pickled.
        error: The exception that the dataset raised.
    """

    index: object
    error: RemoteError

    @classmethod
    def caught(cls, index: object, where: str) -> Self:
        """Wrap the exception that is being handled."""
        return cls(index, RemoteError.caught(where).shortened(_TRACEBACK_CHARACTERS))

    def _values(self) -> tuple[bytes | None, str, bytes]:
        return _dump_index(self.index), describe_index(self.index), self.error.dumps()

    @classmethod
    def _from_values(cls, values: tuple[bytes | None, str, bytes]) -> Self:
        data, text, error = values
        index: object = text
        if data is not None:
            with Suppressed(Exception):  # unpickling the user's key may raise anything
                index = pickle.loads(data)
        return cls(index, RemoteError.loads(error))

    def shortened(self) -> Self:
        """Return the sample in a form of less than 4 KiB."""
        data = _dump_index(self.index)
        error = self.error.shortened(_SHORT_TRACEBACK_CHARACTERS)
        error = replace(error, message=cut_text(error.message, _SHORT_MESSAGE_CHARACTERS))
        if error.type_bytes is not None and len(error.type_bytes) > _SHORT_BYTES:
            error = replace(error, type_bytes=None)
        index = self.index
        if data is None or len(data) > _SHORT_BYTES:
            index = describe_index(index)
        return replace(self, index=index, error=error)


@dataclass(slots=True)
class SampleReport:
    """Counts one batch's samples, and lists those that failed.

    Attributes:
        sample_count: How many samples were asked for.
        failed_count: How many of them failed.
        newest: The last samples that failed, in order; at most ``LISTED``.
    """

    sample_count: int = 0
    failed_count: int = 0
    newest: tuple[BadSample, ...] = ()

    def note(self, bad: BadSample) -> None:
        """Add a failed sample."""
        self.failed_count += 1
        self.newest = (*self.newest, bad)[-LISTED:]

    def dumps(self) -> bytes:
        """Return the report pickled as plain values."""
        values = [bad._values() for bad in self.newest]
        return pickle.dumps((self.sample_count, self.failed_count, values), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def loads(cls, data: bytes) -> Self:
        """Return the report that :meth:`dumps` has pickled."""
        sample_count, failed_count, values = pickle.loads(data)
        return cls(sample_count, failed_count, tuple(map(BadSample._from_values, values)))

    def shortened(self) -> Self:
        """Return the counts and the last failure only, in less than 4 KiB."""
        return replace(self, newest=tuple(bad.shortened() for bad in self.newest[-1:]))


def describe_indices(ticket_indices: object) -> str:
    """Summarize a batch's indices: "indices 64 to 127"."""
    plain = without_position(ticket_indices)
    indices: Sequence[Any] = plain if isinstance(plain, list | tuple) else [plain]
    if len(indices) == 1:  # None for a sample of an iterable dataset
        only = indices[0]
        return "the next sample" if only is None else f"index {reprlib.repr(only)}"
    if indices and all(index is None for index in indices):
        return f"the next {len(indices)} samples"
    if len(indices) > 1 and all(isinstance(index, int) for index in indices):
        first = indices[0]
        if list(indices) == list(range(first, first + len(indices))):
            return f"indices {first} to {indices[-1]}"
    shown = ", ".join(reprlib.repr(index) for index in indices[:_SHOWN])
    if len(indices) > _SHOWN:
        return f"{len(indices)} indices: {shown}, …"
    return f"indices {shown}" if indices else "no indices"


def describe_index(index: object) -> str:
    """Return a short text of a key, whatever its ``repr`` does."""
    try:
        text = reprlib.repr(index)
    except Exception as error:
        if is_interruption(error):
            raise
        text = f"<{type(index).__name__}>"
    return text[:_INDEX_CHARACTERS]


def _dump_index(index: object) -> bytes | None:
    """Pickle a key; None if that fails or is too long."""
    with contextlib.suppress(Exception):  # pickling the user's key may raise anything
        data = pickle.dumps(index, pickle.HIGHEST_PROTOCOL)
        return data if len(data) <= _INDEX_BYTES else None
    return None
