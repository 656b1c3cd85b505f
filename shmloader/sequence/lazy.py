"""The lazy sequences, except ``prefetch``."""

import bisect
import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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
    """A sequence whose items are computed: indices, slices, iteration, and notes on exceptions.

    Args:
        name: Name of the function that makes the sequence, or "slice".
        length: Number of items; None if it is endless.
        compute: Returns the item at an index, which is not negative.
    """

    def __init__(self, name: str, length: int | None, compute: Callable[[int], Any]) -> None:
        self._name, self._length, self._compute = name, length, compute
        self._made_at = _made_at()

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("a cycle without a limit has no length")
        return self._length

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
            if self._length is not None:
                part = range(self._length)[index]
            elif index.stop is not None and min(index.start or 0, index.stop) >= 0:
                part = range(index.start or 0, index.stop, index.step or 1)
            else:
                raise IndexError(f"a cycle without a limit has no end to count from: {index}")
            return LazySequence("slice", len(part), partial(_gathered, self, part))
        position = operator.index(index)
        if position < 0 and self._length is not None:
            position += self._length
        if position < 0 or (self._length is not None and position >= self._length):
            many = "without a limit" if self._length is None else f"of {self._length} items"
            raise IndexError(
                f"the {self._name} {many} made at {self._made_at} has none of index {index}"
            )
        try:
            return self._compute(position)
        except Exception as error:
            with contextlib.suppress(Exception):  # an exception may refuse attributes
                error.add_note(
                    f"Item {position} of the {self._name} made at {self._made_at} failed."
                )
            raise

    def __iter__(self) -> Iterator[Any]:
        # Sequence's __iter__ would take an IndexError that an item raises for the end.
        for index in itertools.count() if self._length is None else range(self._length):
            yield self[index]

    def __repr__(self) -> str:
        return f"<{self._name} made at {self._made_at}>"


def _mapped(f: Callable[..., Any], sequences: tuple[Sequence[Any], ...], index: int) -> Any:
    return f(*[sequence[index] for sequence in sequences])


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
    return LazySequence("smap", lengths[0], partial(_mapped, f, seqs))


def _gathered(sequence: Sequence[Any], indices: Sequence[Any], index: int) -> Any:
    position = operator.index(indices[index])
    if position < 0:  # the sequence itself may not support negative indices
        position += len(sequence)
    if position < 0:
        raise IndexError(f"a sequence of {len(sequence)} items has none of index {indices[index]}")
    return sequence[position]


def gather(seq: Sequence[Any], indices: Sequence[Any]) -> LazySequence:
    """Return a sequence whose item i is ``seq[indices[i]]``: reordered, selected or repeated items.

    Args:
        seq: A sequence.
        indices: A sequence of ints (a list, a range, an array). Negative ones count from the end.
            They are checked when an item is accessed, which raises IndexError for one out of range.
    """
    return LazySequence("gather", len(indices), partial(_gathered, seq, indices))


def _batched(
    sequence: Sequence[Any], size: int, collate_fn: Callable[[list[Any]], Any] | None, index: int
) -> Any:
    end = min((index + 1) * size, len(sequence))
    items = [sequence[position] for position in range(index * size, end)]
    return items if collate_fn is None else collate_fn(items)


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
    size = whole_number(k, "k", minimum=1)
    whole, left = divmod(len(seq), size)
    count = whole if flag(drop_last, "drop_last") else whole + (left > 0)
    return LazySequence("batch", count, partial(_batched, seq, size, collate_fn))


def _concatenated(sequences: list[Sequence[Any]], ends: list[int], index: int) -> Any:
    which = bisect.bisect_right(ends, index)
    return sequences[which][index - (ends[which - 1] if which else 0)]


def concatenate(seqs: Iterable[Sequence[Any]]) -> LazySequence:
    """Return a sequence of the items of several sequences, one sequence after the other."""
    sequences = list(seqs)
    ends = list(itertools.accumulate(map(len, sequences)))
    length = ends[-1] if ends else 0
    return LazySequence("concatenate", length, partial(_concatenated, sequences, ends))


def _cycled(sequence: Sequence[Any], index: int) -> Any:
    return sequence[index % len(sequence)]


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
    return LazySequence("cycle", limit, partial(_cycled, seq))
