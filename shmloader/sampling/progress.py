"""The numbers of a loader's epochs, and how far the newest one has come."""

import bisect
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from shmloader.sampling.checks import whole_number

_NONE: frozenset[int] = frozenset()


class Progress:
    """Tracks how far the newest epoch of a loader has come. Used on the user's thread.

    A ticket is done when the user has received its batch, or an exception instead, or when it was
    skipped because all its samples were left out.

    Attributes:
        position: All tickets of the epoch before this number are done.
        is_ended: Whether the user has seen the epoch's end.
        offset: The argument.
        start: The position at which this run began the epoch.
        is_plain: Whether the position says it all: no later ticket is, or was, done.

    Args:
        position: Where the epoch continues; 0 for a new epoch.
        ahead: Numbers of later tickets that are done already, and are not drawn again.
        offset: Number of the epoch's items before ticket 0: not 0 if the epoch was begun on
            another number of ranks, and stopped within a step of the present ones.
    """

    __slots__ = (
        "_ahead", "_before", "_changes", "is_ended", "is_plain", "offset", "position",
        "start",
    )  # fmt: skip

    def __init__(self, position: int = 0, ahead: frozenset[int] = _NONE, offset: int = 0) -> None:
        self.offset = offset
        self.start = self.position = position
        self.is_plain = not ahead
        # For each ticket in ``ahead``, how many tickets are drawn before it is passed over.
        self._before: Sequence[int] = ()
        self._ahead: set[int] | frozenset[int] = _NONE
        if ahead:
            self._before = [number - position - at for at, number in enumerate(sorted(ahead))]
            self._ahead = set(ahead)
        # Numbers that were added to ``_ahead`` since the mark, and the complements (``~number``) of
        # those that were removed.
        self._changes: list[int] = []
        self.is_ended = False

    @property
    def ahead(self) -> frozenset[int]:
        """Numbers of tickets after the position that are done as well (``in_order=False``)."""
        return frozenset(self._ahead) if self._ahead else _NONE

    def done(self, seq: int) -> None:
        """Note that a ticket is done.

        Args:
            seq: Number of the ticket among those that this run has drawn in the epoch, from 0.
        """
        number = self._number(seq)
        if number == self.position:
            self._advance_to(number + 1)
        else:
            self.is_plain = False
            # In this order, since an interruption may come in between.
            self._changes.append(number)
            self._ahead = self._ahead or set()
            self._ahead |= {number}

    def done_until(self, seq: int) -> None:
        """Note that all tickets up to the one with this ``seq`` are done; see :meth:`done`."""
        if self.is_plain:
            self.position = self.start + seq + 1
            return
        number = self._number(seq)
        for passed in range(self.position, number):
            self._take(passed)
        self._advance_to(number + 1)

    def _advance_to(self, position: int) -> None:
        """Advance to a position, and past the tickets that follow directly and are done."""
        while position in self._ahead:
            self._take(position)
            position += 1
        self.position = position

    def _take(self, number: int) -> None:
        if number in self._ahead:
            self._changes.append(~number)
            self._ahead -= {number}

    def _number(self, seq: int) -> int:
        """Return a ticket's number in the epoch."""
        return self.start + seq + bisect.bisect_right(self._before, seq)

    def dump(self, number: Callable[[int], int] = int) -> dict[str, Any]:
        """Return the position and the runs of tickets that are done ahead of it.

        Args:
            number: Function of each ticket's number that returns the number to save.
        """
        state: dict[str, Any] = {"position": number(self.position)}
        if self._ahead:
            state["ahead"] = [list(map(number, run)) for run in runs_of(self._ahead)]
        return state

    @classmethod
    def load(
        cls, state: dict[str, Any], number: Callable[[int], int] = int, offset: int = 0
    ) -> Self:
        """Return the progress that :meth:`dump` has saved.

        Args:
            state: What :meth:`dump` returned.
            number: Function of each number saved that returns the ticket's number.
            offset: See :class:`Progress`.
        """
        ahead = numbers_of([list(map(number, run)) for run in state.get("ahead", ())])
        return cls(number(state["position"]), ahead, offset)

    def mark(self) -> int:
        """Return a mark for :meth:`go_back`, valid until ``mark`` is called again.

        While the progress ``is_plain``, the position is such a mark.
        """
        if self._changes:
            self._changes = []
        return self.position

    def go_back(self, mark: int) -> None:
        """Undo what was noted since the mark, because those batches did not reach the user."""
        self.position = mark
        for number in reversed(self._changes):
            if number < 0:
                self._ahead |= {~number}
            else:
                self._ahead -= {number}


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Return numbers as runs of consecutive numbers, each run as [first, last + 1]."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs


