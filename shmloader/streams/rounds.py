"""The order of a stream's batches: in rounds, one batch of each reader that still has one. Pure.

::

    round 0   reader 0   reader 1   reader 2   reader 3
    round 1   reader 0   reader 1              reader 3      reader 2 had one batch
    round 2   reader 0                         reader 3

The batches of all rounds, one after the other, are the order. It depends on how many batches each
reader has, which is found out only by reading. So the order is known as far as the readers are:
:class:`Facts` has what is known of each.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Self

from shmloader.streams.reader import Found
from shmloader.streams.stages import State


@dataclass(slots=True)
class Facts:
    """What is known of one reader.

    Attributes:
        known: How many batches it has at least.
        is_all: Whether it has no more.
        positions: Positions of the reader that a worker can begin from, each with the number of the
            batch that follows; in order.
    """

    known: int = 0
    is_all: bool = False
    positions: list[tuple[int, State | None]] = field(default_factory=lambda: [(0, None)])

    @classmethod
    def load(cls, saved: Sequence[Any]) -> Self:
        """Return what :meth:`dump` has saved."""
        known, *position = saved
        known, is_all = max(known, ~known), known < 0
        return cls(known, is_all, [(position[0], position[1]) if position else (known, None)])

    def dump(self, following: int) -> list[Any]:
        """Return what the batches from a number on need, as plain values."""
        position = () if self.has(following) is False else self.before(following)
        return [~self.known if self.is_all else self.known, *position]

    def add(self, found: Found) -> None:
        """Add what was found with one of the reader's batches."""
        self.known, self.is_all = max(self.known, found.known), self.is_all or found.is_all
        if found.size and found.round >= self.positions[-1][0]:
            self.positions.append((found.round + 1, found.state))

    def before(self, number: int) -> tuple[int, State | None]:
        """Return the last position that is not beyond a batch."""
        return self.positions[bisect_right(self.positions, number, key=itemgetter(0)) - 1]

    def forget(self, number: int) -> None:
        """Forget positions that no batch from this number on needs."""
        while len(self.positions) > 1 and self.positions[1][0] <= number:
            del self.positions[0]

    def has(self, number: int) -> bool | None:
        """Whether the reader has a batch of this number; None if that is not known."""
        if number < self.known:
            return True
        return False if self.is_all else None


class Unknown(Exception):  # noqa: N818 - no error: more has to be read first
    """Whether a reader has a further batch is not known yet."""


class Rounds:
    """Goes through the order. One thread uses it.

    Attributes:
        at: The round, and the number of the reader in it, of the batch that was returned last.

    Args:
        facts: What is known of each reader. Others add to it.
        at: Where to go on: after this batch.
        is_strict: Whether a batch is returned only if it is known to exist. Otherwise, readers of
            which that is not known are assumed to have it: where they do not, there is a gap. In
            both cases the first batch of each reader is assumed to exist.
    """

    def __init__(
        self, facts: Sequence[Facts], at: tuple[int, int] = (0, -1), *, is_strict: bool = False
    ) -> None:
        self._facts, self.is_strict = facts, is_strict
        self.at = at

    def next(self, least: int = 1) -> tuple[int, int] | None:
        """Return round and reader of the next batch; None at the end.

        Args:
            least: How many readers a round must have; a round with fewer ends the order.

        Raises:
            Unknown: If that is not known yet.
        """
        number, reader = self.at
        while True:
            for each in range(reader + 1, len(self._facts)):
                has = self._facts[each].has(number)
                if has is None and self.is_strict and number:
                    raise Unknown
                if has is not False:
                    self.at = number, each
                    return self.at
            if all(one.is_all and one.known <= number + 1 for one in self._facts):
                return None
            number, reader = number + 1, -1
            if least > 1 and self._is_shorter(number, least):
                return None

    def _is_shorter(self, number: int, least: int) -> bool:
        """Whether a round has fewer than ``least`` batches; raise Unknown if that is not known."""
        has = [one.has(number) for one in self._facts]
        if has.count(True) >= least:
            return False
        if None in has:
            raise Unknown
        return True
