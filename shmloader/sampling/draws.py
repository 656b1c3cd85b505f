"""The index batches of one epoch, as a loader of torch's kind draws them, from any batch on."""

import collections
import copy
import itertools
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from shmloader.sampling.index_arrays import as_list
from shmloader.sampling.origin import (
    Origin,
    are_known,
    chain,
    describe,
    has_own_state,
    is_known,
    not_over,
    own_state,
    tell_passed_over,
)
from shmloader.sampling.progress import Progress
from shmloader.sampling.ranks import is_cut_for_ranks

# A sampler with a state of its own is asked for it after so many batches: what it gives may be
# large, and what lies between costs no more than to draw it.
_OWN_STATE_EVERY = 1000


class Draws(Iterator[Any]):
    """The index batches of one epoch. Used on the user's thread.

    Args:
        index_sampler: What the loader draws.
        drawing: What ``iter()`` of it gave.
        progress: How far the epoch has come; it begins, or goes on, there.
        found: What :meth:`dump` gave of it; None for a new epoch.
        generator: The loader's.
    """

    def __init__(
        self,
        index_sampler: Any,
        drawing: Iterator[Any],
        progress: Progress,
        found: dict[str, Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._index_sampler = index_sampler
        self._drawing = drawing
        self._progress = progress
        self._origin = Origin(index_sampler, generator=generator)
        self._found = found
        self._number = self._begun_at = progress.position
        self._given = progress.ahead
        self._items: Iterator[Any] | None = None
        # The batches from the one before the position on, as they were drawn; and the sampler's
        # own states.
        self._drawn: collections.deque[tuple[int, Any]] = collections.deque()
        self._stateful: Any = None
        # Whether these tell within an epoch where it is: nothing holds back what it gave.
        self._tells_own = False
        self._own_states: list[tuple[int, Any]] = []
        self._last_sum: int | None = None

    def __next__(self) -> Any:
        """The next index batch."""
        if self._items is None:
            self._items = self._begin()
        item = next(self._items)
        while self._number in self._given:
            self._number += 1
        drawn, last = self._drawn, self._progress.position - 1
        drawn.append((self._number, item))
        while drawn[0][0] < last:
            drawn.popleft()
        self._number += 1
        if self._tells_own and (self._number == 1 or self._number % _OWN_STATE_EVERY == 0):
            self._note_own_state()
        return item

    def dump(self) -> dict[str, Any]:
        """What the epoch comes of, and where in it the user is. Plain values."""
        if self._items is None:
            # Now, rather than at the first batch: what is drawn in between from the process's
            # streams would make it another epoch.
            items = self._begin()
            self._items = itertools.chain(list(islice(items, 1)), items)
        assert self._found is not None
        found = dict(self._found)
        if self._stateful is not None:
            number, state = next(own for own in reversed(self._own_states) if self._is_past(own[0]))
            found["own"], found["own_at"] = state, number
        found["last"] = self._sum_of_last()
        return found

    # -------------------------------------------------------------------------------------

    def _begin(self) -> Iterator[Any]:
        """Begin with the first batch that is wanted, which is drawn here."""
        found = self._found
        self._stateful = self._find_stateful()
        self._tells_own = self._stateful is not None and (
            self._stateful is not self._origin.stateful or self._is_batched_alone()
        )
        if found is None or not found["begun"]:
            self._origin.restore_generators(found or {})
            self._found = self._origin.dump(is_begun=True)
            if self._stateful is not None:
                self._note_own_state()
            if found is not None and "own" in found:
                self._drawing = not_over(self._drawing, self._index_sampler)
            return self._drawing
        self._last_sum = found.get("last")
        with self._origin.drawing(found):
            items = self._go_on(found)
            first = list(islice(items, 1))
        return self._wanted(first, items)

    def _wanted(self, first: list[Any], items: Iterator[Any]) -> Iterator[Any]:
        """All but those that were given ahead of their turn."""
        given, number = self._given, self._progress.position
        for source in (first, items):
            for item in source:
                if number not in given:
                    yield item
                number += 1

    def _find_stateful(self) -> Any:
        """Who has a state of its own: what was iterated, or a sampler that it draws from."""
        if has_own_state(self._drawing):
            return self._drawing
        if self._origin.stateful is not None:
            return self._origin.stateful
        outer = self._index_sampler
        if type(outer) is BatchSampler and not is_known(outer.sampler):
            # It hides the iterator that it draws from, which may have one.
            inner = iter(outer.sampler)
            self._drawing = iter(BatchSampler(inner, outer.batch_size, outer.drop_last))
            return inner if has_own_state(inner) else None
        return None

    def _is_batched_alone(self) -> bool:
        """Whether there is nothing but torch's batch samplers around the sampler with a state."""
        around = itertools.takewhile(
            lambda each: each is not self._stateful, chain(self._index_sampler)
        )
        return all(type(each) is BatchSampler for each in around)

    def _go_on(self, found: dict[str, Any]) -> Iterator[Any]:
        """The batches from the position on, before which all are passed over."""
        position, at = self._progress.position, 0
        if self._stateful is not None and "own" in found:
            at = found["own_at"]
            self._own_states.append((at, found["own"]))
            own = copy.deepcopy(found["own"])
            self._stateful.load_state_dict(own)
            if self._stateful is self._origin.stateful:
                self._drawing = iter(self._index_sampler)  # what was iterated knew nothing of it
            if not at:
                self._drawing = not_over(self._drawing, self._index_sampler)
            if not self._tells_own:
                tell_passed_over(self._index_sampler, position)
        elif (quick := self._sequential_from(position)) is not None:
            return quick
        else:
            tell_passed_over(self._index_sampler, position)
        self._pass_over(position - at, position)
        return self._drawing

    def _sequential_from(self, position: int) -> Iterator[Any] | None:
        """The rest of torch's own order in order, at no cost; None for any other order."""
        outer = self._index_sampler
        inner = outer.sampler if type(outer) is BatchSampler else outer
        if type(inner) is not SequentialSampler:
            return None
        if position > len(outer):
            raise self._too_few(position, len(outer))
        if inner is outer:
            return iter(range(position, len(outer)))
        rest = range(position * outer.batch_size, len(inner))
        return iter(BatchSampler(rest, outer.batch_size, outer.drop_last))

    def _pass_over(self, count: int, position: int) -> None:
        """Draw batches that were given, and see whether they are the same.

        Raises:
            ValueError: If there are not so many, or the last one is another.
        """
        if not count:
            return
        passed = sum(1 for _ in islice(self._drawing, count - 1))
        last = list(islice(self._drawing, 1))
        kind = describe(self._index_sampler)
        if not last:
            raise self._too_few(position, passed)
        expected, got = self._last_sum, _checksum(last[0])
        if expected is not None and got is not None and expected != got:
            raise ValueError(
                f"the state does not fit: {kind} gives another batch {position - 1} than the one "
                "that the state was taken after. Its order has to be the same whenever it is "
                "iterated for the same epoch (seed it, or give it a generator=, a set_epoch(), or "
                "state_dict() and load_state_dict())"
            )

    def _too_few(self, position: int, count: int) -> ValueError:
        return ValueError(
            f"the state does not fit: it is of batch {position} of an epoch, and "
            f"{describe(self._index_sampler)} gives only {count} batches"
        )

    def _note_own_state(self) -> None:
        self._own_states.append((self._number, own_state(self._stateful)))
        # Those that the user is past, but for the newest of them.
        while len(self._own_states) > 1 and self._is_past(self._own_states[1][0]):
            del self._own_states[0]

    def _is_past(self, number: int) -> bool:
        """Whether the user is past a state that was taken after so many batches.

        Not if it is of the last of them: a sampler that has seen its end may be in its next epoch.
        """
        return number < self._progress.position or not number

    def _sum_of_last(self) -> int | None:
        """A checksum of the last batch that the user is done with.

        None for torch's samplers and ours that give each rank a part: whoever saves the state of
        one rank for all has the same position in each.
        """
        is_cut = any(map(is_cut_for_ranks, chain(self._index_sampler)))
        if is_cut and are_known(self._index_sampler):
            return None
        last = self._progress.position - 1
        for number, indices in self._drawn:
            if number == last:
                return _checksum(indices)
        return self._last_sum if last + 1 == self._begun_at else None


def _checksum(indices: object) -> int | None:
    """Of numbers and texts; None if there is anything else, whose text may change."""
    try:
        return zlib.crc32(json.dumps(as_list(indices)).encode())
    except (TypeError, ValueError):
        return None
