"""``PipelineDataLoader``: the usual chain of stages in one call."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from shmloader.engine.failures import FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.pipeline.builder import PipelineBuilder
from shmloader.pipeline.failures import FailedItem
from shmloader.pipeline.ops import kind_of
from shmloader.pipeline.plan import Executor, OutputOrder, Source
from shmloader.sampling.checks import flag, whole_number


class PipelineDataLoader:
    """Loads from a source: each item is preprocessed, items become batches, batches are moved.

    source → ``preprocessor`` → lists of ``batch_size`` → ``aggregator`` → ``transfer_fn`` → buffer.
    What is None is left out of the chain. It can be iterated again and again if the source can;
    each epoch is one run through the source. Threads and worker processes start with the first, and
    persist until :meth:`close`, the end of a ``with`` block, or until the loader is garbage. Errors
    and ends are those of :class:`Pipeline`, and so is the bound on what is in flight.

    Args:
        src: An iterable, iterated on a thread of its own, or an async iterable.
        preprocessor: Called with each item: a function or a coroutine function, or a generator
            function of either kind. None returned leaves the item out.
        batch_size: Items of a batch; None: items are not put together.
        drop_last: Whether a last batch that is shorter is left out.
        aggregator: Makes a batch of a list of items; None: batches are lists.
        transfer_fn: Called with each batch, or item without ``batch_size``, one at a time, on any
            of the threads, of which there is one more for it: what moves it to a GPU, say.
        buffer_size: Batches that may be ready and wait.
        num_threads: How many items are preprocessed at once, and how many batches are aggregated at
            once: by threads which both share, or by as many processes for each of both.
        timeout: Seconds to wait for a batch at most; None: for ever.
        output_order: "completion": as items and batches are ready. "input": in the source's order.
        executor: Who calls ``preprocessor`` and ``aggregator``, unless they are coroutine
            functions: "thread", "process" (results in shared-memory slots), or an ``Executor`` of
            ``concurrent.futures``. See :meth:`PipelineBuilder.pipe`.

    Raises:
        TypeError, ValueError: For arguments that do not fit.
    """

    def __init__(
        self,
        src: Source,
        *,
        preprocessor: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        aggregator: Callable[[list[Any]], Any] | None = None,
        transfer_fn: Callable[[Any], Any] | None = None,
        buffer_size: int = 3,
        num_threads: int = 8,
        timeout: float | None = None,
        output_order: OutputOrder = "completion",
        executor: Executor = "thread",
    ) -> None:
        flag(drop_last, "drop_last")
        whole_number(num_threads, "num_threads", minimum=1)
        given = {"aggregator": aggregator is not None, "drop_last": drop_last}
        for name, is_given in given.items():
            if is_given and batch_size is None:
                raise ValueError(f"{name} needs batch_size: without it there are no batches")
        ops = {"preprocessor": preprocessor, "aggregator": aggregator, "transfer_fn": transfer_fn}
        for name, op in ops.items():
            if op is not None and not callable(op):
                raise TypeError(f"{name} should be callable, but got {name}={op!r}")
        builder = PipelineBuilder().add_source(src)

        def pipe(op: Callable[[Any], Any]) -> None:
            own = None if kind_of(op).is_async else executor
            builder.pipe(op, concurrency=num_threads, executor=own, output_order=output_order)

        # Checked even where nobody uses it.
        PipelineBuilder().pipe(_same, executor=executor, output_order=output_order)
        if preprocessor is not None:
            pipe(preprocessor)
        if batch_size is not None:
            builder.aggregate(whole_number(batch_size, "batch_size", minimum=1), drop_last)
        if aggregator is not None:
            pipe(aggregator)
        if transfer_fn is not None:
            builder.pipe(transfer_fn)
        has_own_thread = transfer_fn is not None and not kind_of(transfer_fn).is_async
        self._pipeline = builder.add_sink(buffer_size).build(
            num_threads=num_threads + has_own_thread, timeout=timeout
        )
        self._is_closed = False

    @property
    def failures(self) -> FailureList[FailedItem]:
        """Items that were left out; see :class:`Pipeline`."""
        return self._pipeline.failures

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; one that is under way is left.

        Raises:
            ClosedLoaderError: After ``close()``.
            RuntimeError: If the source is an iterator, and an epoch before has used it.
        """
        if self._is_closed:
            raise ClosedLoaderError("the loader is closed")
        self._pipeline.start()
        return self._pipeline.get_iterator()

    def close(self) -> None:
        """End threads and worker processes. May be called again."""
        self._is_closed = True
        self._pipeline.stop()

    def __enter__(self) -> Self:
        """The loader itself; closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def _same(item: object) -> object:
    return item
