"""The status page shows what each worker is doing, even a stuck one, which answers nothing.

It is anonymous shared memory with one line for each worker. The worker writes its line and the main
process reads it. Beside it there is a pipe: a worker writes its Python stack into it when the main
process sends a signal. The signal handler is faulthandler's, which does not need the interpreter,
so it also works for a worker inside a call that never returns.
"""

import enum
import faulthandler
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass, replace
from multiprocessing import reduction
from typing import Any

from shmloader.batch.sample_watch import NO_SAMPLE
from shmloader.insight.measurements import read_file
from shmloader.memory.arena import MemoryFile, map_range, memory_file
from shmloader.pools.forking import Descriptors, is_readable

# A line: phase, epoch, seq, time.monotonic_ns() when the phase began, and _SAMPLE and _HELD.
_PHASE, _LINE = struct.Struct("=4q"), struct.Struct("=7q")
# The sample in work and its deadline, if there is a sample_timeout: see SampleWatch.
_SAMPLE, _SAMPLE_AT = struct.Struct("=2q"), _PHASE.size
# Two cache lines for each worker, since processors fetch them in pairs; in words of eight bytes.
_LINE_BYTES, _WORDS = 128, 16
# Which task of the queue the worker has: its number plus FIRST_TASK, NO_TASK, or RECEIVING while it
# may be receiving one. It is written in one piece, so it is right even if the worker is killed.
_HELD = 6
RECEIVING, NO_TASK, FIRST_TASK = range(3)

#: Asks a worker for its stack. Python, torch and their libraries do not use real-time signals.
#: On a system without real-time signals shmloader starts no worker processes.
STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 13

# A stack comes in many small writes. It is complete when nothing more comes for this long.
_QUIET_S = 0.02
# How long to wait for the first write.
_STACK_S = 0.3


class Phase(enum.IntEnum):
    """What a worker is doing. A worker process cannot show its stack before GETTING_READY."""

    STARTING = 0
    GETTING_READY = 1
    IDLE = 2
    LOADING = 3
    LEAVING_EPOCH = 4


@dataclass(frozen=True, slots=True)
class AtWork:
    """What a worker is doing, or was doing when it died.

    Attributes:
        phase: The kind of work.
        epoch: Epoch of the ticket, while LOADING.
        seq: Number of the ticket, while LOADING.
        elapsed_s: Seconds since the phase began.
        stack: Its Python frames, one a line, innermost first; empty if it could not be obtained.
        is_stopped: Whether the process is stopped (SIGSTOP, a debugger).
        sample: Number of the sample in work, while LOADING with a ``sample_timeout``; NO_SAMPLE if
            there is none.
        sample_left_s: Seconds until that sample's deadline; negative once it has passed.
    """

    phase: Phase
    epoch: int
    seq: int
    elapsed_s: float
    stack: str = ""
    is_stopped: bool = False
    sample: int = NO_SAMPLE
    sample_left_s: float = 0.0

    @property
    def is_late(self) -> bool:
        """Whether a sample in work takes longer than it may."""
        is_loading = self.phase is Phase.LOADING and self.sample != NO_SAMPLE
        return is_loading and self.sample_left_s <= 0


