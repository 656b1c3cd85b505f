"""An iterable dataset's place: how it is saved, and how it is gone on from.

Runs where the dataset is: in a worker, or in-process. What is saved is the iterator's own state if
it has both ``state_dict`` and ``load_state_dict``, else the dataset's if it has both, else nothing.
A dataset's state is loaded before ``iter(dataset)``, an iterator's after it; a dataset that is its
own iterator has an iterator's.
"""

import contextlib
import pickle
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import cloudpickle

from shmloader.sampling.origin import has_own_state
from shmloader.workers.payload import PICKLE_ERRORS, main_is_importable
from shmloader.workers.sample_streams import SeededIterator


class Saved(NamedTuple):
    """A stream's state.

    Attributes:
        of: Whose it is.
        is_short: Whether torch's fetcher has seen the stream's end, and given what was left as a
            short batch.
        state: What ``state_dict()`` gave.
        position: Samples that it has given in the epoch, where they have random streams.
    """

    of: Literal["iterator", "dataset"]
    is_short: bool
    state: Any
    position: int = 0


def save(fetcher: Any) -> Saved | None:
    """The state of torch's fetcher of an iterable dataset; None if it has none.

    Raises:
        Exception: What ``state_dict()`` raises; a StopIteration as RuntimeError, since it would
            end the stream.
    """
    iterator, dataset, position = parts_of(fetcher)
    if has_own_state(iterator):
        return Saved("iterator", fetcher.ended, _state_of(iterator), position)
    saved = save_dataset(dataset)
    return None if saved is None else saved._replace(is_short=fetcher.ended, position=position)


def parts_of(fetcher: Any) -> tuple[Any, Any, int]:
    """What torch's fetcher iterates, of which dataset, and how many seeded samples came of it."""
    iterator = fetcher.dataset_iter
    if isinstance(iterator, SeededIterator):
        return iterator.source, iterator.dataset, iterator.position
    return iterator, fetcher.dataset, 0


def save_dataset(dataset: Any) -> Saved | None:
    """The state of a dataset alone, between two epochs."""
    return Saved("dataset", False, _state_of(dataset)) if has_own_state(dataset) else None


def _state_of(thing: Any) -> Any:
    try:
        return thing.state_dict()
    except StopIteration as error:
        raise RuntimeError("state_dict() raised StopIteration") from error


def load_dataset(dataset: Any, saved: Saved | None) -> None:
    """Restore what is loaded before ``iter(dataset)``."""
    if saved is not None and saved.of == "dataset":
        dataset.load_state_dict(saved.state)


def load_iterator(fetcher: Any, saved: Saved | None) -> None:
    """Restore what is loaded after ``iter(dataset)``."""
    if saved is None:
        return
    iterator = fetcher.dataset_iter
    if isinstance(iterator, SeededIterator):
        iterator.go_on(saved.position, saved.state if saved.of == "iterator" else None)
    elif saved.of == "iterator":
        iterator.load_state_dict(saved.state)
    fetcher.ended = saved.is_short


def pass_over(fetcher: Any, batch_count: int, indices: Any) -> None:
    """Let a stream give batches to nobody: it gave them before.

    Args:
        fetcher: torch's, of the dataset.
        batch_count: How many.
        indices: What the index sampler gives; only its length counts.
    """
    collate, fetcher.collate_fn = fetcher.collate_fn, _give_nothing
    try:
        for _ in range(batch_count):
            # Where it failed, by a SystemExit or otherwise, it fails again, and goes on.
            with contextlib.suppress(BaseException):
                fetcher.fetch(indices)
    finally:
        fetcher.collate_fn = collate


def _give_nothing(samples: object) -> None:
    """A collate function for batches that nobody wants."""


def dump_here(saved: Saved, *, by_value: bool) -> bytes:
    """Write a state down, in a worker.

    Args:
        saved: It.
        by_value: Whether the dataset came by cloudpickle, and its state may need it, too.

    Raises:
        Exception: What pickling the user's state raises.
    """
    dumps: Callable[..., bytes] = cloudpickle.dumps if by_value else pickle.dumps
    return dumps(tuple(saved), protocol=pickle.HIGHEST_PROTOCOL)


def dump_for_workers(saved: Saved) -> bytes:
    """Write a state down, in the main process: one that the user loads.

    Raises:
        Exception: What pickling the user's state raises.
    """
    if main_is_importable():
        with contextlib.suppress(*PICKLE_ERRORS):
            return dump_here(saved, by_value=False)
    return dump_here(saved, by_value=True)


def read(data: bytes) -> Saved:
    """Read one that was written down; each time afresh."""
    return Saved(*pickle.loads(data))
