"""What flows through a pipeline: items, exceptions, the end, and the checkpoints between. Pure."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class Raised:
    """Travels in an item's place: an exception that the consumer is to raise."""

    error: BaseException


class Mark:
    """Says that there is no item."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: There is no item yet.
NOTHING = Mark("NOTHING")

#: There will be no further item.
END = Mark("END")


class Checkpoint(NamedTuple):
    """Where an epoch begins that continues after an item.

    Attributes:
        saved: What the source's own ``state_dict()`` returned; None if it has none.
        read: Items of the source after that, or after its beginning, that are complete: all their
            results came before.
        results: Which results of the next items came before: pairs of a stage's number, in
            ascending order, and how many results of the first item that it gets.
    """

    saved: object
    read: int
    results: tuple[tuple[int, int], ...] = ()

    def upto(self, number: int) -> "Checkpoint":
        """Return where the first item that stage ``number`` gets begins."""
        results = tuple(one for one in self.results if one[0] < number)
        return Checkpoint(self.saved, self.read, results)

    def within(self, number: int, result_count: int) -> "Checkpoint":
        """Return the checkpoint after some results that stage ``number`` makes of the next item."""
        return Checkpoint(self.saved, self.read, (*self.results, (number, result_count)))


# An item or a :class:`Raised`, and the checkpoint after it: None if there is none.
Entry = tuple[object, Checkpoint | None]
