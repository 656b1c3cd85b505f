"""Carries the exceptions of a worker to the main process.

Only plain values cross, so that an exception class of the user's cannot make an answer unreadable.
The main process raises an exception of the same class if it can load the class, and otherwise a
RuntimeError.
"""

import contextlib
import pickle
import sys
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import cloudpickle
from torch._utils import ExceptionWrapper, KeyErrorMessage

from shmloader.interruptions import Suppressed, is_interruption
from shmloader.tracebacks import format_for_user

# How many characters of an exception's own text are kept on one line.
_MESSAGE_CHARACTERS = 1000

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
    return cut_text(text, _MESSAGE_CHARACTERS)


def cut_text(text: str, characters: int) -> str:
    """Return a text, or its beginning if it is longer than ``characters``."""
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
