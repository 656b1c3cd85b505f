"""The stages of a reader: iterators over records whose states are positions.

A reader is a chain of stages, one over the other; the lowest one reads shards. Each stage yields
*items*: a record with its *key*, which names its source record. A state is a tuple of ints, in
which the state of the stage below comes last. It counts source records, never yielded ones, so that
filters and skipped records keep it exact::

    Shards      number of the shard in the reader's order, number of the next record in it
    Windowed    number of the window, how many of its records were yielded, the state below where
                the window begins
    Rolling     how many records were yielded, the keys of those in the buffer, the state below
    Taken       how many records have come through, the state below
    Repeated    number of the pass, the state below
    Mapped, Filtered   the state below

Assumes:
    * A function of the user's gives the same result for the same record. With the loader's
      ``seed=``, random numbers depend on the record.

A reader and its stages belong to one thread.
"""

import base64
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from shmloader.streams.formats import Format

#: Names a source record: the pass over the shards, the number of the shard in the list that the
#: user gave, and the number of the record in the shard. A stage over several streams puts the
#: number of the stream first.
Key = tuple[int, ...]

#: A record with its key.
Item = tuple[Key, Any]

#: The position of a stage; ints and nested tuples of ints.
State = tuple[Any, ...]


class SkippedRecord(Exception):  # noqa: N818 - no error
    """A record failed and is left out, as ``on_error`` says. Never reaches the user."""


class Guard:
    """Calls the user's functions for one record after the other.

    This one only names the record in what they raise. The loader's own seeds random number
    generators, applies ``on_error`` and watches the time.
    """

    def call(self, function: Callable[[Any], Any], item: Item, stage: "Stage") -> Any:
        """Return ``function(record)``; raise SkippedRecord if the record is to be left out."""
        key, record = item
        try:
            return function(record)
        except Exception as error:  # noqa: BLE001 - with a note
            raise self.failed(error, key, stage) from None

    def failed(self, error: Exception, key: Key, stage: "Stage") -> Exception:
        """Return what to raise for a record that failed: SkippedRecord if it is left out."""
        error.add_note(f"It was raised for {stage.describe(key)}.")
        return error


@dataclass(frozen=True)
class Run:
    """What the stages of one reader have in common.

    Attributes:
        reader: Number of the reader, from 0.
        readers: Number of readers of the stream.
        epoch: Number of the epoch.
        guard: Calls the user's functions.
        turn: Number of the pass over the shards, which :class:`Repeated` counts.
    """

    reader: int
    readers: int
    epoch: int
    guard: Guard
    turn: int = 0


class Open(Protocol):
    """Makes a stage over the one below it, which is None for the lowest."""

    def __call__(self, source: Any, run: Run) -> "Stage":
        """Return the stage."""


class Stage:
    """An iterator over items, whose position is a tuple. This one changes nothing."""

    def __init__(self, source: "Stage", run: Run) -> None:
        self.source, self.run = source, run

    def __iter__(self) -> "Stage":
        return self

    def __next__(self) -> Item:
        return next(self.source)

    def state(self) -> State:
        """Return the position of the next item."""
        return self.source.state()

    def restore(self, state: State) -> None:
        """Go to a position."""
        self.source.restore(state)

    def again(self, keys: Sequence[Key]) -> list[Item]:
        """Return items that this stage has yielded before, by their keys, in any order."""
        return self.source.again(keys)

    def describe(self, key: Key) -> str:
        """Return the name of a record for a text: "record 7 of shard a.tar"."""
        return self.source.describe(key)


