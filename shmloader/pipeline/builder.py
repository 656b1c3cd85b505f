"""``PipelineBuilder``: says what the stages are, and checks it."""

import collections.abc
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, Self

import torch

from shmloader.device.target import parse_device
from shmloader.loader.arguments import check_max_failures
from shmloader.memory.slot import is_supported, why_unsupported
from shmloader.pipeline.ops import OpKind, kind_of, name_of
from shmloader.pipeline.pipeline import Pipeline
from shmloader.pipeline.plan import (
    Executor,
    Group,
    OutputOrder,
    Pipe,
    Plan,
    Source,
    StagePlan,
    Where,
    check_timeout,
)
from shmloader.sampling.checks import whole_number


class PipelineBuilder:
    """Builds a pipeline: where items come from, what happens to them, and how many wait at the end.

    Each method but :meth:`build` returns the builder. Arguments are checked where they are given.
    ::

        pipeline = (
            PipelineBuilder()
            .add_source(urls)
            .pipe(download, concurrency=64)                        # async def
            .aggregate(32)
            .pipe(decode, concurrency=8, executor="process")
            .add_sink(4)
            .build(num_threads=8)
        )
        for batch in pipeline: ...
    """

    def __init__(self) -> None:
        self._source: Source | None = None
        self._stages: list[StagePlan] = []
        self._buffer_size: int | None = None

    def add_source(self, source: Source) -> Self:
        """Say where items come from.

        Args:
            source: An iterable, which is iterated on a thread of its own (it may block); or an
                async iterable, on the event loop. One that can be iterated again gives an epoch
                each time.

        Raises:
            ValueError: If there is a source already.
            TypeError: If it is neither.
        """
        if self._source is not None:
            raise ValueError("add_source was called before: a pipeline has one source")
        if not isinstance(source, collections.abc.Iterable | collections.abc.AsyncIterable):
            raise TypeError(
                "the source should be an iterable or an async iterable, but got a "
                f"{type(source).__name__}"
            )
        self._source = source
        return self

    def pipe(
        self,
        op: Callable[[Any], Any],
        *,
        concurrency: int = 1,
        executor: Executor | None = None,
        output_order: OutputOrder = "completion",
        name: str | None = None,
        max_failures: int | Fraction | None = None,
    ) -> Self:
        """Add a stage that calls ``op`` with each item.

        Args:
            op: A function, a coroutine function, or a generator function of either kind (one item
                in, many out); a bound method, a ``functools.partial`` or an object with
                ``__call__`` of either. What returns, or yields, None leaves the item out.
            concurrency: Items at once; processes, with ``executor="process"``. Functions share the
                ``num_threads`` threads of the pipeline.
            executor: Who calls a function. None or "thread": threads of the pipeline, which are
                abandoned, not waited for, if they stay in an op when it stops. "process": worker
                processes, whose results cross in shared-memory slots: large tensors and arrays
                are views of a slot, as a loader's batches are, and what ``default_collate`` or
                :func:`shmloader.empty` makes is written straight there; their random streams are
                seeded when they start, by a draw from torch's generator here. Or an
                ``Executor`` of ``concurrent.futures``, which is not shut down. What a generator
                function gives for one item comes together from the latter two. A generator
                function may be resumed by another thread than the one that began it.
            output_order: "completion": results go on as they are ready. "input": in the order of
                the items.
            name: Of the stage, in errors; the op's own if None.
            max_failures: How many calls may fail in an epoch: an int, or a ``fractions.Fraction``
                of the calls, judged from the 100th on and at the stage's end. Failed items are left
                out, counted and listed (:attr:`Pipeline.failures`); more raise ``TooManyFailures``,
                and so does an epoch in which all failed. None: as ``build`` is told.

        Raises:
            TypeError, ValueError: For arguments that do not fit.
        """
        self._check_open("pipe")
        if not callable(op):
            raise TypeError(f"op should be callable, but got a {type(op).__name__}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name should be a str, but got name={name!r}")
        if output_order not in ("completion", "input"):
            raise ValueError(
                f"output_order should be 'completion' or 'input', but got {output_order!r}"
            )
        check_max_failures(max_failures, "skip")
        kind = kind_of(op)
        where = _where(kind, executor)
        if where is Where.PROCESSES and self._has_device:
            raise ValueError(
                "a stage with executor='process' cannot come after transfer: batches on a device "
                "are not sent to other processes"
            )
        self._stages.append(
            Pipe(
                op,
                kind,
                name or name_of(op),
                where,
                whole_number(concurrency, "concurrency", minimum=1),
                output_order == "input",
                max_failures,
                executor if isinstance(executor, concurrent.futures.Executor) else None,
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
            n: Items of a list.
            drop_last: Whether a last list that is shorter is left out. What it had is gone: the
                next epoch begins anew.
            collate: Called with each list, on a thread; its result goes on in the list's place.

        Raises:
            TypeError, ValueError: For arguments that do not fit.
        """
        self._check_open("aggregate")
        if self._has_device:
            raise ValueError("aggregate cannot come after transfer: aggregate on the host")
        if not isinstance(drop_last, bool):
            raise TypeError(f"drop_last should be a bool, but got drop_last={drop_last!r}")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate should be callable, but got collate={collate!r}")
        self._stages.append(Group(whole_number(n, "n", minimum=1), drop_last))
        return self if collate is None else self.pipe(collate, output_order="input")

    def disaggregate(self) -> Self:
        """Add a stage that takes lists (or other iterables) apart: one in, its items out."""
        self._check_open("disaggregate")
        if self._has_device:
            raise ValueError("disaggregate cannot come after transfer: take apart on the host")
        return self.pipe(_take_apart, name="disaggregate")

    def transfer(self, device: str | int | torch.device) -> Self:
        """Add a stage that copies batches to a device, on a thread and a stream of its own.

        As ``DataLoader(device=)`` does: results of a stage with ``executor="process"`` that comes
        directly before are copied from their slots, which are page-locked; others by way of torch's
        pinned memory. The current stream of whoever uses a batch first, the next op or the
        consumer, waits for the copy. No aggregate may follow, nor a stage on processes.

        Args:
            device: ``"cuda:0"``, an index, a ``torch.device``. ``"cpu"``: nothing is added.

        Raises:
            TypeError, ValueError: If it is no device.
            RuntimeError: If this machine, or this build of torch, has none.
        """
        self._check_open("transfer")
        if self._has_device:
            raise ValueError("transfer was called before: batches are on a device already")
        parsed = parse_device(device)
        if parsed is not None:
            self._stages.append(
                Pipe(
                    _unused, OpKind.FUNCTION, f"transfer to {device}", Where.DEVICE, in_order=True,
                    device=parsed,
                )
            )  # fmt: skip
        return self

    def add_sink(self, buffer_size: int = 3) -> Self:
        """End the stages.

        Args:
            buffer_size: Results that may wait for the consumer.

        Raises:
            TypeError, ValueError: If it is no whole number from 1 up, or there is a sink already.
        """
        if self._buffer_size is not None:
            raise ValueError("add_sink was called before: a pipeline has one sink")
        self._buffer_size = whole_number(buffer_size, "buffer_size", minimum=1)
        return self

    def build(
        self,
        *,
        num_threads: int | None = None,
        max_failures: int | Fraction | None = None,
        timeout: float | None = None,
    ) -> Pipeline:
        """The pipeline; nothing is started.

        Args:
            num_threads: Threads for all functions of stages with ``executor=None`` or "thread".
                None: as many as these stages may use at once, at most 32. The source and
                ``transfer`` have one each of their own.
            max_failures: As :meth:`pipe`'s, over all stages together that have none of their own.
                None: the first failure is raised.
            timeout: Seconds that the consumer waits for an item at most; None: for ever.

        Raises:
            ValueError: If there is no source, or no sink; or for arguments that do not fit.
            TypeError: For arguments that do not fit.
        """
        if self._source is None:
            raise ValueError("the pipeline has no source: call add_source")
        if self._buffer_size is None:
            raise ValueError("the pipeline has no sink: call add_sink after the last stage")
        check_max_failures(max_failures, "skip")
        if timeout is not None:
            check_timeout(timeout)
        if num_threads is None:
            num_threads = self._threads_wanted
        return Pipeline(
            Plan(
                self._source,
                tuple(self._stages),
                self._buffer_size,
                whole_number(num_threads, "num_threads", minimum=1),
                max_failures,
                timeout,
            )
        )

    @property
    def _threads_wanted(self) -> int:
        wanted = sum(
            stage.concurrency
            for stage in self._stages
            if isinstance(stage, Pipe) and stage.where is Where.THREADS
        )
        return max(1, min(wanted, _MOST_THREADS))

    @property
    def _has_device(self) -> bool:
        return any(isinstance(one, Pipe) and one.where is Where.DEVICE for one in self._stages)

    def _check_open(self, what: str) -> None:
        if self._buffer_size is not None:
            raise ValueError(f"{what} was called after add_sink: no stage comes after the sink")


# Threads that a pipeline has if it is not told.
_MOST_THREADS = 32


def _where(kind: OpKind, executor: object) -> Where:
    if kind.is_async:
        if executor is not None:
            raise ValueError(
                f"executor={executor!r} cannot be combined with an op that is {kind.value}, which "
                "runs on the event loop"
            )
        return Where.LOOP
    if executor is None or executor == "thread":
        return Where.THREADS
    if executor == "process":
        if not is_supported():
            raise ValueError(
                f"executor='process' cannot be had here, since {why_unsupported()}: use threads, "
                "or an executor of concurrent.futures"
            )
        return Where.PROCESSES
    if isinstance(executor, concurrent.futures.Executor):
        return Where.EXECUTOR
    if isinstance(executor, str):
        raise ValueError(
            f"executor should be 'thread', 'process' or an Executor, but got {executor!r}"
        )
    raise TypeError(
        "executor should be 'thread', 'process' or an Executor, but got a "
        f"{type(executor).__name__}"
    )


def _take_apart(items: Iterable[Any]) -> Iterator[Any]:
    yield from items


def _unused(item: object) -> object:
    """Stands for what a device's stage does."""
    raise AssertionError(f"nobody calls this, with {item!r}")
