"""Checkpoints of datasets: how one is taken within an epoch, and how a dataset is resumed from it.

Runs where the dataset is: in a worker, or in-process. What is saved of an iterable dataset is the
iterator's own state if it has both ``state_dict`` and ``load_state_dict``, else the dataset's if it
has both, else nothing. A dataset's state is loaded before ``iter(dataset)``, an iterator's after
it; a dataset that is its own iterator has an iterator's.

A stream is resumed exactly where its samples are a function of its own state and of the process's
global random generators, which are set to what they were when the stream began: an order that is
drawn in ``__iter__`` is drawn again. What was delivered since the newest state is then read again
and discarded, and a checksum over it shows whether it is the same.
"""

import contextlib
import pickle
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import cloudpickle

from shmloader.batch.fingerprint import FingerprintingCollate, chained
from shmloader.batch.payload import PICKLE_ERRORS, main_is_importable
from shmloader.batch.sample_rng import SeededIterator
from shmloader.sampling.rng import set_global_rng_state
from shmloader.sampling.sampler_checkpoint import has_own_state


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


class IterableCheckpoint(NamedTuple):
    """How far the dataset of one worker has come in an epoch.

    Of a map-style dataset with a state of its own, the state is taken after every batch, and
    nothing is read again: of the fields, only ``given`` and ``snapshot`` are used.

    Attributes:
        given: Batches that were delivered in this epoch, or exceptions in their place.
        snapshot: Newest state of the dataset, a pickled :class:`Saved`; None: the stream's
            beginning.
        at: After how many batches the snapshot was taken.
        has_ended: Whether the stream has ended. The snapshot, and ``rng``, are then what the
            next epoch begins with.
        rng: States of the global random generators that the stream began with; None: those that
            a worker's base seed and ``worker_init_fn`` leave, or, in-process, whatever they are.
        rng_at: In-process, where other code draws from them as well: numbers of batches, and the
            states before them. Before the first batch, since an order may be drawn at
            ``iter(dataset)`` or with the first sample; and where the epoch was resumed.
        check: Checksum over the fingerprints of the batches since the snapshot.
        failed: Numbers, from the stream's beginning, of the batches since the snapshot that
            raised.
    """

    given: int = 0
    snapshot: bytes | None = None
    at: int = 0
    has_ended: bool = False
    rng: dict[str, Any] | None = None
    rng_at: tuple[tuple[int, dict[str, Any]], ...] = ()
    check: int = 0
    failed: tuple[int, ...] = ()

    @property
    def skip(self) -> int:
        """Batches delivered since the snapshot."""
        return self.given - self.at

    def gave(
        self,
        snapshot: bytes | None,
        fingerprint: int | None = None,
        *,
        has_failed: bool = False,
    ) -> "IterableCheckpoint":
        """The same after a further batch.

        Args:
            snapshot: The state after it, if one was taken.
            fingerprint: Of the batch; None if its samples could not be read.
            has_failed: Whether an exception came in its place.
        """
        given = self.given + 1
        if snapshot is not None:
            return IterableCheckpoint(given, snapshot, given, rng=self.rng, rng_at=self.rng_at)
        check = self.check if fingerprint is None else chained(self.check, fingerprint)
        failed = (*self.failed, self.given) if has_failed else self.failed
        return self._replace(given=given, check=check, failed=failed)

    def ended(self, next_epoch: "Beginning") -> "IterableCheckpoint":
        """The same at the stream's end."""
        return IterableCheckpoint(
            self.given, next_epoch.snapshot, self.given, has_ended=True, rng=next_epoch.rng
        )

    def begun_anew(self) -> "IterableCheckpoint":
        """The next epoch's beginning, if the dataset persists."""
        return (
            IterableCheckpoint(0, self.snapshot, rng=self.rng)
            if self.has_ended
            else IterableCheckpoint()
        )


class Beginning(NamedTuple):
    """What an epoch of a dataset that was iterated before begins with.

    Attributes:
        rng: States of the global random generators; None if samples do not depend on them.
        snapshot: The dataset's own state, a pickled :class:`Saved`; None if it has none.
    """

    rng: dict[str, Any] | None = None
    snapshot: bytes | None = None

    def dumps(self) -> bytes | None:
        """Write it down; None if there is nothing to write."""
        return None if self == (None, None) else pickle.dumps(tuple(self))

    @classmethod
    def loads(cls, data: bytes | None) -> Self:
        """Read what :meth:`dumps` gave."""
        return cls() if data is None else cls(*pickle.loads(data))


