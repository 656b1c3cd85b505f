"""Completes a closing step in spite of Ctrl-C or another signal handler's exception.

Closing waits for processes and threads, and users who wait press Ctrl-C. What an interruption left
open would stay open, because a second ``close()`` does nothing.
"""

from collections.abc import Callable

# Enough for several interruptions. It limits how often a step with an error of its own is run.
_TRIES = 5


def uninterruptible(step: Callable[[], object]) -> None:
    """Run a step, and run it again if an exception interrupts it.

    Args:
        step: A function that can be run again after an exception at any point. Its result is
            dropped.

    Raises:
        BaseException: The first exception, after the step was completed or has raised five times.
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
            interruption = None  # its traceback refers to this frame
