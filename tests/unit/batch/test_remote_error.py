"""Exceptions that cross a process, whatever the user's classes do."""

import asyncio
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch._utils import ExceptionWrapper

from shmloader.batch.remote_error import RemoteError

WHERE = "in DataLoader worker process 3"
NOTE = "Worker 3 (pid 812) was loading batch 41 (indices 2624 to 2687)."


class TwoArgumentsError(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class WithMessageError(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.message = message


class FailingStrError(Exception):
    def __str__(self):
        raise ZeroDivisionError("in __str__")


class CancelledOtherwiseError(BaseException):
    """Derives from BaseException, as trio's Cancelled does."""


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("no")


class UnpicklableClass(type):
    def __reduce__(cls):
        raise TypeError("no")


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
        data = RemoteError.caught(WHERE).dumps()
    return raised_by(lambda: RemoteError.loads(data).reraise(NOTE))


def of_torch(error: BaseException) -> BaseException:
    """Return the exception as torch's wrapper raises it."""
    try:
        raise error.with_traceback(None)
    except BaseException:
        wrapper = ExceptionWrapper(where=WHERE)
    return raised_by(pickle.loads(pickle.dumps(wrapper)).reraise)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad value"),
        KeyError("missing"),
        KeyError(("a", 3)),
        IndexError(),
        RuntimeError("multi\nline"),
        OSError(2, "No such file"),
        FileNotFoundError(2, "No such file", "a.jpg"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        AssertionError(),
        NotImplementedError("x"),
        MemoryError(),
        TwoArgumentsError(3, "three"),
        WithMessageError("hello"),
        FailingStrError("x"),
        torch.OutOfMemoryError("cuda"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_and_text_are_torch_s(error):
    ours, theirs = raised_in_main(error), of_torch(error)
    assert type(ours) is type(theirs)

    def text_of(raised):
        """Return the text without the lines that name this file, which differ."""
        text = str(raised.args[0])
        return [line for line in text.splitlines() if "test_remote_error.py" not in line]

    assert text_of(ours) == text_of(theirs)
    assert text_of(ours)[0] == f"Caught {type(error).__name__} {WHERE}."


class KeywordOnlyError(Exception):
    message = "set on the class"

    def __init__(self, *, code):
        super().__init__(code)


@pytest.mark.parametrize(
    "error",
    [ExceptionGroup("several", [ValueError("one"), TypeError("two")]), KeywordOnlyError(code=7)],
    ids=lambda error: type(error).__name__,
)
def test_a_class_with_a_message_that_takes_none_becomes_a_runtime_error(error):
    # torch raises a TypeError that says nothing of the user's.
    arrived = raised_in_main(error)
    assert type(arrived) is RuntimeError
    assert f"Caught {type(error).__name__} {WHERE}." in str(arrived)


@pytest.mark.parametrize(
    "error",
    [
        StopIteration("done"),
        StopAsyncIteration(),
        GeneratorExit("closed"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        CancelledOtherwiseError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_control_flow_arrives_as_a_runtime_error(error):
    arrived = raised_in_main(error)
    assert type(arrived) is RuntimeError
    assert str(arrived).startswith(f"Caught {type(error).__name__} {WHERE}.\nOriginal Traceback")


def test_subclasses_of_control_flow_arrive_as_a_runtime_error():
    class Stop(StopIteration):
        pass

    arrived = raised_in_main(Stop())
    assert type(arrived) is RuntimeError
    assert "Caught Stop in" in str(arrived)


@pytest.mark.parametrize(
    "error", [ValueError("x"), TwoArgumentsError(1, "x"), KeyError("x"), StopIteration()]
)
def test_the_note_is_added_and_the_text_is_not_touched_by_it(error):
    arrived = raised_in_main(error)
    assert arrived.__notes__ == [NOTE]
    assert NOTE not in str(arrived)


def test_a_class_that_only_cloudpickle_can_name_is_kept():
    class LocalError(Exception):
        pass

    arrived = raised_in_main(LocalError("here"))
    assert type(arrived).__name__ == "LocalError"
    assert "here" in str(arrived)


def test_a_class_that_nothing_can_pickle_becomes_a_runtime_error_with_its_text():
    class LocalError(Exception, metaclass=UnpicklableClass):
        lock = torch.Generator()
        opened = (number for number in range(3))

    arrived = raised_in_main(LocalError("here"))
    assert type(arrived) is RuntimeError
    assert "Caught LocalError in DataLoader worker process 3." in str(arrived)
    assert "here" in str(arrived)


def test_an_instance_that_cannot_be_pickled_keeps_its_type():
    arrived = raised_in_main(UnpicklableError("here"))
    assert type(arrived) is UnpicklableError
    assert "here" in str(arrived)


def test_the_worker_s_traceback_and_the_cause_are_in_the_text():
    def broken():
        raise ValueError("the cause")

    try:
        try:
            broken()
        except ValueError as error:
            raise TypeError("the effect") from error
    except TypeError:
        data = RemoteError.caught(WHERE).dumps()
    with pytest.raises(TypeError) as caught:
        RemoteError.loads(data).reraise(NOTE)
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
    assert error.dumps()


def test_ten_megabytes_of_text_are_shortened_to_their_beginning_and_end():
    try:
        raise ValueError("begin " + "x" * 10_000_000 + " end")
    except ValueError:
        error = RemoteError.caught(WHERE)
    assert len(error.dumps()) > 10_000_000
    data = error.shortened(4096).dumps()
    assert len(data) < 5000
    with pytest.raises(ValueError, match="Caught ValueError") as caught:
        RemoteError.loads(data).reraise(NOTE)
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
    before = error.dumps()
    assert error.shortened(100_000).dumps() == before
