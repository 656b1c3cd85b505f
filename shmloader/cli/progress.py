"""Progress on standard error: tqdm's bar where it is installed (the extra ``[cli]``)."""

import sys
import time
from types import TracebackType
from typing import Any, Self

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

_EVERY_S = 1.0


class Progress:
    """How far something has come. Used as a context manager.

    Args:
        name: Of what is done.
        total: How much there is; None if nobody knows.
        unit: What is counted.
    """

    def __init__(self, name: str, total: int | None, unit: str) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._count = 0
        self._told_s = time.monotonic()
        self._bar: Any = None
        if tqdm is not None and sys.stderr.isatty():
            tqdm.monitor_interval = 0  # no thread beside the one that forks the workers
            self._bar = tqdm(desc=name, total=total, unit=unit, leave=False)

    def step(self, note: str = "") -> None:
        """One more is done."""
        self._count += 1
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        elif time.monotonic() - self._told_s > _EVERY_S:
            self._told_s = time.monotonic()
            of = "" if self._total is None else f" of {self._total}"
            note = note and f"; {note}"
            print(f"{self._name}: {self._count}{of} {self._unit}{note}", file=sys.stderr)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
