"""The lowest stage of a reader: the records of its shards."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from shmloader.errors import SampleTimeoutError, ShardError
from shmloader.interruptions import Suppressed
from shmloader.streams.cache import ShardCache
from shmloader.streams.formats import Format
from shmloader.streams.stages import Item, Key, Run, Stage, State


class ShardRecords(Stage):
    """Reads the records of a reader's shards, one shard after the other.

    An error that names this record or a later one makes one record fail. After any other one, the
    rest of the shard is left out: one record fails in its place.

    Args:
        run: The reader.
        paths: All shards of the stream, in the order in which the user gave them.
        order: The numbers of this reader's shards in that list, in the order of this pass.
        form: The format of the shards.
        cache: Brings shards to this machine.
    """

    def __init__(
        self, run: Run, paths: Sequence[str], order: Sequence[int], form: Format, cache: ShardCache
    ) -> None:
        self.run, self._paths, self._order, self._form = run, paths, order, form
        self._cache = cache
        self._at = self._number = 0
        self._asked = -1  # the place for whose next shard was asked
        self._records: Iterator[Any] | None = None

    def __next__(self) -> Item:
        run = self.run
        while self._at < len(self._order):
            key = run.turn, self._order[self._at], self._number
            try:
                if self._records is None:
                    self._records = self._open(key[1])
                record = run.guard.read(self._records, key, self)
            except StopIteration:
                self._go_to(self._at + 1, 0)
                continue
            except Exception as error:  # noqa: BLE001 - it takes the place of the record
                return self._failed(error)
            self._number += 1
            return key, record
        raise StopIteration

    def _failed(self, error: Exception) -> Item:
        """Return what takes the place of the next record, and go past it."""
        key = self.run.turn, self._order[self._at], self._number
        failed = self.run.guard.failed(error, key, self)
        number = self._failed_record(error)
        # What is raised about an earlier record would be raised again.
        if number is None or number < key[2]:
            self._go_to(self._at + 1, 0)
        else:
            self._go_to(self._at, number + 1)
        return key, failed

    def _open(self, shard: int) -> Iterator[Any]:
        path = self._cache.path(self._paths[shard])
        if self._asked != self._at:  # not after each record that fails
            self._asked = self._at
            for following in self._order[self._at + 1 : self._at + 2]:
                self._cache.prefetch(self._paths[following])
        return iter(self._form.read(path, range(self._number, sys.maxsize)))

    def _failed_record(self, error: Exception) -> int | None:
        """Return the number of the record that an error is about; None if the shard is."""
        if isinstance(error, SampleTimeoutError):
            # Otherwise it would have to be read on the way to the next one.
            return self._number if self._form.seeks else None
        return error.record if isinstance(error, ShardError) else None

    def _go_to(self, at: int, number: int) -> None:
        records, self._records = self._records, None
        if hasattr(records, "close"):
            records.close()  # type: ignore[union-attr]
        self._at, self._number = at, number

    def state(self) -> State:
        """Return the number of the shard in the reader's order, and that of the record."""
        return self._at, self._number

    def restore(self, state: State) -> None:
        """Go to a record."""
        self._go_to(*state)

    def again(self, keys: Sequence[Key]) -> list[Item]:
        """Read records by point reads, shard by shard."""
        found: list[Item] = []
        for (_, shard), wanted in itertools.groupby(sorted(keys), itemgetter(0, 1)):
            found += self._again_of(shard, list(wanted))
        return found

    def _again_of(self, shard: int, keys: Sequence[Key]) -> list[Item]:
        if not (self.run.guard.is_watching and self._form.seeks):
            with Suppressed(Exception):  # which of them failed is found out one by one
                return list(zip(keys, self._read_again(shard, keys), strict=False))
        return [(key, self._one_again(key)) for key in keys]

    def _read_again(self, shard: int, keys: Sequence[Key]) -> Iterator[Any]:
        path = self._cache.path(self._paths[shard])
        yield from self._form.read(path, [key[2] for key in keys])
        raise ShardError(f"shard {self._paths[shard]} has fewer records than before")

    def _one_again(self, key: Key) -> Any:
        try:
            return self.run.guard.read(self._read_again(key[1], [key]), key, self)
        except Exception as error:  # noqa: BLE001 - it takes the place of the record, as before
            return self.run.guard.failed(error, key, self)

    def describe(self, key: Key) -> str:
        """Return the record's number and its shard."""
        return f"record {key[-1]} of shard {self._paths[key[-2]]}"
