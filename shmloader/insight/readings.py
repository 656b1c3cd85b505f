"""What an iterator's workers use, asked for while they live."""

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What a worker has used since it was started, with those before it in its place.

    Attributes:
        pid: Process number; None for a thread.
        cpu_ns: CPU time.
        stalled_ns: Time in which it could have run, and no core was free; None if not known.
        pss_bytes: Its memory, what it shares counted by its part; None if not known.
    """

    pid: int | None = None
    cpu_ns: int = 0
    stalled_ns: int | None = None
    pss_bytes: int | None = None


class Readings:
    """The usage of an iterator's workers: asked for while they live, the last ones afterwards."""

    def __init__(self) -> None:
        self._latest: Sequence[Usage] = ()
        self._ask: Callable[[bool], Sequence[Usage] | None] | None = None

    def open(self, ask: Callable[[bool], Sequence[Usage] | None]) -> None:
        """Workers live from now on.

        Args:
            ask: Given True, it takes its time, to measure memory, too. None: nobody knows any more.
        """
        self._ask = ask

    def close(self) -> None:
        """They are about to be let go of. May be called again."""
        ask, self._ask = self._ask, None
        if ask is not None:
            self._note(ask(False))

    def read(self, *, thoroughly: bool) -> Sequence[Usage]:
        """The newest there are."""
        ask = self._ask
        if ask is not None:
            latest = ask(thoroughly)
            if self._ask is not None:
                self._note(latest)
        return self._latest

    def _note(self, latest: Sequence[Usage] | None) -> None:
        if latest is None:
            return
        # What was measured thoroughly holds until it is measured again.
        known = [old.pss_bytes for old in self._latest]
        self._latest = [
            now
            if now.pss_bytes is not None or worker_id >= len(known)
            else dataclasses.replace(now, pss_bytes=known[worker_id])
            for worker_id, now in enumerate(latest)
        ]
