"""The same faults, taken by a new thread while the thread that reached the point continues."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.faults import actions


def __getattr__(name: str) -> Callable[[], None]:
    action = getattr(actions, name)

    def take() -> None:
        threading.Thread(target=action, daemon=True).start()

    return take