class ShardRecords(Stage):
    """Reads the records of a reader's shards, one shard after the other.

    Args:
        run: The reader.
        paths: All shards of the stream, in the order in which the user gave them.
        order: The numbers of this reader's shards in that list, in the order of this pass.
        form: The format of the shards.
        fetch: Returns a context in which a shard lies on a local path.
        ahead: Asks for a shard that will be read soon.
    """

    def __init__(
        self,
        run: Run,
        paths: Sequence[str],
        order: Sequence[int],
        form: "Format",
        fetch: Callable[[str], contextlib.AbstractContextManager[str]],
        ahead: Callable[[str], None],
    ) -> None:
        self.run, self._paths, self._order, self._form = run, paths, order, form
        self._fetch, self._ahead = fetch, ahead
        self._at = self._number = 0
        self._records: Iterator[Any] | None = None
        self._held = contextlib.ExitStack()

    def __next__(self) -> Item:
        while True:
            if self._records is None:
                if self._at >= len(self._order):
                    raise StopIteration
                shard = self._order[self._at]
            try:
                if self._records is None:
                    self._records = self._open(shard)
                record = next(self._records)
            except StopIteration:
                self._close()
                self._at, self._number = self._at + 1, 0
                continue
            except Exception as error:  # noqa: BLE001 - the guard decides
                failure = self._failed(error)
                if isinstance(failure, SkippedRecord):
                    continue
                raise failure from None
            key = self.run.turn, self._order[self._at], self._number
            self._number += 1
            return key, record

    def _open(self, shard: int) -> Iterator[Any]:
        path = self._held.enter_context(self._fetch(self._paths[shard]))
        if self._at + 1 < len(self._order):
            self._ahead(self._paths[self._order[self._at + 1]])
        return iter(self._form.records(path, self._number))

    def _failed(self, error: Exception) -> Exception:
        """Go past a record that cannot be read, or past a whole shard; return what to raise."""
        key = self.run.turn, self._order[self._at], self._number
        is_whole = self._records is None or getattr(error, "record", self._number) is None
        self._close()
        if is_whole:
            self._at, self._number = self._at + 1, 0
        else:
            self._number += 1
        return self.run.guard.failed(error, key, self)

    def _close(self) -> None:
        records, self._records = self._records, None
        if hasattr(records, "close"):
            records.close()  # type: ignore[union-attr]
        self._held.close()

    def state(self) -> State:
        """Return the number of the shard in the reader's order, and that of the record."""
        return self._at, self._number

    def restore(self, state: State) -> None:
        """Go to a record."""
        self._close()
        self._at, self._number = state

    def again(self, keys: Sequence[Key]) -> list[Item]:
        """Read records by point reads, shard by shard."""
        by_shard: dict[int, list[Key]] = {}
        for key in keys:
            by_shard.setdefault(key[1], []).append(key)
        found: list[Item] = []
        for shard, wanted in by_shard.items():
            wanted.sort()
            with self._fetch(self._paths[shard]) as path:
                found += zip(wanted, self._form.at(path, [key[2] for key in wanted]), strict=True)
        return found

    def describe(self, key: Key) -> str:
        """Return the record's number and its shard."""
        return f"record {key[-1]} of shard {self._paths[key[-2]]}"


class Mapped(Stage):
    """Applies a function to each record."""

    def __init__(self, source: Stage, run: Run, function: Callable[[Any], Any]) -> None:
        super().__init__(source, run)
        self.function = function

    def __next__(self) -> Item:
        call, function = self.run.guard.call, self.function
        for item in self.source:
            with contextlib.suppress(SkippedRecord):
                return item[0], call(function, item, self)
        raise StopIteration

    def again(self, keys: Sequence[Key]) -> list[Item]:
        """Apply the function again."""
        call, function = self.run.guard.call, self.function
        return [(item[0], call(function, item, self)) for item in self.source.again(keys)]


class Filtered(Stage):
    """Yields the records for which a function is true."""

    def __init__(self, source: Stage, run: Run, function: Callable[[Any], Any]) -> None:
        super().__init__(source, run)
        self.function = function

    def __next__(self) -> Item:
        call, function = self.run.guard.call, self.function
        for item in self.source:
            with contextlib.suppress(SkippedRecord):
                if call(function, item, self):
                    return item
        raise StopIteration


