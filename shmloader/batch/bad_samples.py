"""What a worker reports of the samples of a batch: how many it looked at, and which failed.

Made where the samples are loaded (:class:`shmloader.batch.fetch.TolerantFetcher`), read in the
main process when the batch is handed over. Plain values cross, so that neither a key nor an
exception class of the user's can make a report unreadable.
"""

import collections
import contextlib
import pickle
import reprlib
from dataclasses import dataclass, field, replace
from typing import Self

from shmloader.batch.remote_error import RemoteError
from shmloader.interruptions import Suppressed, is_interruption

#: Failures that are listed, the newest; the rest is counted. A report carries no more either,
#: since a loader does not list more.
LISTED = 100

# Of a failure's traceback, in characters: its beginning and its end.
_TRACEBACK_CHARACTERS = 4000

# A key that pickles to more than this is listed by its text.
_INDEX_BYTES = 4 * 1024
_INDEX_CHARACTERS = 200

# The same where only a short message can be sent.
_SHORT_TRACEBACK_CHARACTERS = 500
_SHORT_BYTES = 512


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be loaded.

    Attributes:
        index: Its key; the key's text where it could not cross.
        error: What the dataset raised.
    """

    index: object
    error: RemoteError

    @classmethod
    def caught(cls, index: object, where: str) -> Self:
        """Note the exception that is being handled."""
        return cls(index, RemoteError.caught(where).shortened(_TRACEBACK_CHARACTERS))

    def _values(self) -> tuple[bytes | None, str, bytes]:
        return _dump_index(self.index), describe_index(self.index), self.error.dumps()

    @classmethod
    def _from_values(cls, values: tuple[bytes | None, str, bytes]) -> Self:
        data, text, error = values
        index: object = text
        if data is not None:
            with Suppressed(Exception):  # reading a key of the user's own may raise
                index = pickle.loads(data)
        return cls(index, RemoteError.loads(error))

    def shortened(self) -> Self:
        """The same in less than 4 KiB, whatever it was."""
        data = _dump_index(self.index)
        error = self.error.shortened(_SHORT_TRACEBACK_CHARACTERS)
        if error.type_bytes is not None and len(error.type_bytes) > _SHORT_BYTES:
            error = replace(error, type_bytes=None)
        index = self.index
        if data is None or len(data) > _SHORT_BYTES:
            index = describe_index(index)
        return replace(self, index=index, error=error)


@dataclass(slots=True)
class SampleReport:
    """What became of one batch's samples.

    Attributes:
        sample_count: Samples that were looked at, good or bad.
        failed_count: How many of them failed.
        newest: The last of these, in order, at most ``LISTED``.
    """

    sample_count: int = 0
    failed_count: int = 0
    newest: collections.deque[BadSample] = field(
        default_factory=lambda: collections.deque(maxlen=LISTED)
    )

    def note(self, bad: BadSample) -> None:
        """One more has failed."""
        self.failed_count += 1
        self.newest.append(bad)

    def dumps(self) -> bytes:
        """Write it down, as plain values."""
        values = [bad._values() for bad in self.newest]
        return pickle.dumps((self.sample_count, self.failed_count, values), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def loads(cls, data: bytes) -> Self:
        """Read one."""
        sample_count, failed_count, values = pickle.loads(data)
        newest = collections.deque((BadSample._from_values(item) for item in values), LISTED)
        return cls(sample_count, failed_count, newest)

    def shortened(self) -> Self:
        """The counts and the last failure, for where there is no room for more: under 4 KiB."""
        last = [bad.shortened() for bad in list(self.newest)[-1:]]
        return replace(self, newest=collections.deque(last, LISTED))


def describe_index(index: object) -> str:
    """A key in a few characters, whatever its ``repr`` does."""
    try:
        text = reprlib.repr(index)
    except Exception as error:
        if is_interruption(error):
            raise
        text = f"<{type(index).__name__}>"
    return text[:_INDEX_CHARACTERS]


def _dump_index(index: object) -> bytes | None:
    """The pickled key; None if it cannot cross, or is too long."""
    with contextlib.suppress(Exception):  # pickling a key of the user's own may raise
        data = pickle.dumps(index, pickle.HIGHEST_PROTOCOL)
        return data if len(data) <= _INDEX_BYTES else None
    return None
