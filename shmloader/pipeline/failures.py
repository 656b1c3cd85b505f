"""Handles failed calls of ops: raises an error, or leaves the item out, counts and lists it."""

import asyncio
import logging
import numbers
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import PurePath

from shmloader.batch.failures import describe_index
from shmloader.batch.remote_error import RemoteError
from shmloader.engine.failures import JUDGED_FROM, FailureLimit, FailureList
from shmloader.errors import TooManyFailures
from shmloader.pipeline.entries import NOTHING

_log = logging.getLogger("shmloader")

# If these were raised unchanged, they would end the consumer's loop or task, or the program.
_CONTROL_FLOW = (
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
)

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


class Limit:
    """How many calls may fail in one epoch.

    Attributes:
        count: Counts the calls and the failed calls.
        first: The first failure; None before it.
        last: The latest failure; None before the first.

    Args:
        max_failures: A number of calls that may fail, or a share of all calls.
        scope: What the limit is for: "stage 'parse'", "the pipeline".
        is_resumed: Whether the epoch was resumed, so that calls before it are not counted.
    """

    def __init__(
        self, max_failures: int | Fraction, scope: str, *, is_resumed: bool = False
    ) -> None:
        self._is_resumed = is_resumed
        self.count = FailureLimit(max_failures, may_all_fail=False)
        self.first: FailedItem | None = None
        self.last: FailedItem | None = None
        self._max_failures = max_failures
        self._scope = scope

    def is_passed_at_end(self) -> bool:
        """Return whether too many calls of the epoch have failed, or all of them.

        A resumed epoch with fewer than ``JUDGED_FROM`` calls is not judged.
        """
        if self._is_resumed and self.count.sample_count < JUDGED_FROM:
            return False
        return self.count.end_epoch()

    def too_many(self, error: Exception | None) -> TooManyFailures:
        """Return the exception to raise.

        Args:
            error: The op's exception, if it was raised just now. It becomes the cause.
        """
        last, count = self.last, self.count
        assert last is not None
        more = f"more than max_failures={self._max_failures} allows"
        if error is None and count.all_failed:
            more = "which is all of them"
        raised = TooManyFailures(
            f"{count.failed_count} of {count.sample_count} calls in {self._scope} failed, {more}. "
            f"The last was in stage '{last.stage}' for item {describe_index(last.item)}: see the "
            "cause. The pipeline's `failures` lists the newest."
        )
        raised.__cause__ = last.error if error is None else error
        return raised


class StageFailureCounter:
    """Counts the calls of one stage in one epoch; see ``FailureCounter`` in ``stages``.

    A stage has one if failed items are left out, as long as there are not too many.

    Args:
        name: The stage's name.
        own: The limit of the stage alone, or None.
        shared: The common limit of all stages that have no limit of their own, or None. At least
            one of ``own`` and ``shared`` is given.
        failures: The pipeline's list of failures.
        judges_shared: Whether this is the last stage, at whose end the shared limit is judged.
    """

    def __init__(
        self,
        name: str,
        own: Limit | None,
        shared: Limit | None,
        failures: FailureList[FailedItem],
        *,
        judges_shared: bool,
    ) -> None:
        self._name = name
        limit = own or shared
        assert limit is not None
        self._limit = limit
        self._judged = [own, shared if judges_shared else None]
        self._failures = failures

    def note_good(self) -> None:
        """Count a call that has succeeded."""
        self._limit.count.note(1, 0)

    def describe(self, error: Exception, item: object) -> FailedItem:
        """Return the entry for the list of failures. It keeps no frame of the op alive.

        This calls the item's ``repr``, so it must not be called under a lock.
        """
        remote = RemoteError.of(error, f"in stage '{self._name}'")
        summarized = remote.summarized(f"The item was {describe_index(item)}.")
        return FailedItem(self._name, _listed(item), summarized, remote.text)

    def note_bad(self, failed: FailedItem, error: Exception) -> TooManyFailures | None:
        """Count and list a call that has failed.

        Returns:
            The exception to raise, with ``error`` as its cause, if too many have failed.
        """
        limit = self._limit
        limit.first, limit.last = limit.first or failed, failed
        self._failures.total += 1
        self._failures.add(failed)
        return limit.too_many(error) if limit.count.note(1, 1) else None

    def log_first(self, failed: FailedItem, error: Exception) -> None:
        """Log a failure if it is the first of the epoch."""
        if self._limit.first is failed:
            _log.warning(
                "stage '%s' failed for item %s, which is left out (max_failures): %s: %s; further "
                "failures are counted in the pipeline's `failures` and not logged",
                self._name, describe_index(failed.item), type(error).__name__,
                describe_index(error),
            )  # fmt: skip

    def end(self) -> TooManyFailures | None:
        """Return the exception to raise at the stage's end, if too many or all calls failed."""
        for limit in self._judged:
            if limit is not None and limit.is_passed_at_end():
                return limit.too_many(None)
        return None


def explained(error: BaseException, what: str, item: object = NOTHING) -> BaseException:
    """Return the exception to raise to the consumer when the user's code has raised one.

    It is the same exception if possible, with a note that says what has failed.

    Args:
        error: The exception of the user's code.
        what: What has raised it: "stage 'parse'".
        item: The stage's item; NOTHING if there is none.
    """
    of_item = "" if item is NOTHING else f" for item {describe_index(item)}"
    note = f"{what[0].upper()}{what[1:]} failed{of_item}."
    if isinstance(error, _CONTROL_FLOW):
        wrapped = RuntimeError(
            f"{what} raised {type(error).__name__}, which would have ended more than the epoch: "
            f"{text_of(error)}"
        )
        wrapped.__cause__ = error
        error = wrapped
    try:
        if note not in getattr(error, "__notes__", ()):  # several coroutines may share it
            error.add_note(note)
    except Exception:  # noqa: BLE001 - an exception may refuse attributes
        wrapped = RuntimeError(note)
        wrapped.__cause__ = error
        return wrapped
    return error


def text_of(error: BaseException) -> str:
    """Return the text of an exception, even if its ``__str__`` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's own
        return "its __str__ failed"


def _listed(item: object) -> object:
    if item is None or isinstance(item, numbers.Number | PurePath):
        return item
    if isinstance(item, str) and len(item) <= _LISTED_CHARACTERS:
        return item
    return describe_index(item)
