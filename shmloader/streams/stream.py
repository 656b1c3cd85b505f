"""Streams: what users build of shards, one method after the other. Nothing is read here.

A stream is a description: a root that opens records, and steps over it. A loader gives it to its
workers, which begin readers from it (:mod:`shmloader.streams.reader`).
"""

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from shmloader.sampling.arguments import flag, whole_number
from shmloader.streams.reader import Grouped, Reader
from shmloader.streams.rounds import Facts, Rounds
from shmloader.streams.stages import (
    Filtered,
    Guard,
    Mapped,
    Repeated,
    Rolling,
    Run,
    Stage,
    Taken,
    Windowed,
)


class Root(Protocol):
    """What the lowest stages of a stream's readers read.

    Attributes:
        readers: Number of readers.
        seed: Decides the orders.
        store: The store that ranks share; None for that of the default group.
    """

    readers: int
    seed: int
    store: Any

    def begin(self, run: Run) -> Stage:
        """Return the lowest stage of a reader."""

    def facts(self) -> str:
        """Return what the order of the records depends on, as a text."""


class Stream(IterableDataset[Any]):
    """A stream of records from shards, and of batches of them.

    Each method returns another stream, and leaves this one as it is. A stream is exact: the order
    of its batches depends on its arguments and the epoch, and not on workers or ranks.

    Iterated by itself, or in torch's loader, a stream yields everything in its order; torch's
    workers share its readers, and ranks do not. The loaders of this package divide it for ranks.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._steps: tuple[tuple[type[Stage], tuple[Any, ...]], ...] = ()
        self._group: tuple[type, tuple[Any, ...]] | None = None
        self._after: tuple[Callable[[Any], Any], ...] = ()
        self._collate: Callable[[list[Any]], Any] | None = None
        self._epoch = 0

    # Building ------------------------------------------------------------------------------

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Apply a function to each record; after :meth:`batch`, to each batch.

        What is mapped directly before :meth:`batch` is applied only to the records of batches that
        are delivered, so the work is not repeated when a run resumes.

        Args:
            function: Called in the workers. It must return the same for the same record; random
                numbers come from :func:`shmloader.sample_rng`, with ``seed=`` of the loader.
        """
        _check_callable(function)
        if self._group is not None:
            return self._with(_after=(*self._after, function))
        return self._then(Mapped, function)

    def filter(self, function: Callable[[Any], Any]) -> Self:
        """Keep the records for which a function is true. It has to be the same at every call."""
        _check_callable(function)
        return self._then(Filtered, function)

    def shuffle(self, count: int, *, rolling: bool = False) -> Self:
        """Shuffle the records of each reader.

        Args:
            count: How many records each reader holds to choose from.
            rolling: False permutes each run of ``count`` records; the state is a few integers, and
                the run is read again to resume. True yields a random record of a buffer, and fills
                its place; the state has 12 bytes for each record of the buffer, which point reads
                find again. A format that cannot seek is read again from the shard's beginning.
        """
        count = whole_number(count, "count", minimum=1)
        return self._then(Rolling if flag(rolling, "rolling") else Windowed, count, self._root.seed)

    def repeat(self, times: int | None = None) -> Self:
        """Begin the shards again after their end, in the order of a further epoch.

        Args:
            times: How many passes there are; None for no end.
        """
        if times is not None:
            times = whole_number(times, "times", minimum=1)
        begin = functools.partial(_begin, self._root, self._steps)
        return self._then(Repeated, begin, times)

    def take(self, count: int) -> Self:
        """Keep the first records of the stream, counted across its readers in turns.

        With ``shuffle_shards=True`` the first records differ between epochs.
        """
        return self._then(Taken, 0, whole_number(count, "count", minimum=0))

    def skip(self, count: int) -> Self:
        """Leave out the first records of the stream, those which :meth:`take` keeps."""
        return self._then(Taken, whole_number(count, "count", minimum=0), None)

    def batch(
        self,
        size: int,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
    ) -> Self:
        """Make batches of the records of each reader.

        Each reader ends with a batch that may be smaller.

        Args:
            size: How many records a batch has.
            collate: Makes a batch of a list of records, such as those of
                :mod:`shmloader.collate`; torch's ``default_collate`` by default.
            drop_last: Whether a reader's last batch is left out if it has fewer records.
        """
        group = Grouped, (whole_number(size, "size", minimum=1), flag(drop_last, "drop_last"))
        return self._grouped(group, default_collate if collate is None else collate)

    def _grouped(self, group: tuple[type, tuple[Any, ...]], collate: Callable[..., Any]) -> Self:
        _check_callable(collate)
        if self._group is not None:
            raise TypeError("this stream makes batches already: call batch() or pack() only once")
        return self._with(_group=group, _collate=collate)

    def _then(self, stage: type[Stage], *arguments: Any) -> Self:
        if self._group is not None:
            raise TypeError(
                "after batch() or pack(), only map() is possible: call the other methods before"
            )
        return self._with(_steps=(*self._steps, (stage, arguments)))

    def _with(self, **changes: Any) -> Self:
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    # What a loader asks ----------------------------------------------------------------------

    @property
    def readers(self) -> int:
        """The number of readers. A worker serves several; a rank needs at least one."""
        return self._root.readers

    @property
    def store(self) -> Any:
        """The store that ranks share; None for that of the default group."""
        return self._root.store

    @property
    def is_batched(self) -> bool:
        """Whether the stream yields batches."""
        return self._group is not None

    @property
    def collate(self) -> Callable[[Any], Any] | None:
        """What makes a batch of its records, as a loader calls it; None without batches."""
        if self._collate is None or not self._after:
            return self._collate
        return functools.partial(_apply, (self._collate, *self._after))

    def begin(self, run: Run) -> Reader:
        """Return a reader of an epoch, at its beginning."""
        steps = self._steps
        late: list[Callable[[Any], Any]] = []
        group, arguments = self._group or (Grouped, (1, False))
        # Not for groups that look at the records.
        while group is Grouped and steps and steps[-1][0] is Mapped:
            late.insert(0, steps[-1][1][0])
            steps = steps[:-1]
        begin = functools.partial(_begin_groups, self._root, steps, group, arguments)
        return Reader(begin, tuple(late), run)

    def facts(self) -> str:
        """Return what the order of its batches depends on, as a text. Reads the shards' sizes."""
        steps = [*self._steps, *([] if self._group is None else [self._group])]
        return f"{self._root.facts()}, {'.'.join(map(_describe_step, steps)) or 'records'}"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next ``iter()`` of the stream itself; a loader counts its own."""
        self._epoch = whole_number(epoch, "epoch", minimum=0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch in order, or the records without batches."""
        info, guard = get_worker_info(), Guard()
        own = range(self.readers)
        if info is not None:
            own = own[info.id :: info.num_workers]
        opened: dict[int, Reader] = {}
        facts = [Facts(is_all=reader not in own) for reader in range(self.readers)]
        rounds = Rounds(facts)
        while (following := rounds.next()) is not None:
            _, number = following
            if number not in opened:
                opened[number] = self.begin(Run(number, self.readers, self._epoch, guard))
            group, found = opened[number].make(1)
            facts[number].add(found)
            if found.is_all and found.known == found.round + 1:
                opened.pop(number)
            if isinstance(group, Exception):
                raise group
            if group is not None:
                records = [record for _, record in group]
                yield records[0] if self.collate is None else self.collate(records)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.facts()}>"


def _begin(root: Root, steps: tuple[Any, ...], run: Run) -> Stage:
    """Return the uppermost stage of a reader, at its beginning."""
    stage = root.begin(run)
    for kind, arguments in steps:
        stage = kind(stage, run, *arguments)
    return stage


def _begin_groups(
    root: Root, steps: tuple[Any, ...], group: type, arguments: tuple[Any, ...], run: Run
) -> Any:
    return group(_begin(root, steps, run), run, *arguments)


def _apply(functions: tuple[Callable[[Any], Any], ...], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value


def _describe_step(step: tuple[type, tuple[Any, ...]]) -> str:
    """Return a step as a text: its name, and those of its arguments that are plain values."""
    kind, arguments = step
    plain = [repr(one) for one in arguments if isinstance(one, int | str | None)]
    return f"{kind.__name__}({', '.join(plain)})"


def _check_callable(function: object) -> None:
    if not callable(function):
        raise TypeError(f"a function is needed, but got {function!r}")


def digest(text: str) -> str:
    """Return a short checksum of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
