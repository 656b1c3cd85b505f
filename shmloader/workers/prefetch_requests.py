"""Prefetch requests: a worker requests its next task shortly before it finishes one.

With dynamic dispatch a task waits for an idle worker. From the last sample of a batch to the
first of the next one, a worker would wait for its batch to be told of, and for the task: 1.0 ms
where two workers sleep in their samples (batches of 64 that take 94 ms), 0.4 ms if it asks first.
"""

from collections.abc import Callable
from typing import Any

from shmloader.messages import PrefetchRequest, pack
from shmloader.workers.timer import Timer

# Shorter batches ask for nothing: their workers have two tasks at a time (engine.routing).
_SHORT_NS = 2_000_000

# Where a sample takes longer, it is collate that asks: what would be spared counts for less than
# that the task may be stuck behind a last sample that is a slow one.
_LONG_SAMPLE_NS = 4_000_000


class PrefetchRequester:
    """Requests the next task once per batch. Runs on the worker's main thread.

    Args:
        send: Sends a message to the main process.
        timer: Timer of the present batch.
    """

    def __init__(self, send: Callable[[bytes], Any], timer: Timer) -> None:
        self._send = send
        self._timer = timer
        self._has_asked = False

    def begin(self) -> None:
        """Begin a batch."""
        self._has_asked = False

    def note_last(self, sample_count: int) -> None:
        """Note that the last of ``sample_count`` samples begins."""
        if self._timer.elapsed_ns < sample_count * _LONG_SAMPLE_NS:
            self._ask()

    def before(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a collate function so that it sends the request first, unless it was sent."""

        def collate_then(samples: Any) -> Any:
            self._ask()
            return collate(samples)

        return collate_then

    def _ask(self) -> None:
        if not self._has_asked and self._timer.elapsed_ns > _SHORT_NS:
            self._has_asked = True
            self._send(pack(PrefetchRequest()))
