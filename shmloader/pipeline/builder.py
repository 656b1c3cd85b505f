"""``PipelineBuilder``, which checks the description of a pipeline.

The module is long because more than half of it documents the arguments.
"""

import reprlib
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, Self

import torch

from shmloader.device.backend import parse_device
from shmloader.loader.options import OPTIONS
from shmloader.memory.limits import why_unsupported
from shmloader.pipeline.config import (
    Executor,
    OutputOrder,
    PipelineConfig,
    Source,
    StageConfig,
    check_timeout,
    kind_of,
    name_of,
)
from shmloader.pipeline.pipeline import Pipeline
from shmloader.sampling.arguments import choice, flag, whole_number

# The default of `num_threads` is at most this.
_MAX_THREADS = 32


class PipelineBuilder:
    """Builds a pipeline: where items come from, what happens to them, and how many are ready ahead.

    Each method except :meth:`build` returns the builder. All methods check their arguments at once.

    .. code-block:: python

        import asyncio

        import torch
        from shmloader import PipelineBuilder

        async def download(number):
            await asyncio.sleep(0.01)  # waits for a server, say
            return bytes([number]) * 1000

        def decode(data):
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)

        if __name__ == "__main__":
            pipeline = (
                PipelineBuilder()
                .add_source(range(256))
                .pipe(download, concurrency=64)
                .pipe(decode, concurrency=2, executor="process")
                .aggregate(32)
                .add_sink(4)
                .build(num_threads=8)
            )
            for tensors in pipeline:
                batch = torch.stack(tensors)
    """

    __module__ = "shmloader"  # users import it from there

    def __init__(self) -> None:
        self._source: Source | None = None
        self._stages: list[StageConfig] = []
        self._buffer_size: int | None = None
        self._snapshot_every = 1
        self._is_transferred = False

    def add_source(self, source: Source, *, snapshot_every_n_steps: int = 1) -> Self:
        """Set the source of the items.

        Args:
            source: An iterable, which is iterated on a thread of its own: it may block. Each epoch
                iterates it once. If it has ``state_dict()`` and ``load_state_dict()``, or is a
                sequence, the pipeline can be resumed: see :meth:`Pipeline.state_dict`.
            snapshot_every_n_steps: After how many items the source's ``state_dict()`` is called
                again. With 100, a resumed pipeline reads up to 99 items again, and drops them. With
                0, it is called only at the beginning and at the end of an epoch.

        Raises:
            ValueError: If there is a source already, or ``snapshot_every_n_steps`` is negative.
            TypeError: If ``source`` is not iterable, or ``snapshot_every_n_steps`` is not an int.
        """
        if self._source is not None:
            raise ValueError("add_source was called before: a pipeline has one source")
        if not isinstance(source, Iterable):
            raise TypeError(
                f"the source should be an iterable, but got source={reprlib.repr(source)}. For a "
                "dataset with an index, give range(len(dataset)), and then "
                "pipe(dataset.__getitem__). For an async one, pipe an async generator function."
            )
        self._snapshot_every = whole_number(
            snapshot_every_n_steps, "snapshot_every_n_steps", minimum=0
        )
        self._source = source
        return self

    def pipe(
        self,
        op: Callable[..., Any],
        *,
        concurrency: int = 1,
        executor: Executor | None = None,
        output_order: OutputOrder = "completion",
        name: str | None = None,
    ) -> Self:
        """Add a stage that calls ``op`` with each item.

        Args:
            op: A function or a coroutine function, or a generator function of either kind, which
                makes several results of one item. A bound method, a ``functools.partial`` or an
                object with ``__call__`` will also do. Results that are None are left out.
            concurrency: Items processed at once; with ``executor="process"``, the number of
                processes. All stages on threads share the ``num_threads`` threads of the pipeline.
            executor: What calls a function or a generator function.

                None or "thread": threads of the pipeline. A thread that is in an op when the
                pipeline stops is not waited for. A generator may be resumed on another thread.

                "process": worker processes. Results come back in shared-memory slots. Large tensors
                and arrays are views of a slot, like a loader's batches. ``default_collate`` and
                :func:`shmloader.empty` make no second copy of them. When the workers start, their
                random generators are seeded with a number drawn from this process's torch
                generator.

                All results of a generator function for one item come together.

                For an ``Executor`` of ``concurrent.futures``, give a coroutine function:
                ``async def op(x): return await asyncio.wrap_future(pool.submit(f, x))``.
            output_order: "completion" passes results on as they are ready, "input" in the order of
                the items.
            name: The stage's name in errors; by default the op's own name.

        Raises:
            TypeError, ValueError: For wrong arguments.
        """
        if not callable(op):
            raise TypeError(f"op should be callable, but got op={reprlib.repr(op)}")
        choice(output_order, "output_order", ("completion", "input"))
        is_async, makes_many = kind_of(op)
        kind = _stage_kind(executor, is_async=is_async)
        self._check_open("pipe")
        self._stages.append(
            StageConfig(
                name or name_of(op),
                kind,
                op,
                makes_many=makes_many,
                concurrency=whole_number(concurrency, "concurrency", minimum=1),
                in_order=output_order == "input",
            )
        )
        return self

    def aggregate(
        self,
        n: int,
        drop_last: bool = False,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Self:
        """Add a stage that makes lists of ``n`` items.

        Args:
            n: Number of items in a list.
            drop_last: Whether a shorter last list is left out. Its items are lost: the next epoch
                begins with an empty list.
            collate: Called with each list, on a thread of the pipeline (a coroutine function: on
                the event loop). Its result replaces the list.

        Raises:
            TypeError, ValueError: For wrong arguments.
        """
        self._check_open("aggregate")
        size = whole_number(n, "n", minimum=1)
        self._stages.append(
            StageConfig(
                f"aggregate({size})",
                "aggregate",
                size=size,
                drop_last=flag(drop_last, "drop_last"),
            )
        )
        return self if collate is None else self.pipe(collate, output_order="input")

    def disaggregate(self) -> Self:
        """Add a stage that passes on the items of each list, or other iterable, one by one."""
        self._check_open("disaggregate")
        return self.pipe(_each_item, name="disaggregate")

    def transfer(self, device: str | int | torch.device) -> Self:
        """Copy batches to a device, on a thread and a stream of its own. This is the last stage.

        It copies as ``DataLoader(device=)`` does. If the stage before has ``executor="process"``,
        its results are copied from their slots, which are page-locked. Other batches go through
        torch's pinned memory. The consumer may use the batch at once: the current stream of its
        thread waits for the copy.

        Args:
            device: ``"cuda:0"``, an index, or a ``torch.device``. ``"cpu"`` copies nothing.

        Raises:
            TypeError, ValueError: If ``device`` is not a device, or ``transfer`` was called before.
            RuntimeError: If this machine, or this build of torch, does not have the device.
        """
        self._check_open("transfer")
        parsed = parse_device(device)
        self._is_transferred = True
        if parsed is not None:
            name = f"transfer to {device}"
            self._stages.append(StageConfig(name, "device", device=parsed))
        return self

    def add_sink(self, buffer_size: int = 3) -> Self:
        """Set the buffer after the last stage.

        Args:
            buffer_size: Results that may wait for the consumer.

        Raises:
            TypeError, ValueError: If ``buffer_size`` is not a positive int, or there is a sink
                already.
        """
        if self._buffer_size is not None:
            raise ValueError("add_sink was called before: a pipeline has one sink")
        self._buffer_size = whole_number(buffer_size, "buffer_size", minimum=1)
        return self

    def build(
        self,
        *,
        num_threads: int | None = None,
        max_failures: float | Fraction | None = None,
        timeout: float | None = None,
    ) -> Pipeline:
        """Return the pipeline. It is not started.

        Args:
            num_threads: Threads shared by all stages with ``executor=None`` or "thread". By
                default, the sum of their ``concurrency``, at most 32. The source and ``transfer``
                have threads of their own.
            max_failures: How many calls of all stages may fail in an epoch: an int, or a fraction
                of all calls, such as 0.01. A fraction is a float or a ``fractions.Fraction``, above
                0 and at most 1. It is checked once 100 calls have been made, and at the epoch's
                end. Failed items are left out, counted and listed (:attr:`Pipeline.failures`). If
                more calls fail, or all of them, ``TooManyFailures`` is raised. By default, the
                first failure is raised.
            timeout: Longest wait for an item in seconds; None waits without a limit. If no item
                comes in time, ``next()`` raises ``TimeoutError``. Nothing is lost: call it again.

        Raises:
            ValueError: If there is no source or no sink, or for wrong arguments.
            TypeError: For wrong arguments.
        """
        if self._source is None:
            raise ValueError("the pipeline has no source: call add_source")
        if self._buffer_size is None:
            raise ValueError("the pipeline has no sink: call add_sink after the last stage")
        check_timeout(timeout)
        if num_threads is None:
            on_threads = [one for one in self._stages if one.kind == "thread"]
            num_threads = min(sum(one.concurrency for one in on_threads), _MAX_THREADS) or 1
        config = PipelineConfig(
            self._source,
            tuple(self._stages),
            self._buffer_size,
            whole_number(num_threads, "num_threads", minimum=1),
            OPTIONS["max_failures"].check(max_failures),
            timeout,
            self._snapshot_every,
        )
        return Pipeline(config)

    def _check_open(self, what: str) -> None:
        if self._buffer_size is not None:
            raise ValueError(f"{what} was called after add_sink: no stage comes after the sink")
        if self._is_transferred:
            raise ValueError(
                f"{what} was called after transfer, which should be the last stage: "
                "do further work on the device in your loop"
            )


def _stage_kind(executor: Executor | None, *, is_async: bool) -> str:
    """Check ``executor``, and return the kind of the stage."""
    if is_async and executor is not None:
        raise ValueError(
            "the op is async, so it runs on the event loop: it cannot be combined with "
            f"executor={executor!r}"
        )
    if executor == "process" and why_unsupported():
        raise ValueError(
            f"executor='process' is not available here, since {why_unsupported()}: use threads"
        )
    kind: object = executor or "thread"
    if kind not in ("thread", "process"):
        error = ValueError if isinstance(kind, str) else TypeError
        raise error(
            f"executor should be 'thread' or 'process', but got {kind!r}. For an Executor of "
            "yours, give a coroutine function: "
            "async def op(x): return await asyncio.wrap_future(pool.submit(f, x))"
        )
    return "coroutine" if is_async else str(kind)


def _each_item(items: Iterable[Any]) -> Iterator[Any]:
    yield from items
