"""What may come back for a ticket: a batch, nothing, a failure of the user's code, or a death.

The answer of a batch that lies in a slot carries the reader of its layout, since a worker does not
repeat a layout that is the same as that of its last batch.
"""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shmloader.batch.failures import RemoteError, SampleReport
from shmloader.errors import InternalError
from shmloader.interruptions import is_interruption
from shmloader.memory.codec import PickledLayout, decode, lends
from shmloader.memory.flat import FlatLayout, FlatReader
from shmloader.memory.slot import Slot


class PickledReader:
    """Builds a batch that took the general way.

    Attributes:
        layout: The layout.
        lends: Whether the batch has a part that is large enough to be lent.
    """

    def __init__(self, layout: PickledLayout) -> None:
        self.layout = layout
        self.lends = lends(layout)

    def read(self, slot: Slot, lease: object | None) -> object:
        """Build the batch; see :func:`decode`."""
        return decode(self.layout, slot, lease)


class Batch:
    """A batch.

    Attributes:
        content: What gives the batch: in a slot, the reader of its layout; else the batch itself.
        lends: Whether it lies in a slot, and has a part that is large enough to be lent.
        is_kept: The worker still holds memory of the slot.
        check: Bytes of the slot that were used, and their checksum; None if nothing is checked.
        report: What became of its samples, where that is counted.
        snapshot: Of its worker's dataset, if one came with it.
        fingerprint: Of the batch, if one was taken.
        times: Its worker's clock; see :class:`~shmloader.messages.BatchDone`.
        nbytes: Bytes of its slot that it takes; else of its tensors and arrays.
        looked_ns: Since when answers had been looked for, when this one was seen.
        seen_ns: When it was seen.
    """

    __slots__ = (
        "check",
        "content",
        "fingerprint",
        "is_kept",
        "lends",
        "looked_ns",
        "nbytes",
        "report",
        "seen_ns",
        "snapshot",
        "times",
    )

    def __init__(
        self,
        content: Any,
        *,
        lends: bool = False,
        is_kept: bool = False,
        check: tuple[int, int] | None = None,
        report: SampleReport | None = None,
        snapshot: bytes | None = None,
        times: Any = None,
        nbytes: int = 0,
        looked_ns: int = 0,
        seen_ns: int = 0,
        fingerprint: int | None = None,
    ) -> None:
        self.content = content
        self.lends = lends
        self.is_kept = is_kept
        self.check = check
        self.report = report
        self.snapshot = snapshot
        self.times = times
        self.nbytes = nbytes
        self.looked_ns = looked_ns
        self.seen_ns = seen_ns
        self.fingerprint = fingerprint


class LocalError:
    """An exception of this thread, to be raised as it is.

    Has the part of :class:`~shmloader.batch.failures.RemoteError` that the engine uses.
    """

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def rebuilt(self, note: str) -> Exception:  # noqa: ARG002 - the traceback says where
        """Return the exception, and let go of it: its traceback holds the frames up to here."""
        error, self._error = self._error, None
        if error is None:
            raise InternalError("an exception is raised once")
        return error


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of the user's code.

    Attributes:
        error: Raises it.
        is_kept: As for a batch.
        report: As for a batch.
        snapshot: As for a batch.
        fingerprint: As for a batch.
        is_final: Whether the dataset could not be resumed, and no batch follows.
    """

    error: "RemoteError | LocalError"
    is_kept: bool = False
    report: SampleReport | None = None
    snapshot: bytes | None = None
    fingerprint: int | None = None
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Empty:
    """Nothing is left of a batch, all its samples having failed.

    Attributes:
        is_kept: As for a batch.
        report: As for a batch.
        snapshot: As for a batch.
    """

    report: SampleReport | None
    is_kept: bool = False
    snapshot: bytes | None = None


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The iterable dataset is exhausted, where the pool answers as soon as a task is sent."""


Answer = Batch | Failure | Empty


@dataclass(frozen=True, slots=True)
class Death:
    """The worker died before it answered.

    Attributes:
        pid: Its process number.
        exit_code: Negative for a signal; None if it is not known.
        oom_kills: Processes that the kernel has ended for want of memory, this one maybe among
            them.
        restart_limit: Workers that might have been restarted in the epoch.
    """

    pid: int
    exit_code: int | None
    oom_kills: int = 0
    restart_limit: int = 0


Reader = FlatReader | PickledReader


@dataclass(frozen=True, slots=True)
class UnreadableLayout:
    """Stands for the reader of a layout that this process cannot read.

    Attributes:
        error: Why; the failure of all batches that have it.
    """

    error: RemoteError


def make_reader(layout: object) -> Reader:
    """The reader of a layout.

    Raises:
        InternalError: If it is none.
    """
    if type(layout) is FlatLayout:
        return FlatReader(layout)
    if type(layout) is PickledLayout:
        return PickledReader(layout)
    raise InternalError(f"a layout of unknown type: {layout!r}")


def read_layout(data: bytes, known: Iterable[object]) -> Reader | UnreadableLayout:
    """Read a layout that a worker has sent, for its batches from now on.

    Args:
        data: The layout, pickled.
        known: What this function returned for the workers' last layouts. Workers whose layouts are
            equal share one reader, and what it keeps of slots.
    """
    try:
        layout = pickle.loads(data)
        for reader in known:
            if isinstance(reader, Reader) and reader.layout == layout:
                return reader
        return make_reader(layout)
    except Exception as raised:
        if is_interruption(raised):
            raise
        # Of the user's keys, which may raise anything.
        return UnreadableLayout(RemoteError.caught("while reading a batch in the main process"))
