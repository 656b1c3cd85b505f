"""A closing step is completed whatever interrupts it, and the interruption is raised then."""

import pytest

from shmloader.interruptions import uninterruptible


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
