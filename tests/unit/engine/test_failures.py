"""Counting bad samples: when there are too many, which are listed, what is logged."""

import gc
import weakref
from fractions import Fraction
from types import SimpleNamespace

import pytest

from shmloader.batch.failures import BadSample, SampleReport
from shmloader.engine.failures import FailureLimit, FailureList, FailureWatch

HALF, TENTH = Fraction(1, 2), Fraction(1, 10)


def verdicts(limit: FailureLimit, batches: list[tuple[int, int]]) -> list[bool]:
    """What it says of each batch of (samples, failures), and of the epoch's end."""
    return [*(limit.add_samples(*batch) for batch in batches), limit.is_too_much]


@pytest.mark.parametrize(
    ("most", "batches", "expected"),
    [
        (None, [(10, 9), (10, 9)], [False, False, False]),
        (0, [(10, 0), (10, 1)], [False, True, True]),
        (3, [(10, 3), (10, 0)], [False, False, False]),
        (3, [(10, 3), (10, 1), (10, 0)], [False, True, True, True]),
        (3, [(10, 4)], [True, True]),
        # A share is judged from the hundredth sample on, and at the end.
        (TENTH, [(99, 98)], [False, True]),
        (TENTH, [(100, 11)], [True, True]),
        (TENTH, [(100, 10)], [False, False]),
        (TENTH, [(50, 40), (49, 0), (1, 0)], [False, False, True, True]),
        (TENTH, [(50, 11), (50, 0), (10, 0)], [False, True, False, False]),
        (HALF, [(3, 2)], [False, True]),
        (HALF, [(4, 2)], [False, False]),
        (Fraction(1), [(1000, 999)], [False, False]),
        # Nothing was looked at.
        (0, [], [False]),
        (HALF, [(0, 0)], [False, False]),
    ],
)
def test_too_many_is_more_than_the_number_or_the_share(most, batches, expected):
    assert verdicts(FailureLimit(most, may_all_fail=True), batches) == expected


@pytest.mark.parametrize("most", [None, 1000, Fraction(1)])
def test_an_epoch_in_which_all_failed_is_too_many_unless_they_were_replaced(most):
    batches = [(64, 64), (64, 64)]
    assert verdicts(FailureLimit(most, may_all_fail=False), batches) == [False, False, True]
    assert verdicts(FailureLimit(most, may_all_fail=True), batches) == [False, False, False]
    one_good = [*batches, (64, 63)]
    assert verdicts(FailureLimit(most, may_all_fail=False), one_good) == [False] * 4
    assert verdicts(FailureLimit(most, may_all_fail=False), []) == [False]


def report_of_a_bad_sample() -> SampleReport:
    report = SampleReport(1)
    try:
        raise ValueError("sample 0 is bad")
    except ValueError:
        report.add(BadSample.caught(0, "in DataLoader worker process 1"))
    return report


def test_an_error_noted_while_another_is_handled_does_not_hold_that():
    class Held(Exception):  # noqa: N818 - what matters is who holds it
        pass

    listed = FailureList()
    watch = FailureWatch(listed, None, keep_size=False, replaces=False)
    try:
        raise Held
    except Held as held:
        seen = weakref.ref(held)
        watch.add(report_of_a_bad_sample(), "batch 0")
    gc.collect()
    assert listed[0].error.__context__ is None
    assert seen() is None


@pytest.mark.parametrize(
    ("keep_size", "found", "is_refused"),
    [(True, 2, True), (True, 0, False), (False, 2, False)],
)
def test_a_rank_may_not_leave_out_a_batch_that_its_reader_has(keep_size, found, is_refused):
    heard = []
    watch = FailureWatch(
        FailureList(), None, keep_size=keep_size, replaces=False, hear=heard.append
    )
    report = SimpleNamespace(
        found=SimpleNamespace(size=found), sample_count=found, failed_count=found, newest=()
    )
    assert watch.add(report, "batch 0") is None
    assert heard == [report.found]
    assert (watch.left_out("batch 0") is not None) is is_refused
