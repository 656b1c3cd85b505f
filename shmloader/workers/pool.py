"""What the engine asks of a pool of workers."""

from typing import Protocol

from shmloader.workers.board import AtWork


class Pool(Protocol):
    """Moves messages to and from a fixed number of workers, and says who died.

    :class:`shmloader.workers.processes.ProcessPool` is one; its docstrings hold.
    """

    #: Whether :meth:`wait` waits, or was left by an exception while it waited: no message
    #: has been taken from a worker that was not returned.
    is_waiting: bool
    #: Whether this is a forked child of the process that has the workers.
    is_inherited: bool

    def send(self, worker_id: int, data: bytes, *descriptors: int) -> None:
        """Send a message; never blocks."""

    def receive(self, worker_id: int) -> bytes | None:
        """The next message from a worker, if one is there or about to come."""

    def wait(self, timeout_s: float | None) -> list[tuple[int, bytes | None]]:
        """Wait for messages and deaths."""

    def wake(self) -> None:
        """Let :meth:`wait` return; from any thread."""

    def wake_soon(self) -> None:
        """Let :meth:`wait` return in a moment; from one thread."""

    def hurry(self) -> None:
        """Let it return now if it will soon; from the same."""

    def pid(self, worker_id: int) -> int:
        """Process number of a worker."""

    def exit_code(self, worker_id: int) -> int | None:
        """How a lost worker ended."""

    def was_at(self, worker_id: int) -> AtWork:
        """What a worker is at, without asking it, or a lost one was at."""

    def ask(self, worker_id: int) -> AtWork:
        """What a worker is at, with its Python stack."""

    def replace(self, worker_id: int) -> None:
        """Start a worker in place of a lost one."""

    def start(self, worker_id: int) -> None:
        """Start a worker that was not there yet, or was retired."""

    def retire(self, worker_id: int) -> None:
        """End a worker that has nothing to do."""

    def oom_kills(self, worker_id: int) -> int:
        """Processes that the kernel killed for want of memory, if a lost worker may be one."""

    def close(self) -> None:
        """End all workers."""
