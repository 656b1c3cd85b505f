"""A shuffled order of which any part can be asked for first, and which takes little memory.

Up to 262,144 numbers are sorted by random keys. Of more, each position is computed when it is asked
for: a keyed function permutes the numbers below a power of two, and is applied again to what falls
outside of the range (cycle walking). So a hundred million samples cost a rank what its batches
cost, and every process computes the same order, whatever its version of NumPy or torch.
"""

import hashlib

import numpy as np
import numpy.typing as npt

# Below it sorting takes 20 ms at the most, and the order is held: 2 MB. It is exactly random, which
# the network for few numbers is not (it makes even permutations alone).
_SORTED = 1 << 18

# Four would do if the rounds' function were random (Luby and Rackoff, 1988); even, so that the
# halves end where they began.
_ROUNDS = 6

_Words = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int64]


class Permutation:
    """The numbers from 0 to ``length - 1`` in an order that depends on the arguments alone.

    Args:
        length: How many numbers.
        key: Numbers that choose the order, such as a seed and an epoch.
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
        """The numbers at these positions, each from 0 to ``length - 1``; int64, the same shape."""
        if self._order is not None:
            return self._order[positions]
        limit = np.uint64(self.length)
        values = self._mix(positions.astype(np.uint64).reshape(-1))
        while (outside := np.flatnonzero(values >= limit)).size:
            values[outside] = self._mix(values[outside])
        return values.astype(np.int64).reshape(positions.shape)

    def _mix(self, values: _Words) -> _Words:
        """A Feistel network over two halves of the bits: a permutation, whatever its function."""
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
    """The finaliser of MurmurHash3 for 64 bits: every bit depends on every bit."""
    values = values ^ (values >> np.uint64(33))
    values = values * np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values
