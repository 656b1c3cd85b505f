"""What a signal handler raises in a pipeline's ``next()`` ends the epoch, or nothing is lost.

Nor does it hang the pipeline, or its next epoch.
"""

import collections
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shmloader import ClosedLoaderError, PipelineBuilder
from tests.late import switched_on, to_host
from tests.process.bytecodes import KINDS, interrupt

ITEMS = 8
SOON_S = 20.0


def double(item: int) -> int:
    return 2 * item


async def double_soon(item: int) -> int:
    return 2 * item


def tensor(item: int) -> torch.Tensor:
    return torch.full((4,), 2 * item)


@contextlib.contextmanager
def plain() -> Iterator[Any]:
    yield None, lambda item: item


@contextlib.contextmanager
def device() -> Iterator[Any]:
    with switched_on():
        yield "late", lambda item: int(to_host(item)[0])


#: For each kind of pipeline: what it needs, its stages, and of how many instructions one is tried.
KINDS_OF_PIPELINE: dict[str, tuple[Any, Callable[[PipelineBuilder, Any], Any], int]] = {
    "threads": (plain, lambda builder, _: builder.pipe(double, concurrency=2), 29),
    "loop": (plain, lambda builder, _: builder.pipe(double_soon, concurrency=2), 31),
    "processes": (plain, lambda builder, _: builder.pipe(double, executor="process"), 151),
    "device": (device, lambda builder, given: builder.pipe(tensor).transfer(given), 41),
}

CALLS = ("item", "end")


def try_at(
    build: Callable[[], Any], read: Callable[[Any], int], call: str, nth: int, kind: type
) -> str | None:
    """Raise at the nth instruction of a call of ``next()``; what became of the epoch."""
    pipeline = build()
    everything = [2 * number for number in range(ITEMS)]
    with contextlib.ExitStack() as stack:
        if call == "item":
            stack.enter_context(pipeline.auto_stop())
        else:  # what the iterator starts, it stops, at the end
            stack.callback(pipeline.stop)
        items = iter(pipeline)
        given = [read(next(items)) for _ in range(2 if call == "item" else ITEMS)]
        outcome = interrupt(items.__next__, nth, kind)
        if outcome.where is None:
            return None
        assert outcome.has_arrived(kind), f"{outcome.where}: {outcome}"
        became, rest, why = "goes on", [], ""
        try:
            rest = [read(item) for item in items]
        except ClosedLoaderError as error:
            became, why = "is closed", str(error)
        if became == "is closed":
            assert kind.__name__ in why or "did not finish" in why, f"{outcome.where}: {why}"
        else:
            assert sorted(given + rest) == everything, f"{outcome.where}: gave {given + rest}"
        again = [read(item) for item in pipeline]
        assert sorted(again) == everything, f"{outcome.where}: then gave {again}"
    return became


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS_OF_PIPELINE)
def test_what_a_handler_raises_at_any_instruction_of_next_loses_nothing_or_ends_the_epoch(
    name,
) -> None:
    around, add_stages, stride = KINDS_OF_PIPELINE[name]
    if os.environ.get("SHMLOADER_TEST_ALL") == "1":
        stride = 1
    became = collections.Counter()
    with around() as (given, read):

        def build() -> Any:
            builder = PipelineBuilder().add_source(range(ITEMS))
            return add_stages(builder, given).add_sink(1).build(num_threads=2, timeout=SOON_S)

        # Where not all are tried, each call and kind has others.
        for begin, (call, kind) in enumerate(itertools.product(CALLS, KINDS)):
            for nth in itertools.count(1 + begin * stride // 4, stride):
                what = try_at(build, read, call, nth, kind)
                if what is None:
                    break
                became[what] += 1
    assert became["goes on"] > 1
    assert became["is closed"] > 1
