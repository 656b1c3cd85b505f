"""Counting bad samples: when there are too many, which are listed, what is logged."""

import gc
import logging
import weakref
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.batch.failures import LISTED, BadSample, SampleReport
from shmloader.engine.failures import FailureLimit, FailureList, FailureWatch
from shmloader.errors import TooManyFailures

HALF, TENTH = Fraction(1, 2), Fraction(1, 10)


def verdicts(limit: FailureLimit, batches: list[tuple[int, int]]) -> list[bool]:
    """What it says of each batch of (samples, failures), and of the epoch's end."""
    return [*(limit.note(*batch) for batch in batches), limit.end_epoch()]


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


def test_an_epoch_counts_from_0():
    limit = FailureLimit(3, may_all_fail=False)
    for _ in range(5):
        limit.start_epoch()
        assert verdicts(limit, [(10, 3)]) == [False, False]


BATCHES = st.lists(
    st.integers(0, 70).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=12
)
LIMITS = st.one_of(
    st.none(),
    st.integers(0, 100),
    st.fractions(min_value=Fraction(1, 1000), max_value=1, max_denominator=1000),
)


@given(batches=BATCHES, most=LIMITS, may_all_fail=st.booleans())
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


# ---------------------------------------------------------------- list and log


def bad(index: object, error: Exception | None = None) -> BadSample:
    try:
        raise error or ValueError(f"sample {index} is bad")
    except Exception:
        return BadSample.caught(index, "in DataLoader worker process 1")


def report(sample_count: int, *indices: object) -> SampleReport:
    made = SampleReport(sample_count)
    for index in indices:
        made.note(bad(index))
    return made


def make_watch(listed=None, most=None, *, keep_size=False, replaces=False) -> FailureWatch:
    listed = FailureList() if listed is None else listed
    return FailureWatch(listed, most, keep_size=keep_size, replaces=replaces)


def test_failures_are_listed_in_order_the_newest_100_of_them_and_all_are_counted():
    listed = FailureList()
    watch = make_watch(listed)
    assert (len(listed), listed.total, list(listed)) == (0, 0, [])
    for batch in range(3):
        indices = range(50 * batch, 50 * (batch + 1))
        assert watch.note(report(60, *indices), f"batch {batch}", 1, 99) is None
    assert (len(listed), listed.total, LISTED) == (100, 150, 100)
    assert [failed.index for failed in listed] == list(range(50, 150))
    assert [failed.worker for failed in listed] == [1] * 100
    assert isinstance(listed, Sequence)
    assert (listed[0].index, listed[-1].index) == (50, 149)
    assert [failed.index for failed in listed[-2:]] == [148, 149]
    assert listed[3] in listed
    with pytest.raises(IndexError):
        listed[100]
    with pytest.raises(AttributeError):
        listed[0].index = 1


def test_an_error_has_one_line_with_the_traceback_beside_it_and_holds_no_frame():
    listed = FailureList()
    make_watch(listed).note(report(4, 17), "batch 3", 1, 99)
    error = listed[0].error
    assert type(error) is ValueError
    assert str(error) == "sample 17 is bad"
    traceback = listed[0].traceback
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert traceback.endswith("\nValueError: sample 17 is bad\n")
    assert error.__notes__ == [
        "Worker 1 (pid 99) was loading index 17 of batch 3.",
        traceback.rstrip(),
    ]
    assert repr(listed[0]) == (
        "FailedSample(index=17, error=ValueError('sample 17 is bad'), worker=1)"
    )
    assert (error.__traceback__, error.__context__, error.__cause__) == (None, None, None)


@pytest.mark.parametrize(
    ("who", "text"),
    [((), "This process"), ((1, 99), "Worker 1 (pid 99)"), ((1, None), "Worker thread 1")],
)
def test_an_error_s_note_says_whose_it_is(who, text):
    listed = FailureList()
    make_watch(listed).note(report(4, 17), "batch 3", *who)
    assert listed[0].error.__notes__[0] == f"{text} was loading index 17 of batch 3."


def test_an_error_noted_while_another_is_handled_does_not_hold_that():
    class Held(Exception):  # noqa: N818 - what matters is who holds it
        pass

    listed = FailureList()
    watch = make_watch(listed)
    try:
        raise Held
    except Held as held:
        seen = weakref.ref(held)
        watch.note(report(1, 0), "batch 0")
    gc.collect()
    assert listed[0].error.__context__ is None
    assert seen() is None


def test_too_many_failures_say_how_many_and_have_the_last_as_their_cause():
    listed = FailureList()
    watch = make_watch(listed, 2)
    assert watch.note(report(64, 1, 2), "batch 0", 0, 98) is None
    error = watch.note(report(64, 70, 90), "batch 1", 1, 99)
    assert type(error) is TooManyFailures
    assert "4 of the 128 samples tried in this epoch failed" in str(error)
    assert "max_failures=2" in str(error)
    assert "index 90 in worker 1" in str(error)
    assert error.__cause__ is listed[-1].error


def test_a_share_is_told_at_the_end_of_a_short_epoch():
    watch = make_watch(most=TENTH)
    assert watch.note(report(9, 8), "batch 0") is None
    error = watch.end_epoch()
    assert "1 of the 9 samples" in str(error)
    assert "max_failures=1/10" in str(error)
    assert "index 8 in this process" in str(error)


def test_a_limit_holds_for_an_epoch_and_the_list_for_the_loader():
    listed = FailureList()
    watch = make_watch(listed, 1)
    for epoch in range(3):
        watch.start_epoch()
        assert watch.note(report(4, epoch), "batch 0") is None
        assert watch.end_epoch() is None
    assert [failed.index for failed in listed] == [0, 1, 2]


def test_an_empty_batch_is_too_much_where_its_size_is_kept():
    assert make_watch().left_out("batch 5 (indices 1, 2)") is None
    watch = make_watch(keep_size=True)
    watch.note(report(2, 1, 2), "batch 5")
    error = watch.left_out("batch 5 (indices 1, 2)")
    assert type(error) is TooManyFailures
    assert "all samples of batch 5 (indices 1, 2) failed" in str(error)
    assert "sample 2 is bad" in str(error.__cause__)


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "left out"), ({"keep_size": True}, "replaced"), ({"replaces": True}, "replaced")],
)
def test_the_first_failure_of_an_epoch_is_logged_in_one_line(options, words, caplog):
    watch = make_watch(**options)
    with caplog.at_level(logging.DEBUG, "shmloader"):
        for epoch in range(2):
            watch.start_epoch()
            watch.note(report(4), "batch 0", 1, 99)
            assert len(caplog.records) == epoch
            watch.note(report(4, 3, 4), "batch 1", 1, 99)
            watch.note(report(4, 5), "batch 2", 1, 99)
            assert len(caplog.records) == epoch + 1
    for record in caplog.records:
        assert (record.name, record.levelname) == ("shmloader", "WARNING")
        text = record.getMessage()
        assert f"index 3 failed and is {words} (worker 1, on_error)" in text
        assert "ValueError: sample 3 is bad" in text
        assert "\n" not in text
