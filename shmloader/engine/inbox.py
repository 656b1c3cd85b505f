"""Index batches on their way from the user's thread, which draws them, to the engine's (I2)."""

import collections
from collections.abc import Callable
from typing import Self


class Inbox:
    """Of one epoch. An iterator for the engine: it ends whenever nothing is there.

    Attributes:
        is_ended: Whether the sampler has no more.
        is_awaited: Whether the engine's thread is to be woken for what the user's brings: else it
            looks here by itself before it waits, and as soon as it has use for it. Set by it.

    Args:
        ask: Asks the user's thread for one more.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._waiting: collections.deque[object] = collections.deque()
        self.ask = ask
        self.is_ended = False
        self.is_awaited = True

    def put(self, indices: object, wake: Callable[[], None]) -> None:
        """Hand one over. On the user's thread.

        Args:
            indices: What was drawn.
            wake: Gets the engine's thread out of its wait, if it waits for this.
        """
        self._waiting.append(indices)
        if self.is_awaited:
            wake()

    def end(self, wake: Callable[[], None]) -> None:
        """Say that there are no more, in any case. On the user's thread."""
        self.is_ended = True
        wake()

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> object:
        """The next one. On the engine's thread."""
        try:
            return self._waiting.popleft()
        except IndexError:
            raise StopIteration from None

    def __bool__(self) -> bool:
        """Whether one is there."""
        return bool(self._waiting)
