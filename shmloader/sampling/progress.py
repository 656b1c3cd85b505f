"""How far an epoch has come, told by what the user was given."""


class Progress:
    """How far the newest epoch of a loader has come.

    A ticket is done when its batch, or an exception in its place, was handed over, or when it was
    left out since nothing was left of it. Used on the user's thread.

    Attributes:
        position: All tickets of the epoch before this number are done.
        ahead: Numbers of those after it that are done, too (``in_order=False``).
        is_ended: Whether the user has seen the epoch's end.

    Args:
        position: Where the epoch goes on; 0 for a new one.
        ahead: What is not to be loaded again.
    """

    __slots__ = ("_given", "_start", "ahead", "is_ended", "position")

    def __init__(self, position: int = 0, ahead: frozenset[int] = frozenset()) -> None:
        self._start = self.position = position
        self._given = sorted(ahead)
        self.ahead = ahead
        self.is_ended = False

    def done(self, seq: int) -> None:
        """The ticket that was drawn as number ``seq`` since the epoch went on is done."""
        number = self._number(seq)
        if number == self.position and not self.ahead:
            self.position = number + 1
            return
        ahead, position = set(self.ahead), self.position
        ahead.add(number)
        while position in ahead:
            ahead.remove(position)
            position += 1
        self.ahead, self.position = frozenset(ahead), position

    def done_until(self, seq: int) -> None:
        """All tickets up to the one that was drawn as number ``seq`` are done."""
        self.position = self._number(seq) + 1
        if self._given:
            while self.position in self._given:
                self.position += 1
            self.ahead = frozenset(number for number in self._given if number > self.position)

    def _number(self, seq: int) -> int:
        """The number in the epoch of a ticket that was drawn since it went on."""
        number = self._start + seq
        for given in self._given:
            if given <= number:
                number += 1
        return number

    def mark(self) -> tuple[int, frozenset[int]]:
        """What :meth:`go_back` takes."""
        return self.position, self.ahead

    def go_back(self, mark: tuple[int, frozenset[int]]) -> None:
        """Take back what was noted since: it did not reach the user."""
        self.position, self.ahead = mark
