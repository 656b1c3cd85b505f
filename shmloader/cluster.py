"""``shmloader.cluster``: executors of clusters, for ``DataLoader(..., executor=...)``.

Dask, MPI and loky have executors of their own. Ray has none, so :class:`RayExecutor` is one over
Ray. Ray is an extra (``pip install shmloader[ray]``), imported when an executor is made.
"""

import concurrent.futures
import contextlib
import functools
import importlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from shmloader.interruptions import attempt
from shmloader.pools.executor_kinds import CHECK_S, ExecutorGoneError, Future, settle

__all__ = ["RayExecutor"]


# Without SPREAD, Ray sends further tasks to a process that it has leased although other nodes are
# idle. With 16 tasks of 50 ms in flight on 4 nodes, throughput is 0.4 of the ideal, and with SPREAD
# it is 0.92.
_OPTIONS = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}

_GONE = "Ray was shut down, or this process has connected to another cluster"


class RayExecutor(concurrent.futures.Executor):
    """A ``concurrent.futures.Executor`` whose tasks run on Ray.

    Ray chooses the node of each task, and runs a task again if its node is lost. The executor uses
    the cluster that this process is connected to, also by Ray Client (``ray://``). If there is
    none, it calls ``ray.init()``, which finds or starts one. It neither disconnects from a cluster
    nor stops one.

    Cancelling a future drops the task's result, and the task runs all the same: Ray (2.60) may end
    a process that cancels a task at the moment when the task ends.

    Args:
        options: Ray's options for each task, as for ``ray.remote``: ``num_cpus`` (1 by default),
            ``resources``, ``runtime_env``, ``scheduling_strategy`` ("SPREAD" by default: over all
            nodes), ``max_retries`` (how often Ray runs a task again whose node or process was lost;
            3 by default), and so on.

    Raises:
        ModuleNotFoundError: If Ray is not installed.
        TypeError, ValueError: If Ray does not accept an option.
    """

    def __init__(self, **options: Any) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            error.add_note("RayExecutor needs Ray: pip install 'shmloader[ray]'")
            raise
        if not self._ray.is_initialized():
            self._ray.init()
        self._cluster = self._find_cluster()
        self._function = self._ray.remote(**{**_OPTIONS, **options})(_call)
        self._futures: weakref.WeakSet[Future] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_shut_down = False

    def _find_cluster(self) -> object:
        """Return what tells one ``ray.init()`` from another; None if Ray is not connected.

        The job's id alone does not, since jobs are numbered from 1 in each cluster.
        """
        if not self._ray.is_initialized():
            return None
        context = self._ray.get_runtime_context()
        return context.get_job_id(), context.get_node_id()

    def _check_cluster(self) -> None:
        """Raise a RuntimeError if this process has left the cluster, lest a call start one."""
        # It raises if another thread is leaving the cluster.
        if attempt(self._find_cluster) != self._cluster:
            raise RuntimeError(_GONE)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Submit a call of ``fn`` as a task. An ``ObjectRef`` in ``args`` is replaced by its value.

        Returns:
            The task's future.

        Raises:
            RuntimeError: After ``shutdown()``, or if Ray is not connected.
        """
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._check_cluster()
            reference = self._function.remote(fn, *args, **kwargs)
            future = Future()
            self._futures.add(future)
        reference.future().add_done_callback(functools.partial(_pass_on, future))
        return future

    def check(self) -> None:
        """Fail all futures if Ray was shut down in this process; Ray itself leaves them pending."""
        try:
            self._check_cluster()
        except RuntimeError:
            with self._lock:
                futures = list(self._futures)
            for future in futures:
                settle(future, ExecutorGoneError(_GONE))

    def share(self, value: Any) -> Any:
        """Put a value into Ray's store. Returns an ``ObjectRef``, an argument for :meth:`submit`.

        Raises:
            RuntimeError: If Ray is not connected.
        """
        self._check_cluster()
        return self._ray.put(value)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no further tasks. The cluster stays as it is.

        Args:
            wait: Whether to wait for the tasks that were submitted.
            cancel_futures: Whether to cancel the futures, which drops the tasks' results.
        """
        with self._lock:
            self._is_shut_down = True
            futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()
        while wait and concurrent.futures.wait(futures, CHECK_S).not_done:
            self.check()


def _pass_on(future: Future, done: Future) -> None:
    """Pass on the outcome of Ray's own future, which is done."""
    error = done.exception()
    # The future may already be cancelled, or may have failed because Ray was shut down.
    settle(future, error, None if error is not None else done.result())


def _call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function. This is the only remote function of an executor.

    Ray interrupts a task that is cancelled while it runs, as Ctrl-C would. Here the interruption is
    ignored and the task is completed: an interruption could hit the user's code anywhere, in a
    process that runs further tasks.

    Ray ends a process by SIGTERM, for instance on a node that is drained. Ray's handler raises
    SystemExit in the function. The function may catch that, as the one that makes batches does. Its
    result is then dropped and SystemExit is raised again, so that Ray runs the task elsewhere.
    """
    if threading.current_thread() is not threading.main_thread():
        return fn(*args, **kwargs)
    ended: list[SystemExit] = []
    before_term: Any = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: object) -> None:
        try:
            before_term(number, frame)
        except SystemExit as error:
            ended.append(error)
            raise

    with contextlib.ExitStack() as stack:
        stack.enter_context(_handling(signal.SIGINT, signal.SIG_IGN))
        if callable(before_term):
            stack.enter_context(_handling(signal.SIGTERM, end))
        try:
            return fn(*args, **kwargs)
        finally:
            if ended:
                raise ended[0]


@contextlib.contextmanager
def _handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Set a signal's handler for the block, unless the present handler was not set by Python.

    If code in the block sets another handler, that one stays after the block.
    """
    before = signal.getsignal(number)
    if before is None:  # a handler not set by Python, which Python could not restore
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        if signal.getsignal(number) is handler:
            signal.signal(number, before)
