"""Makes the batches of a dataset whose state the loader saves, without workers.

As with workers, the dataset's state is taken after a batch, and the loader's state has the
checkpoint after the last delivered batch.

A dataset that resumes is made ready when its first batch is asked for, so that what its
``load_state_dict()`` sets is the last thing that happens before its first sample. An iterable
dataset then finds the process's global generators in the states of the earlier run, and the
process's own states are restored after the batch.
"""

from collections.abc import Callable
from typing import Any

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.dataset_state import (
    dump_in_main,
    load_dataset,
    read,
)
from shmloader.batch.failures import SampleReport
from shmloader.batch.maker import BatchMaker
from shmloader.engine.delivery import DatasetCheckpoints
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.memory.collate import is_plain
from shmloader.messages import Unsaved
from shmloader.sampling.rng import changed, global_rng_state, kept, set_global_rng_state


class LocalDataset:
    """Makes the batches of a dataset whose state the loader saves, in the main process.

    Constructed before the sampler is iterated, which may depend on the dataset's state.

    Attributes:
        checkpoints: Where the dataset is after the last delivered batch.
        updates: The checkpoint after the batch that was made last.
        is_resuming: Whether the dataset is being resumed, or could not be.

    Args:
        config: The loader's arguments.
        parts: The parts of the loader, which have the checkpoint from which the dataset resumes.
    """

    def __init__(self, config: LoaderConfig, parts: LoaderParts) -> None:
        self._config, self._loaded = config, parts.loaded_generators
        self._is_iterable = config.fetch.is_iterable
        self._draws = self._is_iterable and config.fetch.seed is None
        self._resumed = parts.pop_resumed()
        self.updates: tuple[tuple[int, Checkpoint], ...] = ()
        if self._resumed is not None and not self._is_iterable:
            with kept():  # the state is loaded again before the first sample
                load_dataset(config.dataset, read(self._resumed.checkpoints[0].snapshot))

    def begin(self, make_maker: Callable[[], BatchMaker], *, is_elsewhere: bool) -> None:
        """Begin the epoch, after torch has iterated the sampler.

        Args:
            make_maker: Makes the batch maker, which iterates an iterable dataset.
            is_elsewhere: Whether the global generators have the states of the run that is resumed
                now, and will not have them when the first batch is made.
        """
        self._make_maker, resumed = make_maker, self._resumed
        checkpoint = Checkpoint() if resumed is None else resumed.checkpoints[0]
        self.is_resuming = resumed is not None or (self._draws and is_elsewhere)
        if self._draws and (is_elsewhere or not self.is_resuming):
            checkpoint = checkpoint._replace(rng=(global_rng_state(),))
        self._maker: BatchMaker | None = None
        if not self.is_resuming:
            self._maker = make_maker()
            checkpoint = Checkpoint.beginning(self._state(0), checkpoint.rng)
        self.checkpoints = DatasetCheckpoints([checkpoint], worker_count=0)

    def pop_report(self) -> SampleReport | None:
        """Return what is to be reported of the newest batch's samples."""
        return None if self._maker is None else self._maker.pop_report()

    def _state(self, given: int) -> bytes | Unsaved | None:
        """Return the dataset's state after so many batches; None if none is due."""
        every = self._config.fetch.snapshot_every
        if not every or self._maker is None or (self._is_iterable and given % every):
            return None
        state: bytes | Unsaved | None = self._maker.save(dump_in_main)
        return state

    def make(self, indices: Any) -> Any:
        """Make the batch of a ticket's indices, and take the dataset's state after it."""
        try:
            if self.is_resuming:
                return self._resume(indices)
            (checkpoint,) = self.checkpoints.checkpoints
            if self._draws and not checkpoint.given:
                self._add_rng(checkpoint, checkpoint.rng[0])
            assert self._maker is not None
            return self._maker.make(indices)
        finally:
            (checkpoint,) = self.checkpoints.checkpoints
            snapshot, fingerprint = self._state(checkpoint.given + 1), None
            if self._is_iterable and self._maker is not None:
                fingerprint = self._maker.fetcher.fingerprint
            self.updates = ((0, checkpoint.after_batch(snapshot, fingerprint)),)

    def _add_rng(self, checkpoint: Checkpoint, at_start: dict[str, Any]) -> None:
        """Save the generators' states: the dataset may draw its order with its first sample."""
        rng = at_start, global_rng_state()
        self.checkpoints.checkpoints = (checkpoint._replace(rng=rng),)

    def _resume(self, indices: Any) -> Any:
        """Make the dataset ready where it resumes, and make its first batch.

        Raises:
            Exception: If the dataset cannot be resumed, or what its first batch raises.
        """
        (checkpoint,) = self.checkpoints.checkpoints
        saved, rng = read(checkpoint.snapshot), checkpoint.rng
        own = global_rng_state() if rng else {}
        if rng and not checkpoint.skip and own == rng[-1]:
            own = {}  # they go on as in the earlier run
        loaded = [*self._loaded]  # generators that the dataset's load_state_dict() has set
        try:
            at_start = rng[0] if rng else global_rng_state()
            set_global_rng_state(rng[0] if rng else {})
            before = global_rng_state()
            load_dataset(self._config.dataset, saved)
            loaded += changed(before)
            maker = self._make_maker()
            if self._is_iterable:
                before = global_rng_state()
                if saved is not None:
                    maker.fetcher.resume(saved)
                loaded += changed(before)
            if len(rng) > 1:
                others = {name: each for name, each in rng[1].items() if name not in loaded}
                set_global_rng_state(others)
            elif self._draws:
                self._add_rng(checkpoint, at_start)
            if self._is_iterable and checkpoint.skip:
                with maker.loading(indices) as plain:
                    only_reads = is_plain(self._config.collate_fn)
                    maker.fetcher.replay(checkpoint, plain, only_reads=only_reads)
            self._maker, self.is_resuming = maker, False
            if not checkpoint.skip:  # it draws its order by now
                return maker.make(indices)
        finally:
            left = global_rng_state()
            set_global_rng_state({**own, **{name: left[name] for name in loaded if name in left}})
        return maker.make(indices)
