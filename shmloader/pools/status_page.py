"""The status page shows what each worker is doing, even a stuck one, which answers nothing.

It is anonymous shared memory with one line for each worker. The worker writes its line and the main
process reads it. Beside it there is a pipe: a worker writes its Python stack into it when the main
process sends a signal. The signal handler is faulthandler's, which does not need the interpreter,
so it also works for a worker inside a call that never returns.
"""

import enum
import errno
import faulthandler
import mmap
import os
import re
import select
import signal
import struct
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from shmloader.batch.sample_watch import NO_SAMPLE
from shmloader.insight.measurements import Usage, stalled_ns
from shmloader.memory.arena import MEMFD_NAME, map_range

# Phase, epoch, seq, time.monotonic_ns() when the phase began, and the ident of the worker's thread.
_LINE = struct.Struct("=5q")
# The sample in work and its deadline, if there is a sample_timeout: see SampleWatch.
_SAMPLE = struct.Struct("=2q")
# CPU time, time without a core (-1: not known), memory (-1: not measured): see Usage.
_USAGE = struct.Struct("=3q")
# Two cache lines for each worker.
_LINE_BYTES = 128
_USAGE_AT = _LINE.size
_SAMPLE_AT = _USAGE_AT + _USAGE.size
# Which task of the queue the worker has: its number plus FIRST_TASK, NO_TASK, or RECEIVING while it
# may be receiving one. It is written in one piece, so it is right even if the worker is killed.
_HELD_AT = _SAMPLE_AT + _SAMPLE.size
RECEIVING, NO_TASK, FIRST_TASK = range(3)

# How often a worker notes its usage between two batches, which takes 0.05 to 0.1 ms: when it has
# no task, and, less often, when it has one.
_USAGE_NS = 50_000_000
_USAGE_BUSY_NS = 200_000_000
# Measuring its memory takes milliseconds, so a worker does that when it has been idle for this
# long, once a second at most. A worker that is never idle does it after the first second, and then
# every ten seconds.
MEMORY_IDLE_MS = 20
_MEMORY_NS = 1_000_000_000
_MEMORY_BUSY_NS = 10_000_000_000

#: Asks a worker for its stack. Python, torch and their libraries do not use real-time signals.
#: On a system without real-time signals shmloader starts no worker processes.
STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 13

# A stack comes in many small writes. It is complete when nothing more comes for this long.
_QUIET_MS = 20
# How long to wait for the first write.
_STACK_MS = 300

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n", re.MULTILINE)


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
    def is_loading(self) -> bool:
        """Whether it is, or was, making a batch."""
        return self.phase is Phase.LOADING


