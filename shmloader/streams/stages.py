"""The stages of a reader: iterators over records whose states are positions.

A reader is a chain of stages, one over the other; the lowest one reads shards. Each stage yields
*items*: a record with its *key*, which names its source record. A state is a tuple of ints and of
tuples, in which the state of the stage below comes last. It counts source records, never yielded
ones, so that filters keep it exact::

    ShardRecords  number of the shard in the reader's order, number of the next record in it
    Mixed         how many records were drawn, by how many tokens each source lags behind its share,
                  which sources have ended, and the states of all
    Windowed      number of the window, how many of its records were yielded, the state below where
                  the window begins
    Packed        number of the window, how many of its packs were yielded, how many records after a
                  state below the window begins, and that state
    Rolling       how many records were yielded, the keys of those in the buffer, the state below
    Taken         how many records have come through, the state below
    Repeated      number of the pass, the state below
    Mapped, Filtered   the state below

A record that fails stays in its place, as a :class:`Failed`, and goes through the stages above like
any other. Who makes a batch raises it, or leaves it out. So neither orders nor states depend on
what ``on_error`` says, and no batch is read differently after a failure.

Assumes:
    * A function of the user's gives the same result for the same record. With the loader's
      ``seed=``, random numbers depend on the record.

A reader and its stages belong to one thread.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

#: Names a source record: the pass over the shards, the number of the shard in the list that the
#: user gave, and the number of the record in the shard. A mix puts the number of the source first.
Key = tuple[int, ...]

#: A record with its key.
Item = tuple[Key, Any]

#: The position of a stage; ints, texts, and nested tuples of these.
State = tuple[Any, ...]

#: Returns the number of tokens of a record.
Length = Callable[[Any], int]


class Failed:
    """Stands in the place of a record that could not be read, or for which a function failed.

    Attributes:
        problem: The exception, or what the guard has made of it.
    """

    __slots__ = ("problem",)

    def __init__(self, problem: Any) -> None:
        self.problem = problem


class Guard:
    """Reads records and calls the user's functions for them, one after the other.

    This one only names the record in what they raise. The loader's own seeds random number
    generators, and watches the time.
    """

    @property
    def is_watching(self) -> bool:
        """Whether records may take only a limited time, so that each is read by itself."""
        return False

    def call(self, function: Callable[[Any], Any], item: Item, stage: "Stage") -> Any:
        """Return ``function(record)``, or a Failed."""
        try:
            return function(item[1])
        except Exception as error:  # noqa: BLE001 - it takes the place of the record
            return self.failed(error, item[0], stage)

    def read(self, records: Iterator[Any], key: Key, stage: "Stage") -> Any:  # noqa: ARG002 - see there
        """Return the next record, which has this key; raise what reading raises."""
        return next(records)

    def failed(self, error: Exception, key: Key, stage: "Stage") -> Failed:
        """Return what takes the place of a record that failed. Called where ``error`` is handled.

        Raises:
            Exception: ``error``, if it has nothing to do with the record.
        """
        error.add_note(f"It was raised for {stage.describe(key)}.")
        return Failed(error)


@dataclass(frozen=True, slots=True)
class Run:
    """What the stages of one reader have in common.

    Attributes:
        reader: Number of the reader, from 0.
        readers: Number of readers of the stream.
        epoch: Number of the epoch.
        guard: Reads records and calls the user's functions.
        turn: Number of the pass over the shards, which :class:`Repeated` counts.
        source: In a mix, the number of the source, after those of the mixes that it is in.
    """

    reader: int
    readers: int
    epoch: int
    guard: Guard
    turn: int = 0
    source: tuple[int, ...] = ()


class Stage:
    """An iterator over items, whose position is a tuple. This one changes nothing.

    Attributes:
        source: The stage below.
        run: The reader.
        number: Number among the stages of its stream, from 1; 0 for the lowest one.
    """

    number = 0

    def __init__(self, source: "Stage", run: Run) -> None:
        self.source, self.run = source, run

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self.source)

    def state(self) -> State:
        """Return the position of the next item."""
        return self.source.state()

    def restore(self, state: State) -> None:
        """Go to a position. A stage that was restored, or has ended, can go to any other."""
        self.source.restore(state)

    def again(self, keys: Sequence[Key]) -> list[Item]:
        """Return items that this stage has yielded before, by their keys, in any order."""
        return self.source.again(keys)

    def describe(self, key: Key) -> str:
        """Return the name of a record for a text: "record 7 of shard a.tar"."""
        return self.source.describe(key)

    def measure(self, item: Item, function: Callable[[Any], Any]) -> tuple[Item, int]:
        """Return an item and its length; a function returns a record and its length.

        A failed record, and one for which the function fails, has the length 1.
        """
        if type(item[1]) is Failed:
            return item, 1
        measured = self.run.guard.call(function, item, self)
        record, length = (measured, 1) if type(measured) is Failed else measured
        return (item[0], record), length


class Step(NamedTuple):
    """Describes a stage of a stream's readers.

    Attributes:
        number: The stage's number, from 1.
        name: The method that adds it, as texts name it.
        kind: Its class.
        arguments: The arguments after the source and the run.
    """

    number: int
    name: str
    kind: type[Stage]
    arguments: tuple[Any, ...]

    def over(self, source: Stage, run: Run) -> Stage:
        """Return the stage over another one, at its beginning."""
        stage = self.kind(source, run, *self.arguments)
        stage.number = self.number
        return stage

    def __str__(self) -> str:
        """Return the method with those of its arguments that are plain values."""
        plain = [repr(one) for one in self.arguments if isinstance(one, int | str | None)]
        return f"{self.name}({', '.join(plain)})"


class Mapped(Stage):
    """Applies a function to each record."""

    def __init__(self, source: Stage, run: Run, function: Callable[[Any], Any]) -> None:
        super().__init__(source, run)
        self._function = function

    def __next__(self) -> Item:
        return self.apply(next(self.source))

    def again(self, keys: Sequence[Key]) -> list[Item]:
        """Apply the function again."""
        return list(map(self.apply, self.source.again(keys)))

    def apply(self, item: Item) -> Item:
        """Return an item with the result of the function."""
        if type(item[1]) is Failed:
            return item
        return item[0], self.run.guard.call(self._function, item, self)


class Filtered(Mapped):
    """Yields the records for which a function is true.

    What is mapped is whether a record is kept: True, False, or a Failed if that is not known.
    """

    def __init__(self, source: Stage, run: Run, function: Callable[[Any], Any]) -> None:
        super().__init__(source, run, lambda record: bool(function(record)))

    def __next__(self) -> Item:
        while True:
            item: Item = next(self.source)
            kept = self.apply(item)
            if kept[1]:
                return item if kept[1] is True else kept

    def again(self, keys: Sequence[Key]) -> list[Item]:
        """Call the function again, which may fail for a record."""
        found = [(item, self.apply(item)) for item in self.source.again(keys)]
        return [item if kept[1] is True else kept for item, kept in found]


class Taken(Stage):
    """Yields the records of this reader's share of a range of the stream.

    The stream's records are counted across its readers in turns, so reader r has the records whose
    number is r modulo the number of readers.
    """

    def __init__(self, source: Stage, run: Run, first: int, end: int | None) -> None:
        super().__init__(source, run)
        self._first = share_of(first, run.reader, run.readers)
        self._end = None if end is None else share_of(end, run.reader, run.readers)
        self._count = 0

    def __next__(self) -> Item:
        while self._end is None or self._count < self._end:
            item: Item = next(self.source)
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


def share_of(count: int, reader: int, readers: int) -> int:
    """Return how many of the first ``count`` records of a stream a reader has."""
    return (count - reader + readers - 1) // readers


class Repeated(Stage):
    """Begins the stages below again after their end, with the order of a further epoch.

    Args:
        source: The stages below, in their first pass.
        run: The reader.
        begin: Makes the stages below for a pass. A pass without any record is the last one.
    """

    def __init__(self, source: Stage, run: Run, begin: Callable[[Run], Stage]) -> None:
        super().__init__(source, run)
        self._begin, self._turn, self._is_empty = begin, 0, True
        if run.turn:  # the first pass has another number
            self._go_to(0)

    def __next__(self) -> Any:
        while (item := next(self.source, None)) is None:
            if self._is_empty:
                raise StopIteration
            self._go_to(self._turn + 1)
        self._is_empty = False
        return item

    def _go_to(self, turn: int) -> None:
        self._turn, self._is_empty = turn, True
        self.source = self._begin(replace(self.run, turn=self.run.turn + turn))

    def state(self) -> State:
        """Return the pass, whether it had no record so far, and the state below."""
        return self._turn, int(self._is_empty), self.source.state()

    def restore(self, state: State) -> None:
        """Go to a position."""
        turn, is_empty, below = state
        self._go_to(turn)
        self._is_empty = bool(is_empty)
        self.source.restore(below)


def token_count(record: Any) -> int:
    """Return the length of a record, or of the "input_ids" of a dict."""
    try:
        return len(record["input_ids"] if isinstance(record, Mapping) else record)
    except (KeyError, TypeError) as error:
        error.add_note("Give length=, a function that returns the number of tokens of a record.")
        raise


def generator(*numbers: int) -> np.random.Generator:
    """Return a random number generator that depends only on these numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=16, person=b"shmloader shards")
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))


def permutation(count: int, *numbers: int) -> list[int]:
    """Return a permutation of ``range(count)`` that depends only on these numbers."""
    order: list[int] = generator(*numbers).permutation(count).tolist()
    return order
