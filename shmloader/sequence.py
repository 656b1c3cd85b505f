"""Lazy sequences: an item is computed when it is accessed.

Each function takes objects with ``len()`` and ``[index]`` and returns another such object. Items
are computed when they are accessed, and not kept. Indices may be negative. A slice is a lazy
sequence as well. A lazy sequence can be pickled if the sequences and functions that it is made of
can be pickled.

``prefetch`` computes items ahead, on threads or in worker processes. The sequence is then a
loader's dataset, and each index is a ticket. So the loader takes care of order, slots, failures,
deaths of workers and shutdown.
"""

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from shmloader.grammar import counted
from shmloader.loader.dataloader import DataLoader
from shmloader.sampling.arguments import choice, flag, whole_number

__all__ = ["batch", "concatenate", "cycle", "gather", "prefetch", "smap"]


class LazySequence(Sequence[Any]):
    """A sequence whose items are computed: indices, slices and iteration.

    Indices that are computed are not negative.
    """

    _compute: Callable[[int], Any]

    def __init__(self, name: str, length: int, compute: Callable[[int], Any] | None = None) -> None:
        self._name, self._length = name, length
        if compute is not None:
            self._compute = compute

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Return an item, or for a slice a lazy sequence.

        Raises:
            IndexError: If there is no such item.
            Exception: Whatever computing the item raises.
        """
        position = range(self._length)[index]
        if isinstance(position, range):
            part = partial(_mapped, self.__getitem__, (position,))
            return LazySequence("slice", len(position), part)
        return self._compute(position)

    def __iter__(self) -> Iterator[Any]:
        # Sequence's __iter__ would take an IndexError that an item raises for the end.
        return (self[index] for index in range(self._length))

    def __repr__(self) -> str:
        return f"<{self._name} of {counted(self._length, 'item')}>"


def _mapped(f: Callable[..., Any], sequences: tuple[Sequence[Any], ...], index: int) -> Any:
    return f(*[sequence[index] for sequence in sequences])


def smap(f: Callable[..., Any], *seqs: Sequence[Any]) -> LazySequence:
    """Return a sequence whose item i is ``f(seqs[0][i], seqs[1][i], ...)``.

    Args:
        f: Called with one item of each sequence, whenever an item of the result is accessed.
        seqs: One or more sequences of the same length.

    Raises:
        TypeError: If ``f`` is not callable.
        ValueError: If there is no sequence, or the sequences differ in length.
    """
    _check_callable(f, "f")
    lengths = [len(sequence) for sequence in seqs]
    if len(set(lengths)) != 1:
        raise ValueError(f"smap needs sequences of the same length, but got lengths {lengths}")
    return LazySequence("smap", lengths[0], partial(_mapped, f, seqs))


def _gathered(sequence: Sequence[Any], indices: Sequence[Any], index: int) -> Any:
    position = indices[index]
    # The sequence itself may not support negative indices.
    return sequence[range(len(sequence))[position] if position < 0 else position]


def gather(seq: Sequence[Any], indices: Sequence[Any]) -> LazySequence:
    """Return a sequence whose item i is ``seq[indices[i]]``: reordered, selected or repeated items.

    Args:
        seq: A sequence.
        indices: A sequence of ints (a list, a range, an array). Negative ones count from the end.
            They are checked when an item is accessed, which raises IndexError for one out of range.
    """
    return LazySequence("gather", len(indices), partial(_gathered, seq, indices))


def _batched(
    sequence: Sequence[Any], size: int, collate_fn: Callable[[list[Any]], Any], index: int
) -> Any:
    end = min((index + 1) * size, len(sequence))
    return collate_fn([sequence[position] for position in range(index * size, end)])


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
    collate_fn = _unchanged if collate_fn is None else collate_fn
    _check_callable(collate_fn, "collate_fn")
    size = whole_number(k, "k", minimum=1)
    whole, left = divmod(len(seq), size)
    count = whole if flag(drop_last, "drop_last") else whole + (left > 0)
    return LazySequence("batch", count, partial(_batched, seq, size, collate_fn))


def _unchanged(items: Any) -> Any:
    return items


def _check_callable(function: object, argument: str) -> None:
    if not callable(function):
        raise TypeError(f"{argument} should be callable, but got {argument}={function!r}")


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


def cycle(seq: Sequence[Any], limit: int) -> LazySequence:
    """Return a sequence of the items of ``seq``, repeated.

    Args:
        seq: A sequence that is not empty.
        limit: Total number of items.

    Raises:
        TypeError, ValueError: If ``limit`` is invalid, or ``seq`` is empty and ``limit`` is not 0.
    """
    length = whole_number(limit, "limit", minimum=0)
    if len(seq) == 0 and length:
        raise ValueError("cycle needs a sequence that is not empty")
    return LazySequence("cycle", length, partial(_cycled, seq))


# Prefetching -----------------------------------------------------------------------------


class _OrderFrom:
    """A sampler of the indices from ``start`` to the end of the sequence."""

    def __init__(self, length: int) -> None:
        self.start, self._length = 0, length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self._length))


def _run_hook(hook: Callable[[], Any], _worker_id: int) -> None:
    hook()


class _Prefetched(LazySequence):
    """The sequence that :func:`prefetch` returns. Its workers start at the first access."""

    def __init__(self, sequence: Sequence[Any], options: dict[str, Any]) -> None:
        super().__init__("prefetch", len(sequence))
        self._args = sequence, options
        self._open()

    def _open(self) -> None:
        """Make a loader of this process: a forked child has one of its own."""
        sequence, options = self._args
        self._pid, self._order = os.getpid(), _OrderFrom(self._length)
        self._loader: DataLoader[Any] = DataLoader(
            sequence,  # type: ignore[arg-type] # not of torch's class
            batch_size=None,
            sampler=self._order,
            collate_fn=_unchanged,
            persistent_workers=True,
            **options,
        )
        self._items: Any = None
        # Index of the item that the loader delivers next; -1 if that is not known.
        self._next = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._args

    def _compute(self, index: int) -> Any:
        if self._pid != os.getpid():
            self._open()
        if index != self._next or getattr(self._items, "is_closed", False):
            self._order.start = index
            self._items = iter(self._loader)
        self._next = -1
        item = next(self._items)
        self._next = index + 1
        return item

    def close(self) -> None:
        """Stop the workers. Accessing an item after that starts new ones."""
        self._loader.close()
        self._open()


def prefetch(
    seq: Sequence[Any],
    nworkers: int = 0,
    method: Literal["thread", "process"] = "thread",
    max_buffered: int = 10,
    start_hook: Callable[[], Any] | None = None,
    shm_size: int | str | None = None,
) -> LazySequence:
    """Return a sequence of the same items, computed ahead while they are read in order.

    Reading an item out of order discards the items computed ahead. So put ``gather`` inside
    ``prefetch``, not around it. Workers start when the first item is read. They stop when the
    sequence is garbage-collected, or by its ``close()``. Only one thread at a time may use the
    sequence. If computing an item raises, reading that item raises, too; the following items are
    not affected.

    Args:
        seq: A sequence, shared by the threads or copied to the processes.
        nworkers: Number of threads or processes; 0 for the number of cores that this process may
            use. At most ``max_buffered`` are started.
        method: "thread" or "process". Processes send items in shared-memory slots.
        max_buffered: Maximum number of items computed ahead, including those in progress.
        start_hook: Called in each worker before its first item.
        shm_size: Cap on the shared memory, in bytes or as text such as ``"512MiB"``; see
            :class:`shmloader.DataLoader`. Only with "process".

    Raises:
        TypeError, ValueError: If an argument is invalid.
    """
    choice(method, "method", ("thread", "process"))
    if start_hook is not None:
        _check_callable(start_hook, "start_hook")
    count = whole_number(nworkers, "nworkers", minimum=0) or len(os.sched_getaffinity(0))
    window = whole_number(max_buffered, "max_buffered", minimum=1)
    count = min(count, window)  # more workers would be idle
    options = {
        "num_workers": count,
        "prefetch_factor": window // count,
        "thread_pool": method == "thread",
        "worker_init_fn": start_hook and partial(_run_hook, start_hook),
        "shm_size": shm_size,
    }
    return _Prefetched(seq, options)
