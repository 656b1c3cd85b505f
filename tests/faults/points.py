"""The points of the fault campaign: where functions of the package begin or end.

Every process of a trial calls :func:`install`: the trial itself, and interpreters that are started
for workers, which import the program's main module. Each reads
``SHMLOADER_FAULT=point:nth:module.function``. When it reaches the point for the nth time (from 1),
the function is called without arguments, and may do anything. A point in the workers may name one
worker by its number: ``worker.task/1``.
"""

import os
import pkgutil
import threading
from collections.abc import Callable
from typing import Any

# Functions before which a point lies, and after which one does.
_BEFORE = {
    "main.start": "shmloader.pools.starting:WorkerHandle",  # the process has started
    "main.next": "shmloader.engine.engine:Engine._receive_any",
    "main.deliver": "shmloader.engine.engine:Engine._deliver",
    "main.return": "shmloader.loader.iterator:BatchIterator._count",
    "main.close": "shmloader.pools.process:end_all",
    "main.exit": "shmloader.pools.process:_end_at_exit",
    "worker.start": "shmloader.pools.worker:_Worker.__init__",
    "worker.idle": "shmloader.pools.worker:_Worker._look",
    "worker.task": "shmloader.pools.batch_server:BatchServer.serve",
    "worker.write": "shmloader.memory.writer:SlotWriter.put",
    "worker.answer": "shmloader.pools.worker:_Client._send",
}
_AFTER = {
    "main.dispatch": "shmloader.pools.process:ProcessPool.send",
    "worker.answered": "shmloader.pools.worker:_Client._send",
    "worker.stop": "shmloader.pools.worker:_Worker.run",
}
# Of the stages, only those of the trial's modes.
_STAGES = "shmloader.device.device:DeviceStage.run", "shmloader.device.stage:PinStage.run"


class _Fault:
    """The fault of this process.

    Attributes:
        worker_id: Number of the worker that this process is; None in other processes.
    """

    def __init__(self, text: str) -> None:
        self._point, nth, self._action = text.split(":")
        self._left = int(nth)
        self.worker_id: int | None = None
        # The thread that takes the fault, if it is another one than reaches the point.
        self._thread: threading.Thread | None = None

    def reach(self, point: str) -> None:
        if self._point in (point, f"{point}/{self.worker_id}"):
            self._left -= 1
            if not self._left:
                self._thread = pkgutil.resolve_name(self._action)()
            elif self._left < 0 and self._thread is not None:
                self._thread.join()  # it may be late on a busy machine


_faults: list[_Fault] = []


def reach(point: str) -> None:
    """Count that a point is reached. May not return, and may raise anything."""
    for fault in _faults:
        fault.reach(point)


def install() -> None:
    """Place the point of this process's fault, if it has one. Imports the package."""
    text = os.environ.get("SHMLOADER_FAULT")
    if text is None or _faults:
        return
    _faults.append(_Fault(text))
    for point, name in _BEFORE.items():
        _wrap(name, before=lambda *_, point=point: reach(point))
    for point, name in _AFTER.items():
        _wrap(name, after=lambda point=point: reach(point))
    for name in _STAGES:
        _wrap(name, before=lambda *_: reach("main.stage"))
    _wrap("shmloader.pools.worker:_Worker.__init__", before=_learn_number)  # before all others


def _learn_number(_: object, start: Any, *_rest: object) -> None:
    _faults[0].worker_id = start.worker_id


def _wrap(
    name: str,
    before: Callable[..., object] = lambda *_: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Call functions before and after one of the package."""
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner = pkgutil.resolve_name(":".join([module, ".".join(owners)]) if owners else module)
    function = getattr(owner, attribute)

    def wrapped(*args: Any, **named: Any) -> Any:
        before(*args)
        result = function(*args, **named)
        after()
        return result

    setattr(owner, attribute, wrapped)
