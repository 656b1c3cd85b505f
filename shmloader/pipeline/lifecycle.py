"""Runs ``setup`` and ``teardown`` of stages: per thread, per event loop, or per worker process.

Guarantees:
    * ``setup`` is called before the first item, where the op is called: once on each thread, or
      once on the loop.
    * ``teardown`` is called in the same place, once for each ``setup`` that has returned, after the
      ops. Its exceptions are logged, and prevent no other ``teardown``.
    * In a worker process, only ``setup`` is called.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("shmloader")


@dataclass(frozen=True, slots=True, eq=False)
class Lifecycle:
    """The ``setup`` and ``teardown`` of a stage: called before its first and after its last item.

    Attributes:
        stage: The stage's name.
        setup: Makes the context, which is the op's second argument.
        teardown: Called with the context; None if there is nothing to call.
    """

    stage: str
    setup: Callable[[], Any]
    teardown: Callable[[Any], Any] | None

    def set_up(self) -> Any:
        """Return a new context. Called on a thread of the pipeline, or in a worker process.

        Raises:
            TypeError: If ``setup`` returns a coroutine.
            Exception: An exception of ``setup``.
        """
        context = self.setup()
        if inspect.iscoroutine(context):
            context.close()
            raise TypeError(
                f"setup of stage '{self.stage}' returned a coroutine, which nothing would await: "
                "only stages of coroutine functions run on an event loop"
            )
        return context

    def tear_down(self, context: Any) -> None:
        """Call ``teardown`` on a thread. Its exceptions are logged."""
        if self.teardown is None:
            return
        try:
            result = self.teardown(context)
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError("it returned a coroutine, which nothing would await")
        except BaseException:  # noqa: BLE001 - the user's own, and nothing may depend on it
            self._log_failure()

    async def set_up_on_loop(self) -> Any:
        """Return a new context. Called on the event loop."""
        context = self.setup()
        return await context if inspect.isawaitable(context) else context

    async def tear_down_on_loop(self, context: Any) -> None:
        """Call ``teardown`` on the event loop. Its exceptions are logged."""
        if self.teardown is None:
            return
        try:
            result = self.teardown(context)
            if inspect.isawaitable(result):
                await result
        except BaseException:  # noqa: BLE001 - the user's own, and nothing may depend on it
            self._log_failure()

    def _log_failure(self) -> None:
        _log.exception("teardown of stage '%s' failed", self.stage)


class ThreadContexts:
    """The contexts of all stages on one thread. Used on that thread."""

    def __init__(self) -> None:
        self._contexts: dict[Lifecycle, Any] = {}

    def context_of(self, lifecycle: Lifecycle) -> Any:
        """Return the stage's context on this thread. Raises what ``setup`` raises."""
        if lifecycle not in self._contexts:
            self._contexts[lifecycle] = lifecycle.set_up()
        return self._contexts[lifecycle]

    def close(self) -> None:
        """Tear all contexts down, newest first."""
        while self._contexts:
            lifecycle, context = self._contexts.popitem()
            lifecycle.tear_down(context)


class LoopContexts:
    """The contexts of all stages on an event loop. Used on the loop."""

    def __init__(self) -> None:
        self._contexts: dict[Lifecycle, asyncio.Task[Any]] = {}

    async def context_of(self, lifecycle: Lifecycle) -> Any:
        """Return the stage's context. Raises what ``setup`` raises.

        One asyncio task calls ``setup``, and all coroutines of the stage wait for that task. If one
        of them is cancelled, the task continues.
        """
        task = self._contexts.get(lifecycle)
        if task is None:
            task = asyncio.get_running_loop().create_task(lifecycle.set_up_on_loop())
            self._contexts[lifecycle] = task
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Tear down the contexts of all ``setup`` calls that have returned, newest first."""
        while self._contexts:
            lifecycle, task = self._contexts.popitem()
            if task.done() and not task.cancelled() and task.exception() is None:
                await lifecycle.tear_down_on_loop(task.result())
