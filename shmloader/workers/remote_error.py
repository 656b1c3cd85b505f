"""Carries an exception out of a worker and raises it in the main process."""

import pickle
from typing import NoReturn

import cloudpickle
from torch._utils import ExceptionWrapper

# These would end something in the main process if they were raised there as they are: a loop,
# a generator, the program.
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt)


class RemoteError:
    """An exception with its traceback as text.

    torch's own wrapper does the work, so that type and text are torch's.

    Args:
        where: Where it was caught, for the text: "in DataLoader worker process 3".
    """

    def __init__(self, where: str) -> None:
        """Wrap the exception that is being handled."""
        self._wrapper = ExceptionWrapper(where=where)
        self._kind = self._wrapper.exc_type.__name__
        if issubclass(self._wrapper.exc_type, _CONTROL_FLOW):
            self._wrapper.exc_type = RuntimeError

    def dumps(self) -> bytes:
        """Pickle it; where its class cannot be named, by value, or else as a RuntimeError."""
        for dump in (pickle.dumps, cloudpickle.dumps):
            try:
                data: bytes = dump(self)
                pickle.loads(data)
            except Exception:  # noqa: BLE001 - the next way may do
                continue
            return data
        self._wrapper.exc_type = RuntimeError
        return pickle.dumps(self)

    @staticmethod
    def loads(data: bytes) -> "RemoteError":
        """Unpickle one."""
        error: RemoteError = pickle.loads(data)
        return error

    def shortened(self, characters: int) -> "RemoteError":
        """The same with at most so many characters of traceback: its beginning and its end."""
        text = self._wrapper.exc_msg
        if len(text) > characters:
            half = characters // 2
            cut = len(text) - 2 * half
            self._wrapper.exc_msg = f"{text[:half]}\n[… {cut} characters …]\n{text[-half:]}"
        return self

    def reraise(self, note: str) -> NoReturn:
        """Raise it here, with ``note`` added (PEP 678).

        Raises:
            BaseException: Of the same type, where that can be built from a text or as the class
                has it; else RuntimeError. Its text begins as torch's does.
        """
        try:
            self._raise()
        except BaseException as error:
            error.add_note(note)
            raise

    def _raise(self) -> NoReturn:
        wrapper = self._wrapper
        if self._kind != wrapper.exc_type.__name__:
            raise RuntimeError(f"Caught {self._kind} {wrapper.where}.\nOriginal {wrapper.exc_msg}")
        wrapper.reraise()
        raise AssertionError("ExceptionWrapper.reraise returned")
