"""``shmloader.ShardedDataLoader``: one global order, divided among ranks.

The module is long because half of it documents and lists the arguments.
"""

import concurrent.futures
import inspect
import pickle
import reprlib
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args, overload

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler

from shmloader.batch.failures import OnError
from shmloader.interruptions import probe
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.options import (
    DEVICE_PREFETCH,
    SnapshotInterval,
    WorkerScope,
    is_map_style,
    refuse,
)
from shmloader.loader.resumable import FixedArgument
from shmloader.process_state import PROCESS
from shmloader.sampling.arguments import Ranks, choice, divides_for_ranks, whole_number
from shmloader.sampling.hooks import is_planned
from shmloader.sampling.loader_samplers import SeededShardSampler, leave_out_repeats
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.progress import EpochCounter
from shmloader.sampling.sampler_state import chain
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.sampling.steps import LastBatch
from shmloader.streams.board import gather, pauses, store_of_job
from shmloader.streams.order import ReaderOrder
from shmloader.streams.stream import Stream

if TYPE_CHECKING:  # takes 10 ms
    from shmloader.insight.ranks import RankStats
    from shmloader.insight.stats import LoaderStats

_T_co = TypeVar("_T_co", covariant=True)

# The arguments that every loader has, and those that only this one has.
_OF_ALL = tuple(inspect.signature(DataLoader.__init__).parameters)[1:]
_OF_SHARDS = ("last_batch", "rank", "world_size", "worker_scope")


class Indexable(Protocol[_T_co]):
    """An object whose samples are loaded by index: a dataset, an array, a tensor, a sequence."""

    def __getitem__(self, index: Any, /) -> _T_co:
        """Return the sample of an index."""
        ...


