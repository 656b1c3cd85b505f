"""One reader of a stream: makes its batches one after the other, from any batch on.

A *reading* asks for one batch of one reader. It says from where the reader can go on, so any worker
can make it: one that has the reader at the right batch does so at once; any other goes to the
nearest position that it knows of, and passes over the batches in between. So which worker makes
which batch decides only how fast that is.
"""

import collections
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from shmloader.streams.stages import Item, Run, Stage, State, Step

# A reader passes over so many batches rather than go to a position, where it may have to read a
# window again. With ranks whose number does not divide that of readers, it passes over theirs.
_NEAR = 16

#: The records of a batch, among which may be failed ones.
Group = list[Item]


class Reading(NamedTuple):
    """Asks for one batch of a stream.

    Attributes:
        epoch: Number of the epoch.
        reader: Number of the reader.
        round: Number of the batch among those of the reader.
        at: Number of a batch, this one or an earlier one, before which the reader had ``state``.
        state: The position of the reader; None for the beginning.
        ahead: How many further batches the answer has to know of.
        route: Decides which worker makes the batch: those of a reader have the same.
        sizes: Digest of the sizes of the reader's shards when the state was saved from which the
            epoch goes on; empty if they need not be compared.
    """

    epoch: int
    reader: int
    round: int
    at: int = 0
    state: State | None = None
    ahead: int = 1
    route: int = 0
    sizes: str = ""

    def __repr__(self) -> str:
        return f"batch {self.round} of reader {self.reader}"


class Found(NamedTuple):
    """What is known of a reader after one of its batches.

    Attributes:
        reader: Number of the reader.
        round: Number of the batch.
        known: How many batches the reader has at least.
        is_all: Whether it has no more than these.
        state: The position after the batch.
        size: How many records the batch has, with failed ones; 0 if the reader has no such batch.
    """

    reader: int
    round: int
    known: int
    is_all: bool
    state: State
    size: int


class Grouped(Stage):
    """Groups the records of a stage into batches of ``size``. Yields lists of items.

    Args:
        source: The stage.
        run: The reader.
        size: How many records a batch has.
        drop_last: Whether the reader's last batch is left out if it has fewer.
    """

    def __init__(self, source: Stage, run: Run, size: int, drop_last: bool) -> None:
        super().__init__(source, run)
        self._size, self._least = size, size if drop_last else 1

    def __next__(self) -> Group:
        group = list(islice(self.source, self._size))
        if len(group) < self._least:
            raise StopIteration
        return group


class Reader:
    """Makes the batches of one reader in one epoch. Belongs to one thread.

    Args:
        begin: Makes what groups the records of a reader, at the beginning.
        late: Steps of functions for the records of a batch that is made, and not for those of
            batches that are passed over.
        run: The reader.
    """

    def __init__(self, begin: Callable[[Run], Any], late: Sequence[Step], run: Run) -> None:
        self._begin, self._late, self._run = begin, late, run
        self.go_to(0, None)

    def go_to(self, number: int, state: State | None) -> None:
        """Go to a batch, before which the reader had this position; None at the beginning."""
        # The number of the next batch; the batches that were read ahead, each with the position
        # after it; and the position of the next batch.
        self.round, self._groups = number, self._begin(self._run)
        self._ahead: collections.deque[tuple[Group, State]] = collections.deque()
        self._is_all = False
        if state is not None:
            self._groups.restore(state)
        self._state: State = self._groups.state() if state is None else state
        self._maps: list[Any] = [step.over(self._groups, self._run) for step in self._late]

    def seek(self, reading: Reading) -> None:
        """Go to the batch of a reading, which may be any."""
        if reading.round < self.round or reading.at > self.round + _NEAR:
            self.go_to(reading.at, reading.state)
        while self.round < reading.round and self._read(1):
            self._pop()

    def make(self, ahead: int) -> tuple[Group | None, Found]:
        """Return the records of the next batch; None if there is no batch.

        Args:
            ahead: Of how many further batches to find out whether they exist, 1 or more.
        """
        self._read(1 + ahead)
        number, group = self.round, None
        if self._ahead:
            group = self._pop()
            for stage in self._maps:
                group = list(map(stage.apply, group))
        known, count = self.round + len(self._ahead), len(group or ())
        return group, Found(self._run.reader, number, known, self._is_all, self._state, count)

    def _read(self, count: int) -> bool:
        """Read so many batches ahead; return whether there is one."""
        while len(self._ahead) < count and not self._is_all:
            if (group := next(self._groups, None)) is None:
                self._is_all = True
            else:
                self._ahead.append((group, self._groups.state()))
        return bool(self._ahead)

    def _pop(self) -> Group:
        group, self._state = self._ahead.popleft()
        self.round += 1
        return group
