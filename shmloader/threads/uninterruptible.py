"""Runs closing steps to their end, although Ctrl-C or another signal handler's exception comes.

Closing waits for processes and threads, and users who wait press Ctrl-C. What an interruption left
open would stay open for ever, because a second ``close()`` does nothing.
"""

from collections.abc import Callable

# The first interruption, a few impatient ones, and an end for an error of our own.
_TRIES = 5


def uninterruptible(step: Callable[[], object]) -> None:
    """Run a step to its end. After an interruption the step is run again.

    Args:
        step: The step. It must be possible to run it again after an exception at any point. Its
            result is dropped.

    Raises:
        BaseException: The first interruption, after the step has been completed.
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
