"""The parts of a pipeline, as the builder has checked them. Nothing runs here.

An *op* is the function of a stage.
"""

import functools
import inspect
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch

from shmloader.loader.options import describe_source

Source = Iterable[Any]
Executor = Literal["thread", "process"]
OutputOrder = Literal["completion", "input"]

#: Items that may wait between two stages. They bridge the moment between a finished job and the
#: next item. Items that are to be ready in advance wait in the sink (`buffer_size`).
QUEUE_CAPACITY = 2

#: Items that may wait after the source. The source is woken when half of them are gone: it has a
#: thread of its own, and switching between two threads for each item costs more than all else.
SOURCE_CAPACITY = 8

# Jobs of a stage on processes, for each process: one runs, one is on its way.
_JOBS_PER_PROCESS = 2


def kind_of(op: Any) -> tuple[bool, bool]:
    """Return whether an op is async, and whether it is a generator function of either kind."""
    op = _unwrapped(op)
    called = op if isinstance(op, type) or inspect.isroutine(op) else type(op).__call__
    if inspect.isasyncgenfunction(called):
        return True, True
    return inspect.iscoroutinefunction(called), inspect.isgeneratorfunction(called)


def name_of(op: Any) -> str:
    """Return the name of an op in messages, for a stage without a name of its own."""
    op = _unwrapped(op)
    return str(getattr(op, "__name__", type(op).__name__))


def _unwrapped(op: Any) -> Any:
    while isinstance(op, functools.partial):
        op = op.func
    return op


@dataclass(frozen=True, slots=True, eq=False)
class StageConfig:
    """The source, or a stage that calls an op, copies to a device, or makes lists of items.

    Attributes:
        kind: What runs it: "source", "thread", "coroutine", "process" or "device"; "aggregate" for
            a stage that makes lists.
        makes_many: Whether the op is a generator function.
        concurrency: Items at once; for a stage on processes, the number of processes.
        in_order: Whether results leave in the order of the items.
        size: Length of the lists that the stage makes; 0 if it calls an op.
    """

    name: str
    kind: str
    op: Any = None
    makes_many: bool = False
    concurrency: int = 1
    in_order: bool = True
    device: torch.device | None = None
    size: int = 0
    drop_last: bool = False

    def __str__(self) -> str:
        """Return the stage's name, how many items it takes at once, and where."""
        if self.kind in ("device", "aggregate"):
            return self.name
        where = "processes" if self.kind == "process" else f"{self.kind}s"
        return f"{self.name} ({self.concurrency} on {where})"

    @property
    def title(self) -> str:
        """The stage in messages."""
        return self.name if self.kind in ("source", "aggregate") else f"stage '{self.name}'"

    @property
    def capacity(self) -> int:
        """Items that may be in this stage: those in work, and results that wait to leave."""
        return self.concurrency * (_JOBS_PER_PROCESS if self.kind == "process" else 1)


def results_of(stage: StageConfig, result: Any) -> Sequence[Any]:
    """Return the results of a call, without None: the parts of what a generator function made."""
    if stage.makes_many:
        return [each for each in result if each is not None]
    if type(result) is types.CoroutineType:
        result.close()
        raise TypeError(
            f"the op of {stage.title} returned a coroutine, which nothing would await: make the op "
            "an async def, and await there"
        )
    return () if result is None else (result,)


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """A whole pipeline, as :class:`~shmloader.pipeline.builder.PipelineBuilder` was told."""

    source: Source
    stages: tuple[StageConfig, ...]
    buffer_size: int
    num_threads: int
    max_failures: int | Fraction | None
    timeout_s: float | None
    snapshot_every: int

    def __str__(self) -> str:
        """Return all parts, joined by arrows."""
        parts = [describe_source(self.source), *map(str, self.stages), f"sink({self.buffer_size})"]
        return " → ".join(parts)


def check_timeout(timeout: object) -> None:
    """Check that ``timeout`` is a number of seconds, or None."""
    if timeout is None or (isinstance(timeout, int | float) and timeout >= 0):
        return
    kind = ValueError if isinstance(timeout, int | float) else TypeError
    raise kind(f"timeout should be a number of seconds from 0 on, but got timeout={timeout!r}")
