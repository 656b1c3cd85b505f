"""Streams: what users build of shards, one method after the other. Nothing is read here.

A stream is a description: what opens records, and steps over it. A loader gives it to its
workers, which begin readers from it (:mod:`shmloader.streams.reader`).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from shmloader.grammar import warn_user
from shmloader.sampling.arguments import choice, flag, whole_number
from shmloader.streams.packed import Packed
from shmloader.streams.reader import Grouped, Reader
from shmloader.streams.shuffles import Rolling, Windowed
from shmloader.streams.stages import (
    Failed,
    Filtered,
    Guard,
    Length,
    Mapped,
    Repeated,
    Run,
    Stage,
    Step,
    Taken,
    share_of,
    token_count,
)

# Stages that do not look at the records, so that functions can be applied later.
_BLIND = (Mapped, Windowed, Rolling, Taken)


class Stream(IterableDataset[Any]):
    """A stream of records from shards, and of batches of them.

    Each method returns another stream, and leaves this one as it is. A stream is exact: the order
    of its batches depends on its arguments and the epoch, and not on workers or ranks.

    Iterated by itself, or in torch's loader, a stream yields everything in its order; torch's
    workers share its readers, and ranks do not. The loaders of this package divide it for ranks.

    Attributes:
        paths: All shards.
        readers: The number of readers. A worker serves several; a rank needs at least one.
        seed: Decides the orders.
        store: The store that ranks share; None for that of the default group. Other processes have
            none.
        seeks: Whether records are found again without reading those before them.
    """

    def __init__(
        self, paths: Sequence[str], readers: int, seed: int, store: Any, seeks: bool
    ) -> None:
        self.paths, self.readers, self.seed = paths, readers, seed
        self.store, self.seeks = store, seeks
        self._steps: tuple[Step, ...] = ()
        self._group: Step | None = None
        #: What makes a batch of its records, as a loader calls it; None without batches.
        self.collate: Callable[[Any], Any] | None = None
        self._epoch = 0

    def __copy__(self) -> Self:
        return self._with()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the store, which only the process of the rank uses."""
        return {**vars(self), "store": None}

    # What the kinds of streams differ in --------------------------------------------------------

    def _open(self, run: Run) -> Stage:
        """Return the lowest stage of a reader."""
        raise NotImplementedError

    def _source_counts(self, epoch: int) -> list[int]:
        """Return how many records each reader's lowest stage has in an epoch.

        Raises:
            TypeError: If that is not known before they are read.
        """
        raise NotImplementedError

    def _source_facts(self) -> str:
        """Return what the order of the records depends on, as a text."""
        raise NotImplementedError

    def shards(self, epoch: int, reader: int) -> list[str]:
        """Return the shards of a reader in the first pass of an epoch."""
        raise NotImplementedError

    # Building ------------------------------------------------------------------------------

    def map(self, function: Callable[[Any], Any]) -> Self:
        """Apply a function to each record; after :meth:`batch`, to each batch.

        After the last :meth:`filter` and :meth:`repeat`, functions are called only for the records
        of batches that are delivered. So a shuffle holds the records as they were read, and a run
        that resumes does not repeat the work. Functions before :meth:`pack` are called for every
        record that is read.

        Args:
            function: Called in the workers. It must return the same for the same record; random
                numbers come from :func:`shmloader.sample_rng`, with ``seed=`` of the loader.
        """
        _check_callable(function)
        if self.collate is not None:
            return self._with(collate=functools.partial(_apply_both, self.collate, function))
        return self._then("map", Mapped, function)

    def filter(self, function: Callable[[Any], Any]) -> Self:
        """Keep the records for which a function is true. It has to be the same at every call."""
        _check_callable(function)
        return self._then("filter", Filtered, function)

    def shuffle(self, count: int, *, rolling: bool = False) -> Self:
        """Shuffle the records of each reader.

        Args:
            count: How many records each reader holds to choose from.
            rolling: False shuffles ``count`` records, then the next ``count``. The state is a few
                integers, and these records are read again to resume. True yields a random record of
                a buffer, and fills its place. The state has 2 to 12 bytes for each record of the
                buffer, and each is found again by its number. A shard without random access, such
                as a compressed one, is read from its beginning for that, and a warning says so.
        """
        count = whole_number(count, "count", minimum=1)
        if flag(rolling, "rolling") and not self.seeks:
            warn_user(
                "the shards of this stream can be read only from their beginnings, so a rolling "
                "shuffle is slow to resume. Shuffle without rolling=True, or use uncompressed "
                "shards of a format that seeks, such as open_tar."
            )
        name, kind = ("rolling_shuffle", Rolling) if rolling else ("shuffle", Windowed)
        return self._then(name, kind, count, self.seed)

    def repeat(self) -> Self:
        """Begin the shards again after their end, in the order of a further epoch, without end.

        A reader ends only after a pass without any record. Filter before this: if a filter above
        keeps no record at all, its reader reads for ever.
        """
        return self._then("repeat", Repeated, self.stage)

    def take(self, count: int) -> Self:
        """Keep the first records of the stream, counted across its readers in turns.

        With ``shuffle_shards=True`` the first records differ between epochs.
        """
        return self._then("slice", Taken, 0, whole_number(count, "count", minimum=0))

    def skip(self, count: int) -> Self:
        """Leave out the first records of the stream, those which :meth:`take` keeps."""
        return self._then("slice", Taken, whole_number(count, "count", minimum=0), None)

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
        size, drop_last = whole_number(size, "size", minimum=1), flag(drop_last, "drop_last")
        return self._grouped(collate or default_collate, "batch", Grouped, size, drop_last)

    def pack(
        self,
        max_tokens: int,
        *,
        length: Length | None = None,
        window: int = 1000,
        too_long: Literal["raise", "truncate", "drop"] = "raise",
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Self:
        """Make batches of at most ``max_tokens`` tokens of the records of each reader.

        A window of ``window`` records is packed by best fit, and its packs come in a random order.
        Records that do not fill a pack move to the next window. With log-normal lengths, 99.7 % of
        the tokens are filled, except in a reader's last pack. To resume, the window is read again.
        The number of packs is known only once the records have been read.

        Args:
            max_tokens: The most that the lengths of a batch's records add up to.
            length: Returns the number of tokens of a record. By default, that is the length of the
                record, or of its field "input_ids" if it is a dict.
            window: How many records each reader reads to choose from; more if they do not fill a
                pack.
            too_long: What happens to a record of more tokens. "raise" raises an error in place of
                its batch, or does what ``on_error`` of the loader says. "truncate" cuts it: of a
                record, every sequence that is as long as its length says. "drop" leaves it out.
            collate: Makes a batch of a list of records; ``shmloader.collate.Pack()`` by default.
        """
        choice(too_long, "too_long", ("raise", "truncate", "drop"))
        if length is not None:
            _check_callable(length)
        if collate is None:
            from shmloader.collate import Pack  # noqa: PLC0415 - only a stream of tokens needs it

            collate = Pack()
        window = whole_number(window, "window", minimum=1)
        max_tokens = whole_number(max_tokens, "max_tokens", minimum=1)
        limits = max_tokens, length or token_count, too_long
        return self._grouped(collate, "pack", Packed, window, self.seed, *limits)

    def _grouped(self, collate: Callable[..., Any], name: str, kind: Any, *arguments: Any) -> Self:
        _check_callable(collate)
        if self._group is not None:
            raise TypeError("this stream makes batches already: call batch() or pack() only once")
        step = Step(len(self._steps) + 1, name, kind, arguments)
        return self._with(_group=step, collate=collate)

    def _then(self, name: str, kind: type[Stage], *arguments: Any) -> Self:
        if self._group is not None:
            raise TypeError(
                "after batch() or pack(), only map() is possible: call the other methods before"
            )
        return self._with(_steps=(*self._steps, Step(len(self._steps) + 1, name, kind, arguments)))

    def _with(self, **changes: Any) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self), **changes)
        return other

    # What a loader asks ----------------------------------------------------------------------

    @property
    def repeats(self) -> bool:
        """Whether a reader reads shards of other readers in later passes of an epoch."""
        return any(step.kind is Repeated for step in self._steps)

    @property
    def is_batched(self) -> bool:
        """Whether the stream yields batches."""
        return self._group is not None

    def stage(self, run: Run, steps: Sequence[Step] | None = None) -> Any:
        """Return the uppermost stage of a reader of records, at its beginning.

        Args:
            run: The reader.
            steps: Other steps than those of the stream.
        """
        steps = self._steps if steps is None else steps
        return functools.reduce(lambda stage, step: step.over(stage, run), steps, self._open(run))

    def begin(self, run: Run) -> Reader:
        """Return a reader of an epoch, at its beginning."""
        group = self._group or Step(len(self._steps) + 1, "", Grouped, (1, False))
        blind = itertools.takewhile(lambda step: step.kind in _BLIND, self._steps[::-1])
        late = [step for step in blind if step.kind is Mapped and group.kind is Grouped][::-1]
        steps = [step for step in self._steps if step not in late]
        return Reader(functools.partial(self.stage, steps=(*steps, group)), late, run)

    def record_counts(self, epoch: int) -> list[int]:
        """Return how many records each reader yields in an epoch, with failed ones.

        Raises:
            TypeError: If that is known only once they have been read.
        """
        kinds = {step.kind for step in self._steps}
        if Filtered in kinds:
            raise TypeError("the number of records that filter() keeps is known only afterwards")
        if Repeated in kinds:
            raise TypeError("a stream that is repeated has no length")
        counts = self._source_counts(epoch)
        for first, end in (step.arguments for step in self._steps if step.kind is Taken):
            for reader, count in enumerate(counts):
                most = count if end is None else min(count, share_of(end, reader, len(counts)))
                counts[reader] = max(0, most - share_of(first, reader, len(counts)))
        return counts

    def batch_counts(self, epoch: int) -> list[int]:
        """Return how many batches each reader makes in an epoch; records without batches.

        The first call counts the records of all shards by their indexes, which are made if they are
        missing.

        Raises:
            TypeError: If the number is known only once the shards have been read. That is so with
                filter(), pack() or repeat(), for remote shards, and for a format without an index.
        """
        counts = self.record_counts(epoch)
        if self._group is None:
            return counts
        if self._group.kind is not Grouped:
            raise TypeError("the number of packs is known only once the records have been read")
        size, drop_last = self._group.arguments
        return [count // size if drop_last else -(-count // size) for count in counts]

    def __len__(self) -> int:
        """Return the number of batches of the next epoch; see :meth:`batch_counts`."""
        return sum(self.batch_counts(self._epoch))

    def __bool__(self) -> bool:
        """Return True: a stream may have records though their number is not known."""
        return True

    def facts(self) -> str:
        """Return what the order of its batches depends on, but for sizes of shards, as a text."""
        steps = self._steps if self._group is None else (*self._steps, self._group)
        return f"{self._source_facts()}, {'.'.join(map(str, steps)) or 'records'}"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next ``iter()`` of the stream itself; a loader counts its own."""
        self._epoch = whole_number(epoch, "epoch", minimum=0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch in order, or the records without batches."""
        info, guard = get_worker_info(), Guard()
        own = slice(None) if info is None else slice(info.id, None, info.num_workers)
        left = [
            self.begin(Run(number, self.readers, self._epoch, guard))
            for number in range(self.readers)[own]
        ]
        while left:
            for reader in tuple(left):
                group, found = reader.make(1)
                if found.is_all and found.known <= found.round + 1:
                    left.remove(reader)
                records = [record for _, record in group or ()]
                for record in records:
                    if type(record) is Failed:
                        raise record.problem
                if records:
                    yield records[0] if self.collate is None else self.collate(records)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.facts()}>"


def _apply_both(first: Callable[[Any], Any], then: Callable[[Any], Any], value: Any) -> Any:
    return then(first(value))


def _check_callable(function: object) -> None:
    if not callable(function):
        raise TypeError(f"a function is needed, but got {function!r}")