class ShardedDataLoader(DataLoader[_T_co]):
    """A loader for several GPUs: one in each of their processes, which are the *ranks*.

    All ranks follow one global order of the samples, which depends on ``seed`` and the epoch alone.
    This order is cut into global batches of ``batch_size * world_size`` samples. Rank r takes the
    r-th part of each global batch. So all batches, one after the other, are the same for any number
    of ranks, as long as the global batch has the same size.

    ``docs/reference/arguments.md`` has all arguments and defaults in one table.

    Args:
        dataset: Map-style dataset, NumPy array, tensor or sequence. Or a stream of shards
            (:class:`shmloader.streams.Shards`), of which rank r of W has batches r, r + W, …

        **Batches**

        batch_size: Number of samples in a rank's batch. None only with ``batch_sampler``, or with a
            stream that makes batches.
        collate_fn: Makes a batch of a list of samples.
        drop_last: torch's way to say ``last_batch="discard"``.
        last_batch: What happens to samples that do not fill the last global batch. "pad" (the
            default) adds samples from the start of the epoch, so that all batches of all ranks are
            full. "discard" leaves them out. "keep" delivers them as they are, so that a rank may
            have a shorter last batch, or one step fewer. Cannot be combined with ``batch_sampler``.

        **Order and seed**

        shuffle: Whether each epoch has a random order of its own. The order is computed as needed
            and takes no memory.
        sampler: Yields the indices of all ranks, in the global order. Each rank draws all of them,
            with random generators (``random``, ``numpy.random``, torch) that depend on ``seed`` and
            the epoch. If the sampler has ``set_epoch``, that is called with the epoch. With
            ``thread_pool=True``, samples that draw from these generators at the same time change
            the order, so give the sampler its own generator then.
        batch_sampler: Yields a list of indices for each batch of all ranks. Batches are distributed
            whole: batch s of rank r is number ``s * world_size + r``. If batches do not fill the
            last global step, it is filled up from the epoch's start; with
            :class:`shmloader.sampling.TokenBatches`, as its ``last_batch`` says.
        seed: A whole number, 0 or more. Orders the epoch, and sets the random generators for each
            sample by its position in the global order, as ``seed`` of
            :class:`shmloader.DataLoader` does. So a run is the same on any number of ranks, as long
            as the global batch has the same size. Samples are fetched one by one, even if the
            dataset has ``__getitems__``. With ``thread_pool=True``, only
            :func:`shmloader.sample_rng` is set, not the generators of ``random``, ``numpy.random``
            and torch.
        generator: Random generator for shuffling, as with torch; for one rank only, since several
            could not agree on an order.

        **Ranks**

        rank: Number of this process, from 0. Give both ``rank`` and ``world_size``, or neither. If
            both are None, they are those of the default group of ``torch.distributed``. Without a
            group, they are torchrun's ``RANK`` and ``WORLD_SIZE``, or else Slurm's ``SLURM_PROCID``
            and ``SLURM_STEP_NUM_TASKS``, which ``srun`` sets. Without these, this is rank 0 of 1.
            They are resolved when the first epoch begins, so a loader may be made before the
            processes of a run are launched. Until then, ``len()``, ``state_dict()``,
            ``load_state_dict()`` and the samplers use the values of that moment. They raise
            ValueError if only one of two variables is set, or a value is wrong.
        world_size: Number of ranks.

        **Workers**

        num_workers: Number of worker processes; 0 loads in this process; "auto" as for
            :class:`DataLoader`, with ``worker_scope="rank"`` only.
        thread_pool: Whether workers are threads.
        worker_scope: "rank" (the default) if this loader has its own workers. "host" if all ranks
            of a host share one pool of workers: ``num_workers`` is then the number of workers of
            the host. Each of them makes the oldest batch of the waiting rank that it has served
            least recently. A separate process starts these workers. Each has the dataset once, and
            they persist until the loaders of all ranks are gone. Ranks must have datasets with the
            same contents, which they compare by checksums, and begin their loaders in the same
            order. Loaders of a process share a pool if they have the same dataset object,
            ``num_workers`` and ``worker_init_fn``. Several ranks need ``torch.distributed`` to be
            initialised. Linux only.
        executor: A ``concurrent.futures.Executor`` whose processes make the batches.
        pin_memory: Whether tensors are copied into page-locked memory.

        **As for** :class:`shmloader.DataLoader`

        fetch_concurrency: How many samples of a batch each worker loads at once.
        prefetch_factor: Number of batches in flight for each worker; None for 2, or for 1 with
            ``executor``.
        in_order: Whether batches are delivered in the epoch's order; otherwise, as soon as they are
            made.
        persistent_workers: Whether workers persist after an epoch.
        worker_init_fn: Called in each worker with the worker's number.
        multiprocessing_context: Name of a start method, or a context.
        shm_size: Maximum shared memory of one iterator.
        pin_memory_device: Deprecated by torch.
        device: The device of this rank, where batches arrive.
        device_transform: Called with each batch on the device.
        device_prefetch: Number of batches that may be ready on the device.
        timeout: Seconds to wait for a batch; 0 waits forever.
        sample_timeout: Seconds that one sample may take; None for no limit.
        worker_restarts: How many workers that die are replaced in an epoch.
        on_error: What happens to a sample that raises an ``Exception``.
        max_failures: How many samples may fail in an epoch, or what fraction of them.
        snapshot_every_n_steps: Whether the state of a dataset with ``state_dict()`` is saved after
            each batch. 1 or more for yes, 0 or None for never. "auto" for yes, unless the dataset
            is a ``torch.nn.Module``.

    Attributes:
        rank: The rank. Until the first epoch begins, it is that of the present environment; None if
            the environment variables are incomplete or wrong.
        world_size: The number of ranks, in the same way.
        sampler, batch_sampler: If you give neither, these yield this rank's share of the order,
            batch after batch, for frameworks that read or iterate a loader's samplers. ``sampler``
            is then an instance of torch's ``DistributedSampler``.

    Raises:
        ValueError, TypeError: If an argument has a wrong value or type, or cannot be combined with
            another one.
    """

    __module__ = "shmloader"  # users import it from there

    last_batch = FixedArgument("last_batch")
    _ranks: Ranks
    _sample_seed: int
    #: Whether the sampler yields this rank's share already.
    _is_cut = False

    def __init__(
        self,
        dataset: Indexable[_T_co],
        batch_size: int | None = 1,
        shuffle: bool = False,
        *,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[Any] | Iterable[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        last_batch: LastBatch | None = None,
        seed: int = 0,
        generator: torch.Generator | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: int | Literal["auto"] = 0,
        thread_pool: bool = False,
        executor: concurrent.futures.Executor | None = None,
        fetch_concurrency: int | None = None,
        sample_timeout: float | None = None,
        worker_scope: WorkerScope = "rank",
        prefetch_factor: int | None = None,
        in_order: bool = True,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        shm_size: int | str | None = None,
        pin_memory: bool = False,
        pin_memory_device: str = "",
        device: str | int | torch.device | None = None,
        device_transform: Callable[[Any], Any] | None = None,
        device_prefetch: int = DEVICE_PREFETCH,
        timeout: float = 0,
        worker_restarts: int = 0,
        on_error: OnError = "raise",
        max_failures: int | float | Fraction | None = None,
        snapshot_every_n_steps: SnapshotInterval = "auto",
    ) -> None:
        given = dict(locals())
        if not is_map_style(dataset) and not isinstance(dataset, Stream):
            raise ValueError(
                "ShardedDataLoader cannot divide an IterableDataset or a data pipe, which has no "
                "order of indices. Read its files with shmloader.streams.Shards, or let the "
                "dataset choose its part by rank, in a DataLoader"
            )
        if not isinstance(shuffle, bool | np.bool_ | None):
            raise TypeError(
                f"shuffle should be True or False, but got shuffle={reprlib.repr(shuffle)}"
            )
        _check_samplers(sampler, batch_sampler)
        if last_batch is not None:
            choice(last_batch, "last_batch", get_args(LastBatch))
        whole_number(seed, "seed", minimum=0)  # here None is refused, too
        if batch_sampler is None and batch_size is None and not isinstance(dataset, Stream):
            raise ValueError("batch_size is needed unless there is a batch_sampler")
        leave_out_repeats(batch_sampler)
        self._ranks = Ranks(rank, world_size)
        self._check_generator(generator)
        # All arguments are readable as attributes, some of which cannot be set by setattr(). The
        # properties rank and world_size return the resolved values instead.
        self.__dict__.update({name: given[name] for name in _OF_SHARDS})
        if not isinstance(dataset, Stream):
            drop_last = drop_last or (last_batch == "discard" and batch_sampler is None)
            batch_size = 1 if batch_size is None else batch_size
            given.update(batch_size=batch_size, shuffle=bool(shuffle), drop_last=drop_last)
        super().__init__(**{name: given[name] for name in _OF_ALL})

    def _make_own_sampler(self, counter: EpochCounter) -> SeededShardSampler | None:
        is_shuffled = isinstance(self.sampler, RandomSampler)
        if is_shuffled and self.generator is not None:
            return None  # torch's sampler draws from it
        return SeededShardSampler(self.dataset, self._sample_seed, counter, shuffle=is_shuffled)

    def _make_order(self) -> SeededOrder | ReaderOrder:
        if (stream := self._stream) is not None:
            return ReaderOrder(stream, self._sample_seed, self._ranks, self.last_batch or "pad")
        sampler, batch_size = self._batching()
        batches = sampler if batch_size is None else None
        _check_samplers(sampler, batches)
        own = self._source_of(sampler)
        # An order that a loader has divided leaves no samples over.
        self._is_cut = own is None and any(map(_is_own_share, chain(sampler)))
        last_batch: LastBatch = "keep"
        if not self._is_cut:
            given, drops = self.last_batch, self.drop_last
            refuse(
                {
                    "drop_last=True, which means 'discard'": drops and given in ("pad", "keep"),
                    "batch_sampler, which makes the batches": given and batches is not None,
                },
                f"last_batch={given!r} cannot be combined with ",
            )
            last_batch = "discard" if drops else given or "pad"
            if is_planned(batches) and batches.last_batch == "discard":
                last_batch = "discard"
        order = self._seeded_order(
            sampler,
            batch_size,
            last_batch,
            shuffle=own is not None and sampler.shuffle,
            ranks=None if self._is_cut else self._ranks,
        )
        if own is not None:
            sampler.order = order
        return order

    def _check_generator(self, generator: object) -> None:
        known = self._ranks.known
        if generator is not None and known is not None and known[1] > 1:
            raise ValueError(
                "generator cannot be given for more than one rank, since ranks could not agree on "
                f"an order (world_size={known[1]}); seed= chooses the order"
            )

    @property
    def _auto_collation(self) -> bool:
        """Whether samples are collated into batches; torch's name."""
        return self._stream is None or self.batch_size is not None

    @property
    def rank(self) -> int | None:
        """The rank, from 0; None while the environment variables are incomplete or wrong."""
        return known[0] if (known := self._ranks.known) else None

    @property
    def world_size(self) -> int | None:
        """The number of ranks; None while the environment variables are incomplete or wrong."""
        return known[1] if (known := self._ranks.known) else None

    def _begin_epoch(self, plan: EpochPlan, *, draws_seed: bool) -> None:
        self._ranks.resolve()
        self._check_generator(self.generator)
        super()._begin_epoch(plan, draws_seed=draws_seed)

    def _seed_of_samples(self, seed: int) -> int:
        # Positions in the global order are different on all ranks.
        return super()._seed_of_samples(seed) if self._is_cut else seed

    @property
    def _is_in_ranks(self) -> bool:
        """Whether other ranks have to deliver as many samples as this one."""
        return self._ranks.find()[1] > 1

    @overload
    def stats(
        self, of: Literal["epoch", "total"] = "epoch", *, ranks: Literal[False] = False
    ) -> "LoaderStats": ...

    @overload
    def stats(
        self, of: Literal["epoch", "total"] = "epoch", *, ranks: Literal[True]
    ) -> "RankStats": ...

    def stats(
        self, of: Literal["epoch", "total"] = "epoch", *, ranks: bool = False
    ) -> "LoaderStats | RankStats":
        """Return where the time has gone so far, on this rank or on all ranks.

        With ``ranks=True``, this is a collective operation: **all ranks have to call it**, equally
        often and, if they have several loaders, in the same order. Each waits until all have called
        it, at most ``timeout`` seconds. It goes through the store of ``torch.distributed``, on the
        CPU, and sends some kilobytes for each rank. Otherwise this is
        :meth:`shmloader.DataLoader.stats`.

        Args:
            of: "epoch": the newest epoch, running or over. "total": all epochs since the loader
                was made, without the time between two of them.
            ranks: Whether to gather the statistics of all ranks.

        Returns:
            A frozen snapshot. With ``ranks=True``, a
            :class:`~shmloader.insight.ranks.RankStats`. It says which rank waited longest for
            data, and whether the others waited for that rank.

        Raises:
            ValueError: If ``of`` is neither "epoch" nor "total"; or with ``ranks=True``, if there
                are several ranks and ``torch.distributed`` is not initialised.
            LoaderTimeoutError: If some ranks have not called it within ``timeout`` seconds, or if
                two loaders were made with the same ``rank``.
        """
        own = super().stats(of)
        if not ranks:
            return own
        from shmloader.insight.ranks import RankStats  # noqa: PLC0415 - takes 10 ms

        rank, world_size = self._ranks.find()
        if world_size == 1:
            return RankStats((own,))
        store, number = store_of_job(_NEEDS_GROUP), PROCESS.gathers
        PROCESS.gathers += 1
        wait = pauses(self.timeout, f"rank {rank} waits until all ranks call stats(ranks=True)")
        found = gather(store, number, pickle.dumps(own), (rank, world_size), wait)
        return RankStats(tuple(map(pickle.loads, found)))

    @property
    def padding(self) -> int:
        """Number of repeated samples in the batch that ``next()`` returned last.

        They are the last samples in it. 0 before the first batch.

        Raises:
            RuntimeError: With ``in_order=False``, where the number of that batch is not known.
        """
        if not self.in_order:
            raise RuntimeError("padding is known only with in_order=True")
        plan = self._present_plan
        return int(plan.newest.repeats_before(plan.counter.progress.position))


_NEEDS_GROUP = (
    "stats(ranks=True) asks the other ranks through torch.distributed: call "
    "torch.distributed.init_process_group() before, or stats() for this rank alone"
)


def _check_samplers(sampler: object, batch_sampler: object) -> None:
    for given in (sampler, batch_sampler, probe(batch_sampler, "sampler")):
        if divides_for_ranks(given) and not _is_own_share(given):
            raise ValueError(
                f"{type(given).__name__} gives a part of the samples to each rank, and "
                "ShardedDataLoader would divide that part again. Give a sampler of all samples, "
                "such as shuffle=True, or use DataLoader with this sampler."
            )


def _is_own_share(sampler: object) -> bool:
    """Whether this is another sharded loader's sampler, which frameworks build loaders from."""
    return isinstance(sampler, SeededShardSampler)