class StatusPage:
    """The main process's end, owned by the pool. It pickles as the worker's end."""

    def __init__(self, worker_count: int) -> None:
        nbytes = -(-worker_count * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        # CPU time and time without a core of the workers that were replaced, by worker number.
        self._used_before: dict[int, tuple[int, int]] = {}
        self._fd = os.memfd_create(f"{MEMFD_NAME}-status", os.MFD_CLOEXEC)
        self._stack_read = self._stack_write = -1
        self._held: list[memoryview] = []
        try:
            os.ftruncate(self._fd, nbytes)
            self._mapping = memoryview(map_range(self._fd, 0, nbytes)).cast("B")
            self._held = [
                self._mapping[at : at + 8].cast("q")
                for at in range(_HELD_AT, worker_count * _LINE_BYTES, _LINE_BYTES)
            ]
            for held in self._held:
                held[0] = NO_TASK
            self._stack_read, self._stack_write = os.pipe()
            # Neither a worker in its signal handler nor this process may block.
            os.set_blocking(self._stack_write, False)
            os.set_blocking(self._stack_read, False)
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the worker's end; multiprocessing calls this for each worker it starts."""
        return WorkerStatusPage, (
            reduction.DupFd(self._fd),
            reduction.DupFd(self._stack_write),
            len(self._mapping),
        )

    def close_for_start(self) -> None:
        """Close what only new workers need. No worker may be started afterwards."""
        for name in ("_fd", "_stack_write"):
            self._close(name)

    def clear(self, worker_id: int) -> None:
        """Reset a worker's line before the worker starts; the usage of its predecessor is kept."""
        before = self.usage(worker_id, 0)
        self._used_before[worker_id] = before.cpu_ns, before.stalled_ns
        offset = worker_id * _LINE_BYTES
        _LINE.pack_into(self._mapping, offset, 0, 0, 0, time.monotonic_ns(), 0)
        _USAGE.pack_into(self._mapping, offset + _USAGE_AT, 0, -1, -1)
        _SAMPLE.pack_into(self._mapping, offset + _SAMPLE_AT, NO_SAMPLE, 0)
        self._held[worker_id][0] = NO_TASK

    def held(self, worker_id: int) -> int:
        """Return which task of the queue a worker has: its number plus FIRST_TASK, or a state."""
        return self._held[worker_id][0]

    def open_line(self, worker_id: int, memory: "Memory | None" = None) -> "Line":
        """Return a worker's line. Called in a forked worker, which inherited the page."""
        mapping, self._mapping = self._mapping, memoryview(b"")
        stack, self._stack_write = self._stack_write, -1
        return Line(mapping, stack, worker_id, memory)

    def read(self, worker_id: int) -> AtWork:
        """Return what a worker is doing, or was doing when it died."""
        phase, epoch, seq, since, _ = self._line(worker_id)
        sample, deadline = _SAMPLE.unpack_from(self._mapping, worker_id * _LINE_BYTES + _SAMPLE_AT)
        if not deadline:  # the worker is between writing the number and the deadline
            sample = NO_SAMPLE
        now = time.monotonic_ns()
        return AtWork(
            Phase(phase),
            epoch,
            seq,
            (now - since) / 1e9,
            sample=sample,
            sample_left_s=(deadline - now) / 1e9,
        )

    def usage(self, worker_id: int, pid: int) -> Usage:
        """Return the usage that a worker noted last. Times include the workers that it replaced.

        Raises:
            ValueError: If the page is closed.
        """
        offset = worker_id * _LINE_BYTES + _USAGE_AT
        cpu_ns, waited_ns, pss_bytes = _USAGE.unpack_from(self._mapping, offset)
        cpu_before_ns, waited_before_ns = self._used_before.get(worker_id, (0, 0))
        return Usage(
            pid,
            cpu_ns + cpu_before_ns,
            waited_ns + waited_before_ns,
            None if pss_bytes < 0 else pss_bytes,
        )

    def ask(self, worker_id: int, pid: int) -> AtWork:
        """Return what a living worker is doing, with its stack. Takes up to a third of a second."""
        at_work = self.read(worker_id)
        if _is_stopped(pid):
            return replace(at_work, is_stopped=True)
        if at_work.phase is Phase.STARTING:
            return at_work
        return replace(at_work, stack=self._ask_for_stack(self._line(worker_id)[4], pid))

    def _line(self, worker_id: int) -> tuple[int, ...]:
        return _LINE.unpack_from(self._mapping, worker_id * _LINE_BYTES)

    def _ask_for_stack(self, thread: int, pid: int) -> str:
        self._receive_stack(0, 0)  # drops what came too late the last time
        try:
            os.kill(pid, STACK_SIGNAL)
        except ProcessLookupError:
            return ""
        return _frames(self._receive_stack(_STACK_MS, _QUIET_MS), thread)

    def _receive_stack(self, first_ms: int, quiet_ms: int) -> str:
        poll = select.poll()
        poll.register(self._stack_read, select.POLLIN)
        data = b""
        while poll.poll(quiet_ms if data else first_ms):
            data += os.read(self._stack_read, 1 << 16)
        return data.decode(errors="replace")

    def close(self) -> None:
        """Unmap and close; may be called again."""
        for name in ("_fd", "_stack_read", "_stack_write"):
            self._close(name)
        if hasattr(self, "_mapping"):
            for held in self._held:
                held.release()
            self._mapping.release()

    def _close(self, name: str) -> None:
        fd = getattr(self, name)
        # Reset first: after an interruption, or in a child that another thread forks meanwhile, a
        # second close might close another file of this number.
        setattr(self, name, -1)
        if fd >= 0:
            os.close(fd)


def _frames(text: str, thread: int) -> str:
    """Return one thread's frames from faulthandler's text on all threads."""
    parts = _THREAD.split(text)
    threads = [int(ident, 16) for ident in parts[1::2]]
    if thread not in threads:
        return ""
    return parts[2::2][threads.index(thread)].strip("\n")


class Memory:
    """The last measurement of this process's memory. All lines of the process share it.

    Attributes:
        measured_ns: When the memory was measured last; before that, when this object was made.
        pss_bytes: The proportional set size; -1 if it was not measured.
    """

    def __init__(self) -> None:
        self.measured_ns = time.monotonic_ns()
        self.pss_bytes = -1


class Line:
    """A worker's line, in the worker. It enables the signal that asks for the stack.

    Attributes:
        memory: The last measurement of this process's memory.
        held: Its only item says which task of the queue this worker has: the task's number plus
            FIRST_TASK, or a state.
        usage_is_due: Whether :meth:`note_use` may have to write anything.
    """

    def __init__(
        self,
        mapping: memoryview,
        stack_fd: int,
        worker_id: int,
        memory: Memory | None = None,
    ) -> None:
        self._mapping = mapping
        self._stack_fd = stack_fd
        self._offset = worker_id * _LINE_BYTES
        held_at = self._offset + _HELD_AT
        self.held = mapping[held_at : held_at + 8].cast("q")
        self._thread = threading.get_ident()
        self.memory = memory or Memory()
        self.usage_is_due = False
        self._idle_ns = self._usage_ns = time.monotonic_ns()
        self.show_stack()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
        self.note(Phase.GETTING_READY)

    def show_stack(self) -> None:
        """Send this process's stack to the page's main process whenever that asks for it."""
        try:
            faulthandler.register(STACK_SIGNAL, file=self._stack_fd, all_threads=True, chain=False)
        except OSError:  # a sandbox refuses the signal stack: the worker's stack is not shown
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)

    def close(self) -> None:
        """Unmap the page. Call :meth:`show_stack` of another line afterwards."""
        os.close(self._stack_fd)
        self.held.release()
        self._mapping.release()

    def note(self, phase: Phase, epoch: int = 0, seq: int = 0) -> None:
        """Write what this worker is doing from now on."""
        _LINE.pack_into(
            self._mapping, self._offset, phase, epoch, seq, time.monotonic_ns(), self._thread
        )

    def note_sample(self, number: int, deadline_ns: int) -> None:
        """Write the number and the deadline of the sample in work."""
        _SAMPLE.pack_into(self._mapping, self._offset + _SAMPLE_AT, number, deadline_ns)

    def idle(self) -> None:
        """Write that this worker is idle."""
        self._idle_ns = now_ns = time.monotonic_ns()
        self.usage_is_due = now_ns - self._usage_ns > _USAGE_NS
        _LINE.pack_into(self._mapping, self._offset, Phase.IDLE, 0, 0, now_ns, self._thread)

    def note_use(self, *, has_task: bool) -> None:
        """Write what this process has used, if that is due.

        Args:
            has_task: Whether a message waits for this worker.
        """
        due_ns = _MEMORY_NS if self.memory.pss_bytes < 0 else _MEMORY_BUSY_NS
        if self._idle_ns - self.memory.measured_ns > due_ns:
            self.note_memory()
            return
        due_ns = _USAGE_BUSY_NS if has_task else _USAGE_NS
        if self._idle_ns - self._usage_ns > due_ns:
            self.note_usage()

    @property
    def memory_is_due(self) -> bool:
        """Whether the memory should be measured if this worker stays idle."""
        return self._idle_ns - self.memory.measured_ns > _MEMORY_NS

    def note_memory(self) -> None:
        """Measure this process's memory, and write what it has used. Takes milliseconds."""
        self.memory.measured_ns = self._idle_ns
        self.memory.pss_bytes = measure_memory(os.getpid()) or -1
        self.note_usage()

    def note_usage(self) -> None:
        """Write what this process has used."""
        self._usage_ns = self._idle_ns
        _USAGE.pack_into(
            self._mapping,
            self._offset + _USAGE_AT,
            time.process_time_ns(),
            stalled_ns(),
            self.memory.pss_bytes,
        )


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by a debugger."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


def measure_memory(pid: int) -> int | None:
    """Return a process's proportional set size in bytes; None if it cannot be measured."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    return None if found is None else int(found[1]) << 10


class WorkerStatusPage:
    """The status page in a worker that was not forked from the main process."""

    def __init__(self, status_page: Any, stack: Any, nbytes: int) -> None:
        self._status_page = status_page
        self._stack = stack
        self._nbytes = nbytes

    def open_line(self, worker_id: int, memory: Memory | None = None) -> Line:
        """Return this worker's line.

        Args:
            worker_id: Number of the worker.
            memory: The measurement that all lines of this process share; None to begin one.
        """
        fd = self._status_page.detach()
        try:
            mapping = memoryview(map_range(fd, 0, self._nbytes)).cast("B")
        finally:
            os.close(fd)
        return Line(mapping, self._stack.detach(), worker_id, memory)
