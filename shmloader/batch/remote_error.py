"""Carries an exception out of a worker and raises it in the main process."""

import contextlib
import pickle
import sys
import traceback
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import cloudpickle
from torch._utils import ExceptionWrapper

from shmloader.interruptions import Suppressed, is_interruption

# These would end something in the main process if they were raised there as they are, a loop or a
# generator; and so would what is no Exception: a task, the loader, the program.
_CONTROL_FLOW = (StopIteration, StopAsyncIteration)

# A class that pickles to more than this is sent as a RuntimeError.
_TYPE_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An exception, its traceback as text.

    Attributes:
        kind: Name of its class.
        where: Where it was caught: "in DataLoader worker process 3".
        text: The traceback.
        type_bytes: The pickled class; None if it cannot be had in the main process, which then
            raises a RuntimeError.
    """

    kind: str
    where: str
    text: str
    type_bytes: bytes | None

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
        return cls(
            kind.__name__, where, "".join(traceback.format_exception(error)), _pickle_type(kind)
        )

    def dumps(self) -> bytes:
        """Write it down, as plain values: they can be read whatever becomes of the class."""
        values = (self.kind, self.where, self.text, self.type_bytes)
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)

    @classmethod
    def loads(cls, data: bytes) -> Self:
        """Read one."""
        return cls(*pickle.loads(data))

    def shortened(self, characters: int) -> Self:
        """The same with at most so many characters of traceback: its beginning and its end."""
        text = self.text
        if len(text) > characters:
            half = characters // 2
            cut = len(text) - 2 * half
            text = f"{text[:half]}\n[… {cut} characters …]\n{text[-half:]}"
        return replace(self, text=text)

    def reraise(self, note: str) -> NoReturn:
        """Raise it here, with ``note`` added (PEP 678).

        Raises:
            BaseException: Of the same type, where that can be built from a text or as the class
                has it; else RuntimeError. Its text begins as torch's does.
        """
        try:
            self._raise()
        except BaseException as error:
            if not is_interruption(error):
                with Suppressed(Exception):  # an exception may refuse attributes
                    error.add_note(note)
                error.with_traceback(None)  # one of the frames that it comes from holds it
            raise

    def rebuilt(self, note: str) -> Exception:
        """What :meth:`reraise` would raise for an ``Exception``; holds no frame of this process."""
        try:
            self.reraise(note)
        except Exception as error:
            if is_interruption(error):
                raise
            with Suppressed(Exception):  # an exception may refuse attributes
                error.__context__ = None
            return error.with_traceback(None)

    @property
    def last_line(self) -> str:
        """The traceback's last line: most often the class and what it says."""
        return self.text.rstrip().rpartition("\n")[2]

    def _raise(self) -> NoReturn:
        kind: Any = None
        if self.type_bytes is not None:
            with Suppressed(Exception):  # a module that only the worker has
                kind = pickle.loads(self.type_bytes)
        if kind is not None:
            # torch knows how KeyError and its like want their text.
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


def _pickle_type(kind: type[BaseException]) -> bytes | None:
    """The class by its name, or else by value; None if it must not or cannot cross."""
    if issubclass(kind, _CONTROL_FLOW) or not issubclass(kind, Exception):
        return None
    for dumps in (pickle.dumps, cloudpickle.dumps):
        with contextlib.suppress(Exception):
            data: bytes = dumps(kind)
            return data if len(data) <= _TYPE_BYTES else None
    return None
