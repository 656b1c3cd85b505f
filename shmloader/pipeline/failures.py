"""Handles failed calls of ops: raises an error, or leaves the item out, counts and lists it."""

import contextlib
import numbers
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import PurePath

from shmloader.batch.failures import RemoteError, describe_index
from shmloader.engine.failures import JUDGED_FROM, FailureLimit
from shmloader.errors import TooManyFailures

# A str of up to this length is listed whole. This is long enough for a URL.
_LISTED_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item that a stage has left out because its op failed.

    Attributes:
        stage: The stage's name.
        item: The item, if it is a number, a path or a str of at most 2,000 characters; else the
            beginning of its ``repr``, since a list of failures must not keep large objects alive.
        error: The exception, of the op's own class if that class can be built from a text. Its
            ``str`` is one line.
        traceback: The traceback, as text of several lines, from the op's first frame on.
    """

    stage: str
    item: object
    error: Exception
    traceback: str = field(repr=False)

    @classmethod
    def of(cls, stage: str, item: object, error: Exception) -> "FailedItem":
        """Return the entry for a failure, which keeps no frame of the op alive.

        This calls the item's ``repr``, so it must not be called under a lock.
        """
        remote, text = RemoteError.of(error, f"in stage '{stage}'"), describe_index(item)
        is_small = not isinstance(item, str) or len(item) <= _LISTED_CHARACTERS
        is_listed = is_small and isinstance(item, str | numbers.Number | PurePath | None)
        summarized = remote.summarized(f"The item was {text}.")
        return cls(stage, item if is_listed else text, summarized, remote.text)


class FailureCounter(FailureLimit):
    """Counts the calls of one epoch that share a limit. Used under the flow's lock.

    Args:
        max_failures: A number of calls that may fail, or a share of all calls. With None, the first
            failure is raised.
        is_resumed: Whether the epoch was resumed, so that calls before it are not counted.
    """

    def __init__(self, max_failures: int | Fraction | None, *, is_resumed: bool) -> None:
        super().__init__(max_failures, may_all_fail=False)
        self.max_failures, self._is_resumed = max_failures, is_resumed
        self._last: FailedItem | None = None

    def add_failed(self, failed: FailedItem) -> TooManyFailures | None:
        """Count a call that has failed. Returns the exception to raise if too many have."""
        self._last = failed
        return self._too_many(failed) if self.add(1, 1) else None

    def end(self) -> TooManyFailures | None:
        """Return the exception to raise at the epoch's end, if too many or all calls failed.

        A resumed epoch with fewer than ``JUDGED_FROM`` calls is not judged.
        """
        is_judged = not self._is_resumed or self.sample_count >= JUDGED_FROM
        if self._last is None or not is_judged or not self.end_epoch():
            return None
        return self._too_many(self._last)

    def _too_many(self, last: FailedItem) -> TooManyFailures:
        raised = TooManyFailures(
            f"{self.failed_count} of {self.sample_count} calls failed, with "
            f"max_failures={self.max_failures}. The last was in stage '{last.stage}' for item "
            f"{describe_index(last.item)}: see the cause. The pipeline's `failures` lists the "
            "newest."
        )
        raised.__cause__ = last.error
        return raised


def explained(error: BaseException, what: str, of_item: str) -> BaseException:
    """Return the exception to raise to the consumer when the user's code has raised one.

    It is the same exception if possible, with a note that says what has failed.

    Args:
        error: The exception of the user's code.
        what: What has raised it: "stage 'parse'".
        of_item: The item in words, if there is one: " for item 3".
    """
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        # Raised unchanged, it would end the consumer's loop or task, or the program.
        cause, name = error, type(error).__name__
        error = RuntimeError(f"{what} raised {name}, which would end more than the epoch: {cause}")
        error.__cause__ = cause
    note = f"{what[0].upper()}{what[1:]} failed{of_item}."
    with contextlib.suppress(Exception):  # an exception may refuse attributes
        if note not in getattr(error, "__notes__", ()):  # several coroutines may share it
            error.add_note(note)
    return error
