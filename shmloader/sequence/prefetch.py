"""``prefetch``: items computed ahead, by the loader's engine.

The sequence is a loader's dataset, each index a ticket of its own. Order, slots, failures, deaths
and ends are the loader's.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from shmloader.loader.dataloader import DataLoader
from shmloader.sampling.checks import whole_number
from shmloader.sequence.lazy import LazySequence


class _From:
    """The order: indices from ``start`` on."""

    def __init__(self, length: int) -> None:
        self.start = 0
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self._length))


def _as_it_is(item: Any) -> Any:
    return item


class _Hook:
    """A worker's ``worker_init_fn`` that is not told the number."""

    def __init__(self, hook: Callable[[], Any]) -> None:
        self._hook = hook

    def __call__(self, _worker_id: int) -> None:
        self._hook()


class _Loader(DataLoader[Any]):
    """A loader with a window of its own.

    Args:
        window: Items in flight.
        options: Of :class:`DataLoader`.
    """

    def __init__(self, window: int, **options: Any) -> None:
        self._window = window
        super().__init__(**options)

    def _window_wanted(self) -> int:
        return self._window


class _Prefetched(LazySequence):
    """See :func:`prefetch`. Its workers start with the first item that is asked for."""

    def __init__(self, sequence: Sequence[Any], window: int, **options: Any) -> None:
        super().__init__("prefetch")
        self._sequence = sequence
        self._window = window
        self._options = options
        self._begin_anew()
        self._make_loader()  # which tells at once what is wrong with the arguments

    def _begin_anew(self) -> None:
        self._order = _From(len(self._sequence))
        self._loader: _Loader | None = None
        self._items: Any = None
        # The item that comes next out of the engine.
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

    def __len__(self) -> int:
        return len(self._sequence)

    def _compute(self, index: int) -> Any:
        if self._pid != os.getpid():
            self._begin_anew()  # a forked child, as a loader's worker is: what runs is its parent's
        if self._loader is None:
            self._loader = self._make_loader()
        if index != self._next or self._items is None or self._items.is_closed:
            self._order.start = index
            self._items = iter(self._loader)
        self._next = index + 1
        try:
            return next(self._items)
        except StopIteration:
            raise RuntimeError(
                f"the sequence has changed its length: it had {len(self._order)} items when "
                "prefetch was made"
            ) from None
        except Exception:
            raise  # the item's own: the next one comes all the same
        except BaseException:
            self._items = None  # a Ctrl-C: nobody knows what comes next
            raise

    def close(self) -> None:
        """End the workers; the next item that is asked for starts new ones."""
        if self._loader is not None:
            self._loader.close()
        self._begin_anew()

    def __getstate__(self) -> dict[str, Any]:
        """All but what runs."""
        state = self.__dict__.copy()
        del state["_loader"], state["_items"], state["_next"], state["_order"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`__getstate__` gave."""
        self.__dict__.update(state)
        self._begin_anew()


def prefetch(
    seq: Sequence[Any],
    nworkers: int = 0,
    method: Literal["thread", "process"] = "thread",
    max_buffered: int = 10,
    start_hook: Callable[[], Any] | None = None,
    shm_size: int | str | None = None,
) -> LazySequence:
    """The same items, computed ahead of whoever reads them in order.

    An item that is not the one after the last begins the window anew: put ``gather`` inside of
    ``prefetch``, not around it. Workers start with the first item that is asked for, and end when
    the sequence is garbage, or by its ``close()``. One thread at a time uses it. A failed item
    raises, and the next ones come all the same.

    Args:
        seq: A sequence; shared by the threads, or copied to the processes.
        nworkers: Threads or processes; 0: as many as there are cores.
        method: "thread", or "process": items come in shared-memory slots.
        max_buffered: Items computed, or under way, ahead.
        start_hook: Called in each worker before its first item.
        shm_size: Cap on the shared memory: bytes, or text such as ``"512MiB"``; see
            :class:`shmloader.DataLoader`. With "process" only.

    Raises:
        TypeError, ValueError: For arguments that do not fit.
    """
    if method not in ("thread", "process"):
        raise ValueError(f"method should be 'thread' or 'process', but got method={method!r}")
    if start_hook is not None and not callable(start_hook):
        raise TypeError(f"start_hook should be callable, but got start_hook={start_hook!r}")
    count = whole_number(nworkers, "nworkers", minimum=0) or len(os.sched_getaffinity(0))
    window = whole_number(max_buffered, "max_buffered", minimum=1)
    count = min(count, window)  # more would find nothing to do
    return _Prefetched(
        seq,
        window,
        num_workers=count,
        prefetch_factor=window // count,  # for torch's workers, where ours are not supported
        thread_pool=method == "thread",
        worker_init_fn=None if start_hook is None else _Hook(start_hook),
        shm_size=shm_size,
    )
