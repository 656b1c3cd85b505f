"""Exceptions that cross a process, whatever the user's classes do."""

import pickle
import weakref
from collections.abc import Callable

import pytest

from shmloader.batch.remote_error import RemoteError

WHERE = "in DataLoader worker process 3"
NOTE = "Worker 3 (pid 812) was loading batch 41 (indices 2624 to 2687)."


class TwoArgumentsError(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    pytest.fail("nothing was raised")


def raised_in_main(error: BaseException) -> BaseException:
    """Return the exception as it is raised in the main process."""
    try:
        raise error.with_traceback(None)
    except BaseException:
        data = pickle.dumps(RemoteError.caught(WHERE))
    return raised_by(lambda: pickle.loads(data).reraise(NOTE))


class KeywordOnlyError(Exception):
    message = "set on the class"

    def __init__(self, *, code):
        super().__init__(code)


@pytest.mark.parametrize(
    "error", [ValueError("x"), TwoArgumentsError(1, "x"), KeyError("x"), StopIteration()]
)
def test_the_note_is_added_and_the_text_is_not_touched_by_it(error):
    arrived = raised_in_main(error)
    assert arrived.__notes__ == [NOTE]
    assert NOTE not in str(arrived)


def test_the_worker_s_traceback_and_the_cause_are_in_the_text():
    def broken():
        raise ValueError("the cause")

    try:
        try:
            broken()
        except ValueError as error:
            raise TypeError("the effect") from error
    except TypeError:
        data = pickle.dumps(RemoteError.caught(WHERE))
    with pytest.raises(TypeError) as caught:
        pickle.loads(data).reraise(NOTE)
    text = str(caught.value)
    for part in ("in broken", "the cause", "direct cause", "the effect", __file__.split("/")[-1]):
        assert part in text


def test_an_error_keeps_no_frame_alive():
    class Witness:
        pass

    def fails():
        witness = Witness()
        alive.append(weakref.ref(witness))
        raise ValueError("x")

    alive = []
    try:
        fails()
    except ValueError:
        error = RemoteError.caught(WHERE)
    assert alive[0]() is None
    assert pickle.dumps(error)


def test_ten_megabytes_of_text_are_shortened_to_their_beginning_and_end():
    try:
        raise ValueError("begin " + "x" * 10_000_000 + " end")
    except ValueError:
        error = RemoteError.caught(WHERE)
    assert len(pickle.dumps(error)) > 10_000_000
    data = pickle.dumps(error.shortened(4096))
    assert len(data) < 5000
    with pytest.raises(ValueError, match="Caught ValueError") as caught:
        pickle.loads(data).reraise(NOTE)
    text = str(caught.value)
    assert "Traceback (most recent call last)" in text
    assert text.rstrip().endswith("x end")
    assert " characters …]" in text


def test_a_long_message_keeps_its_beginning_whatever_the_traceback_is():
    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise ValueError("where it begins " + "x" * 10_000_000)

    for depth in (0, 30):
        try:
            deep(depth)
        except ValueError:
            error = RemoteError.caught("here").shortened(2048)
        assert "ValueError: where it begins xxx" in error.text
        assert error.text.startswith("Traceback (most recent call last):")
        assert len(error.text) < 2200


def test_a_short_text_is_not_shortened():
    try:
        raise ValueError("short")
    except ValueError:
        error = RemoteError.caught(WHERE)
    before = pickle.dumps(error)
    assert pickle.dumps(error.shortened(100_000)) == before
