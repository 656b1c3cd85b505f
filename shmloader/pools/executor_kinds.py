"""What the user's executor offers beyond ``concurrent.futures``: a store, and where a task is.

``RayExecutor`` offers a store itself. For an executor of Dask, the Dask client offers one. Of any
other executor only ``submit`` and its futures are known.
"""

import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from shmloader.interruptions import Caught, attempt

Future = concurrent.futures.Future[Any]

#: How often the ``check()`` of an executor that has one is called, in seconds.
CHECK_S = 2.0

# How long to wait for the answer of Dask's scheduler where a task is, in seconds.
_ASK_S = 0.5

_CLOSED = "Dask's client was closed, or it has lost its scheduler for good"


class ExecutorGoneError(ConnectionError):
    """Set on a future whose call the executor has lost. Not an error of the called function."""


class AnyExecutor:
    """Wraps an executor; used for all executors except Dask's.

    Attributes:
        check: Fails the executor's futures if the executor is gone; None if they fail without it.

    Args:
        executor: The user's executor.
    """

    def __init__(self, executor: Any) -> None:
        self._submit: Callable[..., Any] = executor.submit
        self.check: Callable[[], None] | None = getattr(executor, "check", None)
        self._share: Callable[[Any], Any] | None = getattr(executor, "share", None)

    def submit(self, name: str, *call: Any) -> Any:  # noqa: ARG002 - for Dask
        """Submit a call, and return its future.

        Args:
            name: A name that no other call has.
            call: The function and its arguments.
        """
        return self._submit(*call)

    def share(self, contents: Any) -> Any:
        """Put an object into the executor's store. Returns a reference; None without a store."""
        return None if self._share is None else self._share(contents)

    def location_of(self, name: str) -> str:  # noqa: ARG002 - nothing is known
        """Say where a call runs, in words; "" if that is not known."""
        return ""


class DaskExecutor(AnyExecutor):
    """Wraps the executor of a Dask client.

    The executor's own ``submit`` is not used: if the connection to the scheduler breaks while a
    result is on its way, the future of that method stays pending for ever.

    Raises:
        ValueError: If the client is asynchronous on this thread.
    """

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self._executor = executor
        self._client = executor._client
        if self._client.asynchronous:
            raise ValueError(
                "executor= takes no Dask client that is asynchronous on this thread, since next() "
                "would hold up the event loop that sends its tasks: load on another thread "
                "(asyncio.to_thread), with a client that was made there"
            )
        self._futures: weakref.WeakSet[Future] = weakref.WeakSet()
        self._lock = threading.Lock()
        self.check = self._fail_if_closed

    def submit(self, name: str, *call: Any) -> Any:
        """Submit a call under its name, as its key."""
        if getattr(self._executor, "_shutdown", False):
            raise RuntimeError("cannot schedule new futures after shutdown")
        if self._is_closed():  # a client that is closing accepts calls, and drops them
            raise ExecutorGoneError(_CLOSED)
        # Without a key, Dask computes a hash of all arguments.
        options = {**getattr(self._executor, "_kwargs", {}), "key": name}
        there = self._client.submit(*call, **options)

        def cancel(future: Future) -> None:
            # This does not wait for the scheduler, which may be slow or about to be disconnected.
            if future.cancelled() and not self._is_closed():
                cancel_there = functools.partial(self._client.cancel, [there], asynchronous=True)
                self._client.loop.add_callback(cancel_there)

        future = Future()
        future.add_done_callback(cancel)
        with self._lock:
            self._futures.add(future)
        self._client.loop.add_callback(self._follow, there, future)
        return future

    async def _follow(self, there: Any, future: Future) -> None:
        """Pass a call's outcome to its future, as Dask's executor does. Runs in the event loop."""
        try:
            result = await self._client.gather(there, asynchronous=True)
        except Exception as error:  # noqa: BLE001 - the call's own, or its result is lost
            if there.status != "error":
                text = _CLOSED if self._is_closed() else f"{type(error).__name__}: {error}"
                error = ExecutorGoneError(text)
            settle(future, error)
        else:
            settle(future, None, result)

    def _is_closed(self) -> bool:
        """Whether the client brings no more results.

        A client may also have stopped listening to the scheduler because of an internal error that
        it does not report.
        """
        reports = getattr(self._client, "_handle_report_task", None)
        has_stopped = reports is not None and reports.done()
        return has_stopped or self._client.status in ("closing", "closed")

    def _fail_if_closed(self) -> None:
        """Fail all futures if the client is closed: its event loop may have ended before they did.

        A client that has lost its scheduler closes itself when it cannot connect again in time.
        """
        if self._is_closed():
            with self._lock:
                futures = list(self._futures)
            for future in futures:
                settle(future, ExecutorGoneError(_CLOSED))

    def share(self, contents: Any) -> Any:
        """Copy an object to all Dask workers, with the fewest transfers. Returns a reference."""
        return self._client.scatter(contents, broadcast=True, hash=False)

    def location_of(self, name: str) -> str:
        """Ask the scheduler which worker has a call."""
        client = self._client
        ask = client.scheduler.processing
        tasks = attempt(client.sync, ask, callback_timeout=_ASK_S)
        if isinstance(tasks, Caught):
            return "but Dask's scheduler does not answer"
        for address, names in tasks.items():
            if name in names:
                return f"on the Dask worker at {address}"
        return "but no Dask worker has it yet" if tasks else "but Dask has no workers now"


def settle(future: Future, error: BaseException | None, result: Any = None) -> None:
    """End a future, unless it has ended or was cancelled."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def open_executor(executor: Any) -> AnyExecutor:
    """Return the wrapper for an executor."""
    is_of_dask = type(executor).__module__.partition(".")[0] == "distributed"
    if is_of_dask and getattr(executor, "_client", None) is not None:
        return DaskExecutor(executor)
    return AnyExecutor(executor)
