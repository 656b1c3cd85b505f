"""What the user's executor offers beyond ``concurrent.futures``: a store, and where a task is.

``RayExecutor`` offers a store itself. That of Dask's is its client's. Of any other executor nothing
is known but its futures.
"""

import contextlib
from collections.abc import Callable
from typing import Any

# How long Dask's scheduler is waited for when it is asked where a task is, in seconds.
_ASK_S = 0.5


class AnyExecutor:
    """An executor of which nothing more is known.

    Attributes:
        check: Fails the futures of an executor that is gone, where nothing else would; else None.

    Args:
        executor: The user's executor.
    """

    def __init__(self, executor: Any) -> None:
        self._submit: Callable[..., Any] = executor.submit
        self.check: Callable[[], None] | None = getattr(executor, "check", None)
        self._share: Callable[[Any], Any] | None = getattr(executor, "share", None)

    def submit(self, name: str, *call: Any) -> Any:  # noqa: ARG002 - nothing takes a name
        """Submit a call, and return its future.

        Args:
            name: A name that no other call has.
            call: The function and its arguments.
        """
        return self._submit(*call)

    def share(self, contents: Any) -> Any:
        """Put an object into the executor's store. Returns a reference; None without a store."""
        return None if self._share is None else self._share(contents)

    def place_of(self, name: str) -> str:  # noqa: ARG002 - nothing is known
        """Say where a call is, in words; "" if that is not known."""
        return ""


class DaskExecutor(AnyExecutor):
    """The executor of a client of Dask's."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self._client = executor._client

    def submit(self, name: str, *call: Any) -> Any:
        """Submit a call under its name, as its key."""
        # Without a key, Dask computes a hash of all arguments.
        return self._submit(*call, key=name)

    def share(self, contents: Any) -> Any:
        """Put an object into the memory of Dask's workers: of all, by the fewest transfers."""
        return self._client.scatter(contents, broadcast=True, hash=False)

    def place_of(self, name: str) -> str:
        """Ask the scheduler which worker has a call."""
        with contextlib.suppress(Exception):  # the scheduler may be gone, or slow
            client = self._client
            tasks = client.sync(client.scheduler.processing, callback_timeout=_ASK_S)
            for address, names in tasks.items():
                if name in names:
                    return f"with Dask's worker at {address}"
            return "not with a worker of Dask's yet"
        return ""


def open_executor(executor: Any) -> AnyExecutor:
    """Return what an executor offers."""
    is_of_dask = type(executor).__module__.partition(".")[0] == "distributed"
    if is_of_dask and getattr(executor, "_client", None) is not None:
        return DaskExecutor(executor)
    return AnyExecutor(executor)
