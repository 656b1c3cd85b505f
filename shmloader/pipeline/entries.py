"""What flows through a pipeline: items, exceptions, the end, and the checkpoints between. Pure."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class Raised:
    """An exception that travels like an item, and that the consumer is to raise."""

    error: BaseException


class Mark:
    """A marker that stands where there is no item."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: There is no item yet.
NOTHING = Mark("NOTHING")

#: There will be no further item.
END = Mark("END")


class Checkpoint(NamedTuple):
    """The position after an item, where a resumed epoch begins.

    Attributes:
        saved: What the source's own ``state_dict()`` returned; None if it has none.
        read: How many items the source has yielded since ``saved`` (or since its beginning) that
            are complete: all their results came before this position.
        results: Which results of incomplete items came before this position. Each pair has a
            stage's number, and how many results of the first item that the stage gets in the
            resumed epoch came before. Pairs are in ascending order of the stage's number.
    """

    saved: object
    read: int
    results: tuple[tuple[int, int], ...] = ()

    def upto(self, number: int) -> "Checkpoint":
        """Return the position before the first item that stage ``number`` gets."""
        results = tuple(one for one in self.results if one[0] < number)
        return Checkpoint(self.saved, self.read, results)

    def within(self, number: int, result_count: int) -> "Checkpoint":
        """Return the position after some results of the next item.

        Args:
            number: The stage that makes the results.
            result_count: How many of them came before the position.
        """
        return Checkpoint(self.saved, self.read, (*self.results, (number, result_count)))


# An item or a :class:`Raised`, and the checkpoint after it, or None if there is no checkpoint.
Entry = tuple[object, Checkpoint | None]
