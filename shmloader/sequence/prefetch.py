"""``prefetch``: computes the items of a sequence ahead, with a loader.

The sequence is the loader's dataset, and each index is a ticket. So the loader takes care of order,
slots, failures, deaths of workers and shutdown.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from shmloader.loader.config import Sharing
from shmloader.loader.dataloader import DataLoader
from shmloader.sampling.checks import whole_number
from shmloader.sequence.lazy import LazySequence


class _OrderFrom:
    """A sampler of the indices from ``start`` to the end of the sequence."""

    def __init__(self, length: int) -> None:
        self.start = 0
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self._length))


def _as_it_is(item: Any) -> Any:
    return item


def _run_hook(hook: Callable[[], Any], _worker_id: int) -> None:
    hook()


class _Loader(DataLoader[Any]):
    """A loader whose window is an argument, and not computed from ``prefetch_factor``.

    Args:
        window: Maximum number of items in flight.
        options: Other arguments of :class:`DataLoader`.
    """

    def __init__(self, window: int, **options: Any) -> None:
        self._sharing = Sharing(window=window)
        super().__init__(**options)


class _Reader:
    """Reads the items with a loader, which is made at the first access."""

    def __init__(self, sequence: Sequence[Any], window: int, options: dict[str, Any]) -> None:
        self._sequence, self._window, self._options = sequence, window, options
        self._length = len(sequence)
        self._reset()
        self._make_loader()  # raises now if an argument is invalid

    def _reset(self) -> None:
        self._order = _OrderFrom(self._length)
        self._loader: _Loader | None = None
        self._items: Any = None
        # Index of the item that the loader delivers next; -1 if that is not known.
        self._next = -1
        self._pid = os.getpid()

    def _make_loader(self) -> _Loader:
        return _Loader(
            self._window,
            dataset=self._sequence,
            batch_size=None,
            sampler=self._order,
            collate_fn=_as_it_is,
            persistent_workers=True,
            **self._options,
        )

    def read(self, index: int) -> Any:
        """Return an item."""
        if self._pid != os.getpid():
            self._reset()  # in a forked child, the loader still belongs to the parent
        if self._loader is None:
            self._loader = self._make_loader()
        if index != self._next or self._items.is_closed:
            self._order.start = index
            self._items = iter(self._loader)
        self._next = -1
        item = next(self._items)
        self._next = index + 1
        return item

    def close(self) -> None:
        """Stop the workers."""
        if self._loader is not None:
            self._loader.close()
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the loader and its state."""
        state = self.__dict__.copy()
        del state["_loader"], state["_items"], state["_next"], state["_order"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


class _Prefetched(LazySequence):
    """The sequence that :func:`prefetch` returns."""

    def __init__(self, sequence: Sequence[Any], window: int, **options: Any) -> None:
        self._reader = _Reader(sequence, window, options)
        super().__init__("prefetch", len(sequence), self._reader.read)

    def close(self) -> None:
        """Stop the workers. Accessing an item after that starts new ones."""
        self._reader.close()


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
    if method not in ("thread", "process"):
        raise ValueError(f"method should be 'thread' or 'process', but got method={method!r}")
    if start_hook is not None and not callable(start_hook):
        raise TypeError(f"start_hook should be callable, but got start_hook={start_hook!r}")
    count = whole_number(nworkers, "nworkers", minimum=0) or len(os.sched_getaffinity(0))
    window = whole_number(max_buffered, "max_buffered", minimum=1)
    count = min(count, window)  # more workers would be idle
    return _Prefetched(
        seq,
        window,
        num_workers=count,
        prefetch_factor=window // count,  # for torch's workers where ours are not supported
        thread_pool=method == "thread",
        worker_init_fn=start_hook and functools.partial(_run_hook, start_hook),
        shm_size=shm_size,
    )
