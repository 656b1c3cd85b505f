"""What the tests of pipelines share."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from shmloader import Pipeline, PipelineBuilder

# What happens at once, on a busy machine.
SOON_S = 20.0


class Gate:
    """Holds threads back until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Semaphore(0)

    def pass_through(self) -> None:
        self._reached.release()
        assert self._open.wait(3 * SOON_S)

    def at(self, held: int) -> Callable[[int], int]:
        """Return an op that passes through for one number."""

        def op(number: int) -> int:
            if number == held:
                self.pass_through()
            return number

        return op

    def wait_until_reached(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._reached.acquire(timeout=SOON_S)

    def open(self) -> None:
        self._open.set()


class Most:
    """Counts who is inside at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = self.most = self.total = 0

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.total += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1


def chain(source: Iterable[Any], *ops: Callable[[Any], Any], sink: int = 3, **options) -> Pipeline:
    """A pipeline of ops, one at a time each."""
    builder = PipelineBuilder().add_source(source)
    for op in ops:
        builder.pipe(op)
    return builder.add_sink(sink).build(**options)


def pipeline_threads() -> list[str]:
    """Return the names of the threads that pipelines have started, and that run."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("shmloader_")]