def numbers_of(runs: Iterable[list[int]]) -> frozenset[int]:
    """Return the numbers that are in these runs, which :func:`runs_of` returned."""
    return frozenset(itertools.chain.from_iterable(range(*run) for run in runs))


def _no_iterator() -> None:
    """Stand for the reference to an iterator that is gone."""


class EpochCounter:
    """Numbers the epochs of one loader. The loader shares it with the samplers that it made.

    Used on the user's thread.

    Attributes:
        newest: Number of the newest epoch; None before the first.
        next: Number of the epoch that the next ``iter()`` begins.
        is_named: Whether ``set_epoch`` has set ``next`` since the newest epoch began.
        progress: How far the newest epoch has come.
        iterator: Function that returns the newest epoch's iterator, or None if it is gone.

    Args:
        first: Number of the first epoch.
    """

    def __init__(self, first: int = 0) -> None:
        self.newest: int | None = None
        self.next = first
        self.is_named = False
        self.progress = Progress()
        self.iterator: Callable[[], Any] = _no_iterator
        # Numbers of the epochs whose orders the loader's samplers yield while the loader draws from
        # a sampler that wraps them; None at any other time.
        self._passes: Iterator[int] | None = None
        # Whether it is the loader itself that calls ``set_epoch`` of its samplers.
        self._is_telling = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the number of the next epoch. In a copy, no epoch has begun."""
        return EpochCounter, (self.next,)

    @property
    def iterated(self) -> int | None:
        """Number of the newest epoch while its iterator can deliver a batch; otherwise None."""
        iterator = None if self.progress.is_ended else self.iterator()
        return None if iterator is None or iterator.is_closed else self.newest

    @property
    def of_samplers(self) -> int:
        """Number of the epoch that the loader's samplers yield.

        A number set by ``set_epoch`` takes precedence over that of the epoch that is iterated.
        """
        iterated = self.iterated
        return self.next if iterated is None or self.is_named else iterated

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Ignore what samplers are told in this block, in which the loader tells them."""
        self._is_telling = True
        try:
            yield
        finally:
            self._is_telling = False

    def count_passes(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return the items of a sampler that wraps the loader's, for the epoch that has begun.

        Where the wrapper iterates the loader's sampler again and again, each pass has an order of
        its own: those of this epoch and the following ones.
        """
        assert self.newest is not None
        passes = itertools.count(self.newest)
        return map(functools.partial(self._draw, passes), itertools.repeat(items))

    def _draw(self, passes: Iterator[int], items: Iterator[Any]) -> Any:
        self._passes = passes
        try:
            return next(items)
        finally:
            self._passes = None

    def begin_pass(self) -> int:
        """Return the number of the epoch whose order a sampler of the loader yields now."""
        return self.of_samplers if self._passes is None else next(self._passes)

    def name(self, epoch: object) -> None:
        """Set the number of the next epoch, unless it is the loader that calls its own sampler.

        Raises:
            TypeError: If it is not an int.
            ValueError: If it is negative.
        """
        if not self._is_telling:
            self.next = whole_number(epoch, "epoch", minimum=0)
            self.is_named = True

    def begin(self, epoch: int, progress: Progress) -> None:
        """Note that an epoch begins. Its iterator is set when there is one.

        Args:
            epoch: Number of the epoch.
            progress: How far the epoch has come.
        """
        self.newest, self.next, self.is_named = epoch, epoch + 1, False
        self.progress, self.iterator = progress, _Beginning

    def forget_iterator(self) -> None:
        """Note that the newest epoch got no iterator."""
        self.iterator = _no_iterator


class _Beginning:
    """Stands for the iterator of an epoch while the iterator is being made."""

    is_closed = False
