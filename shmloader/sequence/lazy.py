"""The lazy sequences, except ``prefetch``."""

import abc
import bisect
import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from shmloader.sampling.checks import flag, whole_number

_OURS = str(Path(__file__).parent)


def _made_at() -> str:
    """Return the file and line that called this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class LazySequence(Sequence[Any]):
    """Base class of the lazy sequences: indices, slices, iteration, and notes on exceptions.

    Args:
        name: Name of the function that makes the sequence, or "slice".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._made_at = _made_at()

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def _compute(self, index: int) -> Any:
        """Return the item at an index, which is not negative."""

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "LazySequence": ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return an item, or for a slice a lazy sequence.

        Raises:
            IndexError: If there is no such item.
            Exception: Whatever computing the item raises, with a note.
        """
        if isinstance(index, slice):
            return _Gathered(self, self._slice(index), name="slice")
        position = self._position(operator.index(index))
        try:
            return self._compute(position)
        except Exception as error:
            with contextlib.suppress(Exception):  # an exception may refuse attributes
                error.add_note(
                    f"Item {position} of the {self._name} made at {self._made_at} failed."
                )
            raise

    def _slice(self, part: slice) -> range:
        return range(len(self))[part]

    def _position(self, index: int) -> int:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(
                f"the {self._name} made at {self._made_at} has {length} items, and "
                f"none of index {index}"
            )
        return index % length

    def __iter__(self) -> Iterator[Any]:
        # Sequence's __iter__ would take an IndexError that an item raises for the end.
        for index in range(len(self)):
            yield self[index]

    def __repr__(self) -> str:
        return f"<{self._name} made at {self._made_at}>"


class _Mapped(LazySequence):
    def __init__(self, function: Callable[..., Any], sequences: tuple[Sequence[Any], ...]) -> None:
        super().__init__("smap")
        self._function = function
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences[0])

    def _compute(self, index: int) -> Any:
        return self._function(*[sequence[index] for sequence in self._sequences])


def smap(f: Callable[..., Any], *seqs: Sequence[Any]) -> LazySequence:
    """Return a sequence whose item i is ``f(seqs[0][i], seqs[1][i], ...)``.

    Args:
        f: Called with one item of each sequence, whenever an item of the result is accessed.
        seqs: One or more sequences of the same length.

    Raises:
        TypeError: If ``f`` is not callable, or there is no sequence.
        ValueError: If the sequences differ in length.
    """
    if not callable(f):
        raise TypeError(f"f should be callable, but got f={f!r}")
    if not seqs:
        raise TypeError("smap needs at least one sequence")
    lengths = [len(sequence) for sequence in seqs]
    if len(set(lengths)) > 1:
        raise ValueError(f"smap needs sequences of the same length, but got lengths {lengths}")
    return _Mapped(f, seqs)


class _Gathered(LazySequence):
    def __init__(
        self, sequence: Sequence[Any], indices: Sequence[Any], name: str = "gather"
    ) -> None:
        super().__init__(name)
        self._sequence = sequence
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def _compute(self, index: int) -> Any:
        position = operator.index(self._indices[index])
        if position < 0:
            # The sequence itself may not support negative indices.
            length = len(self._sequence)
            if position < -length:
                raise IndexError(f"a sequence of {length} items has none of index {position}")
            position += length
        return self._sequence[position]


def gather(seq: Sequence[Any], indices: Sequence[Any]) -> LazySequence:
    """Return a sequence whose item i is ``seq[indices[i]]``: reordered, selected or repeated items.

    Args:
        seq: A sequence.
        indices: A sequence of ints (a list, a range, an array). Negative ones count from the end.
            They are checked when an item is accessed, which raises IndexError for one out of range.
    """
    return _Gathered(seq, indices)


class _Batched(LazySequence):
    def __init__(
        self,
        sequence: Sequence[Any],
        size: int,
        *,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__("batch")
        self._sequence = sequence
        self._size = size
        self._drop_last = drop_last
        self._collate_fn = collate_fn

    def __len__(self) -> int:
        whole, left = divmod(len(self._sequence), self._size)
        return whole + (left > 0 and not self._drop_last)

    def _compute(self, index: int) -> Any:
        start = index * self._size
        end = min(start + self._size, len(self._sequence))
        items = [self._sequence[position] for position in range(start, end)]
        return items if self._collate_fn is None else self._collate_fn(items)


def batch(
    seq: Sequence[Any],
    k: int,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> LazySequence:
    """Return a sequence of batches: item i is a list of the items from ``i * k`` on, at most ``k``.

    Args:
        seq: A sequence.
        k: Number of items in a batch.
        drop_last: Whether a shorter last batch is left out.
        collate_fn: Called with each list. Its result is the item. With None, the list itself is.

    Raises:
        TypeError, ValueError: If ``k``, ``drop_last`` or ``collate_fn`` is invalid.
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn should be callable, but got collate_fn={collate_fn!r}")
    return _Batched(
        seq,
        whole_number(k, "k", minimum=1),
        drop_last=flag(drop_last, "drop_last"),
        collate_fn=collate_fn,
    )


class _Concatenated(LazySequence):
    def __init__(self, sequences: list[Sequence[Any]]) -> None:
        super().__init__("concatenate")
        self._sequences = sequences
        self._ends = list(itertools.accumulate(map(len, sequences)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _compute(self, index: int) -> Any:
        which = bisect.bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        return self._sequences[which][index - start]


def concatenate(seqs: Iterable[Sequence[Any]]) -> LazySequence:
    """Return a sequence of the items of several sequences, one sequence after the other."""
    return _Concatenated(list(seqs))


class _Cycled(LazySequence):
    def __init__(self, sequence: Sequence[Any], limit: int | None) -> None:
        super().__init__("cycle")
        self._sequence = sequence
        self._limit = limit

    def __len__(self) -> int:
        if self._limit is None:
            raise TypeError("a cycle without a limit has no length")
        return self._limit

    def _slice(self, part: slice) -> range:
        if self._limit is not None:
            return super()._slice(part)
        start, stop, step = part.start or 0, part.stop, 1 if part.step is None else part.step
        if stop is None or start < 0 or stop < 0 or step < 1:
            raise IndexError(f"a cycle without a limit has no end to count from: {part}")
        return range(start, stop, step)

    def _position(self, index: int) -> int:
        if self._limit is not None:
            return super()._position(index)
        if index < 0:
            raise IndexError(f"a cycle without a limit has no item of index {index}")
        return index

    def _compute(self, index: int) -> Any:
        return self._sequence[index % len(self._sequence)]

    def __iter__(self) -> Iterator[Any]:
        for index in itertools.count() if self._limit is None else range(self._limit):
            yield self[index]


def cycle(seq: Sequence[Any], limit: int | None = None) -> LazySequence:
    """Return a sequence of the items of ``seq``, repeated.

    Args:
        seq: A sequence that is not empty.
        limit: Total number of items; None for an endless sequence, for which ``len()`` raises
            TypeError.

    Raises:
        TypeError, ValueError: If ``limit`` is invalid, or ``seq`` is empty and ``limit`` is not 0.
    """
    if limit is not None:
        limit = whole_number(limit, "limit", minimum=0)
    if len(seq) == 0 and limit != 0:
        raise ValueError("cycle needs a sequence that is not empty")
    return _Cycled(seq, limit)
