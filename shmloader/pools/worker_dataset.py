"""Makes a worker's dataset ready, loads from it, resumes it, and takes its state.

It runs in a worker process, or in a process of an executor, on the thread that makes batches. What
the user's code raises while the dataset is made ready or resumed answers every task of the epoch.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.utils.data._utils import worker as torch_worker

from shmloader.batch.arrays import Arrays
from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.collator import Timer
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.dataset_state import (
    Keep,
    Saved,
    dumps_state,
    load_dataset,
    read,
    save_dataset,
)
from shmloader.batch.failures import OnError, RemoteError, SampleReport, add_note
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.batch.sample_watch import SampleWatch
from shmloader.memory.writer import SlotWriter, is_plain
from shmloader.messages import Unsaved
from shmloader.sampling.hooks import set_dataset_epoch
from shmloader.sampling.rng import global_rng_state, set_global_rng_state

_T = TypeVar("_T")


class WorkerDataset:
    """A worker's dataset, and the maker of its batches.

    Attributes:
        error: The answer to every task, if the dataset could not be made ready or resumed.
        has_report: Whether bad samples are reported.
        is_lost: Whether the dataset could not be resumed.
        is_ready: Whether batches can be made, or ``error`` is set. An iterable dataset is made
            ready at the first task, since it may be resumed before that.
        has_ended: Whether the iterable dataset is exhausted in this epoch.
        fingerprint: Fingerprint of a batch. The caller sets it to None before it loads a batch; it
            stays None if none is taken or its samples were not read.
        timer: Measures the parts of the work. The caller begins it with each task.
        told: The number that the dataset was told by ``set_epoch()``; None if that is not known.
        hung: Samples of the next task that hung in an earlier worker. Maps their numbers to what
            that worker was doing.
    """

    has_report = is_lost = is_ready = has_ended = False
    error: RemoteError | None = None
    fingerprint: int | None = None
    _maker: BatchMaker | None = None
    _concurrent_fetcher: ConcurrentFetcher | None = None
    # The answer to every task of all epochs, if the dataset or its state could not be loaded or
    # ``worker_init_fn`` failed.
    _open_error: RemoteError | None = None
    # Whether batches that were delivered before still have to be read again.
    _has_to_replay = False
    # Number of batches that were made, or failed, in this epoch: in this worker and in its
    # predecessors.
    _given = 0

    def __init__(
        self,
        config: FetchConfig,
        worker_id: int,
        where: str,
        writer: SlotWriter | None,
        timer: Timer,
        publish: Callable[[int, int], None] = lambda _number, _deadline_ns: None,
    ) -> None:
        self._config, self._worker_id, self._where = config, worker_id, where
        self._writer, self.timer = writer, timer
        self._sample_watch: SampleWatch | None = None
        if config.sample_timeout_s is not None:
            self._sample_watch = SampleWatch(config.sample_timeout_s, publish)
        self.hung: Mapping[int, str] = {}
        self.told = config.told_epoch
        # Where the dataset is resumed.
        self._checkpoint = Checkpoint()

    def open(self, dataset: Any, collate_fn: Any, on_error: OnError) -> None:
        """Take the dataset, after ``worker_init_fn``, and the functions."""
        self._dataset, self._collate_fn, self._on_error = dataset, collate_fn, on_error
        is_raised = on_error == "raise" or self._config.is_iterable
        self.has_report = self._config.reads or not is_raised
        if not self._config.is_iterable:
            self.get_ready()

    def fail(self, error: RemoteError) -> None:
        """Answer every task of all epochs with an error."""
        self._open_error = self.error = error
        self.is_ready = True

    def get_ready(self, epoch: int | None = None, *, is_further: bool = False) -> Checkpoint:
        """Begin the first or a further epoch. Returns the checkpoint with which that begins."""
        beginning = Checkpoint()
        self.is_ready, self.error = True, self._open_error
        if self._open_error is None:
            try:
                self._set_epoch(epoch)
                if is_further:
                    beginning = self.next_beginning()
                is_resumed = self._config.is_iterable and not is_further
                self._maker = self._begin_stream() if is_resumed else self._make_maker()
            except BaseException:  # noqa: BLE001 - it answers every task
                self.error = RemoteError.caught(self._where)
        return beginning

    def start_epoch(self, epoch: int | None = None) -> Checkpoint:
        """Begin a further epoch. Returns the checkpoint with which it begins."""
        if not self.is_ready:
            self.get_ready(epoch)
        self.has_ended = self._has_to_replay = self.is_lost = False
        self._given = 0
        return self.get_ready(epoch, is_further=True)

    def next_beginning(self) -> Checkpoint:
        """Return the checkpoint with which an epoch that starts now would begin."""
        config = self._config
        snapshot = save_dataset(self._dataset, dumps_state) if config.snapshot_every else None
        draws = config.is_iterable and config.seed is None
        return Checkpoint.beginning(snapshot, (global_rng_state(),) if draws else ())

    def _set_epoch(self, epoch: int | None) -> None:
        """Call the dataset's ``set_epoch()``, unless it was told this number."""
        if epoch is not None and epoch != self.told:
            self.told = epoch
            set_dataset_epoch(self._dataset, epoch)

    def _make_maker(self, saved: Saved | None = None) -> BatchMaker:
        """Prepare to make batches: of an iterable dataset, after a call of ``iter(dataset)``."""
        config, dataset = self._config, self._dataset
        # One fetcher for all epochs: what an async dataset has opened belongs to its event loop.
        if self._concurrent_fetcher is None:
            self._concurrent_fetcher = config.make_concurrent_fetcher()
        load_dataset(dataset, saved)
        maker = BatchMaker(
            config,
            dataset,
            self._collate_fn,
            self._on_error,
            where=self._where,
            timer=self.timer,
            worker_id=self._worker_id,
            arrays=Arrays(dataset, self._writer) if config.takes_arrays else None,
            concurrent_fetcher=self._concurrent_fetcher,
            sample_watch=self._sample_watch,
            writer=self._writer,
        )
        if config.is_iterable and saved is not None:
            maker.fetcher.resume(saved)
        return maker

    def resume(self, checkpoint: Checkpoint) -> None:
        """Resume where a predecessor or an earlier run stopped. Called before the first task."""
        self._checkpoint = checkpoint
        if self._config.is_iterable or self._open_error is not None:
            return
        try:
            load_dataset(self._dataset, read(checkpoint.snapshot))
        except BaseException:  # noqa: BLE001 - it answers every task
            self._lose()

    def _lose(self) -> None:
        """Answer every task with the exception being handled: the dataset cannot be resumed."""
        self.is_lost, self.error = True, RemoteError.caught(self._where)

    def _begin_stream(self) -> BatchMaker | None:
        """Resume the iterable dataset; return its batch maker, or None if it has ended."""
        checkpoint = self._checkpoint
        self._given, self.has_ended = checkpoint.given, checkpoint.has_ended
        self._has_to_replay = checkpoint.skip > 0
        try:
            saved = read(checkpoint.snapshot)
            if checkpoint.rng:
                set_global_rng_state(checkpoint.rng[0])
            if not self.has_ended:
                return self._make_maker(saved)
            load_dataset(self._dataset, saved)  # for the next epoch
        except BaseException:
            if self.has_ended:
                # This epoch has no task that could fail.
                self._open_error = RemoteError.caught(self._where)
            self.is_lost = checkpoint != Checkpoint()
            raise
        return None

    def _replay(self, maker: BatchMaker, indices: object) -> None:
        """Read the delivered batches again. If that fails, every task of the epoch fails."""
        self._has_to_replay = False
        if self._sample_watch is not None:
            self._sample_watch.begin(self.hung, is_replay=True)
        assert self._writer is not None
        try:
            with maker.loading(indices) as plain, self._writer.withheld():
                only_reads = is_plain(self._collate_fn)
                maker.fetcher.replay(self._checkpoint, plain, only_reads=only_reads)
        except BaseException:
            self._lose()
            raise

    def load(self, indices: object, epoch: int | None) -> Any:
        """Make a task's batch.

        Raises:
            StopIteration: At the end of an iterable dataset.
            EmptyBatchError: If all samples failed and were to be skipped.
            BaseException: What the dataset, ``collate_fn`` or ``on_error`` raises.
        """
        maker = self._maker
        assert maker is not None
        if epoch is not None:
            self._set_epoch(epoch)
        if self._has_to_replay:
            self._replay(maker, indices)
        if self._sample_watch is not None:
            self._sample_watch.begin(self.hung)
        is_iterable = self._config.is_iterable
        self._given += 1  # also if the batch fails
        try:
            return maker.make(indices)
        except StopIteration:
            self.has_ended = is_iterable
            raise
        finally:
            if is_iterable:
                self.fingerprint = maker.fetcher.fingerprint

    def save(self, keep: Keep[_T]) -> _T | Unsaved | None:
        """Take the dataset's state after a batch; return None if no snapshot is due.

        Also after a failure: reading the failed batch again might give other samples.

        Args:
            keep: Pickles the state.
        """
        every, is_iterable = self._config.snapshot_every, self._config.is_iterable
        if not every or self.error is not None or (is_iterable and self._given % every):
            return None
        assert self._maker is not None
        state: _T | Unsaved | None = self._maker.save(keep)
        return state

    def close(self) -> None:
        """End the threads that load samples."""
        if self._concurrent_fetcher is not None:
            self._concurrent_fetcher.close()

    def pop_report(self) -> SampleReport | None:
        """Return which samples of the batch have failed; None if no batch could be made."""
        return None if self._maker is None else self._maker.pop_report()


def introduce(
    worker_id: int, worker_count: int, seed: int, dataset: Any, init_fn: Callable[[int], Any] | None
) -> None:
    """Set what ``get_worker_info()`` returns, and call ``worker_init_fn``.

    A note on an exception of ``worker_init_fn`` says where it was raised.
    """
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=worker_count, seed=seed, dataset=dataset
    )
    if init_fn is not None:
        try:
            init_fn(worker_id)
        except Exception as error:
            add_note(error, f"It was raised by worker_init_fn({worker_id}).")
            raise
