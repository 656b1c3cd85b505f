"""The lazy sequences but ``prefetch``; each computes an item when it is asked for."""

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
    """File and line of whoever has called into this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class LazySequence(Sequence[Any]):
    """What all of them have: indices, slices, iteration, and notes on what fails.

    Args:
        name: Of the function that makes it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._made_at = _made_at()

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many items there are."""

    @abc.abstractmethod
    def _compute(self, index: int) -> Any:
        """The item of an index from 0 up."""

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "LazySequence": ...
    def __getitem__(self, index: int | slice) -> Any:
        """An item; or a lazy sequence, for a slice.

        Raises:
            IndexError: If there is no such item.
            Exception: What computing it raises, with a note.
        """
        if isinstance(index, slice):
            return _Gathered(self, self._sliced(index), name="slice")
        place = self._place(operator.index(index))
        try:
            return self._compute(place)
        except Exception as error:
            with contextlib.suppress(Exception):  # an exception may refuse attributes
                error.add_note(f"Item {place} of the {self._name} made at {self._made_at} failed.")
            raise

    def _sliced(self, part: slice) -> range:
        return range(len(self))[part]

    def _place(self, index: int) -> int:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(
                f"the {self._name} made at {self._made_at} has {length} items, and "
                f"none of index {index}"
            )
        return index % length

    def __iter__(self) -> Iterator[Any]:
        # Not by way of IndexError, which an item may raise: that would end the loop in silence.
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
    """Item i is ``f`` of the items i of all sequences.

    Raises:
        TypeError: If ``f`` is not callable, or there is no sequence.
        ValueError: If the sequences are not of one length.
    """
    if not callable(f):
        raise TypeError(f"f should be callable, but got f={f!r}")
    if not seqs:
        raise TypeError("smap needs a sequence")
    lengths = [len(sequence) for sequence in seqs]
    if len(set(lengths)) > 1:
        raise ValueError(f"smap needs sequences of one length, but got lengths {lengths}")
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
        place = operator.index(self._indices[index])
        if place < 0:
            # Not left to the sequence, which may know none: nor is what is too far back, since the
            # sum would be negative again, and another item's.
            length = len(self._sequence)
            if place < -length:
                raise IndexError(f"a sequence of {length} items has none of index {place}")
            place += length
        return self._sequence[place]


def gather(seq: Sequence[Any], indices: Sequence[Any]) -> LazySequence:
    """Item i is ``seq[indices[i]]``: another order, a selection, repetitions.

    Args:
        seq: A sequence.
        indices: Whole numbers, as a sequence (a list, a range, an array); negative ones count from
            the end.
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
        whole, rest = divmod(len(self._sequence), self._size)
        return whole + (rest > 0 and not self._drop_last)

    def _compute(self, index: int) -> Any:
        start = index * self._size
        end = min(start + self._size, len(self._sequence))
        items = [self._sequence[place] for place in range(start, end)]
        return items if self._collate_fn is None else self._collate_fn(items)


def batch(
    seq: Sequence[Any],
    k: int,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> LazySequence:
    """Item i is the list of the i-th ``k`` items, or what ``collate_fn`` makes of it.

    Args:
        seq: A sequence.
        k: Items of a batch.
        drop_last: Whether a last batch that is shorter is left out.
        collate_fn: Called with the list; None: the list itself.

    Raises:
        TypeError, ValueError: For arguments that do not fit.
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
    """The items of several sequences, one sequence after the other."""
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

    def _sliced(self, part: slice) -> range:
        if self._limit is not None:
            return super()._sliced(part)
        start, stop, step = part.start or 0, part.stop, 1 if part.step is None else part.step
        if stop is None or start < 0 or stop < 0 or step < 1:
            raise IndexError(f"a cycle without a limit has no end to count from: {part}")
        return range(start, stop, step)

    def _place(self, index: int) -> int:
        if self._limit is not None:
            return super()._place(index)
        if index < 0:
            raise IndexError(f"a cycle without a limit has no item of index {index}")
        return index

    def _compute(self, index: int) -> Any:
        return self._sequence[index % len(self._sequence)]

    def __iter__(self) -> Iterator[Any]:
        for index in itertools.count() if self._limit is None else range(self._limit):
            yield self[index]


def cycle(seq: Sequence[Any], limit: int | None = None) -> LazySequence:
    """The items again and again.

    Args:
        seq: A sequence that is not empty.
        limit: How many items there are in all; None: no end, and no length.

    Raises:
        TypeError, ValueError: For arguments that do not fit.
    """
    if limit is not None:
        limit = whole_number(limit, "limit", minimum=0)
    if len(seq) == 0 and limit != 0:
        raise ValueError("cycle needs a sequence that is not empty")
    return _Cycled(seq, limit)
