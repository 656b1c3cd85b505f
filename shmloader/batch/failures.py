"""Carries exceptions and failed samples from a worker to the main process.

Only plain values cross, so that neither a key nor an exception class of the user's can make an
answer unreadable. Failed samples are noted where they are loaded
(:class:`shmloader.batch.tolerant_fetcher.TolerantFetcher`), and are read in the main process when
their batch is delivered.
"""

import contextlib
import pickle
import reprlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, Self

import cloudpickle
from torch._utils import ExceptionWrapper, KeyErrorMessage

from shmloader.interruptions import Suppressed, is_interruption
from shmloader.sampling.indices import without_position
from shmloader.tracebacks import format_for_user

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

# The limits of traceback and key where only a short message can be sent.
_SHORT_TRACEBACK_CHARACTERS = 500
_SHORT_BYTES = 512

# The most indices that a text lists.
_SHOWN = 8

# How many characters of an exception's own text are kept on one line.
_MESSAGE_CHARACTERS = 1000
_SHORT_MESSAGE_CHARACTERS = 200

# These become a RuntimeError in the main process, where they would end a loop or a generator. So
# does an exception that is not an ``Exception``: it would end a task, the loader, or the program.
_CONTROL_FLOW = (StopIteration, StopAsyncIteration)

# An exception whose pickled class is longer than this becomes a RuntimeError.
_TYPE_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An exception in a form that can cross to the main process.

    Attributes:
        kind: Name of the exception's class.
        where: Where it was caught, for instance "in DataLoader worker process 3".
        text: The traceback, as text, from the user's first frame on.
        type_bytes: The pickled class; None if the main process is to raise a RuntimeError instead.
        message: The exception's own text, on one line.
        own_notes: The notes of :func:`note_sample`. ``text`` is as torch's, without them.
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
        kind = type(error)
        notes = getattr(error, "__notes__", ())
        own = tuple(str(note) for note in notes if isinstance(note, _SampleNote))
        text = format_for_user(error)
        for note in reversed(own):
            text = text.removesuffix(f"{note}\n")
        return cls(kind.__name__, where, text, _pickle_type(kind), _message_of(error), own)

    def dumps(self) -> bytes:
        """Return the error pickled as plain values, which can always be read."""
        values = (
            self.kind, self.where, self.text, self.type_bytes, self.message, self.own_notes,
        )  # fmt: skip
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)

    @classmethod
    def loads(cls, data: bytes) -> Self:
        """Return the error that :meth:`dumps` has pickled."""
        return cls(*pickle.loads(data))

    def shortened(self, characters: int) -> Self:
        """Return the error with a text of at most about ``characters`` characters.

        The traceback and its last line, which begins with the class and the message, keep their
        beginnings and their ends.
        """
        if len(self.text) <= characters:
            return self
        body = self.text.rstrip("\n")
        trace, newline, last_line = body.rpartition("\n")
        half = characters // 2
        parts = _without_middle(trace, half), newline, _without_middle(last_line, half)
        return replace(self, text="".join(parts) + self.text[len(body) :])

    def reraise(self, note: str) -> NoReturn:
        """Raise the exception in this process, with ``note`` added (PEP 678).

        Raises:
            Exception: An exception of the same class if that can be built from a text, otherwise a
                RuntimeError. Its text begins as torch's does.
        """
        try:
            self._raise()
        except BaseException as error:
            if not is_interruption(error):
                with Suppressed(Exception):  # an exception may refuse attributes
                    for each in (note, *self.own_notes):
                        error.add_note(each)
                error.with_traceback(None)  # it refers to this frame, which refers to the error
            raise

    def rebuilt(self, note: str) -> Exception:
        """Return the exception that :meth:`reraise` would raise, without a traceback.

        So it keeps no frame of this process alive.
        """
        try:
            self.reraise(note)
        except Exception as error:
            if is_interruption(error):
                raise
            with Suppressed(Exception):  # an exception may refuse attributes
                error.__context__ = None
            return error.with_traceback(None)

    @property
    def summary(self) -> str:
        """The name of the class and the message, on one line."""
        return f"{self.kind}: {self.message}" if self.message else self.kind

    def summarized(self, note: str) -> Exception:
        """Return an exception of the same class whose text is one line, for a list of failures.

        If the class cannot be built from a text, a RuntimeError is returned. The traceback is in
        the exception's notes, so Python prints it where the exception is the cause of another one.

        Args:
            note: A note for the exception, which says what failed, such as a sample in a worker.
        """
        error: Exception = RuntimeError(self.summary)
        kind = self._load_type()
        if kind is not None:
            with Suppressed(Exception):  # the class's own constructor or text
                built = _build(kind, self.message)
                if isinstance(built, Exception) and "\n" not in str(built):
                    error = built
        with Suppressed(Exception):  # an exception may refuse attributes
            error.add_note(note)
            error.add_note(self.text.rstrip("\n"))
        return error

    def _load_type(self) -> Any:
        """Return the class; None if the main process cannot load it or must not raise it."""
        if self.type_bytes is not None:
            with Suppressed(Exception):  # a module that only the worker has
                return pickle.loads(self.type_bytes)
        return None

    def _raise(self) -> NoReturn:
        kind = self._load_type()
        if kind is not None:
            # torch's wrapper passes KeyError and some others their text in the form they need.
            wrapper: Any = object.__new__(ExceptionWrapper)
            wrapper.exc_type, wrapper.exc_msg, wrapper.where = kind, self.text, self.where
            try:
                wrapper.reraise()
            except (kind, RuntimeError):
                raise
            except Exception as error:
                if is_interruption(error):
                    raise
                # The class's own constructor failed.
        raise RuntimeError(f"Caught {self.kind} {self.where}.\nOriginal {self.text}")


def _without_middle(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def _message_of(error: BaseException) -> str:
    """Return an exception's own text on one line, whatever its ``__str__`` does."""
    try:
        text = " ".join(str(error).split())
    except Exception as raised:
        if is_interruption(raised):
            raise
        text = "<exception str() failed>"
    return _cut(text, _MESSAGE_CHARACTERS)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]} …"


def _build(kind: Any, text: str) -> Any:
    """Return an exception of a class with a text, built as torch builds it."""
    if kind is KeyError:
        return KeyError(KeyErrorMessage(text))
    return kind(message=text) if getattr(kind, "message", None) else kind(text)


class _SampleNote(str):
    """A note of :func:`note_sample`, which tells it from other notes of an exception."""

    __slots__ = ()


def note_sample(error: BaseException, note: str) -> None:
    """Add a note to an exception of the user's code, such as which sample failed.

    The note replaces an earlier one of this function, since a dataset may raise the same exception
    for two samples.
    """
    with Suppressed(Exception):  # an exception may refuse attributes
        notes = getattr(error, "__notes__", None)
        if notes:
            error.__notes__ = [each for each in notes if not isinstance(each, _SampleNote)]
        error.add_note(_SampleNote(note))


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


def _pickle_type(kind: type[BaseException]) -> bytes | None:
    """Pickle a class by name, or else by value.

    Returns None for a class that the main process must not raise, and for one that cannot be
    pickled or whose pickle is too long.
    """
    if issubclass(kind, _CONTROL_FLOW) or not issubclass(kind, Exception):
        return None
    for dumps in (pickle.dumps, cloudpickle.dumps):
        with contextlib.suppress(Exception):
            data: bytes = dumps(kind)
            return data if len(data) <= _TYPE_BYTES else None
    return None


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
        error = replace(error, message=_cut(error.message, _SHORT_MESSAGE_CHARACTERS))
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
