"""The numbers of a loader's epochs, and how far the newest one has come."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Self

from shmloader.sampling.arguments import whole_number

#: Runs of numbers, each from its first number to before its second, in order and apart.
Runs = tuple[tuple[int, int], ...]


class Progress:
    """Tracks how far the newest epoch of a loader has come. Used on the user's thread.

    A ticket is done when the user has received its batch, or an exception instead, or when it was
    skipped because all its samples were left out.

    Attributes:
        position: All of the epoch before this number is done.
        ahead: Runs of later numbers that are done as well (``in_order=False``).
        start: The position at which this run began the epoch.
        unit: How far a ticket advances the position: 1, or the number of ranks if the position
            counts the items of all ranks.
        is_plain: Whether the position says it all: no later ticket is, or was, done.
        is_ended: Whether the user has seen the epoch's end.
    """

    __slots__ = ("_before", "ahead", "is_ended", "is_plain", "position", "start", "unit")

    def __init__(self, position: int = 0, ahead: Runs = (), unit: int = 1) -> None:
        self.start = self.position = position
        self.ahead = self._before = ahead
        self.unit = unit
        self.is_plain, self.is_ended = not ahead, False

    def done(self, seq: int) -> None:
        """Note that the ticket with this ``seq``, which this run has drawn, is done."""
        first = self._number(seq)
        end = first + self.unit
        runs = []
        for run in self.ahead:
            if run[1] == first:
                first = run[0]
            elif run[0] == end:
                end = run[1]
            else:
                runs.append(run)
        self.is_plain = False
        if first == self.position:
            self.position, self.ahead = end, tuple(runs)
        else:
            self.ahead = tuple(sorted([*runs, (first, end)]))

    def done_until(self, seq: int) -> None:
        """Note that all tickets up to the one with this ``seq`` are done; see :meth:`done`."""
        end = self._number(seq) + self.unit
        runs = [run for run in self.ahead if run[1] > end]
        while runs and runs[0][0] <= end:
            end = runs.pop(0)[1]
        self.position, self.ahead = end, tuple(runs)

    def go_back(self, mark: tuple[int, Runs]) -> None:
        """Undo what was noted since the position and ``ahead`` had these values."""
        self.position, self.ahead = mark

    def _number(self, seq: int) -> int:
        """Return a ticket's number in the epoch."""
        number = self.start + seq * self.unit
        for first, end in self._before:
            if number >= first:
                number += end - first
        return number

    def left_to_do(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return the items from the start on without those that were done ahead of their turn."""
        if not self._before:
            return items
        before, numbers = self._before, itertools.count(self.start, self.unit)

        def is_left(_: object) -> bool:
            number = next(numbers)
            return not any(first <= number < end for first, end in before)

        return filter(is_left, items)

    def dump(self) -> dict[str, Any]:
        """Return the position, and the runs that are done ahead of it, as plain values."""
        ahead = {"ahead": [list(run) for run in self.ahead]} if self.ahead else {}
        return {"position": self.position, **ahead}

    @classmethod
    def load(cls, state: dict[str, Any] | None, unit: int = 1) -> Self:
        """Return the progress that :meth:`dump` has saved; that of a new epoch for None."""
        if state is None:
            return cls(unit=unit)
        return cls(state["position"], tuple(map(tuple, state.get("ahead", ()))), unit)


# What stands for the newest epoch's iterator before there is one: before the first epoch, and while
# an epoch begins.
_NONE: Callable[[], Any] = lambda: None  # noqa: E731
_NO_PROGRESS = Progress()  # never changed
_BEGINNING = functools.partial(SimpleNamespace, is_closed=False)


class EpochCounter:
    """Numbers the epochs of one loader. The loader shares it with the samplers that it made.

    Attributes:
        newest: Number of the newest epoch; None before the first.
        next: Number of the epoch that the next ``iter()`` begins.
        is_named: Whether ``set_epoch`` has set ``next`` since the newest epoch began.
        progress: How far the newest epoch has come.
        iterator: Function that returns the newest epoch's iterator, or None if it is gone.
    """

    # A program may keep very many loaders.
    __slots__ = ("_passes", "is_named", "iterator", "newest", "next", "progress")

    def __init__(self, first: int = 0) -> None:
        self.newest: int | None = None
        self.next = first
        self.is_named = False
        self.progress = _NO_PROGRESS
        self.iterator: Callable[[], Any] = _NONE
        # Numbers of the epochs whose orders the loader's samplers yield while the loader draws from
        # a sampler that wraps them; None at any other time.
        self._passes: Iterator[int] | None = None

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
        """Number of the epoch that the loader's samplers yield; one that was set comes first."""
        iterated = self.iterated
        return self.next if iterated is None or self.is_named else iterated

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Ignore what samplers are told in this block, in which the loader tells them."""
        before = self.next, self.is_named
        try:
            yield
        finally:
            self.next, self.is_named = before

    def count_passes(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return the items of a sampler that wraps the loader's, for the epoch that has begun.

        Where the wrapper iterates the loader's sampler again and again, each pass has an order of
        its own: those of this epoch and the following ones.
        """
        assert self.newest is not None
        draw = functools.partial(self._draw, itertools.count(self.newest))
        return map(draw, itertools.repeat(items))

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
        """Set the number of the next epoch; raise an error if it is no whole number."""
        self.next, self.is_named = whole_number(epoch, "epoch", minimum=0), True

    def begin(self, epoch: int, progress: Progress) -> None:
        """Begin an epoch. Its iterator is set when there is one."""
        self.newest, self.next, self.is_named, self.progress = epoch, epoch + 1, False, progress
        self.iterator = _BEGINNING
