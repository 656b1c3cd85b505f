"""The process's global random streams, set aside while a sampler draws from others."""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class Streams:
    """Global random streams that depend on the arguments alone.

    Inside of :meth:`used` those of ``random``, ``numpy.random`` and torch (CPU) are these; they
    go on where they were left the last time. Afterwards the process's own are back.

    Args:
        key: Numbers that choose the streams, such as a seed and an epoch.
    """

    def __init__(self, *key: int) -> None:
        text = ",".join(map(str, key)).encode()
        words = hashlib.blake2b(text, digest_size=32, person=b"shmloader draws").digest()
        self._seed = words
        self._states: tuple[Any, Any, torch.Tensor] | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Draw from them; on one thread at a time."""
        own = _states()
        if self._states is None:
            random.seed(int.from_bytes(self._seed[:16], "little"))
            np.random.seed(np.frombuffer(self._seed[16:24], dtype="<u4"))
            torch.default_generator.manual_seed(int.from_bytes(self._seed[24:], "little") >> 1)
        else:
            _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(own)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put the process's global random streams back at the end, wherever they were moved to."""
    own = _states()
    try:
        yield
    finally:
        _set_states(own)


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _set_states(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
