"""Makes the batches of a stream of shards, one reading at a time."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shmloader.batch.collator import Collator
from shmloader.batch.failures import BadSample, OnError, RecordName, SampleReport, add_note
from shmloader.batch.fetch import EmptyBatchError, FetchConfig, is_from_outside
from shmloader.batch.sample_rng import SampleRng, Use
from shmloader.batch.sample_watch import SampleWatch
from shmloader.sampling.indices import PositionedIndices
from shmloader.streams.fingerprints import check_sizes
from shmloader.streams.reader import Found, Reading
from shmloader.streams.stages import Failed, Guard, Item, Key, Run, Stage
from shmloader.streams.stream import Stream

# Numbers on a status page are below this, as those of the watch.
_MOST = (1 << 62) - 1


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
        is_strict: Whether an exception of a record is raised; otherwise the record is left out.
        where, rng, watch: See :class:`~shmloader.batch.maker.BatchMaker`; for the others, too.

    Args:
        opened: For each reader that this and other fetchers have begun and none of them uses: the
            number of its epoch, the reader, and its guard.
    """

    def __init__(
        self,
        config: FetchConfig,
        stream: Stream,
        collate: Collator,
        on_error: OnError,
        where: str,
        rng: SampleRng | None,
        watch: SampleWatch | None,
        opened: dict[int, Any] | None = None,
    ) -> None:
        self._stream, self._collate, self._takes_list = stream, collate, config.auto_collation
        self.is_strict, self.where, self.rng, self.watch = on_error == "raise", where, rng, watch
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

    def _checked(self, group: list[Item]) -> list[Any]:
        """Return the records of a batch, without failed ones; raise the first error if strict."""
        self.report.sample_count += len(group)
        records = []
        for _, record in group:
            if type(record) is not Failed:
                records.append(record)
            elif self.is_strict:
                raise record.problem
            else:
                self.report.add(record.problem)
        return records

    def _fetch(self, reading: Reading) -> Any:
        epoch, reader, guard = self._opened.pop(reading.reader, (None, None, None))
        if epoch != reading.epoch:
            if reading.sizes:
                shards = self._stream.shards(reading.epoch, reading.reader)
                check_sizes(shards, reading.sizes)
            guard = LoaderGuard()
            run = Run(reading.reader, self._stream.readers, reading.epoch, guard)
            reader = self._stream.begin(run)
        guard.fetcher = self
        reader.seek(reading)
        group, self.report.found = reader.make(reading.ahead)
        self._opened[reading.reader] = reading.epoch, reader, guard
        records = self._checked(group or [])
        if not records:
            raise EmptyBatchError
        return self._collate(records if self._takes_list else records[0], None)


class LoaderGuard(Guard):
    """Reads records and calls the user's functions as the loader's arguments say.

    Attributes:
        fetcher: The one that uses the reader now.
    """

    fetcher: ReaderFetcher

    @property
    def is_watching(self) -> bool:
        """Whether records may take only a limited time."""
        return self.fetcher.watch is not None

    def call(self, function: Callable[[Any], Any], item: Item, stage: Stage) -> Any:
        """Return ``function(record)``, or a Failed."""
        (key, record), rng = item, self.fetcher.rng
        if rng is not None:
            first = 1  # as one number, which no other numbers below 2**32 make, in whatever count
            for number in _named(stage, key[:-1]):
                first = first << 32 | number
            rng.seed(Use.RECORD, first, key[-1])
        try:
            if self.fetcher.watch is None:
                return function(record)
            return self._watched(function, record, key, stage)
        except Exception as error:  # noqa: BLE001 - it takes the place of the record
            return self.failed(error, key, stage)

    def read(self, records: Iterator[Any], key: Key, stage: Stage) -> Any:
        """Return the next record, which has this key; raise what reading raises."""
        if self.fetcher.watch is None:
            return next(records)
        return self._watched(next, records, key, stage)

    def _watched(
        self, function: Callable[[Any], Any], argument: Any, key: Key, stage: Stage
    ) -> Any:
        assert self.fetcher.watch is not None
        # The same in all workers: the hash of numbers depends on nothing else.
        number = hash(_named(stage, key)) & _MOST
        what = functools.partial(stage.describe, key)
        return self.fetcher.watch.call(function, argument, number, what)

    def failed(self, error: Exception, key: Key, stage: Stage) -> Failed:
        """Return what takes the place of a record that failed. Called where ``error`` is handled.

        Raises:
            Exception: ``error``, if it comes from outside, such as from a signal handler.
        """
        if is_from_outside(error):
            raise error
        name = stage.describe(key)
        if not self.fetcher.is_strict:
            return Failed(BadSample.caught(RecordName(name), self.fetcher.where))
        add_note(error, f"{name[0].upper()}{name[1:]} failed.")
        return Failed(error)


def _named(stage: Stage, key: Key) -> tuple[int, ...]:
    """Return numbers for a key and a stage, which no others have."""
    source = stage.run.source
    return len(source), *source, stage.number, *key
