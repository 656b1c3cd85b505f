"""Warns if states of a dataset, which nobody may ask for, cost much. Used on the user's thread."""

import warnings

_LARGE_BYTES = 1_000_000

# States may take this share of the time of batches. It is judged once the states have taken so long
# that it matters.
_SHARE, _LONG_NS = 0.1, 500_000_000


class StateCost:
    """What the states of one loader's dataset cost. Warns once.

    Attributes:
        is_watched: Whether to warn: not if the user has set ``snapshot_every_n_steps``.
    """

    __slots__ = ("_batches_ns", "_has_warned", "_states_ns", "is_watched")

    def __init__(self) -> None:
        self.is_watched = True
        self._states_ns = self._batches_ns = 0
        self._has_warned = False

    def note(self, nbytes: int, state_ns: int, batch_ns: int, *, stacklevel: int) -> None:
        """Note a batch after which, or before which, a state was taken.

        Args:
            nbytes: Size of the state.
            state_ns: How long it took to take the state.
            batch_ns: How long it took to make the batch.
            stacklevel: How far above this method the user's code is.
        """
        if self._has_warned or not self.is_watched:
            return
        self._states_ns += state_ns
        self._batches_ns += batch_ns
        is_slow = self._states_ns > max(_LONG_NS, _SHARE * self._batches_ns)
        if nbytes < _LARGE_BYTES and not is_slow:
            return
        self._has_warned = True
        cost = f"{nbytes / 1e6:.1f} MB with each batch"
        if nbytes < _LARGE_BYTES:
            share = self._states_ns / max(1, self._batches_ns)
            cost = f"{share:.2f} times as long as the batches take"
        warnings.warn(
            f"the loader saves the state of the dataset for each batch, which costs {cost}. Set "
            "snapshot_every_n_steps=0 if no state is needed. For an iterable dataset, 100 saves it "
            "rarely; 1 saves it for each batch without this warning.",
            stacklevel=stacklevel + 1,
        )
