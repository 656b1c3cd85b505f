"""``shmloader.cluster``: executors on Dask and on Ray, for ``DataLoader(..., executor=...)``.

loky, MPI and the standard library have executors of their own, which are passed as they are. Dask
and Ray are extras (``pip install 'dask[distributed]'``, ``pip install ray``) and imported when they
are used.
"""

import concurrent.futures
import contextlib
import functools
import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from shmloader.interruptions import attempt

__all__ = ["DaskExecutor", "RayExecutor"]

_Future = concurrent.futures.Future[Any]

_LEFT_DASK = "Dask's client was closed, or it has lost its scheduler for good"
_LEFT_RAY = "Ray was shut down, or this process has connected to another cluster"

# Without SPREAD, Ray sends further tasks to a process that it has leased although other nodes are
# idle. With 16 tasks of 50 ms in flight on 4 nodes, throughput is 0.4 of the ideal, and with SPREAD
# it is 0.92.
_OPTIONS = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}


class _ClusterGoneError(concurrent.futures.BrokenExecutor, ConnectionError):
    """The executor has lost a call, or takes none. Not an error of the called function."""


class _ClusterExecutor(concurrent.futures.Executor):
    """An executor whose futures fail when this process has left the cluster."""

    def __init__(self) -> None:
        self._futures: weakref.WeakSet[_Future] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._is_shut_down = False

    def _reason_gone(self) -> str:
        """Return why the cluster brings no more results; "" if it does."""
        raise NotImplementedError

    def _start(self, future: _Future, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Submit a call to the cluster, and have its outcome passed to a future."""
        raise NotImplementedError

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> _Future:
        """Submit a call of ``fn`` as a task. What :meth:`share` returned is replaced by its value.

        Returns:
            The task's future.

        Raises:
            RuntimeError: After ``shutdown()``; a ``BrokenExecutor`` that is a ``ConnectionError``,
                too, if the cluster is gone.
        """
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._fail_if_gone()
            future = _Future()  # no other code has it yet, so no callback runs under the lock
            self._start(future, fn, *args, **kwargs)
            self._futures.add(future)
        return future

    def _fail_if_gone(self) -> None:
        if reason := self._reason_gone():
            raise _ClusterGoneError(reason)

    def check(self) -> None:
        """Fail all futures if this process has left the cluster, which leaves them pending."""
        reason = self._reason_gone()
        if reason:
            with self._lock:
                futures = list(self._futures)
            for future in futures:
                _settle(future, _ClusterGoneError(reason))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Accept no further tasks. The cluster stays as it is.

        Args:
            wait: Without effect: call ``concurrent.futures.wait`` to wait for the tasks.
            cancel_futures: Whether to cancel the futures, which drops the tasks' results.
        """
        with self._lock:
            self._is_shut_down = True
            futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()


class DaskExecutor(_ClusterExecutor):
    """A ``concurrent.futures.Executor`` whose tasks run on the workers of a Dask client.

    Unlike the futures of ``client.get_executor()``, its futures do not stay pending if the
    connection to the scheduler breaks while a result is on its way. Closing the client is left to
    you.

    Args:
        client: A ``distributed.Client`` that is not asynchronous on this thread.
        options: Options of ``client.submit`` for each task: ``workers``, ``resources``,
            ``retries``, ``priority`` and so on.

    Raises:
        ValueError: If the client is asynchronous on this thread.
    """

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__()
        if client.asynchronous:
            raise ValueError(
                "DaskExecutor takes no client that is asynchronous on this thread, since next() "
                "would block its event loop. Load on another thread (asyncio.to_thread), with a "
                "client that was made there."
            )
        self._client = client
        # Without ``pure=False``, Dask computes a hash of all arguments.
        self._options = {"pure": False, **options}

    def _reason_gone(self) -> str:
        # A client that is closing accepts calls, and drops them.
        return _LEFT_DASK if self._client.status in ("closing", "closed") else ""

    def _start(self, future: _Future, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        client = self._client
        started = client.submit(fn, *args, **{**self._options, **kwargs})

        async def pass_on() -> None:  # in the client's event loop
            try:
                result = await client.gather(started, asynchronous=True)
            except Exception as error:  # noqa: BLE001 - the call's own, or its result is lost
                if started.status != "error":
                    reason = self._reason_gone() or f"{type(error).__name__}: {error}"
                    error = _ClusterGoneError(reason)
                _settle(future, error)
            else:
                _settle(future, None, result)

        def cancel(future: _Future) -> None:
            # This does not wait for the scheduler, which may be slow or about to be disconnected.
            if future.cancelled() and not self._reason_gone():
                client.loop.add_callback(
                    functools.partial(client.cancel, [started], asynchronous=True)
                )

        future.add_done_callback(cancel)
        client.loop.add_callback(pass_on)

    def share(self, value: Any) -> Any:
        """Copy a value to all Dask workers, with the fewest transfers. Returns a reference."""
        return self._client.scatter(value, broadcast=True, hash=False)


class RayExecutor(_ClusterExecutor):
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
            nodes), ``max_retries`` and so on. ``max_retries`` says how often Ray runs a task again
            if its node or process was lost; it is 3 by default.

    Raises:
        ModuleNotFoundError: If Ray is not installed.
        TypeError, ValueError: If Ray does not accept an option.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        try:
            self._ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            error.add_note("RayExecutor needs Ray: pip install ray")
            raise
        if not self._ray.is_initialized():
            self._ray.init()
        self._cluster = self._find_cluster()
        self._function = self._ray.remote(**{**_OPTIONS, **options})(_call)

    def _find_cluster(self) -> object:
        """Return what tells one ``ray.init()`` from another; None if Ray is not connected."""
        if not self._ray.is_initialized():
            return None
        context = self._ray.get_runtime_context()  # jobs are numbered from 1 in each cluster
        return context.get_job_id(), context.get_node_id()

    def _reason_gone(self) -> str:
        # A call would start a cluster. Ray raises if another thread is leaving the cluster.
        return "" if attempt(self._find_cluster) == self._cluster else _LEFT_RAY

    def _start(self, future: _Future, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        started = self._function.remote(fn, *args, **kwargs).future()
        started.add_done_callback(functools.partial(_pass_on, future))

    def share(self, value: Any) -> Any:
        """Put a value into Ray's store. Returns an ``ObjectRef``, an argument for :meth:`submit`.

        Raises:
            BrokenExecutor: If Ray is not connected.
        """
        self._fail_if_gone()
        return self._ray.put(value)


def _settle(future: _Future, error: BaseException | None, result: Any = None) -> None:
    """End a future, unless it has ended or was cancelled."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _pass_on(future: _Future, done: _Future) -> None:
    """Pass on the outcome of Ray's own future, which is done."""
    error = done.exception()
    # The future may already be cancelled, or may have failed because Ray was shut down.
    _settle(future, error, None if error is not None else done.result())


def _call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function. This is the only remote function of an executor."""
    return fn(*args, **kwargs)
