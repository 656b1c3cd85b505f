"""Defines what is measured: a batch's times, an engine's counts, and what workers use.

The times of a batch, all by ``time.monotonic_ns()``, which is one clock for all processes::

    offered ── sent ─── began ─ fetch ─ collate ─ encode ─ … seen ──── handed ─ (stage) ─ taken
       └ slot ┘ └ queue ┘                                 └ transport ┘└ reorder, ready ┘
"""

import dataclasses
import re
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shmloader.interruptions import Suppressed


class WorkTimes(NamedTuple):
    """What a worker has measured of a batch, sent with the batch's answer.

    Attributes:
        began_ns: When the worker began the task.
        fetch_ns: Time in the dataset and in the rest of the fetcher.
        collate_ns: Time in ``collate_fn``.
        encode_ns: Time until the answer was ready to be sent.
        sample_count: Number of samples collated.
    """

    began_ns: int
    fetch_ns: int
    collate_ns: int
    encode_ns: int
    sample_count: int


# Times travel and are kept as bytes, which take less time and memory than tuples of numbers.
_WORK = struct.Struct("=5q")

#: Returns the fields of a :class:`WorkTimes`, its arguments, as bytes.
pack_work = _WORK.pack

#: Returns as bytes what an engine knows of a batch that it delivers. The packed
#: :class:`WorkTimes` follow; both together are the *times* of a batch. The arguments:
#:
#: * ``worker_id``: the worker that loaded the batch
#: * ``offered_ns``: when its indices were drawn
#: * ``sent_ns``: when it had a slot and a worker, and its task was sent
#: * ``looked_ns``: when the engine began to look for answers, before it saw this one. The time from
#:   the end of the work to this moment is no delay, since no batch was asked for.
#: * ``seen_ns``: when the engine saw the answer
#: * ``handed_ns``: when the batch was next in order and asked for
#: * ``nbytes``: bytes that the batch takes: of its slot, or of its tensors and arrays
#: * ``lent_count``: the number of slots lent at that moment
pack_batch = struct.Struct("=8q").pack


def work_of(times: bytes) -> WorkTimes:
    """Return what the worker has measured, from its packed times or from the times of a batch."""
    return WorkTimes._make(_WORK.unpack(times[-_WORK.size :]))


@dataclasses.dataclass(slots=True)
class Counts:
    """What an engine has counted since its start. Only the engine writes it.

    ``lent`` and ``copied`` are batches, ``restarts`` replaced workers. ``slot_bytes`` is what all
    slots take now, ``most_bytes`` what they took at most, and ``largest_bytes`` what the largest
    batch took.
    """

    lent: int = 0
    copied: int = 0
    restarts: int = 0
    slot_count: int = 0
    slot_bytes: int = 0
    most_bytes: int = 0
    largest_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What a worker has used.

    Attributes:
        pid: Process id; None for a thread.
        cpu_ns: CPU time.
        stalled_ns: Time in which it could have run but no core was free; 0 if not known.
        pss_bytes: The worker's memory, with its share of the shared pages; None if not known.
    """

    pid: int | None = None
    cpu_ns: int = 0
    stalled_ns: int = 0
    pss_bytes: int | None = None


#: After such a time, the workers' memory is measured once more at an end: milliseconds for each.
LONG_NS = 5_000_000_000


class Readings:
    """The usage of an iterator's workers: read while they live, remembered afterwards."""

    def __init__(self) -> None:
        self._latest: Sequence[Usage] = ()
        self._ask: Callable[[bool], Sequence[Usage] | None] | None = None
        self._opened_ns = 0

    def open(self, ask: Callable[[bool], Sequence[Usage] | None]) -> None:
        """Read the usage with ``ask`` from now on, while the workers live.

        It returns None if the usage is not known any more. Given True, it measures memory as well.
        """
        self._ask, self._opened_ns = ask, time.monotonic_ns()

    def close(self) -> None:
        """Read the usage a last time, before the workers end. May be called again."""
        self.read(thoroughly=time.monotonic_ns() - self._opened_ns > LONG_NS)
        self._ask = None

    def read(self, *, thoroughly: bool) -> Sequence[Usage]:
        """Return the newest usage of each worker; ``thoroughly`` measures memory as well."""
        ask = self._ask
        now = None if ask is None else ask(thoroughly)
        if now is not None and self._ask is not None:  # they were not closed meanwhile
            self._latest = now
        return self._latest


def usage_of(task: int, *, is_thread: bool = False, thoroughly: bool = False) -> Usage:
    """Return what a process or a thread has used.

    Args:
        task: The process id, or the system's id of a thread of this process.
        is_thread: Whether it is a thread.
        thoroughly: Whether to measure the memory, which takes milliseconds.
    """
    cpu_ns, pss_bytes = 0, None
    with Suppressed(OSError):  # it has ended
        # The number of its clock, as clock_getcpuclockid(3) returns it.
        cpu_ns = time.clock_gettime_ns((~task << 3) | (6 if is_thread else 2))
    fields = read_file(f"/proc/{task}/schedstat").split()
    if thoroughly:
        found = re.search(r"^Pss: +(\d+) kB", read_file(f"/proc/{task}/smaps_rollup"), re.MULTILINE)
        pss_bytes = None if found is None else int(found[1]) << 10
    pid = None if is_thread else task
    return Usage(pid, cpu_ns, int(fields[1]) if fields else 0, pss_bytes)


def read_file(path: str | Path) -> str:
    """Return a file's text; "" if it cannot be read, for instance since no descriptor is left."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError as error:
        if error.errno is None:  # a signal handler's
            raise
        return ""
