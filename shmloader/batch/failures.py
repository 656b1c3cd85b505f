"""Carries exceptions and failed samples to the main process, and names samples in texts.

Keys and exception classes of the user's cross as bytes, so that neither can make an answer
unreadable. The main process raises an exception of the same class if it can load the class, and
otherwise a RuntimeError.
"""

import pickle
import reprlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import cloudpickle
from torch._utils import KeyErrorMessage

from shmloader.interruptions import Suppressed, attempt
from shmloader.sampling.indices import without_position
from shmloader.streams.reader import Reading

#: How a sample that fails is handled. A function gets the sample's index and the exception, and
#: returns another sample.
OnError = Literal["raise", "skip"] | Callable[[Any, Exception], Any]

#: How many failures are listed. They are the newest ones; older ones are only counted.
LISTED = 100

# How many characters are kept of an exception's own text, of a failed sample's traceback, and of a
# key. Pickled classes and keys that are longer than this many bytes do not cross.
_MESSAGE_CHARACTERS = 1000
_TRACEBACK_CHARACTERS = 4000
_INDEX_CHARACTERS = 200
_PICKLE_BYTES = 8 * 1024

# These become a RuntimeError in the main process, where they would end a loop or a generator. So
# does an exception that is not an ``Exception``: it would end a task, the loader, or the program.
_CONTROL_FLOW = (StopIteration, StopAsyncIteration)

# The most indices that a text lists.
_SHOWN = 8


class RecordName(str):
    """The key of a record of a stream, which names the record and its shard."""

    __slots__ = ()


class _Note(str):
    """A note of :func:`add_note`, which tells it from other notes of an exception."""

    __slots__ = ()


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception of the user's code, such as which sample failed.

    The note replaces an earlier one of this function, since a dataset may raise the same exception
    for two samples.
    """
    with Suppressed(Exception):  # an exception may refuse attributes
        notes = getattr(error, "__notes__", ())
        if notes:
            error.__notes__ = [each for each in notes if not isinstance(each, _Note)]
        error.add_note(_Note(note))


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An exception in a form that can cross to the main process.

    Attributes:
        kind: Name of the exception's class.
        where: Where it was caught, for instance "in DataLoader worker process 3".
        text: The traceback, as text.
        type_bytes: The pickled class; None if the main process is to raise a RuntimeError instead.
        message: The exception's own text, on one line.
        own_notes: The notes of :func:`add_note`. ``text`` is as torch's, without them.
    """

    kind: str
    where: str
    text: str
    type_bytes: bytes | None
    message: str = ""
    own_notes: tuple[str, ...] = ()

    @classmethod
    def caught(cls, where: str) -> Self:
        """Wrap the exception that is being handled."""
        error = sys.exception()
        assert error is not None
        return cls.of(error, where)

    @classmethod
    def of(cls, error: BaseException, where: str) -> Self:
        """Wrap an exception that was caught."""
        kind, message, type_bytes = type(error), "<exception str() failed>", None
        own = tuple(str(one) for one in getattr(error, "__notes__", ()) if isinstance(one, _Note))
        text = "".join(traceback.format_exception(error))
        for note in own:
            text = text.removesuffix(f"{note}\n")
        with Suppressed(Exception):
            message = _cut(" ".join(str(error).split()), _MESSAGE_CHARACTERS)
        if issubclass(kind, Exception) and not issubclass(kind, _CONTROL_FLOW):
            type_bytes = _pickled(kind, pickle.dumps) or _pickled(kind, cloudpickle.dumps)
        return cls(kind.__name__, where, text, type_bytes, message, own)

    def shortened(self, characters: int) -> Self:
        """Return the error with the two ends of its text, about ``characters`` characters."""
        left, half = len(self.text) - characters, characters // 2
        if left <= 0:
            return self
        text = f"{self.text[:half]}\n[… {left} characters …]\n{self.text[-half:]}"
        return replace(self, text=text)

    def rebuilt(self, note: str) -> Exception:
        """Return an exception of the same class, else a RuntimeError, with torch's text."""
        text = f"Caught {self.kind} {self.where}.\nOriginal {self.text}"
        return _with_notes(self._build(text) or RuntimeError(text), note, *self.own_notes)

    @property
    def summary(self) -> str:
        """The name of the class and the message, on one line."""
        return f"{self.kind}: {self.message}" if self.message else self.kind

    def summarized(self, note: str) -> Exception:
        """Return an exception of the same class, else a RuntimeError, for a list of failures.

        Its text is short. The traceback is in its notes, so Python prints it where it is the cause
        of another one.
        """
        error = self._build(self.message) or RuntimeError(self.summary)
        return _with_notes(error, note, self.text.rstrip("\n"))

    def _build(self, text: str) -> Exception | None:
        """Return an exception of the class with a text, as torch builds it, or None."""
        if self.type_bytes is not None:
            with Suppressed(Exception):  # a module that only the worker has; the constructor
                kind: Any = pickle.loads(self.type_bytes)
                if kind is KeyError:
                    return KeyError(KeyErrorMessage(text))
                built = kind(message=text) if getattr(kind, "message", None) else kind(text)
                # Its own text may be none, or have several lines, which a list of failures has not.
                if isinstance(built, Exception) and ("\n" in text or "\n" not in str(built)):
                    return built
        return None


def _with_notes(error: Exception, *notes: str) -> Exception:
    with Suppressed(Exception):  # an exception may refuse attributes
        for note in notes:
            error.add_note(note)
    return error


def _pickled(value: object, dumps: Callable[[object], bytes]) -> bytes | None:
    """Pickle a short key or class; return None if it is longer, or cannot be pickled."""
    data = attempt(dumps, value)  # pickling the user's key may raise anything
    return data if isinstance(data, bytes) and len(data) <= _PICKLE_BYTES else None


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]} …"


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
        error = RemoteError.caught(where).shortened(_TRACEBACK_CHARACTERS)
        return cls(_pickled(index, pickle.dumps), describe_index(index), error)

    @property
    def index(self) -> object:
        """The sample's key; its text if the key cannot cross."""
        if self.key is not None:
            with Suppressed(Exception):  # unpickling the user's key may raise anything
                return pickle.loads(self.key)
        return self.text


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


def describe_indices(ticket_indices: object) -> str:
    """Summarize a batch's indices: "indices 64 to 127"."""
    plain = without_position(ticket_indices)
    if isinstance(plain, Reading):
        return repr(plain)
    indices: Sequence[Any] = plain if isinstance(plain, list | tuple) else [plain]
    count = len(indices)
    if count and all(index is None for index in indices):  # of an iterable dataset
        return "the next sample" if count == 1 else f"the next {count} samples"
    if count > 1 and all(isinstance(index, int) for index in indices):
        first = indices[0]
        if list(indices) == list(range(first, first + count)):
            return f"indices {first} to {indices[-1]}"
    shown = ", ".join(map(describe_index, indices[:_SHOWN]))
    if count > _SHOWN:
        return f"{count} indices: {shown}, …"
    return f"{'index' if count == 1 else 'indices'} {shown}" if count else "no indices"


def name_of(index: object) -> str:
    """Return a short text that names a sample: "index 3", or "record 7 of shard a.tar"."""
    return index if type(index) is RecordName else f"index {describe_index(index)}"


def describe_index(index: object) -> str:
    """Return a short text of a key, whatever its ``repr`` does."""
    text = f"<{type(index).__name__}>"
    with Suppressed(Exception):
        text = reprlib.repr(index)
    return text[:_INDEX_CHARACTERS]
