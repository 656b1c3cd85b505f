"""Carries the exceptions of a worker to the main process.

The exception's class crosses as bytes, so that it cannot make an answer unreadable.
The main process raises an exception of the same class if it can load the class, and otherwise a
RuntimeError.
"""

import contextlib
import pickle
import sys
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import cloudpickle
from torch._utils import KeyErrorMessage

from shmloader.interruptions import Suppressed
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
            Exception: What :meth:`rebuilt` returns.
        """
        raise self.rebuilt(note)

    def rebuilt(self, note: str) -> Exception:
        """Return an exception of the same class if that can be built from a text.

        Otherwise it is a RuntimeError. Its text begins as torch's does, and ``note`` is added.
        """
        text = f"Caught {self.kind} {self.where}.\nOriginal {self.text}"
        error = self._build(text) or RuntimeError(text)
        with Suppressed(Exception):  # an exception may refuse attributes
            for each in (note, *self.own_notes):
                error.add_note(each)
        return error

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
        error = self._build(self.message, is_line=True) or RuntimeError(self.summary)
        with Suppressed(Exception):  # an exception may refuse attributes
            error.add_note(note)
            error.add_note(self.text.rstrip("\n"))
        return error

    def _build(self, text: str, *, is_line: bool = False) -> Exception | None:
        """Return an exception of the class with a text, built as torch builds it.

        Returns None if the main process cannot load the class or must not raise it, if the class
        does not take the text, or if its text should be one line and is not.
        """
        if self.type_bytes is not None:
            with Suppressed(Exception):  # a module that only the worker has; the constructor
                kind: Any = pickle.loads(self.type_bytes)
                if kind is KeyError:
                    return KeyError(KeyErrorMessage(text))
                built = kind(message=text) if getattr(kind, "message", None) else kind(text)
                if isinstance(built, Exception) and not (is_line and "\n" in str(built)):
                    return built
        return None


def _without_middle(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"


def _message_of(error: BaseException) -> str:
    """Return an exception's own text on one line, whatever its ``__str__`` does."""
    text = "<exception str() failed>"
    with Suppressed(Exception):
        text = " ".join(str(error).split())
    return cut_text(text, _MESSAGE_CHARACTERS)


def cut_text(text: str, characters: int) -> str:
    """Return a text, or its beginning if it is longer than ``characters``."""
    return text if len(text) <= characters else f"{text[:characters]} …"


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
