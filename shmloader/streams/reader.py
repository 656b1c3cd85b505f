"""One reader of a stream: makes its batches one after the other, from any batch on.

A *reading* asks for one batch of one reader. It says from where the reader can go on, so any worker
can make it: one that has the reader at the right batch does so at once; any other goes to the
nearest position that it knows of, and passes over the batches in between. So which worker makes
which batch decides only how fast that is.
"""

import collections
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shmloader.streams.stages import Item, Run, SkippedRecord, Stage, State

# A reader passes over so many batches rather than go to a position, where it may have to read a
# window again. With ranks whose number does not divide that of readers, it passes over theirs.
_NEAR = 16

#: The records of a batch, or what was raised in place of one of them.
Group = list[Item] | Exception


@dataclass(frozen=True, slots=True)
class Reading:
    """Asks for one batch of a stream.

    Attributes:
        epoch: Number of the epoch.
        reader: Number of the reader.
        round: Number of the batch among those of the reader.
        at: Number of a batch, this one or an earlier one, before which the reader had ``state``.
        state: The position of the reader; None for the beginning.
        ahead: How many further batches the answer has to know of.
        route: Decides which worker makes the batch: those of a reader have the same.
    """

    epoch: int
    reader: int
    round: int
    at: int = 0
    state: State | None = None
    ahead: int = 1
    route: int = 0

    def __repr__(self) -> str:
        return f"batch {self.round} of reader {self.reader}"


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a reader after one of its batches.

    Attributes:
        reader: Number of the reader.
        round: Number of the batch.
        known: How many batches the reader has at least.
        is_all: Whether it has no more than these.
        state: The position after the batch.
        count: How many records the batch has; 0 if the reader has no such batch.
    """

    reader: int
    round: int
    known: int
    is_all: bool
    state: State
    count: int


class Grouped:
    """Groups the records of a stage into batches of ``size``.

    Args:
        source: The stage.
        run: The reader.
        size: How many records a batch has.
        drop_last: Whether the reader's last batch is left out if it has fewer.
    """

    def __init__(self, source: Stage, run: Run, size: int, drop_last: bool) -> None:
        self.source, self.run, self._size, self._drop_last = source, run, size, drop_last

    def __iter__(self) -> Iterator[list[Item]]:
        return self

    def __next__(self) -> list[Item]:
        items = list(islice(self.source, self._size))
        if not items or (self._drop_last and len(items) < self._size):
            raise StopIteration
        return items

    def state(self) -> State:
        """Return the position of the next batch."""
        return self.source.state()

    def restore(self, state: State) -> None:
        """Go to a position."""
        self.source.restore(state)


class Reader:
    """Makes the batches of one reader in one epoch. Belongs to one thread.

    Args:
        begin: Makes what groups the records of a reader, at the beginning.
        late: Functions that are applied to the records of a batch when it is made, so not to those
            of batches that are passed over.
        run: The reader.
    """

    def __init__(
        self,
        begin: Callable[[Run], Any],
        late: tuple[Callable[[Any], Any], ...],
        run: Run,
    ) -> None:
        self._begin = functools.partial(begin, run)
        self._late, self._guard = late, run.guard
        self._go_to(0, None)

    def _go_to(self, number: int, state: State | None) -> None:
        # The number of the next batch; the batches that were read ahead, each with the position
        # after it; and the position of the next batch.
        self.round, self._groups = number, self._begin()
        self._ahead: collections.deque[tuple[Group, State]] = collections.deque()
        self._is_all = False
        if state is not None:
            self._groups.restore(state)
        self._state: State = self._groups.state() if state is None else state

    def seek(self, reading: Reading) -> None:
        """Go to the batch of a reading, which may be any."""
        if reading.round < self.round or reading.at > self.round + _NEAR:
            self._go_to(reading.at, reading.state)
        while self.round < reading.round and self._read(1):
            self._pop()

    def make(self, ahead: int) -> tuple[Group | None, Found]:
        """Return the records of the next batch, or an exception; None if there is no batch."""
        self._read(1 + ahead)
        number, run, group = self.round, self._groups.run, None
        if self._ahead:
            group = self._finished(self._pop())
        known = self.round + len(self._ahead)
        count = 0 if group is None else 1 if isinstance(group, Exception) else len(group)
        return group, Found(run.reader, number, known, self._is_all, self._state, count)

    def _finished(self, group: Group) -> Group:
        """Apply the late functions to a batch's records, without those that are left out."""
        if isinstance(group, Exception) or not self._late:
            return group
        items = []
        for key, record in group:
            try:
                for function in self._late:
                    record = self._guard.call(function, (key, record), self._groups.source)  # noqa: PLW2901
            except SkippedRecord:
                continue
            except Exception as error:  # noqa: BLE001 - raised in place of the batch
                return error
            items.append((key, record))
        return items

    def _read(self, count: int) -> bool:
        """Read so many batches ahead; return whether there is one."""
        while len(self._ahead) < count and not self._is_all:
            group: Group
            try:
                group = next(self._groups)
            except StopIteration:
                self._is_all = True
                break
            except Exception as error:  # noqa: BLE001 - raised in place of the batch
                group = error
            self._ahead.append((group, self._groups.state()))
        return bool(self._ahead)

    def _pop(self) -> Group:
        group, self._state = self._ahead.popleft()
        self.round += 1
        return group
