"""All state that belongs to the process rather than to a loader.

None of it can belong to an object: it is looked at by hooks that ``os.fork()`` runs, at the
interpreter's exit, or while an object is unpickled, when no loader is at hand. Everything else has
an owner. (``shmloader.faults`` is apart: it exists for the tests.)

=====================  ==========================================================================
``forks``              how many forks there were: a page that a child may still read is not reused
``threads``            our threads that can be parked while the process forks
``worker_groups``      the workers of all loaders: a forked child closes what it inherited of them
``parent_death_pipes`` the pipes by which workers notice that this process has ended; likewise
``received``           in a worker: the descriptors that its payload came with
``locked_for_good``    slots that could not be unlocked: a device may still read their pages
=====================  ==========================================================================
"""

import os
import threading
import weakref
from typing import Any


class Forks:
    """Counts the forks of this process (I9). The count is all that its callback touches."""

    def __init__(self) -> None:
        self.count = 0

    def one_more(self) -> None:
        """Count a fork."""
        self.count += 1


class Threads:
    """Threads of this process that can be parked (:mod:`shmloader.threads.fork_safety`).

    Attributes:
        lock: Held from the request to park until all threads may continue: meanwhile no thread
            begins or ends.
        live: The threads that run.
        unwilling: Idents of threads that must not wait for a parked thread: the parkable threads
            themselves, and the thread that forks.
        is_exiting: Whether the threads are parked for good.
        is_watching_exit: Whether they will be parked at the interpreter's exit.
    """

    def __init__(self) -> None:
        self.is_exiting = False
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked child, where none of the threads runs."""
        self.lock = threading.Lock()
        self.live: set[Any] = set()
        self.unwilling: set[int] = set()
        self.is_watching_exit = False


class ProcessState:
    """The state of this process; see the head of the module for what each attribute is."""

    def __init__(self) -> None:
        self.forks = Forks()
        self.threads = Threads()
        self.worker_groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self.parent_death_pipes: weakref.WeakSet[Any] = weakref.WeakSet()
        self.received: list[int] = []
        self.locked_for_good: list[Any] = []

    def close_pipes(self) -> None:
        """Close the pipes, in a forked child: it must not keep our workers alive."""
        for pipe in list(self.parent_death_pipes):
            pipe.close_write()

    def leave_groups(self) -> None:
        """Leave the workers to the parent, in a forked child."""
        for group in list(self.worker_groups):
            group.leave_to_parent()


#: The only one. Import it by this name: at the interpreter's exit the modules' own names become
#: None, and what is left of the package still needs it then.
PROCESS = ProcessState()

# The count goes up on both sides of a fork: a lease may begin or end while other hooks run.
os.register_at_fork(before=PROCESS.forks.one_more, after_in_parent=PROCESS.forks.one_more)
# In the child, in this order. Each by itself: what one raises does not keep the next from running.
for _hook in (PROCESS.threads.forget, PROCESS.close_pipes, PROCESS.leave_groups):
    os.register_at_fork(after_in_child=_hook)
