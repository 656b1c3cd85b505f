"""The base class of background threads: starts, parks, ends and joins one.

These threads are not derived from it: one that runs an event loop while its starter waits
(:mod:`shmloader.batch.concurrent_fetcher`), those that call an executor
(:mod:`shmloader.pipeline.executors`) or Ray Client (:mod:`shmloader.cluster`), which may not
return, and in a worker the one that ends it with the main process
(:mod:`shmloader.pools.parent_death`).

It keeps these rules for every other thread of the package:

* Threads are daemons, because a thread may be inside the user's code when the interpreter exits.
  At the exit they are parked for good (:mod:`shmloader.threads.fork_safety`).
* No thread waits for one that is parked for good. A background thread never waits for another one,
  nor does a thread that forks; the garbage collector may run a finalizer on either of these.
* The end is an event, since an interrupted ``Thread.join()`` takes the thread for one that has
  ended (Python 3.11).
* A thread that cannot be waited for closes what it uses when it ends. Either the thread or the
  caller closes, never both.
"""

import abc
import threading

from shmloader.threads.fork_safety import Parkable, may_wait_here


class BackgroundThread(Parkable):
    """A thread that runs :meth:`work` once.

    Args:
        name: Name of the thread. The system shows its first 15 characters.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Whether the thread or the caller closes what the thread uses. The first of them to set
        # this decides; dict.setdefault() is atomic.
        self._closer: dict[str, str] = {}

    @abc.abstractmethod
    def work(self) -> None:
        """Do the thread's work. Runs on the thread."""

    def begin(self) -> None:
        """Prepare the thread, before it can be parked. Does nothing by default."""

    def close_what_it_uses(self) -> None:
        """Close on the thread what :meth:`leave_closing` left to it. Does nothing by default."""

    def depart(self) -> None:
        """Finish on the thread, when it can no longer be parked. Does nothing by default.

        Unlike :meth:`work`, it may wait for other background threads.
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
        left_s = None if timeout_s is None else max(0.0, timeout_s)
        if not may_wait_here() or not self._is_over.wait(left_s):
            return self._is_over.is_set()
        self._thread.join()
        return True

    def leave_closing(self) -> bool:
        """Leave closing to the thread. Returns False if the thread has ended already."""
        return self._closer.setdefault("is", "the thread") == "the thread"

    @property
    def system_id(self) -> int | None:
        """The kernel's id of the thread, or None when it does not run."""
        thread = self._thread
        return None if self._is_over.is_set() else thread.native_id

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
            self._is_over.set()

    def _work_and_close(self) -> None:
        try:
            self.work()
        finally:
            if self._closer.setdefault("is", "the caller") == "the thread":
                self.close_what_it_uses()
