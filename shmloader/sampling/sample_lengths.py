"""The lengths of a dataset's samples, checked, and what becomes of samples over the budget.

Samples have numbers from 0. With ``too_long="split"``, a number is a piece: number i below the
count of samples is the first piece of sample i, and later pieces of long samples have the numbers
after that. So only long samples take memory.
"""

import functools
import zlib
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shmloader.sampling.arguments import as_numbers, whole_number
from shmloader.sampling.packing import Budget, Numbers

TooLong = Literal["raise", "truncate", "split", "drop"]
TOO_LONG = ("raise", "truncate", "split", "drop")

# Numbers that are converted at a time.
_BLOCK = 1 << 20

# Lengths are below this, as int64 numbers.
_TOO_LARGE = 2**63


def check_budget(max_tokens: object, multiple_of: int) -> Budget:
    """Return the budget of each measure, rounded down to what padded samples can take.

    Raises:
        TypeError: If it is neither an int nor a tuple of ints.
        ValueError: If a budget is below 1, or below ``multiple_of``.
    """
    many = isinstance(max_tokens, tuple | list)
    given: Any = max_tokens if many else (max_tokens,)
    if not len(given):
        raise ValueError("max_tokens should have a budget for each measure, but is empty")
    names = [f"max_tokens[{number}]" if many else "max_tokens" for number in range(len(given))]
    return tuple(
        whole_number(value, name, minimum=multiple_of)
        for value, name in zip(given, names, strict=True)
    )


class SampleLengths:
    """Lengths of samples, or of their pieces.

    Attributes:
        lengths: The user's lengths, as an integer array of shape (n, k); not copied if it was one.
        number_count: How many numbers there are: of samples, or of pieces.
        dropped_count: How many samples are left out.
        owners, starts: Of each piece after a first one: the sample, and the first token.

    Args:
        lengths: A sequence, array, memory map or tensor of n or n x k ints.
        limits: The longest sample that a batch can take, in each measure.
        too_long: What becomes of longer samples.

    Raises:
        TypeError: If the lengths are not numbers.
        ValueError: If they have another shape, or one is not a whole number, below 1, or above the
            limit. The message has its index.
    """

    def __init__(self, lengths: object, limits: Budget, too_long: TooLong) -> None:
        self.lengths = _as_whole_numbers(lengths, len(limits))
        self._limits, self._too_long = np.array(limits, np.int64), too_long
        count = len(self.lengths)
        # One row of each piece after a first one.
        self.owners = self.starts = np.zeros(0, np.int64)
        self.dropped_count = 0
        self._has_long = bool(count) and bool((self.lengths.max(axis=0) > self._limits).any())
        if self._has_long:
            self._handle_long(np.flatnonzero((self.lengths > self._limits).any(axis=1)))
        self.number_count = count + len(self.owners)

    def _handle_long(self, long: Numbers) -> None:
        if self._too_long == "raise":
            first = int(long[0])
            length, limit = self.lengths[first].tolist(), self._limits.tolist()
            one = len(limit) == 1
            raise ValueError(
                f"{len(long)} of {len(self.lengths)} samples are too long for a batch: sample "
                f"{first} has {length[0] if one else tuple(length)} tokens, and max_tokens allows "
                f"{limit[0] if one else tuple(limit)}. Give more max_tokens, or too_long='truncate'"
                ", 'split' or 'drop'."
            )
        if self._too_long == "drop":
            self.dropped_count = len(long)
        if self._too_long == "split":
            limit = int(self._limits[0])
            later = -(-self.lengths[long, 0].astype(np.int64) // limit) - 1
            self.owners = np.repeat(long.astype(np.int64), later)
            firsts = np.repeat(np.cumsum(later) - later, later)
            self.starts = (np.arange(len(self.owners)) - firsts + 1) * limit

    def take(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the numbers that are not left out, and their lengths in batches: (m, k), int64."""
        count = len(self.lengths)
        if not len(self.owners):
            lengths = self.lengths[numbers].astype(np.int64)
        else:
            later = numbers >= count
            extra = numbers[later] - count
            lengths = np.empty((len(numbers), 1), np.int64)
            lengths[~later] = self.lengths[numbers[~later]]
            lengths[later, 0] = self.lengths[self.owners[extra], 0] - self.starts[extra]
        if self._has_long and self._too_long == "drop":
            kept = (lengths <= self._limits).all(axis=1)
            return numbers[kept], lengths[kept]
        return numbers, np.minimum(lengths, self._limits) if self._has_long else lengths

    @functools.cached_property
    def checksum(self) -> int:
        """A checksum of the lengths, which does not depend on their dtype."""
        checksum = 0
        for start in range(0, len(self.lengths), _BLOCK):
            block = self.lengths[start : start + _BLOCK].astype("<i8")
            checksum = zlib.crc32(block.tobytes(), checksum)
        return checksum


def _as_whole_numbers(lengths: object, measures: int) -> npt.NDArray[np.integer[Any]]:
    """Return lengths as an integer array of shape (n, measures), each at least 1."""
    array = as_numbers(lengths, "lengths")
    if array.ndim == 1 and measures == 1:
        array = array[:, None]
    if array.shape[1:] != (measures,):
        raise ValueError(
            f"lengths should have shape (samples,) or (samples, measures), with {measures} "
            f"measures as in max_tokens, but got lengths of shape {array.shape}"
        )
    is_float = array.dtype.kind == "f"
    if len(array) and (is_float or not 1 <= array.min() <= array.max() < _TOO_LARGE):
        is_whole = not is_float or array == np.floor(array)
        wrong = np.argwhere(~((array >= 1) & (array < _TOO_LARGE) & is_whole)).tolist()
        if wrong:
            row, column = wrong[0]
            at = f"{row}" if measures == 1 else f"{row}, {column}"
            raise ValueError(
                f"lengths should be whole numbers from 1 to 2**63 - 1, but got lengths[{at}]="
                f"{array[row, column]}"
            )
    return array.astype(np.int64) if is_float else array
