"""A shuffled order with random access that takes little memory.

Up to 262,144 numbers are sorted by random keys. With more numbers, each position is computed when
it is needed: a keyed function permutes the numbers below a power of two, and is applied again to
results outside of the range (cycle walking). So with a hundred million samples, a rank computes
only the positions of its own batches. Every process computes the same order, whatever its version
of NumPy or torch.
"""

import hashlib

import numpy as np
import numpy.typing as npt

# Up to this length, the order is sorted and kept, which takes at most 20 ms and 2 MB. Any order is
# possible then; the network below makes only even permutations if there are few numbers.
_SORTED = 1 << 18

# Four rounds would be enough if the rounds' function were random (Luby and Rackoff, 1988). The
# number is even, so that the two halves end up in their original positions.
_ROUNDS = 6

_Words = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int64]


class Permutation:
    """The numbers from 0 to ``length - 1``, in an order that depends only on the arguments.

    Args:
        length: Count of the numbers.
        key: Numbers that determine the order, such as a seed and an epoch.
    """

    def __init__(self, length: int, *key: int) -> None:
        self.length = length
        text = ",".join(map(str, (length, *key))).encode()
        words = hashlib.blake2b(text, digest_size=8 * _ROUNDS, person=b"shmloader order").digest()
        self._keys = np.frombuffer(words, dtype="<u8").astype(np.uint64)
        self._order: _Numbers | None = None
        if length <= _SORTED:
            counter = np.arange(length, dtype=np.uint64)
            sort_keys = _scramble(_scramble(counter + self._keys[0]) + self._keys[1])
            self._order = np.argsort(sort_keys, kind="stable").astype(np.int64)

    def at(self, positions: _Numbers) -> _Numbers:
        """Return the numbers at these positions, as int64 in the same shape."""
        if self._order is not None:
            return self._order[positions]
        limit = np.uint64(self.length)
        values = self._mix(positions.astype(np.uint64).reshape(-1))
        while (outside := np.flatnonzero(values >= limit)).size:
            values[outside] = self._mix(values[outside])
        return values.astype(np.int64).reshape(positions.shape)

    def _mix(self, values: _Words) -> _Words:
        """Apply a Feistel network over two halves of the bits, which permutes the values."""
        bits = (self.length - 1).bit_length()
        low = bits // 2
        left, right = values >> np.uint64(low), values & _mask(low)
        for number, key in enumerate(self._keys):
            left_bits = low if number % 2 else bits - low
            left, right = right, left ^ (_scramble(right + key) & _mask(left_bits))
        return (left << np.uint64(low)) | right


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _scramble(values: _Words) -> _Words:
    """Apply the finaliser of MurmurHash3 for 64 bits: every result bit depends on every bit."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values
