"""Carries failed samples from a worker to the main process, and names samples in texts.

Keys and exception classes of the user's cross as bytes, so that neither can make an answer
unreadable. Failed samples are noted where they are loaded
(:class:`shmloader.batch.fetchers.MapFetcher`), and are read in the main process when
their batch is delivered.
"""

import contextlib
import pickle
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from shmloader.batch.remote_error import RemoteError, cut_text
from shmloader.interruptions import Suppressed
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


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be loaded.

    Attributes:
        key: The sample's key, pickled; None if it could not be pickled or is long.
        text: The key's text.
        error: The exception that the dataset raised.
    """

    key: bytes | None
    text: str
    error: RemoteError

    @classmethod
    def caught(cls, index: object, where: str) -> Self:
        """Wrap the exception that is being handled."""
        key = None
        with contextlib.suppress(Exception):  # pickling the user's key may raise anything
            key = pickle.dumps(index, pickle.HIGHEST_PROTOCOL)
        key = key if key is not None and len(key) <= _INDEX_BYTES else None
        error = RemoteError.caught(where).shortened(_TRACEBACK_CHARACTERS)
        return cls(key, describe_index(index), error)

    @property
    def index(self) -> object:
        """The sample's key; its text if the key cannot cross."""
        if self.key is not None:
            with Suppressed(Exception):  # unpickling the user's key may raise anything
                return pickle.loads(self.key)
        return self.text

    def shortened(self) -> Self:
        """Return the sample in a form of less than 4 KiB."""
        error = self.error.shortened(_SHORT_TRACEBACK_CHARACTERS)
        error = replace(error, message=cut_text(error.message, _SHORT_MESSAGE_CHARACTERS))
        key, type_bytes = (
            None if data is None or len(data) > _SHORT_BYTES else data
            for data in (self.key, error.type_bytes)
        )
        return replace(self, key=key, error=replace(error, type_bytes=type_bytes))


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

    def add(self, bad: BadSample) -> None:
        """Add a failed sample."""
        self.failed_count += 1
        self.newest = (*self.newest, bad)[-LISTED:]

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
    text = f"<{type(index).__name__}>"
    with Suppressed(Exception):
        text = reprlib.repr(index)
    return text[:_INDEX_CHARACTERS]
