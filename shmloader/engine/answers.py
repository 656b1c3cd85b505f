"""What may come back for a ticket: a batch, nothing, a failure of the user's code, or a death.

A batch's answer carries the reader of its layout, since a worker does not repeat a layout that
is the same as that of its last batch.
"""

import pickle
from collections.abc import Iterable
from typing import Any

from shmloader.errors import InternalError
from shmloader.interruptions import is_interruption
from shmloader.memory.codec import PickledLayout, decode, lends
from shmloader.memory.flat import FlatLayout, FlatReader
from shmloader.memory.slot import Slot
from shmloader.workers.remote_error import RemoteError


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
    """A batch in its slot.

    Attributes:
        reader: Builds it.
        is_kept: The worker still holds memory of the slot.
        check: Bytes of the slot that were used, and their checksum; None if nothing is checked.
        report: What became of its samples, where that is counted: a ``SampleReport`` as written.
        snapshot: Of its worker's dataset, if one came with it.
        fingerprint: Of the batch, if one was taken.
        times: Its worker's clock; see :class:`~shmloader.messages.BatchDone`.
        used_bytes: Bytes of its slot.
        looked_ns: Since when answers had been looked for, when this one was seen.
        seen_ns: When it was seen.
    """

    __slots__ = (
        "check",
        "fingerprint",
        "is_kept",
        "looked_ns",
        "reader",
        "report",
        "seen_ns",
        "snapshot",
        "times",
        "used_bytes",
    )

    def __init__(
        self,
        reader: "Reader",
        *,
        is_kept: bool,
        check: tuple[int, int] | None = None,
        report: bytes | None = None,
        snapshot: bytes | None = None,
        times: Any = None,
        used_bytes: int = 0,
        looked_ns: int = 0,
        seen_ns: int = 0,
        fingerprint: int | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.times = times
        self.used_bytes = used_bytes
        self.looked_ns = looked_ns
        self.seen_ns = seen_ns
        self.reader = reader
        self.is_kept = is_kept
        self.check = check
        self.report = report
        self.snapshot = snapshot


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

    __slots__ = ("error", "fingerprint", "is_final", "is_kept", "report", "snapshot")

    def __init__(
        self,
        error: RemoteError,
        *,
        is_kept: bool,
        report: bytes | None = None,
        snapshot: bytes | None = None,
        fingerprint: int | None = None,
        is_final: bool = False,
    ) -> None:
        self.error = error
        self.fingerprint = fingerprint
        self.is_final = is_final
        self.is_kept = is_kept
        self.report = report
        self.snapshot = snapshot


class Empty:
    """Nothing is left of a batch, all its samples having failed.

    Attributes:
        is_kept: As for a batch.
        report: As for a batch.
        snapshot: As for a batch.
    """

    __slots__ = ("is_kept", "report", "snapshot")

    def __init__(
        self, *, is_kept: bool, report: bytes | None, snapshot: bytes | None = None
    ) -> None:
        self.is_kept = is_kept
        self.report = report
        self.snapshot = snapshot


class Death:
    """The worker died before it answered.

    Attributes:
        pid: Its process number.
        exit_code: Negative for a signal; None if it is not known.
        restart_limit: Workers that might have been replaced in the epoch.
        oom_kills: Processes that the kernel has ended for want of memory, this one maybe among
            them.
    """

    __slots__ = ("exit_code", "oom_kills", "pid", "restart_limit")

    def __init__(
        self, pid: int, exit_code: int | None, oom_kills: int = 0, restart_limit: int = 0
    ) -> None:
        self.pid = pid
        self.exit_code = exit_code
        self.restart_limit = restart_limit
        self.oom_kills = oom_kills


Reader = FlatReader | PickledReader


class UnreadableLayout:
    """Stands for the reader of a layout that this process cannot read.

    Attributes:
        error: Why; the failure of all batches that have it.
    """

    __slots__ = ("error",)

    def __init__(self, error: RemoteError) -> None:
        self.error = error


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
