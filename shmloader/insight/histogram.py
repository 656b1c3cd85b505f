"""Percentiles of durations, in little memory."""

import dataclasses
import math
from typing import Self

# Each power of two is divided into this many equal parts: a value is known to 1/16 of itself.
_PARTS_LOG2 = 3
_PARTS = 1 << _PARTS_LOG2
_SMALLEST_LOG2 = _PARTS_LOG2 + 1
_PART_MASK = _PARTS - 1


@dataclasses.dataclass(slots=True)
class Histogram:
    """Counts durations in buckets whose width grows with the duration.

    Only buckets that have a duration take memory: eight for each power of two. A percentile is
    accurate to 7 %.

    Attributes:
        count: Number of durations noted.
        total_ns: Their sum.
        max_ns: The longest of them.
    """

    count: int = 0
    total_ns: int = 0
    max_ns: int = 0
    _counts: dict[int, int] = dataclasses.field(default_factory=dict)

    def note(self, *durations_ns: int) -> None:
        """Note durations."""
        counts = self._counts
        for duration_ns in durations_ns:
            bits = duration_ns.bit_length()
            if bits < _SMALLEST_LOG2:
                bucket = max(0, duration_ns)
            else:
                part = duration_ns >> (bits - _SMALLEST_LOG2) & _PART_MASK
                bucket = bits << _PARTS_LOG2 | part
            counts[bucket] = counts.get(bucket, 0) + 1
        self.count += len(durations_ns)
        self.total_ns += sum(durations_ns)
        self.max_ns = max(self.max_ns, *durations_ns, 0)

    def copy(self) -> Self:
        """Return a copy."""
        return dataclasses.replace(self, _counts=dict(self._counts))

    def add(self, other: "Histogram") -> None:
        """Add the durations of another histogram."""
        for bucket, count in list(other._counts.items()):
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.count += other.count
        self.total_ns += other.total_ns
        self.max_ns = max(self.max_ns, other.max_ns)

    def percentile(self, percent: float) -> int:
        """Return the duration in ns that ``percent`` % of all do not exceed; 0 if there is none."""
        rank = math.ceil(self.count * percent / 100)
        seen = 0
        for bucket, count in sorted(self._counts.items()):
            seen += count
            if seen >= rank:
                return min(_middle(bucket), self.max_ns)
        return self.max_ns


def _middle(bucket: int) -> int:
    """Return the middle of a bucket, in ns."""
    if bucket < _PARTS:
        return bucket
    shift = (bucket >> _PARTS_LOG2) - _SMALLEST_LOG2
    low = (_PARTS + (bucket & (_PARTS - 1))) << shift
    return low + ((1 << shift) >> 1)
