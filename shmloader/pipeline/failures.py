"""Calls of ops that failed: what is raised, what is left out, counted and listed."""

import asyncio
import logging
import numbers
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePath

from shmloader.batch.failures import RemoteError, describe_index
from shmloader.engine.failures import FailureLimit, FailureList
from shmloader.errors import TooManyFailures
from shmloader.pipeline.flow import NOTHING

_log = logging.getLogger("shmloader")

# Raised as they are, they would end something of the consumer's: a loop, a task, the program.
_CONTROL_FLOW = (
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    SystemExit,
    KeyboardInterrupt,
    asyncio.CancelledError,
)

# As long a text is listed as it is: a URL of any kind.
_LISTED_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item that a stage has left out, since its op has failed.

    Attributes:
        stage: The stage's name.
        item: The item, if it is a number, a path or a text of at most 2,000 characters; else a few
            characters of its text, since a list of failures must not keep what is large.
        error: The exception; its text has the traceback.
    """

    stage: str
    item: object
    error: Exception


class StageFailureCounter:
    """Counts the calls of one stage in one flow; see ``FailureCounter`` in ``flow``.

    Args:
        name: The stage's.
        own: The stage's own limit, with its ``max_failures``; None if it has none.
        shared: The pipeline's, which counts all stages that have none of their own.
        judges_shared: Whether this is the last stage.
        listed: Where failures are listed.
    """

    def __init__(
        self,
        name: str,
        own: "Limit | None",
        shared: "Limit | None",
        listed: FailureList[FailedItem],
        *,
        judges_shared: bool,
    ) -> None:
        self._name = name
        self._own = own
        self._shared = shared
        self._judges_shared = judges_shared
        self._listed = listed

    @property
    def _limit(self) -> "Limit | None":
        return self._own or self._shared

    @property
    def leaves_out(self) -> bool:
        """Whether a failed item is left out, unless too many are."""
        return self._limit is not None

    def note_good(self) -> None:
        """A call has succeeded."""
        if self._limit is not None:
            self._limit.count.note(1, 0)

    def describe(self, error: Exception, item: object) -> FailedItem:
        """What is listed of a failure; holds none of its frames. Calls the item's ``repr``."""
        remote = RemoteError.of(error, f"in stage '{self._name}'")
        rebuilt = remote.rebuilt(f"The item was {describe_index(item)}.")
        return FailedItem(self._name, _as_listed(item), rebuilt)

    def note_bad(self, failed: FailedItem, error: Exception) -> TooManyFailures | None:
        """A call has failed, of which ``failed`` is listed.

        Returns:
            What is to be raised, with ``error`` as its cause, if too many have failed.
        """
        limit = self._limit
        assert limit is not None
        limit.first, limit.last = limit.first or failed, failed
        self._listed.total += 1
        self._listed.add(failed)
        return limit.too_many(error) if limit.count.note(1, 1) else None

    def log_first(self, failed: FailedItem, error: Exception) -> None:
        """Tell the log of a failure, if it is the flow's first."""
        if self._limit is not None and self._limit.first is failed:
            _log.warning(
                "stage '%s' failed for item %s, which is left out (max_failures): %s: %s; further "
                "failures are counted in the pipeline's `failures` and not logged",
                self._name, describe_index(failed.item), type(error).__name__,
                describe_index(error),
            )  # fmt: skip

    def end(self) -> TooManyFailures | None:
        """The stage has ended: what is to be raised, if too many have failed, or all."""
        judged = [self._own, self._shared if self._judges_shared else None]
        for limit in judged:
            if limit is not None and limit.count.end_epoch():
                return limit.too_many(None)
        return None


class Limit:
    """How many calls may fail in one flow.

    Attributes:
        count: Counts them, and those that succeed.
        first: The failure noted first.
        last: The one noted last.

    Args:
        max_failures: A number that may fail, or a share of the calls.
        what: What it is a limit of: "stage 'parse'", "the pipeline".
    """

    def __init__(self, max_failures: int | Fraction, what: str) -> None:
        self.count = FailureLimit(max_failures, may_all_fail=False)
        self.first: FailedItem | None = None
        self.last: FailedItem | None = None
        self._max_failures = max_failures
        self._what = what

    def too_many(self, error: Exception | None) -> TooManyFailures:
        """What is to be raised.

        Args:
            error: The op's, if it was raised just now; it becomes the cause.
        """
        last, count = self.last, self.count
        assert last is not None
        more = f"more than max_failures={self._max_failures} allows"
        if error is None and count.all_failed:
            more = "which is all of them"
        raised = TooManyFailures(
            f"{count.failed_count} of {count.sample_count} calls in {self._what} failed, {more}. "
            f"The last was in stage '{last.stage}' for item {describe_index(last.item)}: see the "
            "cause. The pipeline's `failures` lists the newest."
        )
        raised.__cause__ = last.error if error is None else error
        return raised


def explained(error: BaseException, stage: str, item: object) -> BaseException:
    """What the consumer is to raise for an op's exception: itself, with a note.

    Args:
        error: The exception.
        stage: The stage's name.
        item: Its item; NOTHING for the source.
    """
    of_item = "" if item is NOTHING else f" for item {describe_index(item)}"
    note = f"Stage '{stage}' failed{of_item}."
    if isinstance(error, _CONTROL_FLOW):
        explaining = RuntimeError(
            f"stage '{stage}' raised {type(error).__name__}, which would have ended more than "
            f"this: {text_of(error)}"
        )
        explaining.__cause__ = error
        error = explaining
    try:
        error.add_note(note)
    except Exception:  # noqa: BLE001 - an exception may refuse attributes
        wrapped = RuntimeError(note)
        wrapped.__cause__ = error
        return wrapped
    return error


def text_of(error: BaseException) -> str:
    """What an exception says, whatever its ``__str__`` does."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the user's own
        return "its text cannot be had"


def _as_listed(item: object) -> object:
    if item is None or isinstance(item, numbers.Number | PurePath):
        return item
    if isinstance(item, str) and len(item) <= _LISTED_CHARACTERS:
        return item
    return describe_index(item)
