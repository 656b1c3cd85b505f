"""Iterates a source, and makes the checkpoints from which an epoch can be resumed.

A source can be resumed

* by its own state, if it has both ``state_dict()`` and ``load_state_dict()``. The state is taken on
  the thread or the loop that iterates the source, after an item and before the next one is
  requested. If it is not taken after each item, the items since then are counted, and a resumed
  epoch reads them again.
* by index, if it is a ``collections.abc.Sequence`` (a list, a range, …).
"""

import copy
import enum
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from shmloader.pipeline.stages import Checkpoint
from shmloader.sampling.own_state import has_own_state

Source = Iterable[Any] | AsyncIterable[Any]


class Resumes(enum.Enum):
    """How a source is resumed."""

    BY_STATE = "by its own state"
    BY_INDEX = "by index"
    NEVER = "not at all"


def how_it_resumes(source: Source) -> Resumes:
    """Return how a source is resumed."""
    if has_own_state(source):
        return Resumes.BY_STATE
    return Resumes.BY_INDEX if isinstance(source, Sequence) else Resumes.NEVER


class Unsaved:
    """Stands for a state that could not be taken.

    Args:
        error: What the source's ``state_dict()`` raised.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


def saved_state(source: Any) -> object:
    """Return a copy of what a source's ``state_dict()`` returns, or an :class:`Unsaved`."""
    try:
        return copy.deepcopy(source.state_dict())
    except Exception as error:  # noqa: BLE001 - raised where the pipeline's state is asked for
        return Unsaved(error)


def fresh(source: Source) -> Checkpoint | None:
    """Return the checkpoint where a new epoch begins; None if the source cannot be resumed."""
    match how_it_resumes(source):
        case Resumes.BY_STATE:
            return Checkpoint(saved_state(source), 0)
        case Resumes.BY_INDEX:
            return Checkpoint(None, 0)
        case Resumes.NEVER:
            return None


class SourceReader:
    """Iterates a source once, from a checkpoint on.

    ``note_item`` and ``note_end`` are called on the thread or the loop that iterates the source.

    Attributes:
        start: The checkpoint where the epoch begins; None if the pipeline cannot be resumed.
        is_resumed: Whether ``start`` comes from a loaded state.

    Args:
        source: The source. If it has a state of its own, it has already loaded ``start.saved``.
        start: The checkpoint where the epoch begins, or None.
        snapshot_every: After how many items the source's own state is taken again; with 0, it is
            taken only at the end.
        is_resumed: Whether ``start`` comes from a loaded state.
    """

    def __init__(
        self,
        source: Source,
        start: Checkpoint | None,
        snapshot_every: int,
        *,
        is_resumed: bool = False,
    ) -> None:
        self.is_resumed = is_resumed
        self._source = source
        self.start = start
        self._how = Resumes.NEVER if start is None else how_it_resumes(source)
        self._every = snapshot_every if self._how is Resumes.BY_STATE else 0
        self._saved, self._read = (None, 0) if start is None else (start.saved, start.read)

    def iterate(self) -> Iterator[Any]:
        """Return an iterator over the items that are left. Called on the source's thread.

        Raises:
            RuntimeError: If the source has fewer items than were read when the state was saved.
        """
        source: Any = self._source
        if self._how is Resumes.BY_INDEX and self._read:
            return map(source.__getitem__, range(self._read, len(source)))
        items: Iterator[Any] = iter(source)
        if self._how is Resumes.BY_STATE and self._read:
            _check_read(sum(1 for _ in itertools.islice(items, self._read)), self._read)
        return items

    async def iterate_async(self) -> AsyncIterator[Any]:
        """Yield the items that are left. Runs on the event loop.

        Raises:
            RuntimeError: As for :meth:`iterate`.
        """
        left = self._read if self._how is Resumes.BY_STATE else 0
        source: Any = self._source
        async for item in source:
            if left:
                left -= 1
            else:
                yield item
        _check_read(self._read - left, self._read)

    def note_item(self) -> Checkpoint | None:
        """Note that the source has yielded an item. Returns the checkpoint after it."""
        if self.start is None:
            return None
        self._read += 1
        if self._read == self._every:
            self._saved, self._read = saved_state(self._source), 0
        return Checkpoint(self._saved, self._read)

    def note_end(self) -> Checkpoint | None:
        """Note that the source has no further item. Returns where the next epoch begins."""
        return None if self.start is None else fresh(self._source)


def _check_read(found: int, expected: int) -> None:
    if found < expected:
        raise RuntimeError(
            f"the source yielded {found} items from its loaded state on, but {expected} were read "
            "from there when the state was saved: its data has changed, or its load_state_dict() "
            "does not restore what its state_dict() returned"
        )
