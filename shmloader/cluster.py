"""``shmloader.cluster``: executors of clusters, for ``DataLoader(..., executor=...)``.

Dask, MPI and loky have executors of their own. Ray has none, so :class:`RayExecutor` is one over
Ray. Ray is an extra (``pip install shmloader[ray]``), imported when an executor is made.
"""

import collections
import concurrent.futures
import contextlib
import functools
import importlib
import logging
import queue
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

_log = logging.getLogger("shmloader")

_GONE = "Ray was shut down, or this process has connected to another cluster"


class _Driver:
    """The connection of a program on a node of the cluster.

    Tasks are cancelled on the thread on which Ray completes tasks. If a task were cancelled on
    another thread while Ray completes it, Ray could take that for a fault of its own and end this
    process ("Tried to complete task that was not pending", seen with Ray 2.60). Ray calls back on
    its thread when a task has ended. So a task that does nothing is submitted once, and callbacks
    for this task cancel the others. Its result lies in this process: asking for a result in Ray's
    store, whose process may have died, can also end this process.

    Args:
        ray: The module.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._cancel = _canceller(ray)
        self._context = _unwrapped(ray.get_runtime_context)
        self._id = self._find_id()
        self._ended = ray.remote(num_cpus=0)(_do_nothing).remote()
        self._unwanted: collections.deque[Any] = collections.deque()

    def _find_id(self) -> tuple[str, str]:
        """Return ids that tell one ``ray.init()`` from another.

        The job's id alone does not, since jobs are numbered from 1 in each cluster.
        """
        context = self._context()
        return context.get_job_id(), context.get_node_id()

    def is_gone(self) -> bool:
        """Whether this process has left the cluster that it was connected to."""
        # It raises if another thread is leaving the cluster.
        return (
            attempt(lambda: self._ray.is_initialized() and self._find_id() == self._id) is not True
        )

    def follow(self, reference: Any, call: Callable[[Future], None]) -> None:
        """Pass Ray's own future of a task to ``call`` when it is done, mostly on a Ray thread."""
        reference.future().add_done_callback(call)

    def cancel(self, reference: Any) -> None:
        """Have a task cancelled soon. May be called on any thread, and does not wait."""
        self._unwanted.append(reference)
        self._ended._on_completed(self._cancel_all)

    def _cancel_all(self, _: object) -> None:
        while self._unwanted:
            with contextlib.suppress(Exception):  # taken by another call, or the cluster is gone
                self._cancel(self._unwanted.popleft())


class _Client:
    """The connection of a program by Ray Client (``ray://``).

    Ray Client runs callbacks on the thread that receives all answers. Submitting or cancelling a
    task on that thread would wait for ever. So callbacks and cancelled futures put their calls into
    a queue, and a thread of ours makes these calls.

    Args:
        ray: The module.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._cancel = _canceller(ray)
        self._worker = self._find_worker()
        # A finalizer calls put(). A SimpleQueue's put() takes no lock that this could wait for.
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        threading.Thread(
            target=_call_each, args=(self._calls,), name="shmloader_ray_client", daemon=True
        ).start()

    def _find_worker(self) -> object:
        return self._ray.util.client.ray.get_context().client_worker

    def is_gone(self) -> bool:
        """Whether this process has left the cluster that it was connected to."""
        return not self._ray.util.client.ray.is_connected() or (
            self._find_worker() is not self._worker
        )

    def follow(self, reference: Any, call: Callable[[Future], None]) -> None:
        """Pass Ray's own future of a task to ``call`` when it is done, on a thread of ours."""
        calls = self._calls
        reference.future().add_done_callback(lambda done: calls.put(lambda: call(done)))

    def cancel(self, reference: Any) -> None:
        """Have a task cancelled soon. May be called on any thread, and does not wait."""
        self._calls.put(functools.partial(self._cancel, reference))


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of Ray's without the wrapper that starts a cluster if none is connected."""
    found: Callable[..., Any] = getattr(function, "__wrapped__", function)
    return found


