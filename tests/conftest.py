"""Settings of all tests, and the check of invariant I8 after each of them.

I8: when a loader is closed or garbage, none of its processes, threads, mappings or descriptors
remains. `nothing_remains` compares what the test process holds before and after each test.
"""

import contextlib
import gc
import itertools
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

import pytest
from hypothesis import settings

from tests.holdings import Holdings
from tests.template import shared_template

# Before the first module that uses it is imported.
pytest.register_assert_rewrite("tests.parity.compare")

# Read when torch is imported. OpenMP's threads spin while they wait, on cores that the workers
# under test need: a test that computes with large tensors takes seven times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Many tests send a Ctrl-C. A program that a script runs in the background ignores it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes are reaped and threads end a little after what they served, on a busy machine later.
GRACE_S = 20.0

OUTCOME = pytest.StashKey[bool]()
LAST = pytest.StashKey[Holdings | None]()

# A machine busy with worker processes says nothing about the speed of one example.
settings.register_profile("shmloader", deadline=None)
settings.load_profile("shmloader")


@pytest.fixture(scope="session", autouse=True)
def _services() -> None:
    """Start the services that keep running, so that every test finds them."""
    # The collector passes over what all imports left: 0.4 s a time, in each forked child as well.
    gc.collect()
    gc.freeze()
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    shared_template()  # imports torch when a test needs it


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Switch the garbage collector off: it runs before the test, then only if it is called."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``slow`` what ``sampled(n)`` leaves out: all but n cells of each test function.

    Runs before pytest deselects by ``-m``. The choice of cells depends only on their order.
    """
    cells: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cells.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cells.values():
        (count,) = found[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept = most_pairs([pairs_of(item) for item in found], count)
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def pairs_of(item: pytest.Item) -> set[tuple[Any, ...]]:
    """Return the values of a cell's parameters, by their numbers, and the pairs of these."""
    values = sorted(item.callspec.indices.items())  # type: ignore[attr-defined]
    return {*values, *itertools.combinations(values, 2)}


def most_pairs(cells: Sequence[set[tuple[Any, ...]]], count: int) -> set[int]:
    """Choose ``count`` cells, each the one with the most pairs that no chosen one has.

    Among equals, it chooses the cell that is farthest from those chosen already, so that the cells
    of a function with one parameter are spread over its values.
    """
    chosen: list[int] = []
    covered: set[tuple[Any, ...]] = set()
    while len(chosen) < min(count, len(cells)):
        best = max(
            (number for number in range(len(cells)) if number not in chosen),
            key=lambda number: (
                len(cells[number] - covered),
                min((abs(number - other) for other in chosen), default=-number),
            ),
        )
        chosen.append(best)
        covered |= cells[best]
    return set(chosen)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the late device now if a test needs it: the time of each test is limited."""
    needed = any("late" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        from tests.late import compile_library, reason_to_skip  # imports torch

        if not reason_to_skip():
            with contextlib.suppress(RuntimeError):  # the tests report the error
                compile_library()


@pytest.fixture
def late() -> Iterator[Any]:
    """The late device, switched on; the test is skipped where it cannot be used."""
    from tests.late import switched_on  # imports torch

    with switched_on() as device:
        yield device


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether the test function ended without an exception."""
    if call.when == "setup":
        item.config.stash[LAST] = None  # used, or not checked
    if call.when == "call":
        item.stash[OUTCOME] = call.excinfo is None
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> None:
    """Forget what the last test left, if this fixture can hold more for several tests."""
    if fixturedef.scope != "function":
        request.config.stash[LAST] = None


@pytest.fixture(autouse=True)
def nothing_remains(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, threads, descriptors, mappings or files behind (I8).

    Runs outside the test's own fixtures, so what these close is closed. A test that failed is
    not checked: its traceback still holds its variables.
    """
    before = request.config.stash.get(LAST, None) or Holdings.now()
    yield
    if not request.node.stash.get(OUTCOME, False):
        return
    after = Holdings.now()
    if not after.beyond(before):
        request.config.stash[LAST] = after
    elif remaining := before.left(GRACE_S):
        pytest.fail(
            f"I8: {GRACE_S:g} s after the test there remained\n  " + "\n  ".join(remaining),
            pytrace=False,
        )
