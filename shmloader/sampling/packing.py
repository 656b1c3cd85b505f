"""Packs the samples of a window into batches of a token budget. Pure functions of lengths.

Lengths are an int64 array of n samples by k measures, and a budget is a tuple of k numbers. The
result is a :class:`Packing`. Nothing here knows epochs, random numbers or the dataset.

Best-fit decreasing takes the samples from long to short, and puts each where the least space is
left over. Equal lengths follow one another, and most of a run goes to few batches. Where ``space``
is the smallest space that takes a sample of ``length``, ``space - length`` is the smallest one for
the next of the run, if it fits. So :func:`best_fit_decreasing` takes one step for each
run and batch, not for each sample. 10,000 log-normal lengths take about 2,200 steps, 0.8 ms.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Budget = tuple[int, ...]

# Keys below this are sorted by radix, in a fifth of the time.
_RADIX_LIMIT = 1 << 16


class Packing(NamedTuple):
    """Samples in batches: batch b has ``order[ends[b - 1]:ends[b]]``, the first from 0.

    Attributes:
        order: Rows of the lengths, each once.
        ends: Where each batch ends in ``order``, ascending.
    """

    order: Numbers
    ends: Numbers

    @property
    def starts(self) -> Numbers:
        """Where each batch begins in ``order``."""
        return np.append(0, self.ends)[:-1]

    def arranged(self, batches: Numbers) -> "Packing":
        """Return the packing with these batches, in this order."""
        counts = (self.ends - self.starts)[batches]
        ends = np.cumsum(counts)
        offsets = np.repeat(self.starts[batches] - (ends - counts), counts)
        return Packing(self.order[np.arange(len(offsets)) + offsets], ends)


def sort(keys: Numbers) -> Numbers:
    """Return the rows that sort keys from 0 up; rows of equal keys keep their order."""
    is_narrow = len(keys) > 0 and int(keys.max()) < _RADIX_LIMIT
    narrow = keys.astype(np.uint16) if is_narrow else keys
    return np.argsort(narrow, kind="stable").astype(np.int64)


def best_fit_decreasing(lengths: Numbers, budget: Budget) -> Packing:
    """Pack so that the lengths of a batch add up to at most the budget, in each measure.

    Each sample goes to the batch with the least space that takes it, of equal ones to the first.
    With several measures, samples are ordered by the largest share that they take of a budget.
    Spaces are compared by the sum of their shares. Each sample is a step: 80 ms for 10,000.

    Args:
        lengths: Lengths from 1 to the budget, of shape (n, k).
        budget: The most that a batch may have of each measure.
    """
    if not len(lengths):
        return Packing(lengths[:, 0], lengths[:, 0])
    if len(budget) > 1:
        rows, batches = _fit_measures(lengths, np.array(budget))
    else:
        rows, batches = _fit_runs(lengths[:, 0], budget[0])
    return Packing(rows[sort(batches)], np.cumsum(np.bincount(batches)))


def _fit_runs(lengths: Numbers, budget: int) -> tuple[Numbers, Numbers]:
    """Return the rows from long to short, and the batch of each."""
    rows = sort(budget - lengths)
    ordered = lengths[rows]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    counts = np.diff(np.append(starts, len(ordered)))
    shortest = int(ordered[-1])
    # A key is a space with the number of its batch in the low bits, so that one list has both.
    bits = len(rows).bit_length()
    spaces: list[int] = []
    batches, taken = [], []
    batch_count = 0
    for length, run in zip(ordered[starts].tolist(), counts.tolist(), strict=True):
        left = run
        while left:
            at = bisect_left(spaces, length << bits)
            if at < len(spaces):
                key = spaces.pop(at)
                space, batch = key >> bits, key & ((1 << bits) - 1)
            else:
                space, batch, batch_count = budget, batch_count, batch_count + 1
            count = min(left, space // length)
            left -= count
            space -= count * length
            if space >= shortest:
                insort(spaces, space << bits | batch)
            batches.append(batch)
            taken.append(count)
    return rows, np.repeat(np.array(batches), np.array(taken))


def _fit_measures(lengths: Numbers, budget: Numbers) -> tuple[Numbers, Numbers]:
    """Return the rows from long to short, and the batch of each."""
    shares = lengths / budget
    rows = np.argsort(-shares.max(axis=1), kind="stable")
    # One row for each measure, and their sums as shares.
    spaces = np.repeat(budget[:, None], len(rows), axis=1)
    sums = np.full(len(rows), float(len(budget)))
    batches = np.empty(len(rows), np.int64)
    batch_count = 0
    for at, row in enumerate(rows.tolist()):
        fits = np.ones(batch_count, np.bool_)
        for space, length in zip(spaces, lengths[row], strict=True):
            fits &= space[:batch_count] >= length
        found = np.flatnonzero(fits)
        batch = int(found[sums[found].argmin()]) if len(found) else batch_count
        batch_count = max(batch_count, batch + 1)
        spaces[:, batch] -= lengths[row]
        sums[batch] -= shares[row].sum()
        batches[at] = batch
    return rows, batches


def cut_by_longest(lengths: Numbers, budget: Budget) -> Packing:
    """Cut the samples, from long to short, so that longest x count is within each budget.

    Args:
        lengths: Lengths as they are padded, from 1 to the budget, of shape (n, k).
        budget: The most that a padded batch may have of each measure.
    """
    limits = np.array(budget)
    if len(budget) > 1:
        rows = np.argsort(-(lengths / limits).max(axis=1), kind="stable")
    else:
        rows = sort(budget[0] - lengths[:, 0])
    ordered, ends, start = lengths[rows], [], 0
    while start < len(rows):
        most = int((limits // ordered[start]).min())
        if len(budget) > 1:  # later samples may be longer in another measure
            longest = np.maximum.accumulate(ordered[start : start + most])
            padded = longest * np.arange(1, len(longest) + 1)[:, None]
            most = int((padded <= limits).all(axis=1).sum())
        start = min(start + most, len(rows))
        ends.append(start)
    return Packing(rows, np.array(ends, np.int64))
