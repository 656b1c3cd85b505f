"""Ending things though a Ctrl-C, or what another signal handler raises, comes in between.

Whoever closes waits for processes and threads, and a user who waits presses Ctrl-C. What was left
undone then would never be done: a second ``close()`` does nothing.
"""

from collections.abc import Callable

# The first interruption, a few impatient ones, and an end for an error of our own.
_TRIES = 5


def finish(step: Callable[[], object]) -> None:
    """Run a step to its end: where it is interrupted, it is run again.

    Args:
        step: May be run again after an exception at any point of it. What it returns is dropped.

    Raises:
        BaseException: What interrupted it first; it is done nevertheless.
    """
    interruption: BaseException | None = None
    for _ in range(_TRIES):
        try:
            step()
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            interruption = interruption or error
    if interruption is not None:
        try:
            raise interruption
        finally:
            interruption = None  # its traceback holds this frame
