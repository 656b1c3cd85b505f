"""``PipelineDataLoader``: builds and runs the usual chain of stages in one call."""

from collections.abc import Callable
from typing import Any, Self

from shmloader.errors import LOADER_CLOSED, ClosedLoaderError
from shmloader.pipeline.builder import PipelineBuilder
from shmloader.pipeline.config import Executor, OutputOrder, Source, kind_of
from shmloader.pipeline.pipeline import Pipeline, PipelineIterator
from shmloader.sampling.checks import whole_number


class PipelineDataLoader(Pipeline):
    """Loads from a source: preprocesses each item, makes batches, and moves them to a device.

    source → ``preprocessor`` → lists of ``batch_size`` → ``aggregator`` → ``transfer_fn`` → buffer.
    Steps that are None are left out. Each epoch is one run through the source, so there are further
    epochs if the source can be iterated again. Threads and worker processes start with the first
    epoch, and persist until :meth:`close`, the end of a ``with`` block, or until the loader is
    garbage. It is a :class:`Pipeline`, with the same methods, errors and bounds.

    Args:
        src: An iterable, which is iterated on a thread of its own, or an async iterable.
        preprocessor: Called with each item: a function or a coroutine function, or a generator
            function of either kind. Results that are None are left out.
        batch_size: Number of items in a batch; None passes single items on.
        drop_last: Whether a shorter last batch is left out.
        aggregator: Makes a batch of a list of items. By default, batches are lists.
        transfer_fn: Called with each batch, or with each item if ``batch_size`` is None, one at a
            time: for instance to move it to a GPU. It runs on any of the pipeline's threads, and
            adds one to their number. A coroutine function runs on the event loop.
        buffer_size: Batches that may be ready and wait.
        num_threads: How many items are preprocessed at once, and how many batches are aggregated at
            once. Both steps share this number of threads. With processes, each step has this number
            of processes.
        timeout: Longest wait for a batch in seconds; None waits without a limit.
        output_order: "completion" passes items and batches on as they are ready, "input" in the
            order of the source. With ``num_threads`` above 1, ``state_dict()`` needs "input".
        executor: What calls ``preprocessor`` and ``aggregator``, unless they are coroutine
            functions: "thread", "process" (results in shared-memory slots), or an ``Executor`` of
            ``concurrent.futures``. See :meth:`PipelineBuilder.pipe`.

    Raises:
        TypeError, ValueError: For wrong arguments.
    """

    __module__ = "shmloader"  # users import it from there

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
        if batch_size is None and (aggregator is not None or drop_last):
            name = "drop_last" if aggregator is None else "aggregator"
            raise ValueError(f"{name} needs batch_size: without it there are no batches")
        builder = PipelineBuilder().add_source(src)

        def pipe(op: Callable[[Any], Any]) -> None:
            used = None if kind_of(op)[0] else executor
            builder.pipe(op, concurrency=num_threads, executor=used, output_order=output_order)

        if preprocessor is not None:
            pipe(preprocessor)
        if batch_size is not None:
            builder.aggregate(whole_number(batch_size, "batch_size", minimum=1), drop_last)
        if aggregator is not None:
            pipe(aggregator)
        thread_count = num_threads
        if transfer_fn is not None:
            builder.pipe(transfer_fn)
            thread_count += not kind_of(transfer_fn)[0]
        builder.add_sink(buffer_size)
        super().__init__(builder.build(num_threads=thread_count, timeout=timeout)._config)
        self._is_closed = False

    def __repr__(self) -> str:
        """Return the source, the stages and the sink, and whether an epoch is under way."""
        return f"{super().__repr__()[:-1]}{', closed' if self._is_closed else ''}>"

    def __iter__(self) -> PipelineIterator:
        """Return an iterator over a new epoch. An epoch that is under way is left.

        Raises:
            ClosedLoaderError: After ``close()``.
            RuntimeError: If the source is an iterator, and an earlier epoch has used it.
        """
        if self._is_closed:
            raise ClosedLoaderError(LOADER_CLOSED)
        self.start()
        return self.get_iterator()

    def close(self) -> None:
        """End threads and worker processes. May be called again."""
        self._is_closed = True
        self.stop()

    def __enter__(self) -> Self:
        """Return the loader itself. It is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the loader."""
        self.close()
