"""Makes batches on the thread that asks for them, for a loader without workers.

``seed=`` sets the process's random number generators for each sample. Their earlier states are
restored after each batch.

As with workers, the dataset's state is taken after a batch, and the loader's state has the
checkpoint after the last delivered batch. A dataset that resumes is made ready when its first batch
is asked for, so that what its ``load_state_dict()`` sets is the last thing that happens before its
first sample. An iterable dataset then finds the process's global generators in the states of the
earlier run, and the process's own states are restored after the batch.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from shmloader.batch.arrays import Arrays
from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.collator import Timer, bytes_of
from shmloader.batch.dataset_state import dump_in_main, load_dataset, read
from shmloader.batch.failures import describe_indices
from shmloader.batch.fetch import EmptyBatchError, map_style_stop
from shmloader.batch.maker import BatchMaker
from shmloader.engine.delivery import DatasetCheckpoints, Instead
from shmloader.engine.scheduler import UNASSIGNED, Ticket
from shmloader.errors import ITERATOR_CLOSED, ClosedLoaderError
from shmloader.insight.measurements import pack_batch
from shmloader.insight.record import Record
from shmloader.interruptions import describe_interruption, is_interruption
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.memory.writer import is_plain
from shmloader.messages import Unsaved
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.rng import changed, global_rng_state, kept, set_global_rng_state
from shmloader.streams.order import ReaderOrder


def do_nothing(*_: object) -> None:
    """Do nothing: where there is nothing to close, to begin or to set."""


class InlineEngine:
    """Makes the batches of an epoch when they are asked for.

    It has what the iterator uses of an :class:`~shmloader.engine.engine.Engine`. It is constructed
    before the sampler is iterated, which may depend on the dataset's state, and opened after that.

    Args:
        config: The loader's arguments.
        parts: The objects that all iterators of the loader share.
        resumed: The DatasetCheckpoints from which the dataset resumes; None for the beginning.

    Attributes:
        checkpoints: Where the dataset is after the last delivered batch; None if that is not saved.
        end: Ends the threads that load samples.
        staged: The name, in the statistics, of what was done to the batch after it was collated,
            and when that began and ended.
    """

    is_waiting = is_closed = False
    beginnings = counts = None
    checkpoints: DatasetCheckpoints | None = None
    delivery: Ticket | None = None
    draw_ns, _stage, staged = 0, "build", ("build", 0, 0)
    end: Callable[[], object] = staticmethod(do_nothing)
    record: Record  # of the epoch, which the iterator sets
    _seq, _closed_because = -1, ""
    _step: Callable[[Any], Any] | None = None
    _checkpoint: Checkpoint | None = None  # after the newest batch
    _maker: BatchMaker | None = None  # None until a dataset that resumes is ready

    def __init__(self, config: LoaderConfig, parts: LoaderParts, resumed: Any) -> None:
        self._config, self._is_iterable = config, config.fetch.is_iterable
        self._watch = config.watch_failures(parts)
        self._resumed, self._loaded = resumed, parts.loaded_generators
        if resumed is not None and config.saves_dataset and not self._is_iterable:
            with kept():  # the state is loaded again before the first sample
                load_dataset(config.dataset, read(resumed.checkpoints[0].snapshot))

    def open(self, plan: EpochPlan, pins: bool, pin_device: str | None) -> None:
        """Prepare to make batches; an iterable dataset is iterated now, unless it is resumed."""
        config, fetch = self._config, self._config.fetch
        fetcher = fetch.make_concurrent_fetcher()
        if fetcher is not None:
            self.end = fetcher.close
        self._timer = Timer()
        self._make_maker = functools.partial(
            BatchMaker,
            fetch,
            config.dataset,
            config.collate_fn,
            config.on_error,
            where="in the main process",
            timer=self._timer,
            epoch=plan.counter.newest,
            restores_rngs=True,
            arrays=Arrays(config.dataset) if fetch.takes_arrays else None,
            concurrent_fetcher=fetcher,
        )
        if self._is_iterable or config.saves_dataset:
            self._begin_checkpoints(plan.is_elsewhere)
        else:
            self._maker = self._make_maker()
        if pins or config.device is not None or config.device_transform is not None:
            self._stage, self._step = make_step(config, pins=pins, pin_device=pin_device)

    def start(self, tickets: Iterator[Any]) -> None:
        """Begin the epoch."""
        self._draw: Callable[[], Any] = tickets.__next__
        if type(tickets) is ReaderOrder:
            tickets.may_wait = True  # no batch is being made

    def next_batch(self) -> Any:
        """Return the next batch; see :meth:`shmloader.engine.engine.Engine.next_batch`."""
        self.delivery, self.draw_ns = None, 0
        timer = self._timer
        while True:
            if self.is_closed:
                self._check_open()
            timer.begin()
            ticket = None
            try:
                indices = self._draw()
                self._seq += 1
                ticket = Ticket(self._seq, 0, UNASSIGNED, indices)
                began_ns = timer.began_ns
                timer.begin()
                self.draw_ns += timer.began_ns - began_ns
                batch = self._load(indices)
                if batch is EmptyBatchError:
                    continue
                if self._step is not None:
                    batch = self._step(batch)
                began_ns, fetched_ns = timer.began_ns, timer.fetched_ns
                self.staged = (self._stage, fetched_ns, time.monotonic_ns())
                nbytes = bytes_of(batch)
                times = pack_batch(0, began_ns, began_ns, 0, fetched_ns, fetched_ns, nbytes, 0)
                ticket.checkpoint = self._checkpoint
                ticket.times = times + timer.read(fetched_ns)
                self.delivery = ticket
                return batch
            except Instead:
                raise
            except StopIteration as stop:
                if ticket is None or self._is_iterable:
                    raise Instead(self._end_epoch()) from None
                error: Exception = map_style_stop(stop)
            except Exception as raised:
                if is_interruption(raised):
                    raise
                error = raised
            if ticket is not None and not self.is_closed:
                ticket.checkpoint = self._checkpoint
                self.delivery = ticket
            raise Instead(error) from None

    def _load(self, indices: Any) -> Any:
        """Return the batch of these indices, or EmptyBatchError if it is left out."""
        batch: Any
        try:
            if self.checkpoints is None:
                batch = self._maker.make(indices)  # type: ignore[union-attr]
            else:
                batch = self._make_and_save(indices)
        except EmptyBatchError:
            batch = EmptyBatchError
        except StopIteration:
            raise
        except Exception:
            if self._maker is None:
                self._close_since("its dataset could not be resumed")
            elif self._watch is not None:
                self._count_failures()
            raise
        if self._watch is not None:
            self._count_failures(indices if batch is EmptyBatchError else None)
        return batch

    def _count_failures(self, left_out: object = None) -> None:
        """Count a batch's failed samples; ``left_out`` has its indices if all have failed."""
        watch, maker, error = self._watch, self._maker, None
        assert watch is not None
        assert maker is not None
        report = maker.pop_report()
        if report is not None:
            self.record.failures += report.failed_count
            error = watch.add(report, f"batch {self._seq}")
        if error is None and left_out is not None:
            error = watch.left_out(f"batch {self._seq} ({describe_indices(left_out)})")
        if error is not None:
            self._close_since(error)
            raise Instead(error)

    def _end_epoch(self) -> BaseException:
        """Return the epoch's end, or a TooManyFailures if too many samples of the epoch failed."""
        self._check_open()  # if it was closed meanwhile, the epoch has not ended
        error = None if self._watch is None else self._watch.end_epoch()
        if error is not None:
            self._close_since(error)
        return error or StopIteration()

    # The dataset's state -----------------------------------------------------------------------

    def _begin_checkpoints(self, is_elsewhere: bool) -> None:
        """Begin to save where the dataset is.

        Args:
            is_elsewhere: Whether the global generators are in the resumed run's states now alone.
        """
        resumed, checkpoint = self._resumed, Checkpoint()
        # Whether the dataset may draw from the process's generators.
        self._draws = draws = self._is_iterable and self._config.fetch.seed is None
        if resumed is not None:
            (checkpoint,) = resumed.checkpoints
        if draws and (is_elsewhere or resumed is None):
            checkpoint = checkpoint._replace(rng=(global_rng_state(),))
        if resumed is None and not (draws and is_elsewhere):
            self._maker = self._make_maker()
            checkpoint = Checkpoint.beginning(self._state(0), checkpoint.rng)
        self.checkpoints = DatasetCheckpoints([checkpoint], worker_count=0)

    def _state(self, given: int) -> bytes | Unsaved | None:
        """Return the dataset's state after so many batches; None if none is due."""
        every = self._config.fetch.snapshot_every
        if not every or self._maker is None or (self._is_iterable and given % every):
            return None
        state: bytes | Unsaved | None = self._maker.save(dump_in_main)
        return state

    def _make_and_save(self, indices: Any) -> Any:
        """Make the batch of a ticket's indices, and take the dataset's state after it."""
        checkpoints = self.checkpoints
        assert checkpoints is not None
        (checkpoint,) = checkpoints.checkpoints
        try:
            if self._maker is None:
                return self._resume(checkpoint, indices)
            if self._draws and not checkpoint.given:
                self._add_rng(checkpoint, checkpoint.rng[0])
            return self._maker.make(indices)
        finally:
            (checkpoint,) = checkpoints.checkpoints
            snapshot, fingerprint = self._state(checkpoint.given + 1), None
            if self._is_iterable and self._maker is not None:
                fingerprint = self._maker.fetcher.fingerprint
            self._checkpoint = checkpoint.after_batch(snapshot, fingerprint)

    def _add_rng(self, checkpoint: Checkpoint, at_start: dict[str, Any]) -> None:
        """Save the generators' states: the dataset may draw its order with its first sample."""
        assert self.checkpoints is not None
        rng = at_start, global_rng_state()
        self.checkpoints.checkpoints = (checkpoint._replace(rng=rng),)

    def _resume(self, checkpoint: Checkpoint, indices: Any) -> Any:
        """Make the dataset ready where it resumes, and make its first batch."""
        saved, rng = read(checkpoint.snapshot), checkpoint.rng
        own = global_rng_state() if rng else {}
        if rng and not checkpoint.skip and own == rng[-1]:
            own = {}  # they go on as in the earlier run
        loaded = [*self._loaded]  # generators that the dataset's load_state_dict() has set
        try:
            set_global_rng_state(rng[0] if rng else {})
            at_start = global_rng_state()
            load_dataset(self._config.dataset, saved)
            loaded += changed(at_start)
            maker = self._make_maker()
            if self._is_iterable and saved is not None:
                before = global_rng_state()
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
            self._maker = maker
            if not checkpoint.skip:  # it draws its order by now
                return maker.make(indices)
        finally:
            left = global_rng_state()
            set_global_rng_state({**own, **{name: left[name] for name in loaded if name in left}})
        return maker.make(indices)

    # The end -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            because = self._closed_because
            text = f"the iterator is closed{because}" if because else ITERATOR_CLOSED
            raise Instead(ClosedLoaderError(text)) from None

    def _close_since(self, why: object) -> None:
        """Close for a reason that later calls report."""
        self._closed_because = f" since: {why}"
        self.close()

    def give_up(self, error: BaseException) -> None:
        """Close, and have later calls report the exception that interrupted the engine."""
        if not self.is_closed:
            self._closed_because = describe_interruption(error)
        self.close()

    def close(self) -> None:
        """Make no further batch. May be called again, and from any thread."""
        self.is_closed = True
        self._draw = iter(()).__next__
        self.end()


def make_step(
    config: LoaderConfig, *, pins: bool = False, pin_device: str | None = None
) -> tuple[str, Callable[[Any], Any] | None]:
    """Return the name of what is done to a batch on the user's thread, and a function that does it.

    It pins or moves a batch, and calls the ``device_transform``.
    """
    device, transform, kind = config.device, config.device_transform, "build"
    if device is not None:
        # Few loaders have a device.
        from shmloader.device.stage import map_tensors  # noqa: PLC0415

        kind = "device"
    elif pins:
        from shmloader.device.stage import pin_batch  # noqa: PLC0415

        kind = "pin"
    elif transform is None:
        return kind, None

    def step(batch: Any) -> Any:
        try:
            if device is not None:
                batch = map_tensors(lambda tensor: tensor.to(device), batch)
            elif kind == "pin":
                batch = pin_batch(batch, device=pin_device)
            return batch if transform is None else transform(batch)
        except StopIteration as error:  # which would silently end the epoch
            text = "a batch's device_transform or pin_memory raised StopIteration"
            raise RuntimeError(text) from error

    return kind, step
