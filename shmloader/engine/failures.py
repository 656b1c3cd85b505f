"""Counts and lists bad samples in the main process, and says when there are too many.

A report on a batch's samples is counted in the order of delivery, so the counts of an epoch do not
depend on which worker was faster. Methods return the error to raise, since the caller has to close
the iterator before it raises.
"""

import collections
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Generic, TypeVar

from shmloader.batch.failures import LISTED, RecordName, name_of
from shmloader.errors import TooManyFailures
from shmloader.grammar import counted, describe_worker

#: If ``max_failures`` is a share, it is checked from this many samples on, and at an epoch's end.
JUDGED_FROM = 100

_LOGGED_CHARACTERS = 200

_log = logging.getLogger("shmloader")

_Failed = TypeVar("_Failed")


@dataclass(frozen=True, slots=True)
class FailedSample:
    """A sample that failed.

    Attributes:
        index: Its index, or a text of it if the index cannot be unpickled in this process. Of a
            stream of shards, the name of the record: "record 7 of shard a.tar".
        error: The exception, of the dataset's own class where that can be built from a text. Its
            ``str`` is one line.
        worker: Number of the worker that loaded it; None for this process.
        traceback: The traceback, as text of several lines.
    """

    index: object
    error: Exception
    worker: int | None
    traceback: str = field(repr=False)


class FailureList(Sequence[_Failed], Generic[_Failed]):
    """The newest failures of a loader or a pipeline, at most 100, from oldest to newest.

    Attributes:
        total: The number of all failures so far, including those that are no longer listed.
    """

    def __init__(self) -> None:
        self._newest: collections.deque[_Failed] = collections.deque(maxlen=LISTED)
        self.total = 0

    def add(self, failed: _Failed) -> None:
        """Append a failure that ``total`` already counts."""
        self._newest.append(failed)

    def __len__(self) -> int:
        return len(self._newest)

    def __getitem__(self, index: Any) -> Any:
        return list(self._newest)[index]

    def __repr__(self) -> str:
        return f"<{counted(self.total, 'failure')}, the newest {len(self)}: {list(self._newest)!r}>"


class FailureLimit:
    """Counts the samples of an epoch, and says when too many have failed. Pure.

    Attributes:
        max_failures: The number of samples that may fail, or their share of the samples tried; None
            allows any number.
        sample_count: Samples tried in this epoch.
        failed_count: How many of them failed.

    Args:
        max_failures: See above.
        may_all_fail: Whether all samples may fail, since they are replaced.
    """

    sample_count = failed_count = 0

    def __init__(self, max_failures: int | Fraction | None, *, may_all_fail: bool) -> None:
        self.max_failures, self._may_all_fail = max_failures, may_all_fail

    def add_samples(self, sample_count: int, failed_count: int) -> bool:
        """Count one batch's samples. Returns whether too many have failed so far."""
        self.sample_count += sample_count
        self.failed_count += failed_count
        is_early = self.sample_count < JUDGED_FROM and isinstance(self.max_failures, Fraction)
        return self._is_passed and not is_early

    @property
    def _is_passed(self) -> bool:
        most = self.max_failures
        if isinstance(most, Fraction):
            most *= self.sample_count
        return most is not None and self.failed_count > most

    @property
    def is_too_much(self) -> bool:
        """Whether too many samples of the whole epoch failed, or all of them."""
        return self._is_passed or self.all_failed

    @property
    def all_failed(self) -> bool:
        """Whether there were samples, and all of them failed and were not replaced."""
        return not self._may_all_fail and 0 < self.sample_count == self.failed_count


class FailureWatch(FailureLimit):
    """Counts and lists the failures of one iterator, and logs the first one of each epoch.

    Args:
        listed: The loader's list of failures.
        max_failures: The number of samples that may fail, or their share; None allows any number.
        keep_size: Whether a batch must not be left out, since other ranks expect as many.
        replaces: Whether the user's ``on_error`` function replaces bad samples, or raises them.
        copies: Whether copies of good samples take the places of bad ones.
        hear: Called with each :class:`~shmloader.streams.reader.Found` of a stream's readers; None
            without a stream.
    """

    _last: FailedSample | None = None
    # Whether a batch may be left out because its reader has none, and not since all samples failed.
    _is_reader_over = False

    def __init__(
        self,
        listed: FailureList[FailedSample],
        max_failures: int | Fraction | None,
        *,
        keep_size: bool,
        replaces: bool,
        copies: bool = False,
        hear: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(max_failures, may_all_fail=replaces)
        self._listed, self._hear = listed, hear
        self._keep_size, self._is_replaced = keep_size, replaces or copies

    def start_epoch(self) -> None:
        """Count from 0 again. The list is kept."""
        self.sample_count = self.failed_count = 0
        self._last = None

    def add(
        self, report: Any, batch: str, worker: int | None = None, pid: int | None = None
    ) -> TooManyFailures | None:
        """Count and list the samples of a batch, which ``batch`` names.

        Args:
            report: How many of them failed, and how; of a stream, also what was found of a reader.
            batch: The batch in words, for an exception's note.
            worker: Number of the worker that made the batch; None for this process.
            pid: The worker's process id; None for a thread.

        Returns:
            The error to raise instead of delivering the batch, if too many have failed.
        """
        if self._hear is not None and report.found is not None:
            self._hear(report.found)
            self._is_reader_over = report.found.size == 0
        self._listed.total += report.failed_count
        for bad in report.newest:
            who = "this process" if worker is None else describe_worker(worker, pid)
            name = name_of(index := bad.index)
            if self._last is None:
                _log.warning(
                    "%s failed and is %s (%s, on_error): %s. Further failures "
                    "of this epoch are not logged; `failures` of the loader counts them.",
                    name if type(index) is RecordName else f"the sample of {name}",
                    "replaced" if self._is_replaced else "left out",
                    who,
                    bad.error.summary[:_LOGGED_CHARACTERS],
                )
            note = f"{who[0].upper()}{who[1:]} was loading {name} of {batch}."
            error = bad.error.summarized(note)
            self._last = FailedSample(index, error, worker, bad.error.text)
            self._listed.add(self._last)
        too_many = self.add_samples(report.sample_count, report.failed_count)
        return self._too_many() if too_many else None

    def left_out(self, batch: str) -> TooManyFailures | None:
        """Return the error to raise if a batch without good samples must not be left out."""
        if not self._keep_size or self._is_reader_over:
            return None
        return self._too_many(
            f"all samples of {batch} failed, and none is left for the batch. A "
            "rank cannot leave out a batch while the other ranks have theirs"
        )

    def end_epoch(self) -> TooManyFailures | None:
        """Return the error to raise instead of ending the epoch, or None."""
        if self.all_failed:
            return self._too_many(f"all {self.sample_count} samples of the epoch failed")
        return self._too_many() if self.is_too_much else None

    def _too_many(self, what: str = "") -> TooManyFailures:
        last = self._last
        what = what or (
            f"{self.failed_count} of the {self.sample_count} samples tried in this epoch "
            f"failed, more than max_failures={self.max_failures} allows"
        )
        if last is not None:
            what += f". The last was {name_of(last.index)} (see the cause)"
        error = TooManyFailures(f"{what}. The loader's `failures` lists the newest ones.")
        error.__cause__ = None if last is None else last.error
        return error
