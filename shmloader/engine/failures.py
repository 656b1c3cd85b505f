"""Bad samples in the main process: how many there are, which, and when there are too many.

A report of each batch's samples is noted here when the batch is handed over (or left out, or
raised in its place), on the user's thread and in that order; so the counts of an epoch do not
depend on which worker was fast. What to raise is returned, since whoever asks has to close first.
"""

import collections
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar, overload

from shmloader.batch.failures import LISTED, SampleReport, describe_index
from shmloader.engine.wording import describe_worker
from shmloader.errors import TooManyFailures

#: Samples that are looked at before a share of them is judged, but for the epoch's end.
JUDGED_FROM = 100

_LOGGED_CHARACTERS = 200

_log = logging.getLogger("shmloader")

_Failed = TypeVar("_Failed")


@dataclass(frozen=True, slots=True)
class FailedSample:
    """A sample that failed.

    Attributes:
        index: Its index; the text of it, where it cannot be had in this process.
        error: What the dataset raised, as the loader would raise it; its text has the traceback.
        worker: Number of the worker; None for this process.
    """

    index: object
    error: Exception
    worker: int | None


class FailureList(Sequence[_Failed], Generic[_Failed]):
    """The newest failures of a loader or a pipeline, the oldest of them first.

    Attributes:
        total: All its failures so far; ``len()`` is that of the list, at most 100.
    """

    def __init__(self) -> None:
        self._newest: collections.deque[_Failed] = collections.deque(maxlen=LISTED)
        self.total = 0

    def add(self, failed: _Failed) -> None:
        """List one, which ``total`` counts already."""
        self._newest.append(failed)

    def __len__(self) -> int:
        return len(self._newest)

    @overload
    def __getitem__(self, index: int) -> _Failed: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Failed]: ...
    def __getitem__(self, index: int | slice) -> _Failed | list[_Failed]:
        return list(self._newest)[index]

    def __iter__(self) -> Iterator[_Failed]:
        return iter(list(self._newest))

    def __repr__(self) -> str:
        return f"<{self.total} failures, the newest {len(self)}: {list(self._newest)!r}>"


class FailureLimit:
    """Counts the samples of one epoch, and says when too many have failed. Pure.

    Attributes:
        sample_count: Samples looked at in this epoch.
        failed_count: How many of them failed.

    Args:
        max_failures: A number that may fail, or a share of those looked at; None for any.
        may_all_fail: Whether it is well if all failed, since they were replaced.
    """

    def __init__(self, max_failures: int | Fraction | None, *, may_all_fail: bool) -> None:
        self._max_failures = max_failures
        self._may_all_fail = may_all_fail
        self.sample_count = 0
        self.failed_count = 0

    def start_epoch(self) -> None:
        """Count from 0 again."""
        self.sample_count = self.failed_count = 0

    def note(self, sample_count: int, failed_count: int) -> bool:
        """Count one batch's samples.

        Returns:
            Whether too many have failed now.
        """
        self.sample_count += sample_count
        self.failed_count += failed_count
        is_early = self.sample_count < JUDGED_FROM
        return self._is_passed and not (is_early and isinstance(self._max_failures, Fraction))

    def end_epoch(self) -> bool:
        """Judge the whole epoch: whether too many failed, or all."""
        return self._is_passed or self.all_failed

    @property
    def all_failed(self) -> bool:
        """Whether there were samples, and none of them was good, nor replaced."""
        return not self._may_all_fail and 0 < self.sample_count == self.failed_count

    @property
    def _is_passed(self) -> bool:
        allowed = self._max_failures
        if isinstance(allowed, Fraction):
            return self.failed_count > allowed * self.sample_count
        return allowed is not None and self.failed_count > allowed


class FailureWatch:
    """Notes the failures of one iterator: counts, lists, logs the first of an epoch.

    Attributes:
        keep_size: Whether a batch must not be left out (see ``FetchConfig``).

    Args:
        listed: The loader's list.
        max_failures: The loader's.
        keep_size: As above.
        replaces: Whether a function replaces what fails.
    """

    def __init__(
        self,
        listed: FailureList[FailedSample],
        max_failures: int | Fraction | None,
        *,
        keep_size: bool,
        replaces: bool,
    ) -> None:
        self.keep_size = keep_size
        self._listed = listed
        self._limit = FailureLimit(max_failures, may_all_fail=replaces)
        self._max_failures = max_failures
        self._is_replaced = replaces or keep_size
        self._has_logged = False
        self._last: FailedSample | None = None

    def start_epoch(self) -> None:
        """Count from 0 again; the list goes on."""
        self._limit.start_epoch()
        self._has_logged = False
        self._last = None

    def note(
        self, report: SampleReport, batch: str, worker: int | None = None, pid: int | None = None
    ) -> TooManyFailures | None:
        """Take note of a batch's samples.

        Args:
            report: What became of them.
            batch: The batch in words, for an exception's note.
            worker: Whose report it is; None for this process.
            pid: Its process number; None for a thread.

        Returns:
            What to raise instead of handing the batch over, if too many have failed.
        """
        who = "this process" if worker is None else describe_worker(worker, pid)
        who = f"{who[0].upper()}{who[1:]}"
        self._listed.total += report.failed_count
        for bad in report.newest:
            index = describe_index(bad.index)
            if not self._has_logged:
                self._has_logged = True
                _log.warning(
                    "the sample of index %s failed and is %s (%s, on_error): %s; further ones of "
                    "this epoch are counted in the loader's `failures` and not logged",
                    index,
                    "replaced" if self._is_replaced else "left out",
                    "this process" if worker is None else f"worker {worker}",
                    bad.error.last_line[:_LOGGED_CHARACTERS],
                )
            error = bad.error.rebuilt(f"{who} was loading index {index} of {batch}.")
            self._last = FailedSample(bad.index, error, worker)
            self._listed.add(self._last)
        if self._limit.note(report.sample_count, report.failed_count):
            return self._too_many(self._passed)
        return None

    def left_out(self, batch: str) -> TooManyFailures | None:
        """Nothing is left of a batch: what to raise if that must not be."""
        if not self.keep_size:
            return None
        return self._too_many(
            f"all samples of {batch} failed, and no good one is there to put in their place: a "
            "batch of one rank cannot be left out, since the others have theirs"
        )

    def end_epoch(self) -> TooManyFailures | None:
        """All batches are handed over: what to raise instead of ending the epoch."""
        if not self._limit.end_epoch():
            return None
        if self._limit.all_failed:
            return self._too_many(f"all {self._limit.sample_count} samples of the epoch failed")
        return self._too_many(self._passed)

    @property
    def _passed(self) -> str:
        limit = self._limit
        return (
            f"{limit.failed_count} of the {limit.sample_count} samples looked at in this epoch "
            f"failed, more than max_failures={self._max_failures} allows"
        )

    def _too_many(self, what: str) -> TooManyFailures:
        last = self._last
        where = ""
        if last is not None:
            who = "in this process" if last.worker is None else f"in worker {last.worker}"
            where = f" The last was index {describe_index(last.index)} {who}: see the cause."
        error = TooManyFailures(f"{what}.{where} The loader's `failures` lists the newest.")
        error.__cause__ = None if last is None else last.error
        return error