def generator(*numbers: int) -> np.random.Generator:
    """Return a random number generator that depends only on these numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=16, person=b"shmloader shards")
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))


def permutation(count: int, *numbers: int) -> list[int]:
    """Return a permutation of ``range(count)`` that depends only on these numbers."""
    order: list[int] = generator(*numbers).permutation(count).tolist()
    return order


class Windowed(Stage):
    """Permutes each run of ``count`` records. To resume, the window is read again."""

    def __init__(self, source: Stage, run: Run, count: int, seed: int) -> None:
        super().__init__(source, run)
        self._count, self._seed = count, seed
        # The window that is yielded, or that is being filled.
        self._window, self._taken, self._start = -1, 0, source.state()
        self._items: list[Item] = []
        self._order: list[int] | None = []

    def __next__(self) -> Item:
        if self._order is None or self._taken == len(self._order):
            self._fill()
        assert self._order is not None
        self._taken += 1
        return self._items[self._order[self._taken - 1]]

    def _fill(self) -> None:
        """Read the next window, or go on after an error of one of its records."""
        items = self._items
        if self._order is not None:
            items.clear()
            self._window, self._taken, self._order = self._window + 1, 0, None
            self._start = self.source.state()
        while len(items) < self._count:
            try:
                items.append(next(self.source))
            except StopIteration:
                break
        run = self.run
        numbers = self._seed, run.epoch, run.turn, run.reader, self._window
        self._order = permutation(len(items), *numbers)
        if not items:
            raise StopIteration

    def state(self) -> State:
        """Return the window, how many of its records were yielded, and where it begins."""
        if self._order is not None and self._taken == len(self._order):
            return self._window + 1, 0, self.source.state()
        return self._window, self._taken, self._start

    def restore(self, state: State) -> None:
        """Read the window again, if some of its records were yielded."""
        window, taken, start = state
        self.source.restore(start)
        self._window, self._taken, self._start = window - 1, 0, start
        self._items, self._order = [], []
        while taken:
            try:
                self._fill()
                break
            except StopIteration:
                text = "the shards have fewer records than when the state was saved"
                raise ValueError(text) from None
            except Exception:  # noqa: BLE001 - it was raised before the state was saved
                continue
        self._taken = taken


class Rolling(Stage):
    """Yields a random record of a buffer, into whose place the next record of the source goes.

    The state has the keys of the records in the buffer, 12 bytes each. To resume, they are read
    again by point reads where the format can seek.
    """

    def __init__(self, source: Stage, run: Run, count: int, seed: int) -> None:
        super().__init__(source, run)
        self._count, self._seed = count, seed
        self._yielded, self._is_full = 0, False
        self._items: list[Item] = []
        self._numbers: list[int] = []

    def __next__(self) -> Item:
        items = self._items
        while not self._is_full:
            if len(items) >= self._count or not self._add():
                self._is_full = True
        if not items:
            raise StopIteration
        at = self._draw() % len(items)
        item = items[at]
        # The place is filled with the next call, so that an error of the next record loses nothing.
        items[at] = items[-1]
        items.pop()
        self._yielded += 1
        self._is_full = False
        return item

    def _add(self) -> bool:
        try:
            self._items.append(next(self.source))
        except StopIteration:
            return False
        return True

    def _draw(self) -> int:
        """Return a random number that depends only on how many records were yielded."""
        block, at = divmod(self._yielded, _BLOCK)
        if not at or not self._numbers:
            run = self.run
            numbers = self._seed, run.epoch, run.turn, run.reader, block
            self._numbers = generator(*numbers).integers(1 << 62, size=_BLOCK).tolist()
        return self._numbers[at]

    def state(self) -> State:
        """Return how many records were yielded, the keys in the buffer, and the state below."""
        return self._yielded, pack_keys([key for key, _ in self._items]), self.source.state()

    def restore(self, state: State) -> None:
        """Read the records of the buffer again."""
        self._yielded, packed, below = state
        self.source.restore(below)
        keys = unpack_keys(packed)
        found = dict(self.source.again(keys))
        self._items = [(key, found[key]) for key in keys]
        self._is_full, self._numbers = False, []


# So many random numbers are drawn at once.
_BLOCK = 1024


def pack_keys(keys: Sequence[Key]) -> tuple[int, str]:
    """Return keys as text, which JSON can write, and how many numbers each has."""
    width = len(keys[0]) if keys else 0
    return width, base64.b64encode(np.array(keys, "<u4").tobytes()).decode()


def unpack_keys(packed: Sequence[Any]) -> list[Key]:
    """Return the keys that :func:`pack_keys` has packed."""
    width, text = packed
    numbers = np.frombuffer(base64.b64decode(text), "<u4").reshape(-1, max(1, width))
    return [tuple(key) for key in numbers.tolist()]


class Taken(Stage):
    """Yields the records of this reader's share of a range of the stream.

    The stream's records are counted across its readers in turns, so reader r has the records whose
    number is r modulo the number of readers.
    """

    def __init__(self, source: Stage, run: Run, first: int, end: int | None) -> None:
        super().__init__(source, run)
        self._first = share_of(first, run)
        self._end = None if end is None else share_of(end, run)
        self._count = 0

    def __next__(self) -> Item:
        while self._end is None or self._count < self._end:
            item = next(self.source)
            self._count += 1
            if self._count > self._first:
                return item
        raise StopIteration

    def state(self) -> State:
        """Return how many records have come through, and the state below."""
        return self._count, self.source.state()

    def restore(self, state: State) -> None:
        """Go to a position."""
        self._count, below = state
        self.source.restore(below)


def share_of(count: int, run: Run) -> int:
    """Return how many of the first ``count`` records of a stream a reader has."""
    return (count - run.reader + run.readers - 1) // run.readers


class Repeated(Stage):
    """Begins the stages below again after their end, with the order of a further epoch.

    Args:
        source: The stages below, in their first pass.
        run: The reader.
        begin: Makes the stages below for a pass.
        times: How many passes there are; None for no end.
    """

    def __init__(
        self, source: Stage, run: Run, begin: Callable[[Run], Stage], times: int | None
    ) -> None:
        super().__init__(source, run)
        self._begin, self._times = begin, times
        self._turn = 0

    def __next__(self) -> Item:
        is_empty = False
        while True:
            try:
                return next(self.source)
            except StopIteration:
                self._turn += 1
                if is_empty or self._turn == self._times:
                    self._turn -= 1
                    raise
            self._go_to(self._turn)
            is_empty = True

    def _go_to(self, turn: int) -> None:
        self._turn = turn
        self.source = self._begin(replace(self.run, turn=self.run.turn + turn))

    def state(self) -> State:
        """Return the pass, and the state below."""
        return self._turn, self.source.state()

    def restore(self, state: State) -> None:
        """Go to a position."""
        turn, below = state
        self._go_to(turn)
        self.source.restore(below)
