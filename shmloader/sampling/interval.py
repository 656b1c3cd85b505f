"""Indices at a regular distance."""

from collections.abc import Iterator

from torch.utils.data import Sampler

from shmloader.sampling.checks import flag, whole_number


class IntervalSampler(Sampler[int]):
    """Every ``interval``-th index of ``range(length)``, from 0; then from 1, and so on.

    With length 10 and interval 4: 0, 4, 8, then 1, 5, 9, then 2, 6, then 3, 7. All epochs are
    alike.

    Attributes:
        length, interval, rollover: As given.

    Args:
        length: Number of samples in the whole set, from 0.
        interval: Distance from one index to the next, from 1; where it is not below ``length``,
            each run has one index.
        rollover: Whether to begin again, one further, until each index was given once; else only
            the run from 0 is given.

    Raises:
        TypeError: If a number is no int, or ``rollover`` no bool.
        ValueError: If a number is out of range.
    """

    def __init__(self, length: int, interval: int, rollover: bool = True) -> None:
        self.length = whole_number(length, "length", minimum=0)
        self.interval = whole_number(interval, "interval", minimum=1)
        self.rollover = flag(rollover, "rollover")

    def __iter__(self) -> Iterator[int]:
        """Give an epoch."""
        run_count = min(self.interval, self.length) if self.rollover else 1
        for begin in range(run_count):
            yield from range(begin, self.length, self.interval)

    def __len__(self) -> int:
        """Indices of an epoch."""
        return self.length if self.rollover else len(range(0, self.length, self.interval))
