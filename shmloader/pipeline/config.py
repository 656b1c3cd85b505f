"""The configuration of a pipeline, as the builder has checked it. Nothing runs here.

An *op* is the function of a stage. Its kind says how it is called, and so what can run it. A
stage's ``setup`` and ``teardown`` are called where its op is called: once on each thread, once on
the loop, or (``setup`` alone) once in each worker process. ``teardown`` is called once for each
``setup`` that has returned, after the ops.
"""

import concurrent.futures
import contextlib
import enum
import functools
import inspect
import logging
import math
import types
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch

from shmloader.loader.options import describe_source
from shmloader.memory.system_support import is_supported, why_unsupported
from shmloader.probing import probe

_log = logging.getLogger("shmloader")

Source = Iterable[Any] | AsyncIterable[Any]
Executor = Literal["thread", "process"] | concurrent.futures.Executor
OutputOrder = Literal["completion", "input"]

#: Items that may wait between two stages. They bridge the moment between a finished job and the
#: next item. Items that are to be ready in advance wait in the sink (`buffer_size`).
QUEUE_CAPACITY = 2

#: Items that may wait after the source. The source is woken when half of them are gone: it has a
#: thread of its own, and switching between two threads for each item costs more than all else.
SOURCE_CAPACITY = 8

#: Jobs of a stage on processes, for each process: one runs, one is on its way.
JOBS_PER_PROCESS = 2

# Results of a stage on processes that may lie in their slots at once.
_MAX_LENT = 64


class OpKind(enum.Enum):
    """How an op is called."""

    FUNCTION = "a function"
    GENERATOR = "a generator function"
    COROUTINE = "a coroutine function"
    ASYNC_GENERATOR = "an async generator function"

    @property
    def is_async(self) -> bool:
        """Whether an op of this kind runs on the event loop."""
        return self in {OpKind.COROUTINE, OpKind.ASYNC_GENERATOR}


def kind_of(op: Callable[..., Any]) -> OpKind:
    """Return the kind of a function, a bound method, a partial, or an object with ``__call__``."""
    op = _unwrapped(op)
    candidates = [op]
    if not isinstance(op, type) and not inspect.isroutine(op):
        candidates.append(type(op).__call__)
    for function in candidates:
        if inspect.isasyncgenfunction(function):
            return OpKind.ASYNC_GENERATOR
        if inspect.iscoroutinefunction(function):
            return OpKind.COROUTINE
        if inspect.isgeneratorfunction(function):
            return OpKind.GENERATOR
    return OpKind.FUNCTION


def name_of(op: Callable[..., Any]) -> str:
    """Return the name of an op in messages, for a stage without a name of its own."""
    name = probe(_unwrapped(op), "__name__")
    return name if isinstance(name, str) else type(_unwrapped(op)).__name__


def _unwrapped(op: Any) -> Any:
    while isinstance(op, functools.partial):
        op = op.func
    return op


@dataclass(frozen=True, slots=True, eq=False)
class Lifecycle:
    """The ``setup`` and ``teardown`` of a stage: called before its first and after its last item.

    Attributes:
        stage: The stage's name.
        setup: Makes the context, which is the op's second argument.
        teardown: Called with the context; None if there is nothing to call.
    """

    stage: str
    setup: Callable[[], Any]
    teardown: Callable[[Any], Any] | None

    def set_up(self) -> Any:
        """Return a new context. Called on a thread of the pipeline, or in a worker process."""
        context = self.setup()
        refuse_coroutine(context, f"setup of stage '{self.stage}'")
        return context

    def tear_down(self, context: Any) -> Any:
        """Call ``teardown``, and return what it returns. Its exceptions are logged."""
        with self.logged():
            return None if self.teardown is None else self.teardown(context)

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Log the exceptions of ``teardown``, which prevent no other one."""
        try:
            yield
        except BaseException:  # noqa: BLE001 - the user's own, and nothing may depend on it
            _log.exception("teardown of stage '%s' failed", self.stage)


def refuse_coroutine(result: object, what: str) -> None:
    """Raise TypeError if a result of the user's function ``what`` is a coroutine."""
    if type(result) is types.CoroutineType:
        result.close()
        raise TypeError(
            f"{what} returned a coroutine, which nothing would await: make the stage's op an async "
            "def, and await there"
        )


class RunsOn(enum.Enum):
    """What runs the jobs of a stage. The values are the stage's ``kind`` in the statistics."""

    SOURCE = "source"
    THREADS = "thread"
    LOOP = "coroutine"
    PROCESSES = "process"
    EXECUTOR = "executor"
    DEVICE = "device"
    FLOW = "aggregate"

    @classmethod
    def of(cls, kind: OpKind, executor: object) -> "RunsOn":
        """Return what runs a stage's jobs, after checking the stage's ``executor`` argument.

        Args:
            kind: The kind of the stage's op.
            executor: What the user passed as ``executor``.

        Raises:
            TypeError: If ``executor`` has a wrong type.
            ValueError: If it has a wrong value, does not suit the op, or is not available here.
        """
        if kind.is_async and executor is not None:
            raise ValueError(
                f"the op is {kind.value}, which runs on the event loop: it cannot be combined with "
                f"executor={executor!r}"
            )
        if kind.is_async:
            return cls.LOOP
        if executor is None or executor == "thread":
            return cls.THREADS
        if executor == "process":
            if not is_supported():
                raise ValueError(
                    f"executor='process' is not available here, since {why_unsupported()}: use "
                    "threads, or an executor of concurrent.futures"
                )
            return cls.PROCESSES
        if isinstance(executor, concurrent.futures.Executor):
            return cls.EXECUTOR
        kind_of_error = ValueError if isinstance(executor, str) else TypeError
        raise kind_of_error(
            f"executor should be 'thread', 'process' or an Executor, but got {executor!r}"
        )


