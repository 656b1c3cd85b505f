"""The base class of background threads: starts, parks, ends and joins one.

Two kinds of threads of the package are not derived from it:

* the thread that calls Ray Client (:mod:`shmloader.cluster`), since a call may not return;
* in a worker, the thread that ends the worker with the main process
  (:mod:`shmloader.pools.parent_death`).

Every other thread of the package keeps these rules:

* Threads are daemons, because a thread may be inside the user's code when the interpreter exits.
  At the exit they are parked for good (:mod:`shmloader.threads.fork_safety`).
* No thread waits for a thread that is parked for good. Neither a background thread nor a thread
  that forks waits for a background thread, not even in a finalizer that the garbage collector runs
  on it.
* The end of a thread is a latch, since in Python 3.11 an interrupted ``Thread.join()`` marks the
  thread as ended although it runs.
* A thread that cannot be waited for closes what it uses when it ends. Either the thread or the
  caller closes, never both.
"""

import abc
import threading

from shmloader.threads.fork_safety import Parkable, may_wait_here
from shmloader.threads.wakeup import Latch


class BackgroundThread(Parkable):
    """A thread that runs :meth:`work` once.

    Args:
        name: Name of the thread. The system shows its first 15 characters.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._end = Latch()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Whether the thread or the caller closes what the thread uses. The first of the two that
        # sets this decides; dict.setdefault() is atomic.
        self._closer: dict[str, str] = {}

    @abc.abstractmethod
    def work(self) -> None:
        """Do the thread's work. Runs on the thread."""

    def begin(self) -> None:
        """Prepare, before the thread can be parked. Runs on it. Does nothing by default."""

    def close_what_it_uses(self) -> None:
        """Close what the thread uses, after :meth:`leave_closing`. Does nothing by default.

        Runs on the thread.
        """

    def depart(self) -> None:
        """Finish, when the thread can no longer be parked. Does nothing by default.

        Runs on the thread. Unlike :meth:`work`, it may wait for other background threads.
        """

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: If the system refuses a further thread.
        """
        self._thread.start()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the thread's end, unless the calling thread must not wait.

        Args:
            timeout_s: Longest wait in seconds; None waits without a limit.

        Returns:
            Whether the thread no longer uses anything: it has ended, was never started, or is
            parked for good.
        """
        if self._thread.ident is None or self.is_parked_for_good:
            return True
        if not may_wait_here() or not self._end.wait(timeout_s):
            return self._end.is_set
        self._thread.join()
        return True

    def leave_closing(self) -> bool:
        """Leave closing to the thread. Returns False if the thread has ended already."""
        return self._closer.setdefault("is", "the thread") == "the thread"

    @property
    def system_id(self) -> int | None:
        """The kernel's id of the thread; None while the thread does not run."""
        thread = self._thread
        return None if self._end.is_set else thread.native_id

    def _run(self) -> None:
        try:
            self.begin()
            self.enter()
            try:
                self._work_and_close()
            finally:
                self.leave()
                self.depart()
        finally:
            self._end.set()

    def _work_and_close(self) -> None:
        try:
            self.work()
        finally:
            if self._closer.setdefault("is", "the caller") == "the thread":
                self.close_what_it_uses()
