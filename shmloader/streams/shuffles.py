"""Stages that yield records in another order, and what is common to those that read in windows."""

import abc
import base64
import zlib
from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from shmloader.streams.stages import Item, Key, Run, Stage, State, generator, permutation

# So many random numbers are drawn at once.
_BLOCK = 1024


class Window(Stage, abc.ABC):
    """Yields what is made of each run of records, in a random order. To resume, it is read again.

    Args:
        source: The stage below.
        run: The reader.
        count: How many records are read for a window.
        seed: Decides the order.
    """

    def __init__(self, source: Stage, run: Run, count: int, seed: int) -> None:
        super().__init__(source, run)
        self._count, self._seed = count, seed
        self._begin(0, self._present())

    def _begin(self, window: int, start: State) -> None:
        """Begin a window, whose records come next."""
        self._window, self._start = window, start
        # What is left of it, in reverse order; how many were yielded; and where the next window
        # begins, once this one was read.
        self._left, self._taken = list[Any](), 0
        self._following: State | None = None

    def _present(self) -> State:
        """Return the position of the stage below, as a state has it."""
        return (self.source.state(),)

    def _go_to(self, *start: Any) -> None:
        """Go to such a position."""
        self.source.restore(*start)

    @abc.abstractmethod
    def _make(self) -> tuple[list[Any] | None, State]:
        """Return what is made of the window, None at the end, and where the next one begins."""

    def _fill(self) -> bool:
        made, following = self._make()
        if made is None:
            return False
        run = self.run
        numbers = self._seed, run.epoch, run.turn, run.reader, self._window
        self._left = [made[at] for at in permutation(len(made), *numbers)][::-1]
        self._following = following
        return True

    def __next__(self) -> Any:
        while not self._left:
            if self._following is not None:
                self._begin(self._window + 1, self._following)
            if not self._fill():
                raise StopIteration
        self._taken += 1
        return self._left.pop()

    def state(self) -> State:
        """Return the window, how much of it was yielded, and where it begins."""
        if self._following is not None and not self._left:
            return self._window + 1, 0, *self._following
        return self._window, self._taken, *self._start

    def restore(self, state: State) -> None:
        """Read the window again, if some of it was yielded.

        Raises:
            ValueError: If it has less.
        """
        window, taken, *start = state
        self._go_to(*start)
        self._begin(window, tuple(start))
        if taken:
            self._fill()
            if taken > len(self._left):
                raise fewer_records(self.run)
            self._taken = taken
            del self._left[-taken:]


class Windowed(Window):
    """Permutes each run of ``count`` records."""

    def _make(self) -> tuple[list[Item] | None, State]:
        return list(islice(self.source, self._count)) or None, self._present()


def fewer_records(run: Run) -> ValueError:
    """Return the error for a state that no longer fits the records."""
    return ValueError(
        f"reader {run.reader} has fewer records than when the state was saved: have the shards, or "
        "a function of map() or filter(), changed?"
    )


class Rolling(Stage):
    """Yields a random record of a buffer, into whose place the next record of the source goes.

    The state has the keys of the records in the buffer. To resume, they are read again by point
    reads where the format can seek.
    """

    def __init__(self, source: Stage, run: Run, count: int, seed: int) -> None:
        super().__init__(source, run)
        self._count, self._seed = count, seed
        self._yielded, self._items = 0, list[Item]()
        self._block, self._numbers = -1, list[int]()

    def __next__(self) -> Item:
        items = self._items
        while len(items) < self._count and (item := next(self.source, None)) is not None:
            items.append(item)
        if not items:
            raise StopIteration
        # The last record goes to the place, and the next one of the source to the end.
        at = self._draw() % len(items)
        item, items[at] = items[at], items[-1]
        items.pop()
        self._yielded += 1
        return item

    def _draw(self) -> int:
        """Return a random number that depends only on how many records were yielded."""
        block, at = divmod(self._yielded, _BLOCK)
        if block != self._block:
            run = self.run
            numbers = self._seed, run.epoch, run.turn, run.reader, block
            self._numbers = generator(*numbers).integers(1 << 62, size=_BLOCK).tolist()
            self._block = block
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


def pack_keys(keys: Sequence[Key]) -> str:
    """Return keys as a text, which JSON can write: their columns, compressed and in base 64."""
    columns = np.array(list(zip_longest(*keys, fillvalue=-1)), np.int64)
    return f"{len(columns)}:{base64.b64encode(zlib.compress(columns.tobytes(), 1)).decode()}"


def unpack_keys(packed: str) -> list[Key]:
    """Return the keys that :func:`pack_keys` has packed."""
    width, _, text = packed.partition(":")
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.int64)
    rows = numbers.reshape(int(width), -1).T.tolist() if numbers.size else []
    return [tuple(number for number in row if number >= 0) for row in rows]