@dataclass(frozen=True, slots=True)
class StageConfig:
    """A stage that calls an op, copies to a device, or makes lists of items.

    Attributes:
        name: The stage's name.
        runs_on: What runs the jobs; ``RunsOn.FLOW`` for a stage that makes lists and has none.
        op: The op, if the stage has one.
        kind: The op's kind.
        concurrency: Items at once; for ``RunsOn.PROCESSES``, the number of processes.
        in_order: Whether results leave in the order of the items.
        max_failures: The limit of this stage alone; None for the pipeline's common limit.
        executor: The user's executor, for ``RunsOn.EXECUTOR``.
        device: The target, for ``RunsOn.DEVICE``.
        lifecycle: ``setup`` and ``teardown``; None if the stage has none.
        size: Length of the lists, for ``RunsOn.FLOW``; else 0.
        drop_last: Whether a shorter last list is left out.
    """

    name: str
    runs_on: RunsOn
    op: Any = None
    kind: OpKind = OpKind.FUNCTION
    concurrency: int = 1
    in_order: bool = True
    max_failures: int | Fraction | None = None
    executor: concurrent.futures.Executor | None = None
    device: torch.device | None = None
    lifecycle: Lifecycle | None = None
    size: int = 0
    drop_last: bool = False

    def __str__(self) -> str:
        """Return the stage's name, how many items it takes at once, and where."""
        kind = self.runs_on.value
        if kind in {"device", "aggregate"}:
            return self.name
        where = {"process": "processes", "executor": "an executor"}.get(kind, f"{kind}s")
        return f"{self.name} ({self.concurrency} on {where})"

    @property
    def title(self) -> str:
        """The stage in messages."""
        return self.name if self.size else f"stage '{self.name}'"

    @property
    def keeps_order(self) -> bool:
        """Whether results leave in the order of the items.

        With ``concurrency`` 1 they do, even from a worker process: it takes one item after another.
        """
        return self.in_order or self.concurrency == 1

    @property
    def capacity(self) -> int:
        """Items that may be in this stage: those in work, and results that wait to leave."""
        return self.concurrency * (JOBS_PER_PROCESS if self.runs_on is RunsOn.PROCESSES else 1)


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """A whole pipeline.

    Attributes:
        source: Where items come from.
        stages: The stages, in order.
        buffer_size: Results that may wait for the consumer.
        num_threads: Threads that the stages share.
        max_failures: The common limit of all stages that have no limit of their own. With None,
            the first failure is raised.
        timeout_s: Longest wait of the consumer in seconds; None waits without a limit.
        snapshot_every: After how many items the source's own state is taken again; with 0, it is
            taken only at the beginning and at the end of an epoch.
    """

    source: Source
    stages: tuple[StageConfig, ...]
    buffer_size: int
    num_threads: int
    max_failures: int | Fraction | None
    timeout_s: float | None
    snapshot_every: int = 1

    @property
    def titles(self) -> list[str]:
        """The source and all stages in messages."""
        return ["the source", *(stage.title for stage in self.stages)]

    @property
    def has_teardown(self) -> bool:
        """Whether a stage has a ``teardown``."""
        return any(stage.lifecycle and stage.lifecycle.teardown for stage in self.stages)

    def queue_size(self, number: int) -> int:
        """Return how many items may wait before a stage; number 0 is the source."""
        return (0, SOURCE_CAPACITY)[number] if number <= 1 else QUEUE_CAPACITY

    def lend_limit(self, index: int) -> int:
        """Return how many results of stage ``index`` may be alive after it, at most 64."""
        size, count = 1, self.stages[index].capacity
        for stage in self.stages[index + 1 :]:
            count += size * (QUEUE_CAPACITY + stage.capacity)
            if stage.size:
                size *= stage.size
                count += size
        # The 2 are for the consumer, which holds one while it takes the next.
        count += size * (self.buffer_size + 2)
        return min(count, _MAX_LENT)


def describe_chain(
    source: Source | None, stages: Sequence[StageConfig], buffer_size: int | None
) -> str:
    """Return all parts of a pipeline, joined by arrows. Parts that are None are left out."""
    parts = [] if source is None else [describe_source(source)]
    parts += map(str, stages)
    if buffer_size is not None:
        parts.append(f"sink({buffer_size})")
    return " → ".join(parts) or "empty"


def check_timeout(timeout: object) -> None:
    """Check that ``timeout`` is a number of seconds, or None.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is negative or NaN.
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout should be a number of seconds, but got timeout={timeout!r}")
    if timeout < 0 or math.isnan(timeout):
        raise ValueError(f"timeout should not be negative, but got timeout={timeout!r}")
