"""Saves the state of a dataset within an epoch, and resumes the dataset from it.

Runs where the dataset is: in a worker, or in this process without workers. The state of an iterable
dataset is that of its iterator, if the iterator has both ``state_dict`` and ``load_state_dict``.
Otherwise it is that of the dataset, if the dataset has both. Otherwise there is none. A dataset's
state is loaded before ``iter(dataset)`` is called, and an iterator's state after that. Nothing is
asked for a state if ``snapshot_every_n_steps`` is 0.
"""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import cloudpickle

from shmloader.batch.payload import main_is_importable
from shmloader.memory.pickled import PICKLE_ERRORS
from shmloader.messages import Unsaved
from shmloader.sampling.hooks import ask_state, has_state_methods

_T = TypeVar("_T")


class Saved(NamedTuple):
    """A dataset's state.

    Attributes:
        of: The object that ``state`` belongs to.
        is_short: Whether the fetcher has reached the stream's end, and made a short last batch.
        state: What ``state_dict()`` returned.
        position: How many samples the stream has yielded in the epoch, if samples have random
            number generators of their own.
    """

    of: Literal["iterator", "dataset"]
    is_short: bool
    state: Any
    position: int = 0


#: Copies or pickles a state.
Keep = Callable[[Saved], _T]


# Taking and loading states ---------------------------------------------------------------


def save_dataset(dataset: Any, keep: Keep[_T]) -> _T | Unsaved | None:
    """Return the state of a dataset itself; None if it has no state."""
    if not has_state_methods(dataset):
        return None
    return ask(dataset, lambda state: keep(Saved("dataset", False, state)))


def ask(thing: Any, keep: Callable[[Any], _T]) -> _T | Unsaved:
    """Return the state of a dataset or of its iterator, copied or pickled by ``keep``."""
    remedy = "Correct its state_dict(), or set snapshot_every_n_steps=0 to leave this state out"
    return ask_state(thing, remedy, keep)


def load_dataset(dataset: Any, saved: Saved | None) -> None:
    """Load a dataset's state. Called before ``iter(dataset)``."""
    if saved is not None and saved.of == "dataset":
        dataset.load_state_dict(saved.state)


# Pickled states --------------------------------------------------------------------------


def dump_state(saved: Saved, file: Any, rewind: Callable[[], None]) -> None:
    """Pickle a state into a file, to which the bytes of its long strings are written directly.

    ``rewind`` forgets what was written, before cloudpickle writes what standard pickle cannot.
    """
    try:
        pickle.Pickler(file, pickle.HIGHEST_PROTOCOL).dump(tuple(saved))
    except PICKLE_ERRORS:
        rewind()
        cloudpickle.Pickler(file, pickle.HIGHEST_PROTOCOL).dump(tuple(saved))


def dumps_state(saved: Saved) -> bytes:
    """Return a pickled state; see :func:`dump_state`.

    Memory of the pickle's very size serves the next one again, unlike that of a buffer that grows.
    """
    parts: list[bytes] = []
    file = SimpleNamespace(write=lambda data: parts.append(bytes(data)))
    dump_state(saved, file, parts.clear)
    return b"".join(parts)


def dump_in_main(saved: Saved) -> bytes:
    """Pickle a state in the main process, for workers or for the dataset there."""
    if main_is_importable():
        return dumps_state(saved)
    return cast("bytes", cloudpickle.dumps(tuple(saved), pickle.HIGHEST_PROTOCOL))


def read(data: bytes | None) -> Saved | None:
    """Return a new copy of a pickled state; None for None."""
    return None if data is None else Saved(*pickle.loads(data))
