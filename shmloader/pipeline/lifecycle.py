"""Runs ``setup`` and ``teardown`` of stages: per thread, per event loop, or per worker process.

Guarantees:
    * ``setup`` is called before the first item, where the op is called: once on each thread, or
      once on the loop.
    * ``teardown`` is called in the same place, once for each ``setup`` that has returned, after the
      ops. Its exceptions are logged, and prevent no other ``teardown``.
    * In a worker process, only ``setup`` is called.
"""

import contextlib
import inspect
import logging
import types
from collections.abc import Callable, Iterator
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
        refuse_coroutine(context, f"setup of stage '{self.stage}'")
        return context

    def tear_down(self, context: Any) -> None:
        """Call ``teardown`` on a thread. Its exceptions are logged."""
        with self._logged():
            if self.teardown is not None:
                refuse_coroutine(self.teardown(context), "it")

    async def set_up_on_loop(self) -> Any:
        """Return a new context. Called on the event loop."""
        context = self.setup()
        return await context if inspect.isawaitable(context) else context

    async def tear_down_on_loop(self, context: Any) -> None:
        """Call ``teardown`` on the event loop. Its exceptions are logged."""
        with self._logged():
            result = None if self.teardown is None else self.teardown(context)
            if inspect.isawaitable(result):
                await result

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # noqa: BLE001 - the user's own, and nothing may depend on it
            _log.exception("teardown of stage '%s' failed", self.stage)


def refuse_coroutine(result: object, what: str) -> None:
    """Raise TypeError if a result is a coroutine.

    Args:
        result: What a function of the user's has returned.
        what: The function: "the op of stage 'decode'".
    """
    if type(result) is types.CoroutineType:
        result.close()
        raise TypeError(
            f"{what} returned a coroutine, which nothing would await: make the stage's op an async "
            "def, and await there"
        )
