"""Groups records into packs of a budget of tokens.

A window of records is packed at a time. The records after those that fill whole packs begin the
next window, so that no pack is left with little in it before the end.
"""

from itertools import islice
from typing import Any

import numpy as np

from shmloader.sampling.packing import Numbers, Packing, best_fit_decreasing
from shmloader.sampling.pieces import cut_sequences
from shmloader.streams.reader import Group
from shmloader.streams.shuffles import Window, fewer_records
from shmloader.streams.stages import Item, Length, Run, Stage, State

# So many records are left to the next window, one by one, if best-fit needs a pack too many.
_TRIES = 8


class Packed(Window):
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

    _start: tuple[int, State]

    def __init__(
        self,
        source: Stage,
        run: Run,
        window: int,
        seed: int,
        max_tokens: int,
        length: Length,
        too_long: str,
    ) -> None:
        self._max_tokens, self._length, self._too_long = max_tokens, length, too_long
        # Records of the next window that were read already, and the length of each.
        self._items, self._lengths = list[Item](), list[int]()
        super().__init__(source, run, window, seed)

    def _present(self) -> State:
        """Return how many records after a position below the window begins, and that position."""
        return 0, self.source.state()

    def _go_to(self, *start: Any) -> None:
        """Go to such a position."""
        skipped, below = start
        self.source.restore(below)
        if len(list(islice(self.source, skipped))) < skipped:
            raise fewer_records(self.run)
        self._items, self._lengths = [], []

    def _make(self) -> tuple[list[Group] | None, State]:
        items, lengths = self._items, self._lengths
        known, below, total = len(items), self.source.state(), sum(lengths)
        while is_short := len(items) < self._count or total < self._max_tokens:
            if (item := next(self.source, None)) is None:
                break
            item, length = self.measure(item, self._fitted)
            items.append(item)
            lengths.append(length)
            total += length
        if not items:
            return None, ()
        packing, count = self._pack(np.array(lengths, np.int64), is_end=is_short)
        packs = [
            [items[row] for row in np.sort(packing.order[first:end]).tolist()]
            for first, end in zip(packing.starts.tolist(), packing.ends.tolist(), strict=True)
        ]
        del items[:count], lengths[:count]
        if count < known:
            skipped, below = self._start
            return packs, (skipped + count, below)
        return packs, (count - known, below)

    def _pack(self, lengths: Numbers, *, is_end: bool) -> tuple[Packing, int]:
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

    def _fitted(self, record: Any) -> tuple[Any, int]:
        """Return a record, which may be cut, and its length; 0 to leave it out."""
        length, most = int(self._length(record)), self._max_tokens
        if length <= most:
            return record, max(1, length)
        if self._too_long == "drop":
            return None, 0
        if self._too_long == "truncate":
            shorter = cut_sequences(record, length, slice(0, most))
            if shorter is not record:
                return shorter, most
            raise ValueError(
                f"a record of {length} tokens is longer than max_tokens={most}, and has no tensor, "
                "array or list of that length to cut. Give too_long='drop', or cut it in map()."
            )
        raise ValueError(
            f"a record of {length} tokens is longer than max_tokens={most}: give more max_tokens, "
            "or too_long='truncate' or 'drop'"
        )