class StatusPage:
    """The page, owned by the pool. In a process that gets it pickled, it is a worker's end."""

    def __init__(self, worker_count: int) -> None:
        self._page = memory_file("-status")
        nbytes = -(-worker_count * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._page.truncate(nbytes)
        self._words = _map_words(self._page, nbytes)
        self._read, self._write = (Descriptors([fd]) for fd in os.pipe())
        # Neither a worker in its signal handler nor this process may block.
        for fd in (*self._read, *self._write):
            os.set_blocking(fd, False)

    def __getstate__(self) -> tuple[Any, Any, int]:
        """Pickle for a process that is being started."""
        return self._page, reduction.DupFd(*self._write), self._words.nbytes

    def __setstate__(self, state: tuple[Any, Any, int]) -> None:
        page, write, nbytes = state
        self._words = _map_words(page, nbytes)
        self._write = Descriptors([write.detach()])

    def open_line(self, worker_id: int) -> "Line":
        """Return a worker's line, in that worker. It takes the page over."""
        words, self._words = self._words, memoryview(b"")
        write, self._write = self._write, Descriptors()
        return Line(words, write, worker_id)

    def close_for_start(self) -> None:
        """Close what only new workers need. No worker may be started afterwards."""
        self._page.close()
        self._write.close_all()

    def clear(self, worker_id: int) -> None:
        """Reset a worker's line before the worker starts."""
        values = 0, 0, 0, time.monotonic_ns(), NO_SAMPLE, 0, NO_TASK
        _LINE.pack_into(self._words, worker_id * _LINE_BYTES, *values)

    def held(self, worker_id: int) -> int:
        """Return which task of the queue a worker has: its number plus FIRST_TASK, or a state."""
        return int(self._words[worker_id * _WORDS + _HELD])

    def read(self, worker_id: int, pid: int | None = None) -> AtWork:
        """Return what a worker is doing, or was doing when it died.

        With the pid of a living worker, also its stack. This takes up to a third of a second.
        """
        line = _LINE.unpack_from(self._words, worker_id * _LINE_BYTES)
        phase, epoch, seq, since, sample, deadline, _ = line
        if not deadline:  # the worker is between writing the number and the deadline
            sample = NO_SAMPLE
        now = time.monotonic_ns()
        elapsed_s, left_s = (now - since) / 1e9, (deadline - now) / 1e9
        at_work = AtWork(Phase(phase), epoch, seq, elapsed_s, "", False, sample, left_s)
        if pid is None:
            return at_work
        if read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] in (["T"], ["t"]):
            return replace(at_work, is_stopped=True)
        if at_work.phase is Phase.STARTING:
            return at_work
        self._receive_stack(0.0, 0.0)  # drops what came too late the last time
        try:
            os.kill(pid, STACK_SIGNAL)
        except ProcessLookupError:
            return at_work
        return replace(at_work, stack=self._receive_stack(_STACK_S, _QUIET_S))

    def _receive_stack(self, first_s: float, quiet_s: float) -> str:
        """Return the frames that come through the pipe, without the heading above them."""
        data = b""
        while is_readable(self._read[0], quiet_s if data else first_s):
            data += os.read(self._read[0], 1 << 16)
        return data.decode(errors="replace").partition("\n")[2].rstrip("\n")

    def close(self) -> None:
        """Unmap and close; may be called again."""
        self.close_for_start()
        self._read.close_all()
        self._words.release()


def _map_words(page: MemoryFile, nbytes: int) -> memoryview:
    return memoryview(map_range(page.fileno(), 0, nbytes)).cast("B").cast("q")


class Line:
    """A worker's line, in the worker. It enables the signal that asks for the stack.

    ``held[0]`` says which task of the queue it has: its number plus FIRST_TASK, or a state.
    """

    def __init__(self, words: memoryview, stack: Descriptors, worker_id: int) -> None:
        self._words, self._stack = words, stack
        self._offset, held_at = worker_id * _LINE_BYTES, worker_id * _WORDS + _HELD
        self.held = words[held_at : held_at + 1]
        self.show_stack()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
        self.set(Phase.GETTING_READY)

    def show_stack(self) -> None:
        """Send this thread's stack to the page's main process whenever that asks for it."""
        try:
            faulthandler.register(STACK_SIGNAL, file=self._stack[0], all_threads=False, chain=False)
        except OSError:  # a sandbox refuses the signal stack: the worker's stack is not shown
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)

    def close(self) -> None:
        """Unmap the page. Call :meth:`show_stack` of another line afterwards."""
        self._stack.close_all()
        self.held.release()
        self._words.release()

    def set(self, phase: Phase, epoch: int = 0, seq: int = 0) -> None:
        """Write what this worker is doing from now on."""
        _PHASE.pack_into(self._words, self._offset, phase, epoch, seq, time.monotonic_ns())

    def set_sample(self, number: int, deadline_ns: int) -> None:
        """Write the number and the deadline of the sample in work."""
        _SAMPLE.pack_into(self._words, self._offset + _SAMPLE_AT, number, deadline_ns)
