"""Injects faults into processes, for the fault campaign (``tests/faults``).

Each process reads ``SHMLOADER_FAULT=point:nth:action`` when it imports the package. Commas separate
several faults. When a process reaches the point for the nth time (from 1), the action happens:

    * a signal's name (``SIGKILL``): the process sends itself this signal;
    * ``exit`` or ``exit=3``: the process ends at once, with this code;
    * ``module.function``: this function is called without arguments, and may do anything.

A point in the workers may name one worker by its number: ``worker.task/1``. Without the variable, a
point costs only a look at a global variable.
"""

import importlib
import os
import signal

_VARIABLE = "SHMLOADER_FAULT"


class _Faults:
    """The faults of this process.

    Attributes:
        worker_id: Number of the worker that this process is; None in other processes.

    Args:
        text: Value of the environment variable.

    Raises:
        ValueError: If the text does not have the form that the module's docstring describes.
    """

    def __init__(self, text: str) -> None:
        self._faults: list[tuple[str, int, str]] = []
        for fault in text.split(","):
            fields = fault.strip().split(":")
            if len(fields) != 3 or not fields[1].isdecimal() or not all(fields):  # noqa: PLR2004
                raise ValueError(f"{_VARIABLE} should be point:nth:action, but got {fault!r}")
            self._faults.append((fields[0], int(fields[1]), fields[2]))
        self._counts: dict[str, int] = {}
        self.worker_id: int | None = None

    def reach(self, point: str) -> None:
        """Note that a point is reached. May not return, and may raise anything."""
        count = self._counts[point] = self._counts.get(point, 0) + 1
        names = (point, f"{point}/{self.worker_id}")
        for name, nth, action in self._faults:
            if nth == count and name in names:
                _take(action)


def _take(action: str) -> None:
    if action.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[action])
    elif action == "exit" or action.startswith("exit="):
        os._exit(int(action.partition("=")[2] or 0))
    else:
        module, _, name = action.rpartition(".")
        getattr(importlib.import_module(module), name)()


def _read() -> _Faults | None:
    text = os.environ.get(_VARIABLE)
    return _Faults(text) if text else None


#: None unless the variable is set: ``if FAULTS is not None: FAULTS.reach("worker.task")``.
FAULTS = _read()
