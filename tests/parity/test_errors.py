"""The same exceptions at the same place, with texts that begin as torch's; then on as torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmloader import DataLoader
from tests.parity.compare import (
    Failure,
    Step,
    outcome,
    run_both,
    run_ours,
    run_torch,
    walk,
)
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

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

WAYS: dict[str, dict[str, Any]] = {
    "in-process": {"num_workers": 0},
    "one worker": {"num_workers": 1},
    "two workers": {"num_workers": 2},
    "three workers, one batch ahead": {"num_workers": 3, "prefetch_factor": 1},
    "two persistent workers": {"num_workers": 2, "persistent_workers": True},
}
WORKERS = [way for way in WAYS if way != "in-process"]


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ERRORS)
def test_a_failing_sample_raises_its_error_in_its_place(case: str) -> None:
    """The epoch goes on with the next batch; the failing one is lost."""
    batches = run_both(
        lambda: {
            "dataset": Failing(ERRORS[case], at=(3, 8)),
            "batch_size": 2,
            "collate_fn": as_is,
            "num_workers": 2,
        }
    )
    assert batches == [[0, 1], [4, 5], [6, 7], [10, 11]] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [(0,), (11,), (0, 1, 2, 3), tuple(range(12))], ids=str)
def test_every_way_of_working_goes_on_after_an_error(at: tuple[int, ...], way: str) -> None:
    batches = run_both(
        lambda: {
            "dataset": Failing(ERRORS["a ValueError"], at=at),
            "batch_size": None,
            "shuffle": True,
            **WAYS[way],
        }
    )
    assert len(batches) == 2 * (12 - len(at))


@pytest.mark.parametrize(
    "case", ["a KeyError", "an error of one's own", "an error of several lines"]
)
def test_in_process_the_error_is_the_users_own(case: str) -> None:
    def drive(loader: Any) -> list[Step]:
        return list(walk(loader, epochs=2))

    def make() -> dict[str, Any]:
        return {"dataset": Failing(ERRORS[case]), "batch_size": None}

    ours, theirs = run_ours(make, drive), run_torch(make, drive)
    assert ours == theirs
    raised = next(step.value for step in ours if step.event == "error")
    assert raised == Failure(type(ERRORS[case](3)), str(ERRORS[case](3)))


def test_the_text_tells_the_worker_and_its_traceback() -> None:
    steps = run_ours(
        lambda: {"dataset": Failing(ERRORS["a ValueError"]), "batch_size": 2, "num_workers": 2},
        epochs=1,
    )
    (failure,) = [step.value for step in steps if step.event == "error"]
    assert failure.text.startswith(
        "Caught ValueError in DataLoader worker process 1.\n"
        "Original Traceback (most recent call last):\n"
    )
    assert "in __getitem__" in failure.text
    assert "ValueError: sample 3 is bad" in failure.text


def test_the_text_of_a_key_error_has_lines() -> None:
    steps = run_ours(
        lambda: {"dataset": Failing(ERRORS["a KeyError"]), "batch_size": 2, "num_workers": 1},
        epochs=1,
    )
    (failure,) = [step.value for step in steps if step.event == "error"]
    assert failure.kind is KeyError
    first, *_, last = failure.text.splitlines()
    assert first == "Caught KeyError in DataLoader worker process 0."
    assert last.startswith("KeyError: ")


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WORKERS)
def test_an_exception_in_the_collate_fn(way: str) -> None:
    batches = run_both(
        lambda: {"dataset": range(9), "batch_size": 2, "collate_fn": fail_on_5, **WAYS[way]}
    )
    assert batches == [[0, 1], [2, 3], [6, 7], [8]] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WORKERS)
def test_an_exception_in_the_worker_init_fn(way: str) -> None:
    """It is raised in place of that worker's first batch; the worker then fails or works on."""
    run_both(
        lambda: {
            "dataset": Made(str, 6),
            "batch_size": None,
            "worker_init_fn": fail_in_worker_1,
            **WAYS[way],
        },
        epochs=1,
        take=[2],
    )


def test_the_text_of_an_exception_in_the_worker_init_fn() -> None:
    steps = run_ours(
        lambda: {"dataset": range(6), "num_workers": 2, "worker_init_fn": fail_in_worker_1},
        epochs=1,
        take=[2],
    )
    (failure,) = [step.value for step in steps if step.event == "error"]
    assert failure.kind is OwnError
    assert failure.text.startswith("Caught OwnError in DataLoader worker process 1.")
    assert "OwnError: worker 1 will not start" in failure.text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_in_a_streams_next(way: str) -> None:
    """A generator is over after an exception; torch then ends that worker's part."""
    run_both(
        lambda: {"dataset": FailingStream(at_iter=False), "batch_size": 2, **WAYS[way]}, epochs=2
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_fails_once_goes_on(way: str) -> None:
    run_both(lambda: {"dataset": Moody(), "batch_size": 2, **WAYS[way]}, epochs=2)


def test_in_process_an_exception_in_iter_is_raised_at_once() -> None:
    run_both(lambda: {"dataset": FailingStream(at_iter=True)}, epochs=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_in_iter_in_a_worker_is_raised_at_the_first_next(workers: int) -> None:
    batches = run_both(
        lambda: {"dataset": FailingStream(at_iter=True), "num_workers": workers},
        epochs=1,
        take=[workers],
    )
    assert batches == []


def test_errors_while_other_iterators_live_stay_with_their_own() -> None:
    def drive(loader: Any) -> list[list[str]]:
        first, second = walk(loader, epochs=1), walk(loader, epochs=1)
        events = [(a.event, b.event) for a, b in zip(first, second, strict=True)]
        return [list(pair) for pair in events]

    def make() -> dict[str, Any]:
        dataset = Failing(ERRORS["a ValueError"])
        return {"dataset": dataset, "batch_size": 2, "num_workers": 1}

    ours = run_ours(make, drive)
    assert ours == run_torch(make, drive)
    assert ours.count(["error", "error"]) == 1


def test_a_stop_iteration_from_a_map_style_dataset_does_not_end_the_epoch_silently() -> None:
    """Torch ends the epoch there; ours says what happened."""

    def stop(_index: int) -> int:
        raise StopIteration("not meant to be the end")

    for workers in (0, 1):
        steps = run_ours(
            lambda workers=workers: {"dataset": Made(stop, 2), "num_workers": workers}, epochs=1
        )
        assert [step.value.kind for step in steps if step.event == "error"] == [RuntimeError] * 2


def test_timeouts_that_are_not_reached_change_nothing() -> None:
    run_both(lambda: {"dataset": range(9), "batch_size": 2, "num_workers": 2, "timeout": 30})


def test_a_timeout_in_process_is_refused_as_torch_refuses_it() -> None:
    theirs, ours = (
        outcome(lambda kind=kind: next(iter(kind([1], timeout=5)))).failure
        for kind in (torch.utils.data.DataLoader, DataLoader)
    )
    assert theirs is not None
    assert ours is not None
    assert ours.kind is theirs.kind
    assert ours.text.startswith(theirs.text)


def test_a_prefetch_factor_of_zero_is_refused_at_iter() -> None:
    def first(cls: Any) -> Any:
        return next(iter(cls([1], num_workers=1, prefetch_factor=0)))

    ours = outcome(first, DataLoader)
    assert ours.failure is not None
    assert ours.failure.kind in (AssertionError, ValueError)
