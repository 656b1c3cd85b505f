"""The process's global random streams, set aside while a sampler draws from others."""

import base64
import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from shmloader.interruptions import is_interruption


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


def dump_generator(generator: torch.Generator) -> str:
    """A generator's state as text."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def load_generator(generator: torch.Generator, text: str) -> None:
    """Set a generator's state.

    Raises:
        ValueError: If the text is no state of such a generator.
    """
    try:
        state = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
        generator.set_state(torch.from_numpy(state.copy()))
    except (ValueError, TypeError, RuntimeError) as error:
        if is_interruption(error):
            raise
        raise ValueError(f"a generator's state in it cannot be read: {error}") from error


#: The process's global random number generators: random, numpy.random and torch's for the CPU.
GLOBAL_STREAMS = ("torch", "numpy", "python")


def global_rng_state(names: Iterable[str] = GLOBAL_STREAMS) -> dict[str, Any]:
    """The states of global generators, as plain values; 13 KB for all of them.

    Args:
        names: Which of :data:`GLOBAL_STREAMS`.
    """
    found: dict[str, Any] = {}
    if "torch" in names:
        found["torch"] = dump_generator(torch.default_generator)
    if "numpy" in names:
        kind, *values = np.random.get_state(legacy=True)
        if kind == "MT19937":
            words, *others = values
            text = base64.b64encode(np.asarray(words, dtype=np.uint32).tobytes()).decode()
            found["numpy"] = [text, *map(_plain, others)]
    if "python" in names:
        version, numbers, gauss = random.getstate()
        text = base64.b64encode(np.array(numbers, dtype=np.uint32).tobytes()).decode()
        found["python"] = [version, text, gauss]
    return found


def _plain(number: Any) -> int | float:
    return float(number) if isinstance(number, float) else int(number)


def set_global_rng_state(found: dict[str, Any]) -> None:
    """Set the process's global generators to what :func:`global_rng_state` gave.

    Raises:
        ValueError: If a state cannot be read.
    """
    try:
        if not isinstance(found, dict):
            raise TypeError(f"{type(found).__name__} in place of a dict")
        if "torch" in found:
            load_generator(torch.default_generator, found["torch"])
        if "numpy" in found:
            text, *others = found["numpy"]
            words = np.frombuffer(base64.b64decode(text), dtype=np.uint32)
            np.random.set_state(("MT19937", words, *others))
        if "python" in found:
            version, text, gauss = found["python"]
            numbers = np.frombuffer(base64.b64decode(text), dtype=np.uint32).tolist()
            random.setstate((version, tuple(numbers), gauss))
    except (TypeError, ValueError, LookupError, OverflowError, AttributeError) as error:
        if is_interruption(error):
            raise
        raise ValueError(f"the state of a random number generator is damaged: {error}") from error


@contextlib.contextmanager
def with_global_rng_state(found: dict[str, Any]) -> Iterator[None]:
    """Have the global generators in these states; afterwards the process's own are back."""
    with kept():
        set_global_rng_state(found)
        yield
