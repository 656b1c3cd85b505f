"""``shmloader.DataLoader``: torch's loader, with our iterators behind it.

The module is long because half of it documents and lists the arguments.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
import torch.utils.data
from torch.utils.data import Dataset, Sampler

from shmloader.batch.arrays import is_plain_data
from shmloader.batch.failures import OnError
from shmloader.batch.sample_rng import seed_of_rank
from shmloader.engine.failures import FailedSample, FailureList
from shmloader.errors import LOADER_CLOSED, ClosedLoaderError
from shmloader.grammar import warn_user
from shmloader.insight.record import sum_of, write_trace
from shmloader.insight.sums import Sums
from shmloader.interruptions import probe
from shmloader.loader.config import config_of, start_count
from shmloader.loader.iterator import BatchIterator
from shmloader.loader.options import (
    DEFAULTS,
    DEVICE_PREFETCH,
    NOT_WITH_STREAM,
    WRAPPED_DATA_PIPES,
    SnapshotInterval,
    describe_source,
    describe_unsupported,
    read_options,
    refuse,
)
from shmloader.loader.resumable import FixedArgument, ResumableLoader
from shmloader.memory.limits import usable_cores
from shmloader.pools.adapting import Adapter
from shmloader.sampling.arguments import choice, is_cut_for_ranks, rank_of
from shmloader.streams.stream import Stream

if TYPE_CHECKING:
    from shmloader.insight.stats import LoaderStats

_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(ResumableLoader[_T_co]):
    """A drop-in for ``torch.utils.data.DataLoader`` whose batches lie in shared memory.

    It takes torch's arguments, in torch's order and with torch's meaning, and yields the same
    batches. Each worker process writes its batch into a reusable block of shared memory, a *slot*.
    A large tensor of a batch is a view of its slot. The slot is free again when the last view is
    dropped. You may keep batches for as long as you like: if you keep more than four, the further
    ones are copied out of their slots.

    ``docs/reference/arguments.md`` has all arguments and defaults in one table.

    Args:
        dataset: Map-style or iterable dataset, or a data pipe, as for torch's loader. Or a stream
            of shards (:class:`shmloader.streams.Shards`), with ``batch_size=None`` if it makes
            batches.

        **Batches**

        batch_size: Number of samples in a batch; None to load samples without batching.
        collate_fn: Makes a batch of a list of samples. ``default_collate`` writes into shared
            memory at once, also when your own function calls it, so the batch is not copied again.
            Your function can do the same with a tensor from :func:`shmloader.empty`.
        drop_last: Whether samples that do not fill the last batch are left out. Otherwise, that
            batch is shorter.

        **Order and seed**

        shuffle: Whether each epoch has a random order of its own.
        sampler: Yields the indices of an epoch.
        batch_sampler: Yields a list of indices for each batch.
        in_order: Whether batches are delivered in the sampler's order; otherwise, as soon as they
            are made.
        generator: Random generator for shuffling and for the base seed of the workers.
        seed: A whole number, 0 or more. The same seed gives the same order and the same random
            augmentation for any number of workers. A sample's random numbers depend only on the
            seed, the epoch and the sample's position in the order. ``shuffle=True`` orders by the
            seed in place of torch's global generator. A ``sampler`` or ``batch_sampler`` is drawn
            with generators of ``random``, ``numpy.random`` and torch that depend on the seed and
            the epoch. Its ``set_epoch``, if it has one, is called with the epoch. These generators
            are set anew before each sample and before each collate, and
            :func:`shmloader.sample_rng` returns a generator of the sample's own. Samples are
            fetched one by one, even if the dataset has ``__getitems__``. Setting the generators
            takes 9 µs a sample, and up to 35 µs after large transforms. This is left out for
            samples that run no code of yours: those of tensors, arrays and lists, and of torch's
            ``TensorDataset``, ``Subset``, ``ConcatDataset`` and ``StackDataset`` of these. With
            ``thread_pool=True``, only ``sample_rng()`` is set. With ``num_workers=0``, the state of
            the process's generators is restored after each batch that has set them, which takes
            0.2 ms. Positions are counted in this loader's order. So with a sampler that is cut
            for ranks (``DistributedSampler``), random numbers depend on the rank as well: give all
            ranks the same seed. If the dataset itself is cut for ranks, give each rank its own
            seed. The random numbers of an iterable dataset's samples depend on the worker's number
            and the position in that worker's stream. If you give no sampler, ``loader.sampler`` and
            ``loader.batch_sampler`` yield the order that is delivered, for frameworks that read,
            wrap or iterate a loader's samplers. Calling ``set_epoch`` of these sets the number of
            the next epoch. Cannot be combined with ``generator``. None: all randomness is as with
            torch.

        **Workers**

        num_workers: Number of worker processes; 0 loads in this process. "auto" begins with half of
            the cores and adds a worker as long as batches then come faster, up to twice the cores.
            The first worker of an epoch that does not help is the last one, and the next epoch
            begins without it. The attribute ``num_workers`` is the number of workers that help, and
            ``get_worker_info().num_workers`` the maximum. The batches do not depend on the number
            if samples do not depend on their worker: with ``seed``, or if the dataset draws no
            random numbers. Without ``seed``, a warning says so. "auto" is for map-style datasets
            and this loader's own worker processes only.
        thread_pool: Whether workers are threads of this process. For map-style datasets that wait
            or release the interpreter, and are safe to use from several threads. Nothing is
            copied, and ``get_worker_info()`` is None. The threads use the random generators of
            this process and do not seed them. Cannot be combined with
            ``multiprocessing_context``, ``shm_size``, ``worker_restarts`` or ``sample_timeout``.
        executor: A ``concurrent.futures.Executor`` whose processes make the batches, on this or
            other machines, in place of the loader's own workers. For example
            :class:`shmloader.cluster.DaskExecutor`, :class:`shmloader.cluster.RayExecutor`, MPI's,
            or a ``ProcessPoolExecutor``. For map-style datasets. ``num_workers`` is the number of
            batches in flight there (times ``prefetch_factor``, which is 1 if None). The dataset is
            sent once to each process and kept there, and ``worker_init_fn`` is called once in each
            process, whatever ``persistent_workers`` is. A process makes one batch at a time. Any
            process makes the next batch, so give ``seed``. In Dask's workers, whose own threads
            draw from Python's ``random``, samples repeat only if they draw from
            :func:`shmloader.sample_rng`, numpy or torch. The executor is never shut down. Cannot be
            combined with ``thread_pool``, ``multiprocessing_context``, ``sample_timeout`` or
            ``shm_size``.
        fetch_concurrency: How many samples of a batch of a map-style dataset each worker (or this
            process, with ``num_workers=0``) loads at once. If ``__getitem__`` is an ``async def``,
            the samples are coroutines on an event loop that lasts as long as the worker. Otherwise
            threads call ``__getitem__`` at the same time. Samples are fetched one by one, even if
            the dataset has ``__getitems__``. If samples fail, the loader waits for the others that
            are being loaded, and raises the exception of the first failed sample in order. With
            ``seed``, only ``sample_rng()`` is set. None: one after the other.
        prefetch_factor: Number of batches in flight for each worker; None for 2, or for 1 with
            ``executor``.
        persistent_workers: Whether workers persist after an epoch.
        worker_init_fn: Called in each worker with the worker's number, from 0.
        multiprocessing_context: Name of a start method ("fork", "forkserver" or "spawn"), or a
            context of ``multiprocessing``; None for the default of ``multiprocessing``.

        **Memory and device**

        shm_size: Maximum shared memory of one iterator: bytes, or text such as ``"512MiB"``. It is
            divided equally among ``prefetch_factor * num_workers + 4`` slots, each for one batch.
            With a device, ``device_prefetch + 2`` takes the place of the 4 if that is more. A batch
            that needs more than its share raises ``SharedMemoryError``. None: no maximum.
        pin_memory: Whether tensors are copied into page-locked memory, by a thread if there are
            workers.
        pin_memory_device: Deprecated by torch.
        device: Where batches arrive: ``"cuda:0"``, an index or a ``torch.device``. With workers, a
            thread of the loader copies them there on its own stream. If workers are processes,
            their shared memory is page-locked where possible, and the GPU reads it directly. The
            current stream of the thread that calls ``next()`` waits for the copy. With
            ``num_workers=0``, the thread that calls ``next()`` copies them. None or ``"cpu"``: no
            copy.
        device_transform: Called with each batch on the device, on the thread and the stream that
            copy it, before ``next()`` returns the result. With ``device="cpu"``, it is called on
            the thread that calls ``next()``.
        device_prefetch: Number of batches that may be ready on the device; only with workers.

        **Failures and resuming**

        timeout: Seconds that ``next()`` waits for a batch before it raises
            ``LoaderTimeoutError``; 0 waits forever. No batch is lost: the next call waits on.
        sample_timeout: Seconds that one sample may take; None for no limit. While ``next()`` waits
            for a batch, a worker that takes longer is killed and replaced. Its batch is loaded
            again, with a ``SampleTimeoutError`` in place of that sample. The error is raised at its
            batch's place, or handled as ``on_error`` says. It names the index and has the Python
            stack where the worker was killed. ``__getitems__`` gets the limit times the number of
            indices. The stream of an iterable dataset ends with the sample that hung, as after any
            exception of its iterator. The limit does not apply to ``collate_fn``. It needs worker
            processes: a thread cannot be ended (``thread_pool=True``). These replacements do not
            count for ``worker_restarts``, but here, too, a new worker's random generators start
            anew.
        worker_restarts: How many workers that die are replaced in an epoch. The batches that they
            were loading are loaded again, in order. If no replacement is left (with 0, there is
            none), a death raises ``WorkerDiedError``.
            With ``executor``, this is how many batches that the executor has lost are submitted
            again in an epoch. A batch that is lost more than once counts each time, and what the
            executor makes again by itself does not count. The random generators of a new worker
            start anew (with ``seed``, those of each sample are the same as before). An iterable
            dataset resumes from its last state, see ``snapshot_every_n_steps``. Without a state, it
            is iterated again from the start, and the samples that were already delivered are
            discarded.
        on_error: What happens to a sample for which a map-style dataset raises an ``Exception``.
            "raise": ``next()`` raises it in place of the batch. "skip": the batch is delivered
            without the sample, or is left out if no sample remains. A function of ``(index,
            exception)`` is called in the worker and returns a sample to take its place. What the
            function raises, ``next()`` raises. With a ``DistributedSampler`` of several replicas,
            "skip" keeps ranks equal: a copy of the batch's first good sample replaces a bad one. A
            batch without any good sample then raises ``TooManyFailures``. With a
            :class:`~shmloader.sampling.TokenBatches`, bad samples are left out, since a copy might
            exceed the budget. If ``__getitems__`` fails for a batch, ``__getitem__`` is called for
            each index. Exceptions of ``collate_fn`` are always raised, and so are those of an
            iterable dataset's iterator: with such a dataset, only "raise" is possible.
        max_failures: How many samples may fail in an epoch: a number, or a fraction of the samples
            tried, such as 0.01. A fraction is checked once 100 samples have been tried, and at the
            epoch's end. It is a float or a ``fractions.Fraction``, above 0 and at most 1. If more
            fail, ``next()`` raises ``TooManyFailures``, with the last failure as its cause, and the
            iterator ends. None: any number may fail, but with "skip" an epoch in which all samples
            failed raises ``TooManyFailures`` as well.
        snapshot_every_n_steps: After how many of its batches a worker saves the state of the
            dataset; 0 or None for never. This is for a dataset that has ``state_dict()`` and
            ``load_state_dict(state)``, or whose iterator has them. Methods of these names that need
            other arguments are not called. "auto" means 1, or 0 if the dataset is a
            ``torch.nn.Module``, whose state is its weights. When the loader is resumed, or the
            worker replaced, an iterable dataset resumes from its last saved state. What was
            delivered since then is read again and discarded. The batches do not depend on this
            number; save large states rarely. The state of a map-style dataset is saved after every
            batch, whatever the number is. A state that cannot be saved breaks no epoch: only
            ``state_dict()`` of the loader raises.

    Attributes:
        failures: The newest 100 samples that failed and were skipped or replaced, over all epochs,
            oldest first. Each has ``index``, ``error`` (the exception, whose ``str`` is one line),
            ``traceback`` (its traceback, as text) and ``worker`` (its number; None without
            workers). ``failures.total`` counts them all. A failure is recorded when its batch is
            delivered, in the order of batches.
        epoch: Number of the epoch that is being iterated, from 0. Between epochs, it is the number
            of the epoch that the next ``iter()`` begins. States and :meth:`set_epoch` use the same
            number. With several iterators, the newest counts. An epoch that is left early is over
            when its iterator is dropped or closed. With ``persistent_workers=True``, the loader
            keeps the iterator, so such an epoch is over when the next one begins.

    Raises:
        ValueError, TypeError: If an argument has a wrong value or type, or cannot be combined with
            another one. Where torch checks an argument, the text is torch's.
    """

    __module__ = "shmloader"  # users import it from there

    shm_size: int | str | None
    worker_restarts: int
    device: Any
    device_transform: Callable[[Any], Any] | None
    device_prefetch: int
    on_error: OnError
    max_failures: int | float | Fraction | None
    fetch_concurrency: int | None
    sample_timeout: float | None

    _sample_seed: int | None = None
    #: Directory that contains ``proc`` and ``sys``.
    _root = "/"

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        shm_size: int | str | None = None,
        worker_restarts: int = 0,
        device: str | int | torch.device | None = None,
        device_transform: Callable[[Any], Any] | None = None,
        device_prefetch: int = DEVICE_PREFETCH,
        on_error: OnError = "raise",
        max_failures: int | float | Fraction | None = None,
        thread_pool: bool = False,
        seed: int | None = None,
        snapshot_every_n_steps: SnapshotInterval = "auto",
        fetch_concurrency: int | None = None,
        sample_timeout: float | None = None,
        executor: concurrent.futures.Executor | None = None,
    ) -> None:
        given, is_own = locals(), type(self) is not DataLoader
        # Now, since torch's constructor calls check_worker_number_rationality(), and past the
        # descriptors, which refuse some. A user's class may have attributes of these names.
        for name, default in DEFAULTS.items():
            if is_own or given[name] is not default:
                self.__dict__[name] = given[name]
        if num_workers == "auto":
            cores = usable_cores(Path("/"))
            self._adapter = Adapter(max(1, cores // 2), 2 * cores)
            num_workers = self._adapter.count
        if executor is not None and num_workers and prefetch_factor is None:
            prefetch_factor = 1
        if Stream in type(dataset).__mro__:
            refuse(
                {
                    "shuffle: call its method shuffle()": shuffle,
                    "sampler or batch_sampler": (sampler, batch_sampler) != (None, None),
                    "drop_last here: give it to batch()": batch_size is None and drop_last,
                },
                NOT_WITH_STREAM,
            )
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn,
            pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, in_order=in_order,
        )  # fmt: skip
        values = read_options(self)
        if "seed" in values:
            self._sample_seed = self.__dict__["seed"] = values["seed"]
        self._make_plan(sampler, batch_sampler)
        # What depends on the order.
        if shm_size is not None and (self._ranks is None or self._ranks.known):
            _ = config_of(self).slot_bytes
        is_free = executor is not None or self._adapter is not None
        if seed is None and is_free and not is_plain_data(dataset):
            given_by = "num_workers='auto'" if executor is None else "executor="
            warn_user(
                f"{given_by} lets any idle worker take the next batch, so random augmentation "
                "depends on timing. Give seed= to make it reproducible. Without random numbers "
                "in samples, this is safe to ignore."
            )

    @property
    def failures(self) -> FailureList[FailedSample]:
        """The newest 100 samples that failed, oldest first; the class describes them."""
        return self._parts.failures

    def __repr__(self) -> str:
        """Return the class, the dataset, the batch size and the number of workers."""
        # A constructor may have raised, so attributes may be missing.
        dataset = describe_source(getattr(self, "dataset", None))
        size, workers = getattr(self, "batch_size", 1), getattr(self, "num_workers", 0)
        return f"{type(self).__name__}({dataset}, batch_size={size}, num_workers={workers})"

    # Iterators -------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        """Begin an epoch.

        Raises:
            ClosedLoaderError: After ``close()``.
        """
        # As torch's method does, which users' classes may rely on.
        if not (self.persistent_workers and self.num_workers > 0):
            return self._get_iterator()
        with self._parts.begin_lock:
            if getattr(self._iterator, "is_closed", False):
                self._iterator = None  # its workers died or were ended
            return super().__iter__()

    def _get_iterator(self) -> Any:
        """Return an iterator over a new epoch, with new workers. torch's ``__iter__`` calls it."""
        return self.begin_epoch(self._make_iterator, draws_seed=True)

    def begin_epoch(self, make: Callable[[], Any], *, draws_seed: bool) -> Any:
        """Begin an epoch, and return its iterator; called by iterators with persistent workers.

        Args:
            make: Makes a new iterator, or has one with persistent workers begin the epoch.
            draws_seed: Whether torch draws a base seed: not if workers run already.
        """
        # The iterator takes the state of its epoch from the loader, so one thread begins at a time.
        with self._parts.begin_lock:
            if self._is_closed:
                raise ClosedLoaderError(LOADER_CLOSED)
            plan = self._present_plan
            resumed = plan.resumed
            try:
                if resumed is not None:
                    plan.drop_state_of_another()  # a sampler's set_epoch() may have been called
                with contextlib.nullcontext() if plan.resumed is None else self._resuming(plan):
                    self._begin_epoch(plan, draws_seed=draws_seed)
                    iterator = make()
            except BaseException:
                plan.undo_begin(resumed)
                raise
            is_ours = isinstance(iterator, BatchIterator)
            plan.counter.iterator = weakref.ref(iterator) if is_ours else lambda: None
            return iterator

    def _make_iterator(self) -> Any:
        """Return an iterator over the epoch that has begun."""
        plan, parts = self._plan, self._parts
        assert plan is not None
        iterator: Any
        needs_torchs = self._needs_torchs_workers
        if needs_torchs:
            self._warn_of_torchs_workers()
        if needs_torchs or type(self.dataset) in WRAPPED_DATA_PIPES:
            iterator = super()._get_iterator()
            if not self.num_workers:
                return iterator
        else:
            config = config_of(self)
            if self.num_workers:
                self.check_worker_number_rationality()
            if self.num_workers > 1:
                config.start_count = start_count(self, config)
            iterator = BatchIterator(self, config, plan, parts)
        parts.add(iterator)
        if self._is_closed:  # by another thread, while the workers were started
            iterator._shutdown_workers()
            raise ClosedLoaderError(LOADER_CLOSED)
        return iterator

    def _warn_of_torchs_workers(self) -> None:
        """Warn that torch's own workers load, or raise if they cannot do all arguments."""
        text, given = describe_unsupported(), {*read_options(self)} - {"snapshot_every_n_steps"}
        if self._ranks is not None:
            given.add("ShardedDataLoader")
        if given:
            raise RuntimeError(f"{text} These cannot be combined with {', '.join(sorted(given))}.")
        warn_user(text, RuntimeWarning)

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as torch does.

        Threads may be many, an executor's processes elsewhere, and "auto" measures what helps.
        """
        if not self.thread_pool and self.executor is None and self._adapter is None:
            super().check_worker_number_rationality()

    @property
    def _all_samplers(self) -> tuple[object, ...]:
        """The samplers of this loader, one of which may be cut for ranks."""
        batches = self.batch_sampler
        return self.sampler, batches, probe(batches, "sampler"), probe(batches, "batch_sampler")

    @property
    def _is_in_ranks(self) -> bool:
        """Whether the loaders of other ranks have to deliver as many samples as this one."""
        return any(map(is_cut_for_ranks, self._all_samplers))

    def _seed_of_samples(self, seed: int) -> int:
        """Return the seed of the samples' random numbers, which differ between ranks.

        The order depends on the user's seed alone, since ranks must agree on it.
        """
        rank = rank_of(self._all_samplers)
        return seed if rank is None else seed_of_rank(seed, rank)

    # Where the time goes -----------------------------------------------------------------------

    def stats(self, of: Literal["epoch", "total"] = "epoch") -> "LoaderStats":
        """Return where the time has gone so far.

        May be called at any time, on any thread, and after ``close()``.

        ``print(loader.stats())`` shows a table. ``loader.stats().verdict`` says in a sentence or
        two what limits the speed and what to change.

        A call takes some milliseconds for each living worker, to measure its memory. If torch's own
        iterator loads (data pipes, or a system without memfd and pidfd), nothing is measured.

        Args:
            of: "epoch": the newest epoch, running or over. "total": all epochs since the loader
                was made, without the time between two of them.

        Returns:
            A frozen snapshot.

        Raises:
            ValueError: If ``of`` is neither "epoch" nor "total".
        """
        statistics = self._parts.statistics
        if choice(of, "of", ("epoch", "total")) == "epoch":
            return self._snapshot(statistics.newest(), min(1, statistics.epochs))
        return self._snapshot(statistics.total(), statistics.epochs)

    def _snapshot(self, sums: Sums | None, epochs: int) -> "LoaderStats":
        from shmloader.insight.verdict import snapshot  # noqa: PLC0415 - takes 10 ms

        return snapshot(sums, epochs, usable_cores(Path(self._root)))

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record the epochs that begin inside the block, and write them to a file at the end.

        The file opens in ui.perfetto.dev, and ``shmloader report`` makes a page of it. It has the
        batches of these epochs that were delivered inside the block, and their statistics.
        Recording takes about half a kilobyte of memory per batch. The file is also written if the
        block raises.

        Args:
            path: Path of the file, which is overwritten.

        Raises:
            OSError: If the file cannot be written: at the beginning of the block if it cannot be
                opened, otherwise at the end.
            RuntimeError: If a trace of this loader is being recorded already.
        """
        statistics, target = self._parts.statistics, Path(path)
        if statistics.traced is not None:
            raise RuntimeError("a trace of this loader is being recorded already")
        target.write_bytes(b"")
        statistics.traced = []
        try:
            yield
        finally:
            records = statistics.end_trace()
            total = records[0].sums() if len(records) == 1 else sum_of(None, records)
            stats = self._snapshot(total, len(records))
            write_trace(records, target, {"stats": dataclasses.asdict(stats), "table": str(stats)})

    # The end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers of this loader and free its memory. May be called again.

        Batches that were delivered stay as they are. Further calls of ``iter()`` and ``next()``
        raise ``ClosedLoaderError``; those of torch's own iterator raise what torch raises.
        """
        self._is_closed = True
        with contextlib.ExitStack() as stack:  # if a close is interrupted, the others still run
            for iterator in self._parts.open_iterators():
                stack.callback(iterator._shutdown_workers)
        self._parts.host_pool = self._parts.nursery = None
        # Last, since no exception is raised from an iterator that is freed as garbage.
        self._iterator = None

    def __enter__(self) -> Self:
        """Return the loader itself, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the loader."""
        self.close()


for _name, _default in DEFAULTS.items():
    setattr(DataLoader, _name, _default)
DataLoader.seed = FixedArgument("seed")
