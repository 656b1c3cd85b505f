"""Exceptions and failed samples cross a process, whatever the user's classes do."""

import pickle

import pytest

from shmloader.batch.failures import LISTED, BadSample, RemoteError, SampleReport

WHERE = "in DataLoader worker process 3"
NOTE = "Worker 3 (pid 812) was loading batch 41 (indices 2624 to 2687)."


class TwoArgumentsError(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class KeywordOnlyError(Exception):
    message = "set on the class"

    def __init__(self, *, code):
        super().__init__(code)


class Shy:
    """Neither its pickle nor its text can be had."""

    def __reduce__(self):
        raise ZeroDivisionError

    def __repr__(self):
        raise ZeroDivisionError


def caught(error: BaseException) -> RemoteError:
    """Return an exception as it arrives in the main process."""
    try:
        raise error
    except BaseException:
        arrived: RemoteError = pickle.loads(pickle.dumps(RemoteError.caught(WHERE)))
        return arrived


def bad(index: object, error: Exception) -> BadSample:
    try:
        raise error
    except Exception:
        return BadSample.caught(index, WHERE)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), ValueError),
        (KeyError("x"), KeyError),
        (TwoArgumentsError(1, "x"), RuntimeError),
        (KeywordOnlyError(code=1), RuntimeError),
        (StopIteration(), RuntimeError),
        (KeyboardInterrupt(), RuntimeError),
    ],
)
def test_the_class_arrives_where_a_text_makes_one_and_the_note_is_added(error, kind):
    arrived = caught(error).rebuilt(NOTE)
    assert type(arrived) is kind
    assert arrived.__notes__ == [NOTE]
    assert str(arrived).startswith(f"Caught {type(error).__name__} {WHERE}.\nOriginal Traceback (")
    assert NOTE not in str(arrived)


def test_the_worker_s_traceback_and_the_cause_are_in_the_text():
    def broken():
        raise ValueError("the cause")

    try:
        try:
            broken()
        except ValueError as error:
            raise TypeError("the effect") from error
    except TypeError as error:
        text = str(RemoteError.of(error, WHERE).rebuilt(NOTE))
    for part in ("in broken", "the cause", "direct cause", "the effect", __file__.split("/")[-1]):
        assert part in text


def test_ten_megabytes_of_text_are_shortened_to_their_beginning_and_end():
    error = caught(ValueError("begin " + "x" * 10_000_000 + " end"))
    short = error.shortened(4096)
    assert len(pickle.dumps(short)) < 6000
    text = str(short.rebuilt(NOTE))
    assert "Traceback (most recent call last)" in text
    assert text.rstrip().endswith("x end")
    assert " characters …]" in text
    assert short.summary.startswith("ValueError: begin xxx")
    assert short.shortened(100_000) == short


def test_a_report_names_the_newest_and_counts_all():
    report = SampleReport(300)
    for index in range(250):
        report.add(bad(index, ValueError("bad")))
    assert (report.failed_count, len(report.newest)) == (250, LISTED)
    assert [one.index for one in report.newest] == list(range(150, 250))


def test_keys_that_cannot_cross_are_named_by_their_text():
    assert bad(Shy(), ValueError()).index.startswith("<Shy ")
    assert str(bad("x" * 100_000, ValueError()).index).startswith("'xxx")
