"""Interruptions are told from what the user's code raises, and delay no closing step."""

import functools
import signal
from collections.abc import Callable
from typing import Any

import pytest

from shmloader.interruptions import Caught, Suppressed, attempt, is_interruption, uninterruptible


def fail(*_: object) -> None:
    raise LookupError


class Handler:
    def method(self, signum: int, frame: object) -> None:
        fail()

    def __call__(self, signum: int, frame: object) -> None:
        self.method(signum, frame)


def handle(signum: int, frame: object) -> None:
    fail()


def handle_alone(signum: int, frame: object) -> None:
    """A handler that deletes the frame, as many do to satisfy a linter."""
    del signum, frame
    fail()


class Heir(Handler):
    """A handler that inherits ``__call__``."""


class Forgetful:
    def __call__(self, signum: int, frame: object) -> None:
        frame = None  # noqa: F841 - this is what it does
        fail()


def handle_any(*arguments: object) -> None:
    fail()


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.fixture(
    params=[
        handle,
        handle_alone,
        Heir(),
        Forgetful(),
        Forgetful().__call__,
        functools.partial(handle_any, "more"),
        Handler(),
        Handler().method,
        lambda signum, frame: fail(),
    ]
)
def handler(request) -> Any:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


def deep(depth: int) -> None:
    if depth:
        deep(depth - 1)
    signal.raise_signal(signal.SIGUSR1)


def in_a_generator() -> None:
    for _ in (deep(0) for _ in range(1)):
        pass


@pytest.mark.parametrize("function", [lambda: deep(0), lambda: deep(3), in_a_generator])
def test_what_a_handler_raises_is_an_interruption(handler, function) -> None:
    error = caught(function)
    assert type(error) is LookupError
    assert is_interruption(error)


def test_what_a_users_timer_raises_in_its_own_block_is_the_users_error() -> None:
    def sample() -> None:
        before = signal.signal(signal.SIGUSR1, handle)
        try:
            deep(1)
        finally:
            signal.signal(signal.SIGUSR1, before)

    assert not is_interruption(caught(sample))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_is_an_interruption_wherever_it_is_raised(kind) -> None:
    assert is_interruption(kind())


@pytest.mark.parametrize(
    "function", [fail, functools.partial(fail, 1, 2), lambda: int("x"), lambda: {}["no"]]
)
def test_what_the_code_itself_raises_is_no_interruption(function) -> None:
    assert not is_interruption(caught(function))


def test_what_was_never_raised_is_no_interruption() -> None:
    assert not is_interruption(ValueError())


def test_an_interruption_is_not_suppressed(handler) -> None:
    with Suppressed(LookupError):
        fail()
    with pytest.raises(LookupError), Suppressed(LookupError):
        deep(1)
    with pytest.raises(ValueError, match="another kind"), Suppressed(LookupError):
        raise ValueError("another kind")


def test_what_a_function_raises_becomes_a_value_unless_it_is_an_interruption() -> None:
    def fail(text: str) -> None:
        raise KeyError(text)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    assert attempt(max, 3, 4) == 4
    caught = attempt(fail, "a")
    assert isinstance(caught, Caught)
    assert isinstance(caught.error, KeyError)
    with pytest.raises(KeyboardInterrupt):
        attempt(stop)


class Alarm(BaseException):
    """What a signal handler raises."""


def test_the_first_interruption_is_raised_once_the_step_is_done() -> None:
    first, done = Alarm(1), []
    left = [Alarm(2), first]

    def step() -> None:
        done.append("begun")
        if left:
            raise left.pop()
        done.append("over")

    with pytest.raises(Alarm) as caught:
        uninterruptible(step)
    assert caught.value is first
    assert done == ["begun"] * 3 + ["over"]


def test_a_step_that_always_fails_is_given_up() -> None:
    tries = []

    def step() -> None:
        tries.append(OSError(len(tries)))
        raise tries[-1]

    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one is what counts
        uninterruptible(step)
    assert caught.value is tries[0]
    assert 1 < len(tries) < 10
