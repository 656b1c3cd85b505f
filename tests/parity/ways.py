"""The ways in which a loader works, and two kinds of tests that go through them.

A `Case` is walked over epochs by `run_both`. A function under `compared` drives a loader as it
likes; what it returns has to be the same with torch's loader and with ours.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from tests.parity.compare import assert_same, both_outcomes, run_both, run_ours, run_torch

Make = Callable[[], dict[str, Any]]

PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
WAYS: dict[str, dict[str, Any]] = {
    "in-process": {"num_workers": 0},
    "two workers": {"num_workers": 2},
    "two persistent workers": PERSISTENT,
    "one worker": {"num_workers": 1},
    "three workers, one batch ahead": {"num_workers": 3, "prefetch_factor": 1},
    "two workers, five batches ahead": {"num_workers": 2, "prefetch_factor": 5},
    "three persistent workers": {"num_workers": 3, "persistent_workers": True},
}
ALL = list(WAYS)
SOME, THREE, BOTH, WORKERS = ALL[:5], ALL[:3], ALL[:2], ALL[1:]


class Case(NamedTuple):
    """Arguments for both loaders, and what is to be found besides that they agree.

    Attributes:
        make: Gives fresh arguments, to which those of a way are added.
        ways: Names of the ways in which it is tried.
        count: How many batches come in all epochs; not checked if None.
        check: Called with the batches and the name of the way.
        walk: Options of `run_both`.
    """

    make: Make
    ways: Sequence[str] = BOTH
    count: int | None = None
    check: Callable[[list[Any], str], object] | None = None
    walk: dict[str, Any] = {}  # noqa: RUF012 - never changed


def tried(quick: int, cases: dict[str, Case]) -> Any:
    """Returns a test of all cases in all their ways, of which ``quick`` cells are quick."""

    @pytest.mark.sampled(quick)
    @pytest.mark.parametrize(
        ("name", "way"),
        [pytest.param(n, way, id=f"{n}, {way}") for n, case in cases.items() for way in case.ways],
    )
    def test(name: str, way: str) -> None:
        case = cases[name]
        batches = run_both(lambda: {**case.make(), **WAYS[way]}, **case.walk)
        assert case.count in (None, len(batches))
        if case.check is not None:
            assert case.check(batches, way) is not False

    return test


def compared(
    make: Make, ways: Sequence[str] = BOTH, *, quick: int = 2, check: Any = None
) -> Callable[[Callable[[Any], Any]], Any]:
    """Makes a test of a function that drives a loader; ``check`` is called with its result."""

    def decorate(drive: Callable[[Any], Any]) -> Any:
        @pytest.mark.sampled(quick)
        @pytest.mark.parametrize("way", ways)
        def test(way: str) -> None:
            def arguments() -> dict[str, Any]:
                return {**make(), **WAYS[way]}

            theirs = run_torch(arguments, drive)
            assert check is None or check(theirs) is not False
            assert_same(run_ours(arguments, drive), theirs)

        return test

    return decorate


def with_both_classes(check: Callable[[Any], object]) -> Callable[[Callable[[Any], Any]], Any]:
    """Makes a test of a function of the class: the same result, error and warnings with both."""

    def decorate(go: Callable[[Any], Any]) -> Any:
        def test() -> None:
            ours, theirs = both_outcomes(go)
            assert ours == theirs
            assert check(theirs) is not False

        return test

    return decorate
