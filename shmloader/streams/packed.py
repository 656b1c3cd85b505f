"""Groups records into packs of a budget of tokens.

A window of records is packed at a time. The records after those that fill whole packs begin the
next window, so that no pack is left with little in it before the end.
"""

from itertools import islice
from typing import Any

import numpy as np

from shmloader.sampling.packing import Numbers, Packing, best_fit_decreasing
from shmloader.sampling.pieces import cut_sequences
from shmloader.streams.lengths import Counter
from shmloader.streams.reader import Group
from shmloader.streams.shuffles import fewer_records
from shmloader.streams.stages import Failed, Item, Run, Stage, State, generator

# So many records are left to the next window, one by one, if best-fit needs a pack too many.
_TRIES = 8


class Packed(Stage):
    """Groups the records of each window by best-fit decreasing. Yields lists of items.

    Packs come in a random order, since best-fit makes those with long records first. Records of a
    pack are in the order in which they came.

    Args:
        source: The stage below.
        run: The reader.
        window: How many records are packed together. More if they do not fill a pack.
        seed: Decides the order of packs.
        max_tokens: The most that the lengths of a pack add up to.
        length: Returns the number of tokens of a record.
        too_long: What becomes of a longer record: "raise", "truncate" or "drop".
    """

    def __init__(
        self,
        source: Stage,
        run: Run,
        window: int,
        seed: int,
        max_tokens: int,
        length: Counter,
        too_long: str,
    ) -> None:
        super().__init__(source, run)
        self._count, self._seed = window, seed
        self._max_tokens, self._length, self._too_long = max_tokens, length, too_long
        # Records of the next window that were read already, and the length of each.
        self._items, self._lengths = list[Item](), list[int]()
        self._next = (0, 0, source.state())
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next window."""
        # The number of the window, and where it begins: so many records after a state below.
        self._window, self._skipped, self._start = self._next
        self._packs, self._taken = list[Any](), 0

    def __next__(self) -> Group:
        while self._taken == len(self._packs):
            if self._next[0] > self._window:
                self._go_on()
            if not self._fill():
                raise StopIteration
        pack: Group = self._packs[self._taken]
        self._packs[self._taken] = None
        self._taken += 1
        return pack

    def _fill(self) -> bool:
        """Read and pack the window; return False if it has no records."""
        items, lengths = self._items, self._lengths
        known, start, total = len(items), self.source.state(), sum(lengths)
        is_end = False
        while len(items) < self._count or total < self._max_tokens:
            item = next(self.source, None)
            if item is None:
                is_end = True
                break
            item, length = self._measure(item)
            items.append(item)
            lengths.append(length)
            total += length
        if not items:
            return False
        packing, count = self._pack(np.array(lengths, np.int64), is_end)
        packs = [
            [items[row] for row in np.sort(packing.order[first:end]).tolist()]
            for first, end in zip(packing.starts.tolist(), packing.ends.tolist(), strict=True)
        ]
        run = self.run
        numbers = self._seed, run.epoch, run.turn, run.reader, self._window
        self._packs = [packs[at] for at in generator(*numbers).permutation(len(packs)).tolist()]
        if count < known:
            self._next = self._window + 1, self._skipped + count, self._start
        else:
            self._next = self._window + 1, count - known, start
        del items[:count], lengths[:count]
        return True

    def _pack(self, lengths: Numbers, is_end: bool) -> tuple[Packing, int]:
        """Return packs of the first records, and how many these are: all at the end."""
        count = len(lengths)
        if not is_end:
            sums = lengths.cumsum()
            whole = int(sums[-1]) // self._max_tokens
            most = int(np.searchsorted(sums, whole * self._max_tokens, side="right"))
            for count in range(most, max(0, most - _TRIES), -1):
                packing = self._best_fit(lengths[:count])
                if len(packing.ends) <= whole:
                    return packing, count
        return self._best_fit(lengths), len(lengths)

    def _best_fit(self, lengths: Numbers) -> Packing:
        rows = np.flatnonzero(lengths)  # without those that are left out
        packing = best_fit_decreasing(lengths[rows, None], (self._max_tokens,))
        return packing._replace(order=rows[packing.order])

    def _measure(self, item: Item) -> tuple[Item, int]:
        """Return an item, which may be cut, and its length; 0 to leave it out."""
        if type(item[1]) is Failed:
            return item, 1
        fitted = self.run.guard.call(self._fitted, item, self)
        if type(fitted) is Failed:
            return (item[0], fitted), 1
        length, record = fitted
        return (item[0], record), length

    def _fitted(self, record: Any) -> tuple[int, Any]:
        """Return the length of a record and the record, which may be cut; 0 to leave it out."""
        length, most = self._length(record), self._max_tokens
        if length <= most:
            return max(1, length), record
        if self._too_long == "drop":
            return 0, None
        if self._too_long == "truncate":
            shorter = cut_sequences(record, length, slice(0, most))
            if shorter is not record:
                return most, shorter
            raise ValueError(
                f"a record of {length} tokens is longer than max_tokens={most}, and has no tensor, "
                "array or list of that length to cut. Give too_long='drop', or cut it in map()."
            )
        raise ValueError(
            f"a record of {length} tokens is longer than max_tokens={most}: give more max_tokens, "
            "or too_long='truncate' or 'drop'"
        )

    def state(self) -> State:
        """Return the window, how many packs were yielded, and where the window begins."""
        if self._taken == len(self._packs) and self._next[0] > self._window:
            window, skipped, start = self._next
            return window, 0, skipped, start
        return self._window, self._taken, self._skipped, self._start

    def restore(self, state: State) -> None:
        """Read the window again."""
        window, taken, skipped, start = state
        self.source.restore(start)
        passed = sum(1 for _ in islice(self.source, skipped))
        self._items, self._lengths = [], []
        self._next = (window, 0, self.source.state())
        self._go_on()
        if taken:
            self._fill()
        if passed < skipped or taken > len(self._packs):
            raise fewer_records(self.run)
        self._taken = taken
        self._packs[:taken] = [None] * taken
