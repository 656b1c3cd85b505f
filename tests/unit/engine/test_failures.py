"""Counting bad samples: when there are too many, which are listed, what is logged."""

import gc
import weakref
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_an_epoch_without_samples_has_not_failed():
    assert verdicts(FailureLimit(None, may_all_fail=False), []) == [False]


BATCHES = st.lists(
    st.integers(0, 70).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=12
)
LIMITS = st.one_of(
    st.none(),
    st.integers(0, 100),
    st.fractions(min_value=Fraction(1, 1000), max_value=1, max_denominator=1000),
)


@given(batches=BATCHES, most=LIMITS, may_all_fail=st.booleans())
@settings(max_examples=40)
def test_the_verdicts_follow_from_the_sums(batches, most, may_all_fail):
    said = verdicts(FailureLimit(most, may_all_fail=may_all_fail), batches)
    seen = failed = 0
    for batch, verdict in zip(batches, said[:-1], strict=True):
        seen, failed = seen + batch[0], failed + batch[1]
        if isinstance(most, Fraction):
            expected = seen >= 100 and failed * most.denominator > seen * most.numerator
        else:
            expected = most is not None and failed > most
        assert verdict is expected
    all_failed = seen > 0 and failed == seen and not may_all_fail
    if isinstance(most, Fraction):
        assert said[-1] is (failed * most.denominator > seen * most.numerator or all_failed)
    else:
        assert said[-1] is ((most is not None and failed > most) or all_failed)


def bad(index: object, error: Exception | None = None) -> BadSample:
    try:
        raise error or ValueError(f"sample {index} is bad")
    except Exception:
        return BadSample.caught(index, "in DataLoader worker process 1")


def report(sample_count: int, *indices: object) -> SampleReport:
    made = SampleReport(sample_count)
    for index in indices:
        made.add(bad(index))
    return made


def make_watch(listed=None, most=None, *, keep_size=False, replaces=False) -> FailureWatch:
    listed = FailureList() if listed is None else listed
    return FailureWatch(listed, most, keep_size=keep_size, replaces=replaces)


def test_an_error_noted_while_another_is_handled_does_not_hold_that():
    class Held(Exception):  # noqa: N818 - what matters is who holds it
        pass

    listed = FailureList()
    watch = make_watch(listed)
    try:
        raise Held
    except Held as held:
        seen = weakref.ref(held)
        watch.add(report(1, 0), "batch 0")
    gc.collect()
    assert listed[0].error.__context__ is None
    assert seen() is None
