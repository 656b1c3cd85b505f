"""What comes of a ticket: an answer, or the death of its worker.

Also what the pools have in common whose batches come as ordinary objects.

The answer of a batch that lies in a slot carries the reader of its layout, since a worker does not
repeat a layout that is the same as that of its last batch.
"""

import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.collator import bytes_of
from shmloader.batch.failures import RemoteError, SampleReport
from shmloader.batch.fetch import EmptyBatchError
from shmloader.batch.maker import BatchMaker
from shmloader.insight.measurements import Counts, Readings
from shmloader.interruptions import Caught, Wakeup, attempt, uninterruptible
from shmloader.memory.flat import FlatReader
from shmloader.memory.pickled import PickledLayout, PickledReader
from shmloader.messages import InSlot, Unsaved
from shmloader.pools.worker_dataset import WorkerDataset


@dataclass
class Answer:
    """The answer to a ticket: a batch, an exception, or that there is no batch.

    Attributes:
        content: The reader of the batch's layout, if it lies in a slot (None in the message from
            the worker); else the batch itself.
        report: How many of its samples failed, and how; None if bad samples raise.
        times: Packed :class:`~shmloader.insight.measurements.WorkTimes`; None if not known.
        nbytes: Bytes that the batch takes of its slot; without a slot, those of its tensors and
            arrays.
        error: Rebuilds the exception of the user's code that comes in place of the batch; else
            None.
        is_empty: Whether there is no batch, since all its samples failed and are left out.
        is_final: Whether the dataset could not be resumed, and no batch follows.
        snapshot: State of the worker's dataset after the batch, or why there is none; None if none
            was due. The message from the worker may say where it lies.
        fingerprint: Fingerprint of the batch, if one was taken.
        looked_ns: When the engine began to look for answers, before it saw this one.
        seen_ns: When the engine saw the answer.
    """

    content: Any = None
    report: SampleReport | None = None
    times: bytes | None = None
    nbytes: int = 0
    error: RemoteError | None = None
    # Values of the class take no time in the constructor.
    is_empty: bool = field(default=False, init=False)
    is_final: bool = field(default=False, init=False)
    snapshot: bytes | InSlot | Unsaved | None = field(default=None, init=False)
    fingerprint: int | None = field(default=None, init=False)
    looked_ns: int = field(default=0, init=False)
    seen_ns: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Death:
    """Says that the worker died before it answered.

    Attributes:
        pid: The worker's process id; 0 if it never started, ``UNKNOWN_PID`` for a task of an
            executor.
        exit_code: The worker's exit code, negative for a signal; None if it is not known, for
            instance since a SIGCHLD handler of the user's has reaped it.
        was_elsewhere: Whether the worker was loading a batch of another rank that shares it.
        because: Why the worker is gone or could not be started, if that is known; else "".
        reason: What the executor said of its lost task; "" if the worker is a process of ours.
        is_final: Whether a restart would not help: the executor takes no tasks or refuses the
            dataset, or its processes cannot make batches.
    """

    pid: int
    exit_code: int | None
    was_elsewhere: bool = False
    because: str = ""
    reason: str = ""
    is_final: bool = False


Reader = FlatReader | PickledReader


def read_layout(data: bytes, known: Iterable[object]) -> Reader | RemoteError:
    """Return the reader of a layout that a worker has sent, or the error of all its batches.

    ``known`` has what this function returned for the workers' last layouts: workers with equal
    layouts share one reader.
    """

    def read() -> Reader:
        layout = pickle.loads(data)
        same = (one for one in known if isinstance(one, Reader) and one.layout == layout)
        kind = PickledReader if type(layout) is PickledLayout else FlatReader
        return next(same, None) or kind(layout)

    # Unpickling or comparing the user's keys may raise anything.
    found = attempt(read)
    if isinstance(found, Caught):
        return RemoteError.of(found.error, "while reading a batch in the main process")
    return found


class ObjectPool:
    """Base of the pools without slots. Methods do and raise what ``Pool`` says.

    Attributes:
        wakeup: Set when there is an answer, and by :meth:`wake`.
    """

    memory = None

    def __init__(self) -> None:
        self.counts, self.readings = Counts(), Readings()
        self.is_waiting = False
        self.wakeup = Wakeup()
        self._owner_pid = os.getpid()
        # Tasks that were sent and whose answers were not reported, by seq.
        self._tasks: dict[int, Any] = {}

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, which has neither the threads nor the tasks."""
        return os.getpid() != self._owner_pid

    def start_epoch(self, worker_id: int, epoch: int) -> bool:  # noqa: ARG002 - nothing to tell
        """Return True: the worker's task was dropped, so it may begin the next epoch's."""
        return True

    def resume(self, worker_id: int, checkpoint: Checkpoint) -> None:
        """Do nothing: these pools load no datasets with states."""

    def enable_wake(self) -> None:
        """Do nothing: ``wake`` works from the beginning."""

    def wake(self) -> None:
        """Make the present or the next ``wait`` return. Called from any thread."""
        self.wakeup.set()

    def end_workers(self) -> None:
        """End the threads, or cancel tasks. May be called again, and from any thread."""
        if not self.is_inherited:
            uninterruptible(self._end)

    def _end(self) -> None:
        """End the threads, or cancel tasks. Runs again if it is interrupted."""


def make_answer(
    maker: BatchMaker | WorkerDataset,
    make: Callable[[], object],
    where: str,
    raised: tuple[type[BaseException], ...] = (),
) -> Answer:
    """Make a batch by ``make``, and return the answer to its ticket.

    ``maker`` has the report on the samples and the times. ``where`` is for texts of failures.
    Exceptions of the types in ``raised`` are no answer.
    """
    pid, answer = os.getpid(), Answer()
    try:
        answer.content = make()
    except EmptyBatchError:
        answer.is_empty = True
    except raised:
        raise
    except BaseException:  # noqa: BLE001 - it is the answer
        answer.error = RemoteError.caught(where)
    if os.getpid() != pid:  # a child that the user's code has forked must not answer
        os._exit(1)
    answer.report, answer.times = maker.pop_report(), maker.timer.read()
    answer.nbytes = bytes_of(answer.content)
    return answer
