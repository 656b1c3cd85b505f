"""Makes the batches of a stream of shards, one reading at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shmloader.batch.collator import Collator
from shmloader.batch.failures import BadSample, SampleReport, add_note
from shmloader.batch.fetch import EmptyBatchError, is_from_outside
from shmloader.batch.sample_rng import SampleRng
from shmloader.batch.sample_watch import SampleWatch
from shmloader.sampling.indices import PositionedIndices
from shmloader.streams.reader import Found, Reader, Reading
from shmloader.streams.stages import Guard, Item, Key, Run, SkippedRecord, Stage
from shmloader.streams.stream import Stream


@dataclass(slots=True)
class ReadReport(SampleReport):
    """The report on the records of a batch, and what was found of their reader.

    Attributes:
        found: What was found; None if the reader could not be begun.
    """

    found: Found | None = None


class ReaderFetcher:
    """Makes batches of a stream. Keeps the readers that it has begun in this epoch.

    Attributes:
        report: The report on the batch that is being made.
        rng, is_strict, where: See the arguments.

    Args:
        stream: The stream.
        collate: Makes batches of records.
        takes_list: Whether it takes a list of records rather than one.
        is_strict: Whether an exception of a record is raised; otherwise the record is left out.
        where: Where this runs, for texts of failures.
        rng: Seeds the random generators of each record; None without a seed.
        watch: Watches how long records take; None if they may take any time.
        opened: The readers that this and other fetchers have begun; a reader is in it while none
            of them uses it.
    """

    def __init__(
        self,
        stream: Stream,
        collate: Collator,
        *,
        takes_list: bool,
        is_strict: bool,
        where: str,
        rng: SampleRng | None,
        watch: SampleWatch | None,
        opened: dict[int, Any] | None = None,
    ) -> None:
        self._stream, self._collate, self.rng = stream, collate, rng
        self._takes_list, self.is_strict, self.where = takes_list, is_strict, where
        self._watch = watch
        self._opened = {} if opened is None else opened
        self.report = ReadReport()

    def pop_report(self) -> ReadReport:
        """Return the report on the batch that was made last."""
        report, self.report = self.report, ReadReport()
        return report

    def save(self, _: object) -> None:
        """Return None: what is found of a reader is in the report."""

    def fetch(self, reading: Reading) -> Any:
        """Return the batch of a reading.

        Raises:
            EmptyBatchError: If the reader has no such batch, or all its records were left out.
            BaseException: What reading, the user's functions or the collate function raise.
        """
        number = reading.round * self._stream.readers + reading.reader
        if self.rng is None:
            return self._fetch(reading)
        with self.rng.at(PositionedIndices(None, reading.epoch, number)):
            return self._fetch(reading)

    def _fetch(self, reading: Reading) -> Any:
        opened = self._opened.pop(reading.reader, None)
        if opened is None or opened.epoch != reading.epoch:
            guard = LoaderGuard()
            run = Run(reading.reader, self._stream.readers, reading.epoch, guard)
            opened = OpenReader(reading.epoch, self._stream.begin(run), guard)
        opened.guard.fetcher = self
        opened.reader.seek(reading)
        group, found = opened.reader.make(reading.ahead)
        self._opened[reading.reader] = opened
        self.report.found = found
        if isinstance(group, Exception):
            raise group
        if not group:
            raise EmptyBatchError
        self.report.sample_count += len(group)
        records = [record for _, record in group]
        return self._collate(records if self._takes_list else records[0], None)


class LoaderGuard(Guard):
    """Calls the user's functions as the loader's arguments say.

    Attributes:
        fetcher: The one that uses the reader now.
    """

    fetcher: ReaderFetcher

    def call(self, function: Callable[[Any], Any], item: Item, stage: Stage) -> Any:
        """Return ``function(record)``; raise SkippedRecord if the record is to be left out."""
        (key, record), rng = item, self.fetcher.rng
        if rng is not None:
            rng.begin_record(*_numbers(key))
        try:
            return function(record)
        except Exception as error:
            if is_from_outside(error):
                raise
            raise self.failed(error, key, stage) from None

    def failed(self, error: Exception, key: Key, stage: Stage) -> Exception:
        """Return what to raise for a record that failed: SkippedRecord if it is left out."""
        fetcher, name = self.fetcher, stage.describe(key)
        if fetcher.is_strict or is_from_outside(error):
            add_note(error, f"{name[0].upper()}{name[1:]} failed.")
            return error
        fetcher.report.sample_count += 1
        fetcher.report.add(BadSample.caught(name, fetcher.where))
        return SkippedRecord()


class OpenReader(NamedTuple):
    """A reader that was begun.

    Attributes:
        epoch: Number of its epoch.
        reader: The reader.
        guard: Its guard.
    """

    epoch: int
    reader: Reader
    guard: LoaderGuard


def _numbers(key: Key) -> tuple[int, int]:
    """Return a key as two numbers, which no other key has."""
    first = 0
    for number in key[:-1]:
        first = first << 32 | number
    return first, key[-1]
