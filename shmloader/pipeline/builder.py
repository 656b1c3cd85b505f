"""``PipelineBuilder``: takes the description of a pipeline, and checks it."""

import collections.abc
import concurrent.futures
import reprlib
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, Self

import torch

from shmloader.device.backend import parse_device
from shmloader.loader.arguments import check_max_failures, parse_max_failures
from shmloader.pipeline.config import (
    Aggregate,
    Executor,
    OpKind,
    OutputOrder,
    Pipe,
    PipelineConfig,
    RunsOn,
    Source,
    check_timeout,
    kind_of,
    name_of,
)
from shmloader.pipeline.pipeline import Pipeline
from shmloader.sampling.checks import whole_number

# The default of `num_threads` is at most this.
_MAX_THREADS = 32


class PipelineBuilder:
    """Builds a pipeline: where items come from, what happens to them, and how many are ready ahead.

    Each method but :meth:`build` returns the builder, and checks its arguments at once. ::

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
        self._stages: list[Pipe | Aggregate] = []
        self._buffer_size: int | None = None

    def add_source(self, source: Source) -> Self:
        """Set the source of the items.

        Args:
            source: An iterable, which is iterated on a thread of its own (it may block), or an
                async iterable, which is iterated on the event loop. Each epoch iterates it once.

        Raises:
            ValueError: If there is a source already.
            TypeError: If it is neither.
        """
        if self._source is not None:
            raise ValueError("add_source was called before: a pipeline has one source")
        if not isinstance(source, collections.abc.Iterable | collections.abc.AsyncIterable):
            raise TypeError(
                "the source should be an iterable or an async iterable, but got "
                f"source={reprlib.repr(source)}"
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
        max_failures: float | Fraction | None = None,
    ) -> Self:
        """Add a stage that calls ``op`` with each item.

        Args:
            op: A function, a coroutine function, or a generator function of either kind, which
                makes several results of one item; also a bound method, a ``functools.partial`` or
                an object with ``__call__``. Results that are None are left out.
            concurrency: Items processed at once; with ``executor="process"``, the number of
                processes. Functions share the ``num_threads`` threads of the pipeline.
            executor: What calls a function or a generator function.

                None or "thread": threads of the pipeline. A thread that is in an op when the
                pipeline stops is not waited for. A generator may be resumed on another thread.

                "process": worker processes. Results come back in shared-memory slots: large tensors
                and arrays are views of a slot, like a loader's batches, and ``default_collate`` and
                :func:`shmloader.empty` write straight into it. The workers' random generators are
                seeded at their start, with a draw from torch's generator here.

                An ``Executor`` of ``concurrent.futures``, which is not shut down.

                With processes and executors, all results of a generator function for one item come
                together.
            output_order: "completion" passes results on as they are ready, "input" in the order of
                the items.
            name: The stage's name in errors; by default the op's own name.
            max_failures: How many calls may fail in an epoch: an int, or a share of all calls. A
                share is a float or a ``fractions.Fraction``, above 0 and at most 1, and is judged
                from the 100th call on and at the stage's end. Failed items are left out, counted
                and listed (:attr:`Pipeline.failures`). If more calls fail, or all of them,
                ``TooManyFailures`` is raised. By default, the limit that ``build`` sets for all
                stages together.

        Raises:
            TypeError, ValueError: For wrong arguments.
        """
        self._check_open("pipe")
        if not callable(op):
            raise TypeError(f"op should be callable, but got op={reprlib.repr(op)}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name should be a str, but got name={name!r}")
        if output_order not in ("completion", "input"):
            raise ValueError(
                f"output_order should be 'completion' or 'input', but got {output_order!r}"
            )
        limit = parse_max_failures(max_failures)
        check_max_failures(limit, "skip")
        kind = kind_of(op)
        runs_on = RunsOn.of(kind, executor)
        if runs_on is RunsOn.PROCESSES and self._has_device:
            raise ValueError(
                "a stage with executor='process' cannot come after transfer: batches on a device "
                "are not sent to other processes"
            )
        self._stages.append(
            Pipe(
                op,
                kind,
                name or name_of(op),
                runs_on,
                whole_number(concurrency, "concurrency", minimum=1),
                output_order == "input",
                limit,
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
            drop_last: Whether a shorter last list is left out. Its items are lost: the next epoch
                begins with an empty list.
            collate: Called with each list on a thread. Its result replaces the list.

        Raises:
            TypeError, ValueError: For wrong arguments.
        """
        self._check_open("aggregate")
        if self._has_device:
            raise ValueError("aggregate cannot come after transfer: aggregate before")
        if not isinstance(drop_last, bool):
            raise TypeError(f"drop_last should be a bool, but got drop_last={drop_last!r}")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate should be callable, but got collate={collate!r}")
        self._stages.append(Aggregate(whole_number(n, "n", minimum=1), drop_last))
        return self if collate is None else self.pipe(collate, output_order="input")

    def disaggregate(self) -> Self:
        """Add a stage that takes each list, or other iterable, apart into its items."""
        self._check_open("disaggregate")
        if self._has_device:
            raise ValueError("disaggregate cannot come after transfer: disaggregate before")
        return self.pipe(_take_apart, name="disaggregate")

    def transfer(self, device: str | int | torch.device) -> Self:
        """Add a stage that copies batches to a device, on a thread and a stream of its own.

        It copies as ``DataLoader(device=)`` does. If the stage before has ``executor="process"``,
        its results are copied from their slots, which are page-locked. Other batches go through
        torch's pinned memory. The thread that uses a batch next, of an op or of the consumer, has
        its current stream wait for the copy. No ``aggregate``, ``disaggregate`` or stage on
        processes may follow.

        Args:
            device: ``"cuda:0"``, an index, or a ``torch.device``. ``"cpu"`` adds no stage.

        Raises:
            TypeError, ValueError: If it is not a device.
            RuntimeError: If this machine, or this build of torch, does not have the device.
        """
        self._check_open("transfer")
        if self._has_device:
            raise ValueError("transfer was called before: batches are on a device already")
        parsed = parse_device(device)
        if parsed is not None:
            self._stages.append(
                Pipe(
                    _unused, OpKind.FUNCTION, f"transfer to {device}", RunsOn.DEVICE,
                    in_order=True, device=parsed,
                )
            )  # fmt: skip
        return self

    def add_sink(self, buffer_size: int = 3) -> Self:
        """Set the buffer after the last stage.

        Args:
            buffer_size: Results that may wait for the consumer.

        Raises:
            TypeError, ValueError: If it is not a positive int, or there is a sink already.
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
            max_failures: The limit of all stages together that have none of their own; see
                :meth:`pipe`. By default, the first failure is raised.
            timeout: Longest wait for an item in seconds; None waits without a limit.

        Raises:
            ValueError: If there is no source or no sink, or for wrong arguments.
            TypeError: For wrong arguments.
        """
        if self._source is None:
            raise ValueError("the pipeline has no source: call add_source")
        if self._buffer_size is None:
            raise ValueError("the pipeline has no sink: call add_sink after the last stage")
        limit = parse_max_failures(max_failures)
        check_max_failures(limit, "skip")
        if timeout is not None:
            check_timeout(timeout)
        if num_threads is None:
            num_threads = self._default_num_threads
        return Pipeline(
            PipelineConfig(
                self._source,
                tuple(self._stages),
                self._buffer_size,
                whole_number(num_threads, "num_threads", minimum=1),
                limit,
                timeout,
            )
        )

    @property
    def _default_num_threads(self) -> int:
        used = sum(
            stage.concurrency
            for stage in self._stages
            if isinstance(stage, Pipe) and stage.runs_on is RunsOn.THREADS
        )
        return max(1, min(used, _MAX_THREADS))

    @property
    def _has_device(self) -> bool:
        return any(
            isinstance(stage, Pipe) and stage.runs_on is RunsOn.DEVICE for stage in self._stages
        )

    def _check_open(self, what: str) -> None:
        if self._buffer_size is not None:
            raise ValueError(f"{what} was called after add_sink: no stage comes after the sink")


def _take_apart(items: Iterable[Any]) -> Iterator[Any]:
    yield from items


def _unused(item: object) -> object:
    """Stand in for the op of a transfer."""
    raise AssertionError(f"called with {item!r}")
