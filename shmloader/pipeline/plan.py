"""The stages of a pipeline, as they were asked for and checked. Nothing runs here."""

import concurrent.futures
import enum
import math
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch

from shmloader.pipeline.ops import OpKind

Source = Iterable[Any] | AsyncIterable[Any]
Executor = Literal["thread", "process"] | concurrent.futures.Executor
OutputOrder = Literal["completion", "input"]

#: Items that may wait between two stages. They bridge the time between a place that becomes free
#: and the next item; what is to be ready ahead is the sink's to say.
QUEUE_ROOM = 2

#: Items that may wait after the source, which is woken when half of them are gone. It has a thread
#: of its own, and to go to and fro between two threads for each item costs more than all else.
SOURCE_ROOM = 8

#: Jobs of a stage on processes, for each of these: one in work, one on its way.
JOBS_PER_PROCESS = 2

# Results of a stage on processes that may lie in their slots at once, at most: each takes one or
# two descriptors in this process.
_MOST_LENT = 64


class Where(enum.Enum):
    """Who runs a stage's jobs."""

    THREADS = enum.auto()
    LOOP = enum.auto()
    PROCESSES = enum.auto()
    EXECUTOR = enum.auto()
    DEVICE = enum.auto()


@dataclass(frozen=True, slots=True)
class Pipe:
    """A stage that calls an op.

    Attributes:
        op: It; for ``Where.DEVICE`` unused.
        kind: Its kind.
        name: As texts have it.
        where: Who calls it.
        concurrency: Items at once; processes, for ``Where.PROCESSES``.
        in_order: Whether results come in the order of the items.
        max_failures: Of this stage alone; None: the pipeline's.
        executor: The user's, for ``Where.EXECUTOR``.
        device: Where to, for ``Where.DEVICE``.
    """

    op: Callable[..., Any]
    kind: OpKind
    name: str
    where: Where
    concurrency: int = 1
    in_order: bool = False
    max_failures: int | Fraction | None = None
    executor: concurrent.futures.Executor | None = None
    device: torch.device | None = None

    @property
    def places(self) -> int:
        """Items that may be in this stage: in work, or done and not passed on."""
        return self.concurrency * (JOBS_PER_PROCESS if self.where is Where.PROCESSES else 1)


@dataclass(frozen=True, slots=True)
class Group:
    """A stage that makes lists of items.

    Attributes:
        size: Items of a list.
        drop_last: Whether a last list that is shorter is left out.
    """

    size: int
    drop_last: bool

    name = "aggregate"
    max_failures = None
    places = 1


StagePlan = Pipe | Group


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole pipeline.

    Attributes:
        source: Where items come from.
        stages: In order.
        buffer_size: Results that may wait for the consumer.
        num_threads: Threads that the stages share.
        max_failures: Of all stages together that have no limit of their own; None: a failure is
            raised.
        timeout_s: Longest wait of the consumer; None for ever.
    """

    source: Source
    stages: tuple[StagePlan, ...]
    buffer_size: int
    num_threads: int
    max_failures: int | Fraction | None
    timeout_s: float | None

    def lent_after(self, place: int) -> int:
        """Results of a stage that may be alive at once, up to a limit; see ``lend_limit``.

        Args:
            place: Number of the stage, from 0.
        """
        size, count = 1, self.stages[place].places
        for stage in self.stages[place + 1 :]:
            count += size * (QUEUE_ROOM + stage.places)
            if isinstance(stage, Group):
                size *= stage.size
                count += size
        # The one that the consumer holds while it asks for the next.
        count += size * (self.buffer_size + 2)
        return min(count, _MOST_LENT)


def check_timeout(timeout: object) -> None:
    """Check a number of seconds.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is negative, or not a number of seconds that can be waited for.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout should be a number of seconds, but got timeout={timeout!r}")
    if timeout < 0 or math.isnan(timeout):
        raise ValueError(f"timeout should not be negative, but got timeout={timeout!r}")
