"""What an engine says of each batch that it delivers, and of what is raised in a batch's place."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shmloader.engine.dataset_checkpoints import DatasetUpdate
from shmloader.insight.measurements import BatchTimes


class Instead(Exception):  # noqa: N818 - never raised to the user
    """Carries an exception that ``next()`` is to raise in place of a batch.

    What the user's code raises, and what an engine reports itself, is wrapped in this class where
    it is found, and raised to the user by ``BatchIterator.__next__`` alone. So any other
    exception is an interruption, such as a Ctrl-C.

    Attributes:
        error: The exception; a StopIteration at the epoch's end.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def unwrapped(function: Callable[..., object], *arguments: object) -> None:
    """Call a function, and raise the exception that an :class:`Instead` of it carries."""
    try:
        function(*arguments)
        return
    except Instead as instead:
        error = instead.error
    try:
        # Not in the except block, which would add the Instead as its context.
        raise error
    finally:
        del error  # breaks a reference cycle: the traceback holds this frame


class Delivery(NamedTuple):
    """Describes a delivered ticket, whose batch was returned or whose error was raised.

    Attributes:
        seq: Number of the ticket.
        left_out: Numbers of the tickets since the last delivery whose batches were left out, since
            all their samples failed.
        datasets: If checkpoints of the workers' datasets are kept: those after the batches that
            were left out since the last delivery, and the one after this batch.
        times: When the batch passed each step; None if an error was raised.
    """

    seq: int
    left_out: tuple[int, ...] = ()
    datasets: Sequence[DatasetUpdate] = ()
    times: BatchTimes | None = None


#: Makes a :class:`Delivery` from a tuple, in a third of the time that a call of the class takes.
delivery_of: Callable[[tuple[object, ...]], Delivery] = functools.partial(tuple.__new__, Delivery)