def _canceller(ray: Any) -> Callable[[Any], object]:
    """Return the function that cancels a task.

    It is called without ``force``, which would kill the task's process. A task that already runs is
    completed: see :func:`_call`.
    """
    return functools.partial(_unwrapped(ray.cancel), force=False, recursive=False)


def _do_nothing() -> None:
    """Do nothing. The task that :class:`_Driver` submits."""


def _call_each(calls: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
    """Make the calls from a queue until it yields None. Runs on a thread of its own."""
    while (call := calls.get()) is not None:
        try:
            call()
        except Exception:  # noqa: BLE001 - the connection may be gone
            _log.debug("a call of Ray Client failed", exc_info=True)
        del call


class _RayFuture(concurrent.futures.Future[Any]):
    """The future of a Ray task. Cancelling the future cancels the task, unless that runs already.

    Args:
        reference: Ray's reference to the task's result.
        connection: Cancels the task if the future is cancelled.
    """

    def __init__(self, reference: Any, connection: _Driver | _Client) -> None:
        super().__init__()
        self._reference: Any = reference
        self._connection = connection

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        reference, self._reference = self._reference, None
        if reference is not None:
            with contextlib.suppress(RuntimeError):  # another thread was faster
                self.set_running_or_notify_cancel()  # for concurrent.futures.wait()
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._connection.cancel(reference)
        return True

    def pass_on(self, done: Future) -> None:
        """Take over the result or the error from Ray's own future, which is done."""
        self._reference = None
        error = done.exception()
        # This future may already be cancelled, or may have failed because Ray was shut down.
        settle(self, error, None if error is not None else done.result())


class RayExecutor(concurrent.futures.Executor):
    """A ``concurrent.futures.Executor`` whose tasks run on Ray.

    Ray chooses the node of each task, and runs a task again if its node is lost. The executor uses
    the cluster that this process is connected to. If there is none, it calls ``ray.init()``, which
    finds or starts one. It neither disconnects from a cluster nor stops one.

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
        is_by_client = self._ray.util.client.ray.is_connected()
        self._connection = _Client(self._ray) if is_by_client else _Driver(self._ray)
        self._function = self._ray.remote(**{**_OPTIONS, **options})(_call)
        self._futures: weakref.WeakSet[_RayFuture] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Submit a call of ``fn`` as a task. An ``ObjectRef`` in ``args`` is replaced by its value.

        Returns:
            The task's future. Cancelling it cancels the task, unless the task runs already.

        Raises:
            RuntimeError: After ``shutdown()``, or if Ray is not connected.
        """
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._connection.is_gone():  # otherwise remote() would start a cluster
                raise RuntimeError(_GONE)
            reference = self._function.remote(fn, *args, **kwargs)
            future = _RayFuture(reference, self._connection)
            self._futures.add(future)
        self._connection.follow(reference, future.pass_on)
        return future

    def check(self) -> None:
        """Fail all futures if Ray was shut down in this process; Ray itself leaves them pending."""
        if self._connection.is_gone():
            with self._lock:
                futures = list(self._futures)
            for future in futures:
                settle(future, ExecutorGoneError(_GONE))

    def share(self, value: Any) -> Any:
        """Put a value into Ray's store. Returns an ``ObjectRef``, an argument for :meth:`submit`.

        Raises:
            RuntimeError: If Ray is not connected.
        """
        if self._connection.is_gone():  # otherwise put() would start a cluster
            raise RuntimeError(_GONE)
        return self._ray.put(value)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no further tasks. The cluster stays as it is.

        Args:
            wait: Whether to wait for the tasks that were submitted.
            cancel_futures: Whether to cancel the tasks that have not begun.
        """
        with self._lock:
            self._is_shut_down = True
            futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()
        while wait and concurrent.futures.wait(futures, CHECK_S).not_done:
            self.check()


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
