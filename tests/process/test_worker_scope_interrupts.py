"""``worker_scope="host"``: what a signal handler raises, at any instruction, loses nothing."""

import functools
import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from shmloader import ClosedLoaderError
from shmloader.process_state import PROCESS
from tests.process.bytecodes import KINDS, PACKAGE, Outcome, interrupt
from tests.process.host_loaders import contents, expected, has_ended, loader, owner_of, pids
from tests.process.ranks import LONG_S, Rank
from tests.process.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TRIES_ALL = os.environ.get("SHMLOADER_TEST_ALL") == "1"


#: At how many places a call is interrupted by each kind of exception, where not at all of them.
PLACES = 12

#: How long a rank may take for all of it on a busy machine.
TRIALS_S = 600


#: Where descriptors are received and opened.
ATTACHING = tuple(f"{PACKAGE}/pools/{name}.py" for name in ("nursery", "handle", "host_pool"))


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


def result_of(rank: Rank) -> int:
    found = rank.result(TRIALS_S)
    if isinstance(found, BaseException):
        raise found
    return found


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


def spawned_children() -> list[psutil.Process]:
    """The interpreters that multiprocessing has started for this process and not reaped yet."""
    children = psutil.Process().children()
    return [
        each
        for each in children
        if each.status() == psutil.STATUS_ZOMBIE or "spawn_main" in " ".join(each.cmdline())
    ]


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
            wait_until(lambda: not spawned_children(), LONG_S)
            return outcome

        return try_all(trial, places=4)

    assert result_of(run.start(trials, 0, 1)) > PLACES


KEPT: list[Any] = []


def rank_that_joins(**options: Any) -> Any:
    """The loader of a rank that has made none before, and so meets those that have made one."""
    PROCESS.pools_on_host = 0
    return loader(**options)


def keep_pool() -> int:
    one = loader()
    next(iter(one))
    KEPT.append(one)
    return owner_of(one)


def with_other(run: Any, trial: Callable[..., Outcome]) -> int:
    """Run trials in rank 1 of 2, while rank 0 keeps the pool that it has begun.

    Args:
        run: The run.
        trial: Gets :class:`Descriptors`, and the arguments of a trial of :func:`try_all`.

    Returns:
        What :func:`try_all` returns.
    """
    owner = run.start(keep_pool, 0).result()

    def trials() -> int:
        return try_all(functools.partial(trial, Descriptors(owner)))

    return result_of(run.start(trials, 1))


class Descriptors:
    """How many descriptors this process and the owner have open, which is to be as at first."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.processes = [psutil.Process(), psutil.Process(owner)]
        self.of_owner = self.count()[1]
        self.before: list[int] | None = None

    def count(self) -> list[int]:
        return [process.num_fds() for process in self.processes]

    def check(self, where: object) -> None:
        gc.collect()
        if self.before is None:  # what the first trial opens here for good
            self.before = [self.count()[0], self.of_owner]
        try:
            wait_until(lambda: self.count() == self.before, LONG_S)
        except AssertionError:
            text = f"{self.before} descriptors, and {self.count()} after {where}"
            raise AssertionError(text) from None


@pytest.mark.parametrize("files", [(PACKAGE,), ATTACHING], ids=["anywhere", "where it attaches"])
def test_while_a_rank_meets_the_owner_that_another_has_started(run, files):
    own = expected(1)[0]

    def trial(descriptors: Descriptors, nth: int, kind: type[BaseException]) -> Outcome:
        one = rank_that_joins()
        with warnings.catch_warnings():
            # Python closes a socket that an interruption has lost, and warns of it.
            warnings.simplefilter("ignore", ResourceWarning)
            outcome = interrupt(functools.partial(begin, one), nth, kind, files)
        assert read_all(one) == own, outcome.where
        assert owner_of(one) == descriptors.owner
        one.close()
        del one
        forget_frames(outcome.error)
        descriptors.check(outcome.where)
        return outcome

    assert with_other(run, trial) > PLACES


def test_while_a_rank_leaves_the_pool_that_another_uses(run):
    own = expected(1)[0]

    def trial(descriptors: Descriptors, nth: int, kind: type[BaseException]) -> Outcome:
        one = rank_that_joins()
        iterator = iter(one)
        assert contents([next(iterator)]) == own[:1]
        outcome = interrupt(one.close, nth, kind)
        one.close()
        del iterator, one
        forget_frames(outcome.error)
        descriptors.check(outcome.where)
        return outcome

    assert with_other(run, trial) > PLACES


def test_while_a_dead_worker_is_replaced(run):
    """The epoch goes on without a loss, or the iterator is closed and says why."""
    own = expected(1)[0]
    became = multiprocessing.RawArray("i", 2)  # which is closed, and which goes on

    def trial(_: Descriptors, nth: int, kind: type[BaseException]) -> Outcome:
        one = rank_that_joins(worker_restarts=2)
        iterator = iter(one)
        batches = [next(iterator)]
        victim = psutil.Process(*pids(batches))
        victim.kill()
        victim.wait(LONG_S)

        def read() -> None:
            for batch in iterator:
                batches.append(batch)

        outcome = interrupt(read, nth, kind)
        try:
            batches += iterator
        except ClosedLoaderError as error:
            why = str(error)
            assert kind.__name__ in why or "did not finish" in why, f"{outcome.where}: {why}"
            became[0] += 1
            assert contents(batches) == own[: len(batches)], outcome.where
        else:
            became[1] += 1
            assert contents(batches) == own, outcome.where
        assert read_all(one) == own, outcome.where
        one.close()
        return outcome

    assert with_other(run, trial) > PLACES
    assert min(became) > 1
