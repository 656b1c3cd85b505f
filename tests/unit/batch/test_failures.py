"""Reports of samples that cross a process, whatever the user's objects do."""

import pickle

import pytest

from shmloader.batch.failures import LISTED, BadSample, SampleReport, describe_index
from shmloader.messages import INLINE_BYTES

WHERE = "in DataLoader worker process 3"


def bad(index: object, error: Exception) -> BadSample:
    try:
        raise error
    except Exception:
        return BadSample.caught(index, WHERE)


def crossed(report: SampleReport) -> SampleReport:
    data = pickle.dumps(report)
    return pickle.loads(data)


class FailsToPickle:
    def __reduce__(self):
        raise ZeroDivisionError

    def __repr__(self):
        return "the key"


class Shy(FailsToPickle):
    def __repr__(self):
        raise ZeroDivisionError


def test_a_report_comes_out_as_it_went_in():
    report = SampleReport(7)
    for index in (0, "a", (1, 2)):
        report.add(bad(index, LookupError(f"no {index}")))
    arrived = crossed(report)
    assert arrived == report
    assert (arrived.sample_count, arrived.failed_count) == (7, 3)
    assert [one.index for one in arrived.newest] == [0, "a", (1, 2)]
    assert [one.error.summary for one in arrived.newest] == [
        "LookupError: no 0", "LookupError: no a", "LookupError: no (1, 2)",
    ]  # fmt: skip


def test_a_report_names_the_newest_and_counts_all():
    report = SampleReport(300)
    for index in range(250):
        report.add(bad(index, ValueError("bad")))
    assert len(report.newest) == LISTED
    arrived = crossed(report)
    assert (arrived.failed_count, len(arrived.newest)) == (250, LISTED)
    assert [one.index for one in arrived.newest] == list(range(150, 250))
    arrived.add(bad(250, ValueError("bad")))
    assert len(arrived.newest) == LISTED


def test_a_traceback_is_shortened_to_its_beginning_and_its_end():
    one = bad(1, ValueError("m" * 10_000_000 + " is the end"))
    assert len(one.error.text) < 5000
    assert one.error.text.startswith("Traceback (most recent call last)")
    assert one.error.text.endswith("is the end\n")


def test_a_shortened_report_has_the_counts_and_the_last_failure():
    class Local(Exception):  # noqa: N818 - a class that pickles by value
        filler = "f" * 3000

    report = SampleReport(300)
    for index in range(200):
        report.add(bad("€" * 1300 + str(index), Local("€" * 100_000)))
    assert len(pickle.dumps(report)) > 64 * 1024
    short = report.shortened()
    assert len(pickle.dumps(short)) <= INLINE_BYTES // 4
    arrived = crossed(short)
    assert (arrived.sample_count, arrived.failed_count) == (300, 200)
    (one,) = arrived.newest
    assert "199" in one.index
    assert one.error.kind == "Local"
    assert SampleReport(5).shortened() == SampleReport(5)


def test_a_shortened_report_keeps_a_short_key_and_class():
    report = SampleReport(300)
    report.add(bad((1, "two"), LookupError("x" * 100_000)))
    (one,) = crossed(report.shortened()).newest
    assert one.index == (1, "two")
    assert type(one.error.rebuilt("")) is LookupError


@pytest.mark.parametrize(
    "index", [3, "key", Shy(), [Shy()] * 100, "x" * 10**6, pytest.param(10**5000, id="long")]
)
def test_every_index_has_a_short_description(index):
    assert 0 < len(describe_index(index)) <= 200
