"""A list that lies in shared memory."""

import itertools
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar, overload

from shmloader.shared.records import Records

_T = TypeVar("_T")

# Items that a repr shows at either end.
_SHOWN = 3


class SharedList(Sequence[_T]):
    """A list, or tuple, whose items lie in shared memory, once for all processes.

    It reads as the list does, but for two things: an item is built when it is asked for, a new
    object each time, so that changing one changes nothing here; and the list cannot be changed.
    It equals a list, a tuple or another of its kind with equal items. A slice is a view, and has no
    memory of its own. Pickled, it is a handle. A text of a hundred characters takes 0.3 µs.

    Made by :func:`shmloader.share`.
    """

    __slots__ = ("_range", "_read", "_records")

    def __init__(self, records: Records, selected: range | None = None) -> None:
        """Items of ``records``: all, or the selected ones."""
        self._records = records
        self._range = range(len(records)) if selected is None else selected
        self._read = records.__getitem__

    def __reduce__(self) -> tuple[Any, ...]:
        """A handle."""
        return SharedList, (self._records, self._range)

    def __len__(self) -> int:
        """How many items."""
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> "SharedList[_T]": ...
    def __getitem__(self, index: Any) -> Any:
        """An item, from either end; or a view of some, for a slice.

        Raises:
            IndexError: If there is no such item.
            TypeError: If the index is neither a whole number nor a slice.
        """
        try:
            number = self._range[index]
        except IndexError:
            raise IndexError("list index out of range") from None
        except TypeError:
            raise TypeError(
                f"list indices must be integers or slices, not {type(index).__name__}"
            ) from None
        if type(number) is range:
            return SharedList(self._records, number)
        return self._read(number)

    def __iter__(self) -> Iterator[_T]:
        """The items, each built in its turn."""
        return map(self._read, self._range)

    def __eq__(self, other: object) -> bool:
        """Whether the other is a list, tuple or shared list of equal items."""
        if not isinstance(other, SharedList | list | tuple):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(map(_is_equal, self, other))

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __repr__(self) -> str:
        """All items of a short one; of a long one those at either end, and how many there are."""
        count = len(self)
        if count <= 2 * _SHOWN:
            return f"SharedList({list(self)!r})"
        shown = [reprlib.repr(item) for item in self[:_SHOWN]]
        shown += ["...", *(reprlib.repr(item) for item in self[-_SHOWN:])]
        return f"SharedList([{', '.join(shown)}], {count} items)"

    def __add__(self, other: Any) -> list[_T]:
        """An ordinary list of both's items, as of two lists."""
        if not isinstance(other, SharedList | list | tuple):
            return NotImplemented
        return list(itertools.chain(self, other))

    def __radd__(self, other: Any) -> list[_T]:
        """The same, the other first."""
        if not isinstance(other, SharedList | list | tuple):
            return NotImplemented
        return list(itertools.chain(other, self))

    def __setitem__(self, index: object, value: object = None) -> NoReturn:
        """Refuse.

        Raises:
            TypeError: Always, with what to do instead.
        """
        raise TypeError(
            "a SharedList cannot be changed, since all processes read the one copy: change "
            "list(shared) and share that, or keep what changes in a dict beside it"
        )

    __delitem__ = __setitem__


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)
