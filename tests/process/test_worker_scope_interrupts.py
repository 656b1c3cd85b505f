"""``worker_scope="host"``: what a signal handler raises, at any instruction, loses nothing."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.process.bytecodes import KINDS, Outcome, interrupt
from tests.process.host_loaders import contents, expected, has_ended, loader, owner_of
from tests.process.ranks import LONG_S
from tests.process.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * 160)]

TRIES_ALL = os.environ.get("SHMLOADER_TEST_ALL") == "1"


#: At how many places a call is interrupted by each kind of exception, where not at all of them.
PLACES = 12

#: How long a rank may take for all of it on a busy machine.
TRIALS_S = 160


def try_all(trial: Callable[[int, type[BaseException]], Outcome], places: int = PLACES) -> int:
    """Interrupt a call at places all over it.

    Returns:
        How many instructions of the package the call has.
    """
    count = trial(1 << 60, KINDS[0]).count
    for half, kind in enumerate(KINDS):
        stride = 1 if TRIES_ALL else max(1, count // places)
        for nth in range(1 + half * stride // 2, count, stride):
            outcome = trial(nth, kind)
            assert outcome.where is None or outcome.has_arrived(kind), outcome
    return count


def begin(one: Any) -> Any:
    return next(iter(one))


def forget_frames(error: BaseException | None) -> None:
    """Drop the frames that an exception keeps, and those of what was handled as it was raised."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def read_all(one: Any) -> Any:
    one.set_epoch(0)
    return contents(one)


def test_while_a_rank_starts_the_owner_and_ends_it(run):
    """Alone: each trial has an owner of its own, of which nothing is left."""

    def trials() -> Any:
        own = expected(0, 1)[0]

        def trial(nth: int, kind: type[BaseException]) -> Outcome:
            one = loader()
            outcome = interrupt(functools.partial(begin, one), nth, kind)
            assert read_all(one) == own, outcome.where
            owner = owner_of(one)
            one.close()
            del one
            forget_frames(outcome.error)
            gc.collect()
            wait_until(functools.partial(has_ended, owner), LONG_S)
            children = psutil.Process().children()
            left = [each for each in children if "spawn_main" in " ".join(each.cmdline())]
            assert not left, outcome.where
            return outcome

        return try_all(trial, places=4)

    rank = run.start(trials, 0, 1)
    found = rank.result(TRIALS_S)
    if isinstance(found, BaseException):
        raise found
    assert found > PLACES
