"""Faults placed on purpose, for the fault campaign (``tests/faults``).

``SHMLOADER_FAULT=point:nth:action`` is read once, in each process, when the package is imported;
several are separated by commas. Where a point is reached for the nth time in a process (from 1),
the action is taken there:

    * a signal's name (``SIGKILL``): the process sends it to itself;
    * ``exit`` or ``exit=3``: the process ends at once, with this code;
    * ``module.function``: it is called, without arguments, and may do anything.

A point in the workers may name one worker alone: ``worker.task/1``. Unset, a point costs one look
at a module's global.
"""

import importlib
import os
import signal

_VARIABLE = "SHMLOADER_FAULT"


class _Faults:
    """The faults of this process.

    Args:
        text: As in the environment.

    Raises:
        ValueError: If the text is not of the form above.
    """

    def __init__(self, text: str) -> None:
        self._placed: list[tuple[str, int, str]] = []
        for part in text.split(","):
            fields = part.strip().split(":")
            if len(fields) != 3 or not fields[1].isdecimal() or not all(fields):  # noqa: PLR2004
                raise ValueError(f"{_VARIABLE} should be point:nth:action, but got {part!r}")
            self._placed.append((fields[0], int(fields[1]), fields[2]))
        self._counts: dict[str, int] = {}
        self.worker_id: int | None = None

    def reach(self, point: str) -> None:
        """A point is reached; may not return, and may raise anything."""
        count = self._counts[point] = self._counts.get(point, 0) + 1
        here = (point, f"{point}/{self.worker_id}")
        for where, nth, action in self._placed:
            if nth == count and where in here:
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


#: None, unless the variable is set: ``if FAULTS is not None: FAULTS.reach("worker.task")``.
FAULTS = _read()
