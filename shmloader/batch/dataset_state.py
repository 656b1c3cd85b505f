"""Saves the state of a dataset within an epoch, and resumes the dataset from it.

Runs where the dataset is: in a worker, or in this process without workers. The state of an iterable
dataset is that of its iterator, if the iterator has both ``state_dict`` and ``load_state_dict``.
Otherwise it is that of the dataset, if the dataset has both. Otherwise there is none. A dataset's
state is loaded before ``iter(dataset)`` is called, and an iterator's state after that. Nothing is
asked for a state if ``snapshot_every_n_steps`` is 0.

A stream is resumed exactly if its samples depend only on its own state and on the process's global
random generators. These are set to their states at the stream's beginning, so that an order that is
drawn in ``__iter__`` is drawn again. Batches that were delivered since the newest state are read
again and discarded, and a checksum shows whether they are the same.
"""

import contextlib
import pickle
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import cloudpickle

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.payload import main_is_importable
from shmloader.memory.pickled import PICKLE_ERRORS
from shmloader.messages import Unsaved
from shmloader.sampling.own_state import ask_state, has_own_state, has_state_methods

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


def save(fetcher: Any, keep: Keep[_T]) -> _T | Unsaved | None:
    """Return the state of the iterable dataset that a fetcher iterates; None if it has no state.

    Args:
        fetcher: The dataset's fetcher.
        keep: Copies or pickles the state.
    """
    iterator, others = fetcher.iterator, (fetcher.ended, fetcher.position)
    if has_own_state(iterator):
        return _ask("iterator", iterator, keep, *others)
    return save_dataset(fetcher.dataset, keep, *others)


def save_dataset(
    dataset: Any, keep: Keep[_T], is_short: bool = False, position: int = 0
) -> _T | Unsaved | None:
    """Return the state of a dataset itself; None if it has no state."""
    if not has_state_methods(dataset):
        return None
    return _ask("dataset", dataset, keep, is_short, position)


def _ask(
    of: Literal["iterator", "dataset"], thing: Any, keep: Keep[_T], is_short: bool, position: int
) -> _T | Unsaved:
    remedy = "Correct its state_dict(), or set snapshot_every_n_steps=0 to leave this state out"
    return ask_state(thing, remedy, lambda state: keep(Saved(of, is_short, state, position)))


def load_dataset(dataset: Any, saved: Saved | None) -> None:
    """Load a dataset's state. Called before ``iter(dataset)``."""
    if saved is not None and saved.of == "dataset":
        dataset.load_state_dict(saved.state)


def replay(fetcher: Any, checkpoint: Checkpoint, indices: Any, *, only_reads: bool) -> None:
    """Read again, and discard, the batches that a stream has delivered since its snapshot.

    Args:
        fetcher: The fetcher of the dataset, at the snapshot.
        checkpoint: Where the stream is resumed.
        indices: A ticket's indices, of which only the number counts.
        only_reads: Whether batches are not collated, since collating draws no random numbers and
            keeps no state.

    Raises:
        ValueError: If the stream ends too early, or yields other samples than before.
        BaseException: What the dataset or ``collate_fn`` raises where it did not raise before.
    """
    found = Checkpoint()
    raised: BaseException | None = None
    fetcher.only_reads = only_reads
    try:
        for number in range(checkpoint.at, checkpoint.given):
            try:
                fetcher.fetch(indices)
            except StopIteration:
                raise raised or ValueError(
                    f"the state does not fit this loader: {checkpoint.given} batches had been "
                    f"delivered of the dataset when the state was saved, and this loader's dataset "
                    f"ends after {number}. Give the dataset with which it was saved"
                ) from None
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                raised = raised or error  # the checksum shows whether that was so before, too
            found = found.after_batch(None, fetcher.fingerprint)
    finally:
        fetcher.only_reads = False
    if found.check != checkpoint.check:
        raise raised or ValueError(
            f"the state does not fit this loader: read again from "
            f"{'the start' if checkpoint.snapshot is None else 'its state'}, its dataset yields "
            f"other samples than the {checkpoint.skip} batches that were delivered before the "
            "state was saved, so some samples would be lost and others repeated. Make its order "
            "depend only on the loader's seed=, on the global random generators of a worker "
            "process, or on get_worker_info().seed; or give it state_dict() and load_state_dict()"
        )


# Pickled states --------------------------------------------------------------------------


def dump_state(saved: Saved, *, by_value: bool = False) -> bytes:
    """Pickle a state.

    Args:
        saved: The state.
        by_value: Whether the dataset was pickled by cloudpickle, so that its state may need that,
            too.

    Raises:
        Exception: What pickling the user's state raises.
    """
    dumps: Callable[..., bytes] = cloudpickle.dumps if by_value else pickle.dumps
    return dumps(tuple(saved), protocol=pickle.HIGHEST_PROTOCOL)


def dump_in_main(saved: Saved) -> bytes:
    """Pickle a state in the main process, for workers or for the dataset there.

    Raises:
        Exception: What pickling the user's state raises.
    """
    if main_is_importable():
        with contextlib.suppress(*PICKLE_ERRORS):
            return dump_state(saved, by_value=False)
    return dump_state(saved, by_value=True)


def read(data: bytes | None) -> Saved | None:
    """Return a new copy of a pickled state; None for None."""
    return None if data is None else Saved(*pickle.loads(data))
