"""The same exceptions at the same place, with texts that begin as torch's; then on as torch."""

from collections.abc import Callable
from typing import Any

import pytest

from shmloader import DataLoader
from tests.parity.compare import Failure, both_outcomes, outcome, run_ours, run_torch, walk
from tests.parity.data import (
    Failing,
    FailingStream,
    Made,
    Moody,
    OwnError,
    TwoArgumentsError,
    WithMessageError,
    as_is,
    fail_in_worker_1,
    fail_on_5,
)
from tests.parity.ways import SOME, Case, compared, tried

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

WORKERS = SOME[1:]


class QuietError(Exception):
    """Has no text."""


class LongWindedError(Exception):
    def __str__(self) -> str:
        return f"in long: {self.args[0]}"


ERRORS: dict[str, Callable[[int], BaseException]] = {
    "a ValueError": lambda n: ValueError(f"sample {n} is bad"),
    "a KeyError": lambda n: KeyError(f"no key {n}"),
    "an IndexError": IndexError,
    "a TypeError": lambda n: TypeError("of the wrong type"),
    "an AssertionError": lambda n: AssertionError(),
    "an OSError": lambda n: FileNotFoundError(2, "No such file or directory", "/nowhere"),
    "a UnicodeDecodeError": lambda n: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    "a MemoryError": lambda n: MemoryError("out of memory, says the test"),
    "a NotImplementedError": lambda n: NotImplementedError("later"),
    "an error of one's own": lambda n: OwnError(f"sample {n}"),
    "an error without text": lambda n: QuietError(),
    "an error with its own str()": lambda n: LongWindedError(n, "x"),
    "an error with a message": lambda n: WithMessageError(message=f"sample {n}"),
    "an error of several lines": lambda n: RuntimeError("line 1\nline 2\n  line 3"),
    "an error in other letters": lambda n: ValueError("\N{SNOWMAN} \N{GREEK SMALL LETTER PI}"),
}


def failing(case: str, *at: int, **options: Any) -> dict[str, Any]:
    return {"dataset": Failing(ERRORS[case], at or (3,)), "collate_fn": as_is, **options}


def everywhere(*at: int) -> Case:
    """The epoch goes on after an error at any of these indices."""
    make = lambda: failing("a ValueError", *at, batch_size=None, shuffle=True)  # noqa: E731
    return Case(make, SOME, 2 * (12 - len(at)))


def batches_are(*expected: list[int]) -> Any:
    return lambda batches, _way: batches == list(expected) * 2


test_errors_come_in_torchs_places_and_words = tried(
    16,
    {
        **{
            case: Case(
                lambda case=case: failing(case, 3, 8, batch_size=2),
                ["two workers"],
                check=batches_are([0, 1], [4, 5], [6, 7], [10, 11]),
            )
            for case in ERRORS
        },
        "the first sample": everywhere(0),
        "the last sample": everywhere(11),
        "all of the first batches": everywhere(0, 1, 2, 3),
        "all samples": everywhere(*range(12)),
        "a collate function": Case(
            lambda: {"dataset": range(9), "batch_size": 2, "collate_fn": fail_on_5},
            WORKERS,
            check=batches_are([0, 1], [2, 3], [6, 7], [8]),
        ),
        # In place of that worker's first batch; the worker then fails or works on.
        "a worker_init_fn": Case(
            lambda: {
                "dataset": Made(str, 6), "batch_size": None, "worker_init_fn": fail_in_worker_1,
            },
            WORKERS,
            walk={"epochs": 1, "take": [2]},
        ),
        # A generator is over after an exception; torch then ends that worker's part.
        "a stream's next": Case(
            lambda: {"dataset": FailingStream(at_iter=False), "batch_size": 2}, SOME
        ),
        "a stream that fails once and goes on": Case(
            lambda: {"dataset": Moody(), "batch_size": 2}, SOME
        ),
        "a stream's iter, at once": Case(
            lambda: {"dataset": FailingStream(at_iter=True)}, ["in-process"], 0
        ),
        "a stream's iter, at the worker's first next": Case(
            lambda: {"dataset": FailingStream(at_iter=True)},
            ["one worker", "two workers"],
            0,
            walk={"epochs": 1, "take": [1]},
        ),
        "no timeout that is reached": Case(
            lambda: {"dataset": range(9), "batch_size": 2, "timeout": 30}, ["two workers"], 10
        ),
    },
)  # fmt: skip


@pytest.mark.parametrize(
    "case", ["a KeyError", "an error of one's own", "an error of several lines"]
)
def test_in_process_the_error_is_the_users_own(case: str) -> None:
    steps = run_ours(lambda: failing(case, batch_size=None))
    raised = next(step.value for step in steps if step.event == "error")
    assert raised == Failure(type(ERRORS[case](3)), str(ERRORS[case](3)))


def test_an_error_that_one_string_cannot_rebuild_arrives_all_the_same() -> None:
    def make() -> dict[str, Any]:
        error = Failing(lambda n: TwoArgumentsError("first", n))
        return {"dataset": error, "batch_size": None, "num_workers": 2}

    theirs, ours = run_torch(make, epochs=1), run_ours(make, epochs=1)
    for mine, torchs in zip(ours, theirs, strict=True):
        assert mine.event == torchs.event
        if mine.event == "error":
            assert torchs.value.kind is RuntimeError
            assert mine.value.kind in (RuntimeError, TwoArgumentsError)
            assert torchs.value.text.splitlines()[0] in mine.value.text


@compared(
    lambda: failing("a ValueError", batch_size=2),
    ["one worker"],
    check=lambda events: events.count(["error", "error"]) == 1,
)
def test_errors_while_other_iterators_live_stay_with_their_own(loader: Any) -> list[list[str]]:
    first, second = walk(loader, epochs=1), walk(loader, epochs=1)
    return [[a.event, b.event] for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_iteration_from_a_map_style_dataset_does_not_end_the_epoch_silently(workers) -> None:
    """Torch ends the epoch there; ours says what happened."""

    def stop(_index: int) -> int:
        raise StopIteration("not meant to be the end")

    steps = run_ours(lambda: {"dataset": Made(stop, 2), "num_workers": workers}, epochs=1)
    assert [step.value.kind for step in steps if step.event == "error"] == [RuntimeError] * 2


def test_a_timeout_in_process_is_refused_as_torch_refuses_it() -> None:
    ours, theirs = both_outcomes(lambda cls: next(iter(cls([1], timeout=5))))
    assert ours.failure.kind is theirs.failure.kind
    assert ours.failure.text.startswith(theirs.failure.text)


def test_a_prefetch_factor_of_zero_is_refused_at_iter() -> None:
    ours = outcome(lambda: next(iter(DataLoader([1], num_workers=1, prefetch_factor=0))))
    assert ours.failure.kind in (AssertionError, ValueError)
