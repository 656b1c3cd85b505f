"""All state that belongs to the process rather than to a loader.

None of this state can belong to an object, because of where it is used: in hooks that
``os.fork()`` runs, at the interpreter's exit, in torch's classes, or while an object is unpickled,
when no loader is known. All other state has an owner.

======================  =========================================================================
``arenas``              the slots of all loaders: before a fork, the user's batches get memory of
                        their own, and a forked worker closes the arenas that it inherits
``threads``             our threads, which can be parked while the process forks
``worker_groups``       the workers of all loaders: a forked child closes what it inherits of them
``parent_death_pipes``  the pipes that end our workers with this process: a child closes them, too
``meetings``            what a child closes: meetings of which this rank is the host, and
                        the connections to the nursery and to processes that own shared workers
``nursery``             the process that forks the workers of loaders with spawn or forkserver
``imports_threads``     whether the program's main module starts threads when it is imported
``calls_on_host``       the number of calls of ``share_on_host()``: ranks tell calls apart by it
``pools_on_host``       the number of pools that this rank has shared with the ranks of its host:
                        ranks tell pools apart by it
``host_pools``          the shared pools that this process uses. Loaders share a pool if they have
                        the same key: ids of dataset and ``worker_init_fn``, number of workers
``gathers``             the number of calls of ``stats(ranks=True)``: ranks tell calls apart by it
``builds_on_host``      idents of the threads that run a function for ``share_on_host()``
``received``            while a payload is unpickled, the descriptors that came with it
``opening``             a lock that a thread holds while it unpickles a payload
``segments``            the segments that this process has mapped, by their tokens
``slot_writer``         in a worker, what torch's collate functions write to; None elsewhere
``tasks``               in a process of an executor, its name and what its tasks keep
``exporters``           for each registry of Prometheus, what exports loaders to it
``installation``        what ``shmloader.install()`` installed for torch's loaders; None for nothing
======================  =========================================================================
"""

import collections
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Threads:
    """Threads of this process that can be parked (:mod:`shmloader.threads`).

    Attributes:
        lock: Held from the request to park until all threads may continue. Meanwhile no thread
            begins or ends.
        live: The parkable threads that run.
        unwilling: Idents of threads that must not wait for a parked thread: the parkable threads
            themselves, and the thread that forks.
        to_park: The threads that are to park. A set is replaced, never changed.
        prefetching: Held by the threads that download shards ahead: by two at a time.
        is_exiting: Whether the threads are parked for good.
        is_watching_exit: Whether a function is registered that parks the threads at the
            interpreter's exit.
    """

    def __init__(self) -> None:
        self.is_exiting = False
        self.forget()

    def forget(self) -> None:
        """Forget all threads. Called in a forked child, where none of them runs."""
        self.lock = threading.Lock()
        self.live: set[Any] = set()
        self.to_park: set[Any] = set()
        self.unwilling: set[int] = set()
        self.prefetching = threading.Semaphore(2)
        self.is_watching_exit = False


class Tasks:
    """What the tasks of an executor find in this process (:mod:`shmloader.pools.executor_task`).

    Attributes:
        lock: Held while a task makes a batch.
        token: A random number, which no other process has.
        makers: What tasks keep for later tasks, by the loader's key; the least recently used first.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the state of the parent. Called in a forked child, where no task runs."""
        self.lock = threading.Lock()
        self.token = os.urandom(8)
        self.makers: collections.OrderedDict[bytes, Any] = collections.OrderedDict()


class ProcessState:
    """The state of this process. The module's docstring describes the attributes."""

    def __init__(self) -> None:
        self.arenas: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.threads = Threads()
        self.worker_groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self.parent_death_pipes: weakref.WeakSet[Any] = weakref.WeakSet()
        self.meetings: weakref.WeakSet[Any] = weakref.WeakSet()
        self.nursery: Callable[[], Any] = lambda: None  # a weak reference
        self.imports_threads = False
        self.calls_on_host = 0
        self.pools_on_host = 0
        self.gathers = 0
        self.host_pools: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self.builds_on_host: set[int] = set()
        self.received: list[int] = []
        self.opening = threading.RLock()
        self.segments: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
        self.slot_writer: Any = None
        self.tasks = Tasks()
        self.exporters: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.installation: Any = None

    def all_arenas(self) -> list[Any]:
        """Return the arenas. Called on any thread, while others may make arenas."""
        arenas = [reference() for reference in self.arenas.valuerefs()]
        return [arena for arena in arenas if arena is not None]

    def part_lent_slots(self) -> None:
        """Part the user's batches from their slots (I9). Called before a fork."""
        for arena in self.all_arenas():
            arena.part_lent()

    def close_pipes(self) -> None:
        """Close the pipes. Called in a forked child, which must not keep our workers alive."""
        for pipe in list(self.parent_death_pipes):
            pipe.write.close_all()

    def leave_meetings(self) -> None:
        """Close the meetings in a forked child, which must not keep their names bound."""
        self.opening = threading.RLock()
        for meeting in list(self.meetings):
            meeting.close()

    def leave_groups(self) -> None:
        """Leave the workers to the parent. Called in a forked child."""
        for group in list(self.worker_groups):
            group.leave_to_parent()


#: The only instance. Import this name, rather than use it through the module: at the interpreter's
#: exit the names in modules become None, while remaining objects of the package still use it.
PROCESS = ProcessState()

os.register_at_fork(before=PROCESS.part_lent_slots)
# In the child, these run in this order. They are registered separately, so that an error in one
# does not prevent the others.
for _hook in (
    PROCESS.threads.forget,
    PROCESS.tasks.forget,
    PROCESS.close_pipes,
    PROCESS.leave_meetings,
    PROCESS.leave_groups,
):
    os.register_at_fork(after_in_child=_hook)
