"""Passes index batches from the user's thread, which draws them, to the engine's thread (I2)."""

import collections
from collections.abc import Callable
from typing import Self


class Inbox:
    """The index batches of one epoch that are on their way to the engine.

    The engine iterates over the inbox. Iteration stops whenever the inbox is empty, and may be
    continued later.

    Attributes:
        is_ended: Whether the sampler is exhausted.

    Args:
        ask: Asks the user's thread for one more index batch. Called with True if it is wanted in
            addition to all others, and with False if it replaces one that yielded no batch.
    """

    def __init__(self, ask: Callable[[bool], None]) -> None:
        self._waiting: collections.deque[object] = collections.deque()
        self.ask = ask
        self.is_ended = False

    def put(self, indices: object, wake: Callable[[], None]) -> None:
        """Add an index batch. Called on the user's thread.

        Args:
            indices: The index batch.
            wake: Ends the wait of the engine's thread.
        """
        self._waiting.append(indices)
        wake()

    def end(self, wake: Callable[[], None]) -> None:
        """Note that the sampler is exhausted, and wake the engine. Called on the user's thread."""
        self.is_ended = True
        wake()

    def __iter__(self) -> Self:
        """Return the inbox itself."""
        return self

    def __next__(self) -> object:
        """Return the next index batch. Called on the engine's thread."""
        try:
            return self._waiting.popleft()
        except IndexError:
            raise StopIteration from None

    def __bool__(self) -> bool:
        """Return whether an index batch is waiting."""
        return bool(self._waiting)
