"""How many workers there should be (``num_workers="auto"``). Pure.

Period after period, one step at a time, and each step is a trial: a further worker stays if batches
come faster for it, one fewer stays away if nobody waits for it. After a trial that did not help,
nothing is tried for twice as many periods as after the one before.
"""

from dataclasses import dataclass

# A period is at least so long, and of so many batches for each worker.
PERIOD_NS = 500_000_000
_BATCHES_EACH = 4
# A consumer that waits for more of its time than this may gain by a further worker.
_WAITS = 0.1
# One that waits for less than this does not miss a worker, if the others can do its work.
_NEVER_WAITS = 0.02
# Most of their time that the others may be busy with it.
_BUSY = 0.7
# By how much batches have to come faster.
_GAIN = 1.05
_LONGEST_REST = 64


@dataclass(frozen=True, slots=True)
class _Trial:
    """A step that is being tried.

    Attributes:
        count: Workers before.
        rate: Batches a nanosecond before.
    """

    count: int
    rate: float


class Adapter:
    """Decides by what the consumer sees. On its thread.

    Attributes:
        count: Workers that there should be.
        most: There may be.

    Args:
        count: To begin with.
        most: See above.
    """

    def __init__(self, count: int, most: int) -> None:
        self.count = count
        self.most = most
        self._trial: _Trial | None = None
        self._rest = 0
        self._next_rest = 1
        self.begin()

    def begin(self) -> None:
        """An epoch begins; its first period, with workers that start, does not count."""
        self._is_settling = True
        self._start_ns: int | None = None
        self._batches = self._wait_ns = self._busy_ns = 0

    def note(self, now_ns: int, wait_ns: int, busy_ns: int) -> int:
        """A batch was taken.

        Args:
            now_ns: When.
            wait_ns: How long the consumer waited for it.
            busy_ns: How long its worker was busy with it.

        Returns:
            How many workers there should be from now on.
        """
        if self._start_ns is None:
            self._start_ns = now_ns
            return self.count
        self._batches += 1
        self._wait_ns += wait_ns
        self._busy_ns += busy_ns
        elapsed_ns = now_ns - self._start_ns
        if elapsed_ns >= PERIOD_NS and self._batches >= _BATCHES_EACH * self.count:
            if self._is_settling:
                self._is_settling = False
            else:
                self._decide(elapsed_ns)
            self._start_ns = now_ns
            self._batches = self._wait_ns = self._busy_ns = 0
        return self.count

    def _decide(self, elapsed_ns: int) -> None:
        rate = self._batches / elapsed_ns
        wait_share = self._wait_ns / elapsed_ns
        trial, self._trial = self._trial, None
        if trial is not None and not self._has_helped(trial, rate, wait_share):
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
            self._go_to(trial.count)
        elif self._rest:
            self._rest -= 1
        else:
            if trial is not None:
                self._next_rest = 1
            self._try(rate, wait_share, self._busy_ns / elapsed_ns)

    def _has_helped(self, trial: _Trial, rate: float, wait_share: float) -> bool:
        if self.count > trial.count:
            return rate > _GAIN * trial.rate
        return wait_share < _WAITS / 2

    def _try(self, rate: float, wait_share: float, busy_workers: float) -> None:
        if wait_share > _WAITS and self.count < self.most:
            self._trial = _Trial(self.count, rate)
            self._go_to(self.count + 1)
        elif (
            wait_share < _NEVER_WAITS and self.count > 1 and busy_workers < _BUSY * (self.count - 1)
        ):
            self._trial = _Trial(self.count, rate)
            self._go_to(self.count - 1)

    def _go_to(self, count: int) -> None:
        self.count = count
        self._is_settling = True
