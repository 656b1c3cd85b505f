"""How far an epoch has come, told by what the user was given."""

import bisect
import itertools
from collections.abc import Iterable, Sized


class Progress:
    """How far the newest epoch of a loader has come.

    A ticket is done when its batch, or an exception in its place, was handed over, or when it was
    left out since nothing was left of it. Used on the user's thread.

    Attributes:
        position: All tickets of the epoch before this number are done.
        is_ended: Whether the user has seen the epoch's end.

    Args:
        position: Where the epoch goes on; 0 for a new one.
        ahead: What is not to be loaded again.
    """

    __slots__ = ("_added", "_ahead", "_before", "_removed", "_start", "is_ended", "position")

    def __init__(self, position: int = 0, ahead: frozenset[int] = frozenset()) -> None:
        self._start = self.position = position
        # How many tickets are drawn before the draw passes over each of those that were given.
        self._before = [number - position - at for at, number in enumerate(sorted(ahead))]
        self._ahead = set(ahead)
        # What became of them since the mark.
        self._added: list[int] = []
        self._removed: list[int] = []
        self.is_ended = False

    @property
    def ahead(self) -> frozenset[int]:
        """Numbers of tickets after the position that are done, too (``in_order=False``)."""
        return frozenset(self._ahead)

    def done(self, seq: int) -> None:
        """The ticket that was drawn as number ``seq`` since the epoch went on is done."""
        number = self._number(seq)
        if number == self.position:
            self._go_on_at(number + 1)
        else:
            self._added.append(number)  # first: an interruption may come in between
            self._ahead.add(number)

    def done_until(self, seq: int) -> None:
        """All tickets up to the one that was drawn as number ``seq`` are done."""
        if not self._before and not self._ahead:
            self.position = self._start + seq + 1
            return
        number = self._number(seq)
        for passed in range(self.position, number):
            self._take(passed)
        self._go_on_at(number + 1)

    def _go_on_at(self, position: int) -> None:
        """Go on there, or past what is done after it."""
        while position in self._ahead:
            self._take(position)
            position += 1
        self.position = position

    def _take(self, number: int) -> None:
        if number in self._ahead:
            self._removed.append(number)
            self._ahead.remove(number)

    def _number(self, seq: int) -> int:
        """The number in the epoch of a ticket that was drawn since it went on."""
        return self._start + seq + bisect.bisect_right(self._before, seq)

    def mark(self) -> int:
        """What :meth:`go_back` takes, until the next call."""
        self._added.clear()
        self._removed.clear()
        return self.position

    def go_back(self, mark: int) -> None:
        """Take back what was noted since: it did not reach the user."""
        self.position = mark
        self._ahead.update(self._removed)
        self._ahead.difference_update(self._added)


def is_all(count: int, drawn: Sized) -> bool:
    """Whether so many are all that can be drawn; not where the length is not known (yet)."""
    try:
        return count >= len(drawn)
    except (TypeError, NotImplementedError):
        return False


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as few: the first of each run of successive ones, and that after its last."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs


def numbers_of(runs: Iterable[list[int]]) -> frozenset[int]:
    """The numbers that :func:`runs_of` had."""
    return frozenset(itertools.chain.from_iterable(range(*run) for run in runs))
