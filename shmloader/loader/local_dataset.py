"""Makes the batches of a dataset whose state the loader saves, without workers.

The object belongs to the iterator; :mod:`shmloader.loader.local_checkpoint` tracks the dataset.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.iterable_state import (
    load_dataset,
    load_iterator,
    read,
    replay,
)
from shmloader.batch.maker import BatchMaker
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.loader.local_checkpoint import LocalCheckpoint, LocalStreamCheckpoint
from shmloader.memory.collate import is_plain
from shmloader.sampling.rng import (
    changed,
    global_rng_state,
    set_global_rng_state,
    with_global_rng_state,
)


class LocalDataset:
    """Makes the batches of a dataset whose state the loader saves, in the main process.

    Constructed before the sampler is iterated, which may depend on the dataset's state.

    Attributes:
        checkpoint: Where the dataset is.
        is_replaying: Whether batches are being re-read to resume an iterable dataset, or could not
            be.

    Args:
        config: The loader's arguments.
        parts: The parts of the loader, which have the checkpoint from which the dataset resumes.
    """

    checkpoint: LocalCheckpoint
    _maker: BatchMaker

    def __init__(self, config: LoaderConfig, parts: LoaderParts) -> None:
        resumed = parts.pop_resumed()
        checkpoint = DatasetCheckpoint() if resumed is None else resumed.checkpoints[0]
        saved = None if checkpoint.snapshot is None else read(checkpoint.snapshot)
        # The states of global generators that the dataset's load_state_dict() has set: they are set
        # again before the first sample, and the process goes on from them.
        loaded = dict(parts.loaded_generators)
        if saved is not None and saved.of == "dataset":
            with _as_before(checkpoint.rng):
                before = global_rng_state()
                load_dataset(config.dataset, saved)
                loaded = changed(before)
        self._config, self._cost = config, parts.state_cost
        self._begins_from, self._saved, self._loaded = checkpoint, saved, loaded
        self.is_replaying = False
        # Set until the first batch after resuming is made.
        self._resumed: DatasetCheckpoint | None = None

    def begin(self, make_maker: Callable[[], BatchMaker], *, is_elsewhere: bool) -> BatchMaker:
        """Begin the epoch, after torch has iterated the sampler, and return the batch maker.

        Args:
            make_maker: Makes the batch maker, which iterates an iterable dataset.
            is_elsewhere: Whether the global generators have the states of the run that is resumed
                now, and will not have them when the first batch is made.
        """
        fetch, checkpoint, saved = self._config.fetch, self._begins_from, self._saved
        loaded, is_seeded = self._loaded, fetch.seed is not None
        if saved is None:
            # The whole epoch is resumed. As in the earlier run, torch has drawn from them since,
            # and for a shuffled order draws once more.
            loaded = global_rng_state(loaded) if fetch.is_iterable else {}
        rng = global_rng_state() if fetch.is_iterable and not is_seeded else None
        with _as_before(None if is_seeded else checkpoint.rng):
            if loaded:
                set_global_rng_state(loaded)
            self._maker = maker = make_maker()
            if fetch.is_iterable and not is_seeded:
                if saved is not None:
                    before = global_rng_state()
                    load_iterator(maker.fetcher, saved)
                    loaded = loaded | changed(before)
                if is_elsewhere:
                    checkpoint = checkpoint._replace(rng=rng, rng_at=((0, global_rng_state()),))
            self._loaded = {} if is_seeded or not loaded else global_rng_state(loaded)
        if fetch.is_iterable:
            if is_seeded:
                load_iterator(maker.fetcher, saved)
            self._begin_stream(checkpoint, rng)
        else:
            self.checkpoint = LocalCheckpoint(self._config.dataset, self._cost)
        return maker

    def _begin_stream(self, checkpoint: DatasetCheckpoint, rng: dict[str, Any] | None) -> None:
        """Begin an iterable dataset's stream where a checkpoint says, and track its position."""
        fetcher = self._maker.fetcher
        if checkpoint.rng is not None or checkpoint.skip or self._loaded:
            self._resumed = checkpoint
        fetcher.ended |= checkpoint.has_ended
        self._only_reads = is_plain(self._config.collate_fn)
        self._stream = self.checkpoint = LocalStreamCheckpoint(
            fetcher, checkpoint, rng, asks=self._config.fetch.snapshot_every > 0
        )

    def add_batch(self, *, has_failed: bool) -> None:
        """Count a batch that was delivered, or that raised."""
        self.checkpoint.add_batch(self._maker.fetcher, has_failed=has_failed)

    def make(self, indices: Any) -> Any:
        """Make the batch of a ticket's indices."""
        self.checkpoint.begin_batch()
        if isinstance(self.checkpoint, LocalStreamCheckpoint):
            if self._resumed is not None:
                return self._make_first(indices, self._resumed)
        elif self._loaded:
            set_global_rng_state(self._loaded)
            self._loaded = {}
        return self._maker.make(indices)

    def _make_first(self, indices: Any, checkpoint: DatasetCheckpoint) -> Any:
        """Make the first batch since the stream was resumed."""
        # The dataset may draw its order when its first sample is read.
        rng, loaded = dict(checkpoint.rng_at).get(0, checkpoint.rng), self._loaded
        if loaded:
            rng = {**(global_rng_state() if rng is None else rng), **loaded}
        left = self._replay(indices, checkpoint, rng) if checkpoint.skip else None
        self._resumed = None
        if rng is None:
            return self._maker.make(indices)
        set_global_rng_state({name: (left or rng)[name] for name in loaded})
        now = global_rng_state()
        if checkpoint.skip:
            if left != now:
                self._stream.mark_rng()
                self._stream.begin_batch()
            return self._maker.make(indices)
        if rng == now:
            return self._maker.make(indices)
        self._stream.mark_rng()  # later batches draw from the process's own states
        with with_global_rng_state(rng, leaves=loaded):
            return self._maker.make(indices)

    def _replay(
        self, indices: Any, checkpoint: DatasetCheckpoint, rng: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Re-read and discard the batches since the snapshot; return the generators' states.

        Raises:
            Exception: If the batches cannot be read again, or differ.
        """
        self.is_replaying = True
        with _as_before(rng), self._maker.loading(indices) as plain:
            replay(self._maker.fetcher, checkpoint, plain, only_reads=self._only_reads)
            left = None if rng is None else global_rng_state()
        self.is_replaying = False
        return left


def _as_before(rng: dict[str, Any] | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the global generators have earlier states; None changes nothing."""
    return contextlib.nullcontext() if rng is None else with_global_rng_state(rng)