def save(fetcher: Any) -> Saved | None:
    """The state of torch's fetcher of an iterable dataset; None if it has none.

    Raises:
        Exception: What ``state_dict()`` raises; a StopIteration as RuntimeError, since it would
            end the stream.
    """
    iterator, dataset, position = parts_of(fetcher)
    saved = None
    if has_own_state(iterator):
        saved = _saved("iterator", iterator, is_short=fetcher.ended)
    elif has_own_state(dataset):
        saved = _saved("dataset", dataset, is_short=fetcher.ended)
    return None if saved is None else saved._replace(position=position)


def parts_of(fetcher: Any) -> tuple[Any, Any, int]:
    """What torch's fetcher iterates, of which dataset, and how many seeded samples came of it."""
    iterator = fetcher.dataset_iter
    if isinstance(iterator, SeededIterator):
        return iterator.source, iterator.dataset, iterator.position
    return iterator, fetcher.dataset, 0


def take_fingerprints(fetcher: Any) -> FingerprintingCollate:
    """Have torch's fetcher of an iterable dataset take the fingerprint of each batch."""
    collate = FingerprintingCollate(fetcher.collate_fn, takes_list=fetcher.auto_collation)
    fetcher.collate_fn = collate
    return collate


def save_dataset(dataset: Any) -> Saved | None:
    """The state of a dataset alone, between two epochs."""
    return _saved("dataset", dataset, is_short=False) if has_own_state(dataset) else None


def _saved(of: Literal["iterator", "dataset"], thing: Any, *, is_short: bool) -> Saved | None:
    try:
        return Saved(of, is_short, thing.state_dict())
    except NotImplementedError:  # of a base class, in place of a method
        return None
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


def replay(
    fetcher: Any,
    checkpoint: IterableCheckpoint,
    indices: Any,
    collate: FingerprintingCollate,
    *,
    only_reads: bool,
) -> None:
    """Read again, and discard, the batches that a stream has delivered since its snapshot.

    Args:
        fetcher: torch's, of the dataset, at the snapshot.
        checkpoint: Where the stream is resumed.
        indices: What the index sampler gives; only its length counts.
        collate: The fetcher's collate function.
        only_reads: Whether batches need not be collated: to collate them draws nothing, and keeps
            nothing.

    Raises:
        ValueError: If the stream ends too early, or gives other samples than it gave before.
        BaseException: What the dataset, or collate, raises where it did not raise before.
    """
    check, failed, rng_at = 0, frozenset(checkpoint.failed), dict(checkpoint.rng_at)
    if only_reads:
        fetcher.collate_fn = collate.take
    try:
        for number in range(checkpoint.at, checkpoint.given):
            if number in rng_at:
                set_global_rng_state(rng_at[number])
            collate.reset()
            try:
                fetcher.fetch(indices)
            except StopIteration:
                raise ValueError(
                    f"the state does not fit: the stream had given {checkpoint.given} batches, "
                    f"and now ends after {number}"
                ) from None
            except BaseException as error:
                if number not in failed or isinstance(error, KeyboardInterrupt):
                    raise
            # Samples that were read where they could not be before, or the other way round, show
            # in the checksum.
            if collate.value is not None:
                check = chained(check, collate.value)
    finally:
        fetcher.collate_fn = collate
    if check != checkpoint.check:
        raise _other_samples(checkpoint)


def _other_samples(checkpoint: IterableCheckpoint) -> ValueError:
    start = "the start" if checkpoint.snapshot is None else "its state"
    return ValueError(
        f"the state does not fit: read again from {start}, the dataset gives other samples than "
        f"the {checkpoint.skip} batches that it gave before, so that some would be lost and others "
        "come twice. Have its order depend on the loader's seed=, on the global random generators "
        "of a worker process, or on get_worker_info().seed alone; or give it "
        "state_dict() and load_state_dict()"
    )


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
