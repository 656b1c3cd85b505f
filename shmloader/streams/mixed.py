"""The lowest stage of a reader of a mix: draws each record from the same reader of a source.

The next record comes from the source that lags most behind its share of what was drawn so far. That
keeps every source within a record or two of its share at any time, without random numbers. Lags are
whole numbers, so a state has them exactly.

If all readers began alike, they would draw from a rare source at the same time. So each reader
begins as if some records had been drawn before, a different number of them.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from shmloader.streams.stages import Item, Key, Length, Run, Stage, State, generator

#: Weights as whole numbers, from a number of records on.
Phase = tuple[int, tuple[int, ...]]

# The weights add up to about this.
_WHOLE = 1 << 30

# A reader begins as if up to so many records had been drawn. Multiples of the step, modulo the
# cycle, are evenly spread for any number of neighbouring readers.
_CYCLE, _STEP = 256, 159


class Mixed(Stage):
    """Yields records of several sources.

    Args:
        run: The reader.
        sources: The uppermost stages of the sources.
        phases: The weights, ascending by the number of this reader's records from which they hold;
            0 for a source that is not drawn.
        length: Returns the tokens of a record, if shares count tokens; None if they count records.
        stop: "first": the reader ends with the first source that does. Otherwise, it goes on with
            the others; a number says how many records it yields at most.
    """

    def __init__(
        self,
        run: Run,
        sources: Sequence[Stage],
        phases: Sequence[Phase],
        length: Length | None,
        stop: str | int,
    ) -> None:
        self.run, self._sources, self._phases, self._length = run, sources, phases, length
        self._stop, self._count, self._ended = stop, 0, [False] * len(sources)
        self._find_weights()
        self._lags = [0] * len(sources)
        seed = int(generator(run.epoch, run.turn, *run.source).integers(_CYCLE))
        for _ in range((seed + run.reader * _STEP) % _CYCLE):
            self._add(self._choose(), 1)

    def __next__(self) -> Item:
        if self._count == self._stop:
            raise StopIteration
        if self._count >= self._until:
            self._find_weights()
        while (item := next(self._sources[at := self._choose()], None)) is None:
            if self._stop == "first":
                raise StopIteration
            self._ended[at] = True
            self._find_weights()
        item, length = ((at, *item[0]), item[1]), 1
        if self._length is not None:
            item, length = self.measure(item, self._measured)
        if not self._count:  # what was drawn before had the length of the first record
            self._lags = [lag * length for lag in self._lags]
        self._count += 1
        self._add(at, length)
        return item

    def _find_weights(self) -> None:
        """Find the weights of the next record, and the number of the record when they change."""
        phase = bisect_right(self._phases, self._count, key=itemgetter(0))
        self._until = self._phases[phase][0] if phase < len(self._phases) else math.inf
        pairs = zip(self._phases[phase - 1][1], self._ended, strict=True)
        left = [(at, weight) for at, (weight, ended) in enumerate(pairs) if weight and not ended]
        # Shares of what is drawn of the sources that are left.
        total = sum(weight for _, weight in left)
        self._shares = [(at, weight * _WHOLE // total) for at, weight in left]

    def _choose(self) -> int:
        """Return the source that lags most; raise StopIteration if none is left."""
        best, most, lags = -1, 0, self._lags
        for at, _ in self._shares:
            if best < 0 or lags[at] > most:
                best, most = at, lags[at]
        if best < 0:
            raise StopIteration
        return best

    def _add(self, at: int, length: int) -> None:
        """Count a record of a source."""
        lags = self._lags
        for each, share in self._shares:
            lags[each] += share * length
        lags[at] -= _WHOLE * length

    def _measured(self, record: Any) -> tuple[Any, int]:
        assert self._length is not None
        return record, max(1, int(self._length(record)))

    def state(self) -> State:
        """Return what was drawn, and the states of the sources."""
        sources = tuple(source.state() for source in self._sources)
        return self._count, tuple(self._lags), tuple(map(int, self._ended)), sources

    def restore(self, state: State) -> None:
        """Go to a position."""
        self._count, lags, ended, states = state
        self._lags, self._ended = list(lags), list(map(bool, ended))
        self._find_weights()
        for source, below in zip(self._sources, states, strict=True):
            source.restore(below)

    def again(self, keys: Sequence[Key]) -> list[Item]:
        """Read the records again from their sources."""
        by_source: dict[int, list[Key]] = {}
        for at, *key in keys:
            by_source.setdefault(at, []).append(tuple(key))
        found: list[Item] = []
        for at, wanted in by_source.items():
            found += (((at, *key), record) for key, record in self._sources[at].again(wanted))
        if self._length is None:
            return found
        return [self.measure(item, self._measured)[0] for item in found]

    def describe(self, key: Key) -> str:
        """Return the name that the source has for the record."""
        return self._sources[key[0]].describe(key[1:])
