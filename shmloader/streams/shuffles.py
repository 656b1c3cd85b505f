"""Stages that yield records in another order."""

import base64
from collections.abc import Sequence

import numpy as np

from shmloader.streams.stages import Item, Key, Run, Stage, State, generator, permutation

# So many random numbers are drawn at once.
_BLOCK = 1024

_DTYPES = ("|u1", "<u2", "<u4", "<u8")


class Windowed(Stage):
    """Permutes each run of ``count`` records. To resume, the run is read again."""

    def __init__(self, source: Stage, run: Run, count: int, seed: int) -> None:
        super().__init__(source, run)
        self._count, self._seed = count, seed
        self._go_to(0)

    def _go_to(self, window: int) -> None:
        """Begin a window, where the source is now."""
        self._window, self._start = window, self.source.state()
        # The records that are left, in reverse order; and how many were yielded.
        self._left, self._taken = list[Item](), 0

    def __next__(self) -> Item:
        if not self._left:
            if self._taken:
                self._go_to(self._window + 1)
            self._fill()
            if not self._left:
                raise StopIteration
        self._taken += 1
        return self._left.pop()

    def _fill(self) -> None:
        items, run = self.source.take(self._count), self.run
        numbers = self._seed, run.epoch, run.turn, run.reader, self._window
        self._left = [items[at] for at in permutation(len(items), *numbers)][::-1]

    def state(self) -> State:
        """Return the window, how many of its records were yielded, and where it begins."""
        if self._taken and not self._left:
            return self._window + 1, 0, self.source.state()
        return self._window, self._taken, self._start

    def restore(self, state: State) -> None:
        """Read the window again, if some of its records were yielded.

        Raises:
            ValueError: If the window has fewer.
        """
        window, taken, start = state
        self.source.restore(start)
        self._go_to(window)
        if not taken:
            return
        self._fill()
        if taken > len(self._left):
            raise fewer_records(self.run)
        self._taken = taken
        del self._left[-taken:]


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
        self._yielded, self._is_over = 0, False
        self._items: list[Item] = []
        self._block, self._numbers = -1, list[int]()

    def __next__(self) -> Item:
        items = self._items
        while len(items) < self._count and not self._is_over:
            try:
                items.append(next(self.source))
            except StopIteration:
                self._is_over = True
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
        self._is_over = False


def pack_keys(keys: Sequence[Key]) -> tuple[str, ...]:
    """Return keys as texts, which JSON can write: one for each place, and one for their lengths.

    A text has the size of its numbers in bytes, and the numbers in base 64.
    """
    if not keys:
        return ()
    lengths = list(map(len, keys))
    width = max(lengths)
    columns: list[Sequence[int]] = [lengths]
    if min(lengths) == width:
        columns += zip(*keys, strict=True)
    else:
        columns += zip(*(key + (0,) * (width - len(key)) for key in keys), strict=True)
    return tuple(map(_pack, columns))


def _pack(numbers: Sequence[int]) -> str:
    size, most = 0, max(numbers)
    if most == min(numbers):  # as the pass and the lengths are
        return f"{len(numbers)}x{most}"
    while most >> (8 << size):
        size += 1
    return f"{size}:{base64.b64encode(np.array(numbers, _DTYPES[size]).tobytes()).decode()}"


def unpack_keys(packed: Sequence[str]) -> list[Key]:
    """Return the keys that :func:`pack_keys` has packed."""
    if not packed:
        return []
    lengths, *columns = map(_unpack, packed)
    rows = zip(*columns, strict=True)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _unpack(text: str) -> list[int]:
    if ":" not in text:
        count, _, number = text.partition("x")
        return [int(number)] * int(count)
    numbers: list[int] = np.frombuffer(base64.b64decode(text[2:]), _DTYPES[int(text[0])]).tolist()
    return numbers
