"""Injects a fault into processes, for the fault campaign (``tests/faults``).

Each process reads ``SHMLOADER_FAULT=point:nth:module.function`` when it imports the package. When
it reaches the point for the nth time (from 1), the function is called without arguments, and may do
anything. A point in the workers may name one worker by its number: ``worker.task/1``. Without the
variable, a point costs only a look at a global variable.
"""

import os
import pkgutil


class _Fault:
    """The fault of this process.

    Attributes:
        worker_id: Number of the worker that this process is; None in other processes.

    Args:
        text: Value of the environment variable.
    """

    def __init__(self, text: str) -> None:
        self._point, nth, self._action = text.split(":")
        self._left = int(nth)
        self.worker_id: int | None = None

    def reach(self, point: str) -> None:
        """Count that a point is reached. May not return, and may raise anything."""
        if self._point in (point, f"{point}/{self.worker_id}"):
            self._left -= 1
            if not self._left:
                pkgutil.resolve_name(self._action)()


_TEXT = os.environ.get("SHMLOADER_FAULT")

#: None unless the variable is set: ``if FAULTS is not None: FAULTS.reach("worker.task")``.
FAULTS = _Fault(_TEXT) if _TEXT else None
