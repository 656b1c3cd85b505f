"""``shmloader.DataLoader``: torch's loader, with our iterators behind it."""

import contextlib
import copy
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    Sampler,
)
from torch.utils.data.dataloader import _DatasetKind

from shmloader.batch.fetch import FetchConfig, OnError
from shmloader.batch.plain_data import only_hands_out
from shmloader.device.backend import parse_device
from shmloader.engine.adapting import Adapter
from shmloader.engine.failures import FailedSample, FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.loader.by_torch import (
    TorchInProcessIterator,
    TorchIterator,
    TorchWorkerIterator,
)
from shmloader.loader.config import LoaderConfig, LoaderParts, lend_limit
from shmloader.loader.in_process import InProcessIterator
from shmloader.loader.iterator import WorkerIterator
from shmloader.loader.measured import MeasuredLoader
from shmloader.loader.resumable import describe_unsupported
from shmloader.loader.threaded import ThreadIterator
from shmloader.memory.slot import is_supported
from shmloader.options import (
    DEVICE_PREFETCH,
    LastBatch,
    check_auto,
    check_device_options,
    check_fetch_concurrency,
    check_last_batch,
    check_max_failures,
    check_on_error,
    check_seed,
    check_snapshot_interval,
    check_thread_pool,
    check_worker_restarts,
    parse_size,
    slot_share,
)
from shmloader.pools.cores import usable_cores
from shmloader.probing import probe
from shmloader.sampling.checks import whole_number
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.positions import PositionedStreams
from shmloader.sampling.ranks import is_cut_for_ranks
from shmloader.sampling.rollover import RolloverBatchSampler
from shmloader.sampling.sampler_order import SamplerOrder
from shmloader.sampling.seeded_order import SeededOrder, SeededRandomSampler
from shmloader.sampling.steps import Cut, Tail

_T_co = TypeVar("_T_co", covariant=True)

_AUTO_WARNING = (
    "num_workers='auto' gives a batch to whichever worker is there: what samples draw from random "
    "streams depends on who loads them, and so on the machine's speed. Give seed=, and it does "
    "not; if samples draw nothing, there is nothing to heed."
)


class _BeginLock:
    """Held by the thread that begins an epoch. A forked child does not find it held."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it, once nobody else does."""
        if self._pid != os.getpid():  # by a thread that is not there
            self._pid, self._lock = os.getpid(), threading.RLock()
        with self._lock:
            yield


def _own_parts() -> dict[str, Any]:
    """Attributes that each loader has of its own: a copy of it, or a pickle, gets new ones."""
    return {
        "_open_iterators": weakref.WeakSet(),
        "_begin_lock": _BeginLock(),
    }


class DataLoader(MeasuredLoader[_T_co]):
    """A drop-in for ``torch.utils.data.DataLoader`` whose batches lie in shared memory.

    Takes torch's arguments, in torch's order and with torch's meaning, and gives the same
    batches. Workers collate straight into shared-memory slots that are used again and again; a
    large tensor of a batch is a view of its slot, which comes back when the last view is
    dropped. Batches may be kept for as long as one likes: beyond four, they are copied out.

    Args:
        dataset: As torch's, likewise all that follow but the last.
        batch_size: Samples in a batch; None for no batching.
        shuffle: Whether each epoch has an order of its own.
        sampler: Gives the indices.
        batch_sampler: Gives lists of indices.
        num_workers: Worker processes; 0 loads in this process. "auto" begins with half of the cores
            and changes their number while it runs: one more as long as batches come faster for it,
            one fewer where none is missed, up to twice the cores. The attribute is the present
            number, and ``get_worker_info().num_workers`` the most there may be. The batches are
            the same where samples do not depend on their worker: with ``seed``, or a dataset that
            draws no random numbers; without ``seed``, a warning says so. Map-style datasets and
            processes only.
        collate_fn: Makes a batch of samples. ``default_collate``, called from here or from a
            function of one's own, writes straight into the slot, and so does what writes into
            :func:`shmloader.empty`.
        pin_memory: Whether tensors are copied into page-locked memory.
        drop_last: Whether a last batch that is short is left out.
        timeout: Seconds to wait for a batch; 0 for ever.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: A start method's name or a context.
        generator: Random stream for shuffling and the base seed.
        prefetch_factor: Batches in flight for each worker; 2 if None.
        persistent_workers: Whether workers persist after an epoch.
        pin_memory_device: Deprecated by torch.
        in_order: Whether batches come in the sampler's order.
        shm_size: Cap on the shared memory of one iterator: bytes, or text such as ``"512MiB"``.
            It is cut into equal shares for ``prefetch_factor * num_workers + 4`` slots (with a
            device, ``device_prefetch + 2`` in place of the 4 if that is more), and a batch that
            needs more than its share raises ``SharedMemoryError``. None: no cap.
        worker_restarts: How many workers that die are replaced in an epoch; what they had in work
            is loaded again, in order. 0: a death raises ``WorkerDiedError``, and so does a second
            death over the same batch. The new worker's random streams start anew (with ``seed``,
            each sample's are what they were). An iterable dataset goes on from its last state
            (``snapshot_every_n_steps``) if it has any, else it is iterated anew, past what was
            given already.
        device: Where batches are to arrive: ``"cuda:0"``, an index, a ``torch.device``. They are
            copied there from page-locked slots by a thread, on a stream of its own; the current
            stream of the thread that calls ``next()`` waits for them. None or ``"cpu"``: nowhere.
        transform: Called with each batch on the device, on that thread and stream.
        device_prefetch: Batches that may be ready on the device.
        on_error: What becomes of a sample for which a map-style dataset raises an ``Exception``.
            "raise": the batch raises it. "skip": the batch comes without it, and not at all if
            nothing is left of it. A function ``(index, exception) -> sample``, called in the
            worker: the batch has what that returns; what it raises, the batch raises. With a
            ``DistributedSampler`` of several replicas, "skip" puts a copy of the batch's first
            good sample in the place of a bad one, so that ranks stay equal, and a batch without
            any raises ``TooManyFailures``. Where ``__getitems__`` fails for a batch, it is asked
            for each index by itself. What collate raises, and the iterator of an iterable
            dataset, is always raised.
        max_failures: How many samples may fail in an epoch: an int, or a ``fractions.Fraction``
            of the samples looked at, judged from the 100th on and at the epoch's end. More raise
            ``TooManyFailures`` with the last failure as its cause, and end the iterator. None:
            any number, but with "skip" an epoch in which all failed raises it, too.
        last_batch: What becomes of samples that do not fill the last batch: "keep" gives them as
            a shorter batch (torch's default), "discard" leaves them out (as ``drop_last=True``),
            "rollover" puts them first in the next epoch. These are taken over when an epoch is
            complete: one that is left early neither loses nor repeats what it began with. Not
            together with ``drop_last`` or ``batch_sampler``.
        thread_pool: Whether workers are threads of this process, for map-style datasets that wait,
            or let go of the interpreter, and are safe to use from several threads. Nothing is
            copied, ``get_worker_info()`` is None, and no random stream is seeded: the threads use
            this process's. Not with ``multiprocessing_context``, ``shm_size``, ``worker_restarts``.
        seed: A whole number: randomness depends on it, the epoch and a sample's position in the
            order alone, not on who loads what, and when. ``shuffle=True`` orders by it, in place
            of torch's global stream; a ``sampler`` or ``batch_sampler`` is drawn under streams of
            ``random``, ``numpy.random`` and torch that depend on it, and told the epoch by its
            ``set_epoch``, if it has one. Before each sample these streams are set anew, and before
            each collate; :func:`shmloader.sample_rng` gives a generator of the sample's own.
            Samples are fetched one by one, whatever ``__getitems__`` there is. With
            ``thread_pool=True``, ``sample_rng()`` alone is set. In-process, the streams are put
            back after each batch. A position is that in this loader's order: of several ranks,
            give each a seed of its own, or use :class:`shmloader.ShardedDataLoader`. The samples
            of an iterable dataset depend on the number of the worker and the position in its
            stream. ``loader.sampler`` is the order that is delivered, whose ``set_epoch`` names the
            next epoch, where torch would have a ``RandomSampler``. Not with ``generator``. None:
            all is torch's.
        snapshot_every_n_steps: After how many batches a worker takes the state of a dataset that
            has ``state_dict`` and ``load_state_dict``, or whose iterator has; 0 or None: never. An
            iterable dataset goes on from there when the loader is resumed, or the worker replaced:
            what was delivered since is read again and discarded. Where states are large, take them
            rarely; the batches are the same. A map-style dataset is asked after every batch, unless
            never.
        fetch_concurrency: How many samples of a batch are loaded at once inside each worker (in
            this process with ``num_workers=0``), of a map-style dataset: k coroutines, where
            ``__getitem__`` is an ``async def``, on an event loop that a worker keeps for its life;
            else k threads, from which ``__getitem__`` is called at the same time. Samples are
            fetched one by one, whatever ``__getitems__`` there is. Where one fails, those under way
            are waited for, and the first in order is raised. With ``seed``, ``sample_rng()`` alone
            is set. None: one after the other.

    Attributes:
        failures: The newest 100 samples that failed and were skipped or replaced, over all
            epochs, the oldest first: records with ``index``, ``error`` (an exception as it would
            have been raised) and ``worker`` (its number; None in-process). ``failures.total``
            counts them all. They are noted when their batch is handed over, in its order.
        epoch: Number of the epoch that the next ``iter()`` begins; see :meth:`set_epoch`.

    Raises:
        ValueError, TypeError: For arguments that do not fit, in torch's words.
    """

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
        transform: Callable[[Any], Any] | None = None,
        device_prefetch: int = DEVICE_PREFETCH,
        on_error: OnError = "raise",
        max_failures: int | Fraction | None = None,
        last_batch: LastBatch | None = None,
        thread_pool: bool = False,
        seed: int | None = None,
        snapshot_every_n_steps: int | None = 1,
        fetch_concurrency: int | None = None,
    ) -> None:
        self.thread_pool = thread_pool  # torch's constructor warns of too many processes
        if num_workers == "auto":
            num_workers = self._take_auto(dataset, is_seeded=seed is not None)
        if seed is not None:
            seed = whole_number(seed, "seed", minimum=0)
        check_seed(
            seed,
            has_generator=generator is not None,
            is_data_pipe=isinstance(dataset, IterDataPipe | MapDataPipe),
        )
        check_last_batch(
            last_batch,
            batch_size,
            drop_last=drop_last,
            has_batch_sampler=batch_sampler is not None,
            is_iterable=isinstance(dataset, IterableDataset | MapDataPipe),
        )
        if last_batch == "discard":
            drop_last = True
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        check_worker_restarts(worker_restarts, self.num_workers)
        self.shm_size = shm_size
        self.worker_restarts = worker_restarts
        wanted = self._wanted_devices(device)
        parsed = [parse_device(one) for one in wanted]
        has_device = any(one is not None for one in parsed)
        named = next((one for one in wanted if one is not None), None)
        check_device_options(named, transform, device_prefetch)
        if shm_size is not None:
            lent = lend_limit(has_device=has_device, device_prefetch=device_prefetch)
            most = self.num_workers if self._adapter is None else self._adapter.most
            window = self._window_wanted() or most * (self.prefetch_factor or 0)
            slot_share(parse_size(shm_size, "shm_size"), window + lent)
        self.device = device
        self.transform = transform
        self.device_prefetch = device_prefetch
        check_on_error(on_error)
        check_max_failures(max_failures, on_error)
        if on_error != "raise" and isinstance(dataset, MapDataPipe):
            raise ValueError(
                "on_error option should be 'raise' for a MapDataPipe, which torch's own iterator "
                f"loads, but got on_error={on_error!r}"
            )
        self.on_error = on_error
        self.max_failures = max_failures
        self._check_thread_pool()
        check_snapshot_interval(snapshot_every_n_steps)
        self.snapshot_every_n_steps = snapshot_every_n_steps
        check_fetch_concurrency(
            fetch_concurrency, is_iterable=isinstance(dataset, IterableDataset | MapDataPipe)
        )
        self.fetch_concurrency = fetch_concurrency
        self.__dict__.update(_own_parts())
        self._parts = LoaderParts(self._adapter)
        self.last_batch = last_batch
        self.seed = seed
        # Users may set the attribute; what the samples depend on was decided here.
        self._sample_seed = seed
        if seed is not None and sampler is None and batch_sampler is None:
            self._use_seeded_sampler(seed)
        if last_batch == "rollover":
            assert batch_size is not None
            # Set past torch's guard, which is there for users.
            self.__dict__["batch_sampler"] = RolloverBatchSampler(self.sampler, batch_size)
        self._plan = EpochPlan(self._make_order(sampler, batch_sampler))
        self._share_carry_over()
        self._is_closed = False

    def _take_auto(self, dataset: object, *, is_seeded: bool) -> int:
        """The number of workers to begin with; called by the constructor."""
        check_auto(
            is_iterable=isinstance(dataset, IterableDataset | MapDataPipe),
            thread_pool=self.thread_pool,
        )
        if not (is_seeded or self._may_shard or only_hands_out(dataset)):
            warnings.warn(_AUTO_WARNING, stacklevel=3)
        cores = usable_cores(Path("/"))
        self._adapter = Adapter(max(1, cores // 2), 2 * cores)
        return self._adapter.count

    def _get_iterator(self) -> Any:
        """An iterator over a new epoch; torch's ``__iter__`` calls it."""
        self._check_thread_pool()  # attributes may have been set since
        plan, parts = self._present_plan, self._parts
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            # torch's own, for its graph of data pipes.
            iterator: Any = self._make_torchs_iterator()
        elif self.num_workers == 0:
            iterator = InProcessIterator(self, self._config(), plan, parts)
        elif self.thread_pool:
            iterator = ThreadIterator(self, self._config(), plan, parts)
        elif not is_supported():
            ours = {
                "shm_size": self.shm_size,
                "worker_restarts": self.worker_restarts,
                "device": self.device,
                "on_error": self.on_error != "raise",
                "last_batch": self.last_batch == "rollover",
                "steps of several batches": self._may_shard,
                "seed": self._sample_seed is not None,
                "fetch_concurrency": self.fetch_concurrency is not None,
            }
            wanted = [name for name, value in ours.items() if value]
            if wanted:
                raise RuntimeError(
                    f"{describe_unsupported()} It has no use for {', '.join(wanted)}."
                )
            warnings.warn(describe_unsupported(), RuntimeWarning, stacklevel=2)
            iterator = self._make_torchs_iterator()
        else:
            self.check_worker_number_rationality()
            iterator = WorkerIterator(self, self._config(), plan, parts)
        self._open_iterators.add(iterator)
        if self._is_closed:  # by another thread, while its workers were started
            iterator.close()
            raise ClosedLoaderError("the loader is closed")
        return iterator

    def _make_torchs_iterator(self) -> TorchIterator:
        if self.num_workers == 0:
            return TorchInProcessIterator(self, self._present_plan, self._parts)
        self.check_worker_number_rationality()
        return TorchWorkerIterator(self, self._present_plan, self._parts)

    def _check_thread_pool(self) -> None:
        given = {
            "multiprocessing_context": self.multiprocessing_context is not None,
            "shm_size": self.shm_size is not None,
            "worker_restarts": bool(self.worker_restarts),
        }
        is_iterable = isinstance(self.dataset, IterableDataset | MapDataPipe)
        check_thread_pool(self.thread_pool, self.num_workers, is_iterable=is_iterable, given=given)

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as torch does.

        Threads may be many, and "auto" has found out that these help.
        """
        if not self.thread_pool and self._adapter is None:
            super().check_worker_number_rationality()

    @property
    def _dispatches_dynamically(self) -> bool:
        """Whether a batch need not come from a certain worker, and there are several."""
        may = not self.in_order or self._sample_seed is not None
        may = (may and self.num_workers > 1) or self._adapter is not None
        return may and self._dataset_kind == _DatasetKind.Map

    #: Whether what is drawn may be a list of index lists.
    _may_shard = False

    @property
    def failures(self) -> FailureList[FailedSample]:
        """The newest samples that failed; see the class."""
        return self._parts.failures

    _open_iterators: weakref.WeakSet[Any]
    _begin_lock: _BeginLock
    #: Decides how many workers there are, with ``num_workers="auto"``.
    _adapter: Adapter | None = None

    def _use_seeded_sampler(self, seed: int) -> None:
        """Put the order that is delivered in the place of torch's RandomSampler."""
        if type(self.sampler) is RandomSampler:
            self._set_own_sampler(SeededRandomSampler(self.sampler.data_source, seed))

    def _own_sampler(self, items: Iterable[Any] | None) -> SeededRandomSampler | None:
        """Return the loader's own seeded sampler; None if the user's ``items`` are the order."""
        sampler = self.sampler
        return sampler if items is None and isinstance(sampler, SeededRandomSampler) else None

    def _set_own_sampler(self, sampler: SeededRandomSampler) -> None:
        """Set ``sampler``, and the batch sampler over it, past torch's guard."""
        own = self.__dict__
        own["sampler"] = sampler
        batches = own["batch_sampler"]
        if type(batches) is BatchSampler:
            own["batch_sampler"] = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        elif isinstance(batches, RolloverBatchSampler):
            batches.sampler = sampler

    def _share_carry_over(self) -> None:
        """Have the batch sampler begin with what the order of the loader carries over."""
        assert self._plan is not None
        carry_over = self._plan.order.carry_over
        if carry_over is not None and isinstance(self.batch_sampler, RolloverBatchSampler):
            self.batch_sampler.carry_over = carry_over

    def _make_order(
        self, sampler: Iterable[Any] | None, batch_sampler: Iterable[list[Any]] | None
    ) -> SeededOrder | SamplerOrder:
        """Return what the index batches come from; called by the constructor.

        Args:
            sampler: The user's, or None.
            batch_sampler: The user's, or None.
        """
        seed, index_sampler = self._sample_seed, super()._index_sampler
        is_iterable = isinstance(self.dataset, IterableDataset)
        if seed is None or is_iterable:
            return SamplerOrder(
                index_sampler if seed is None else PositionedStreams(index_sampler),
                is_iterable=is_iterable,
                batch_size=self.batch_size,
                tail="drop" if self.drop_last else self.last_batch or "keep",
                seed=seed,
            )
        tail: Tail = "drop" if self.drop_last else "uneven"
        items = sampler if batch_sampler is None else batch_sampler
        return SeededOrder(
            self.batch_size,
            0,
            Cut(self.batch_size or 1),
            "rollover" if self.last_batch == "rollover" else tail,
            seed,
            length=cast("Sized", self.dataset) if items is None else None,
            shuffle=isinstance(self.sampler, RandomSampler),
            items=items,
            own_sampler=self._own_sampler(items),
            may_shard=False,
            is_positioned=True,
        )

    @property
    def _is_in_ranks(self) -> bool:
        """Whether other loaders have to give as many samples as this one."""
        samplers = (self.sampler, self.batch_sampler, probe(self.batch_sampler, "sampler"))
        return any(map(is_cut_for_ranks, samplers))

    def _wanted_devices(self, device: object) -> list[Any]:
        """Where batches are to arrive; called by the constructor."""
        return [device]

    def _window_wanted(self) -> int | None:
        """Batches in flight, if not by ``prefetch_factor``; called by the constructor."""
        return None

    def _config(self) -> LoaderConfig:
        """Return the arguments as an iterator that begins now finds them."""
        is_iterable = self._dataset_kind == _DatasetKind.Iterable
        size, adapter = self.shm_size, self._adapter
        order = self._present_plan.order
        fetch = FetchConfig(
            is_iterable,
            self._auto_collation,
            self.drop_last,
            keep_size=self.on_error == "skip" and self._is_in_ranks,
            may_shard=(self._may_shard and isinstance(order, SeededOrder) and order.may_give_lists),
            seed=self._sample_seed,
            snapshot_every=self._snapshot_interval(is_iterable=is_iterable),
            is_persistent=bool(self.persistent_workers),
            concurrency=self.fetch_concurrency,
        )
        return LoaderConfig(
            fetch=fetch,
            dataset=self.dataset,
            collate_fn=self.collate_fn,
            on_error=self.on_error,
            max_failures=self.max_failures,
            saves_dataset=self._saves_dataset,
            num_workers=self.num_workers,
            most_workers=max(self.num_workers, 0 if adapter is None else adapter.most),
            prefetch_factor=self.prefetch_factor or 0,
            fixed_window=self._window_wanted(),
            in_order=self.in_order,
            is_dynamic=self._dispatches_dynamically,
            timeout_s=self.timeout,
            worker_init_fn=self.worker_init_fn,
            worker_restarts=self.worker_restarts,
            multiprocessing_context=self.multiprocessing_context,
            is_threaded=self.thread_pool,
            shm_bytes=None if size is None else parse_size(size, "shm_size"),
            devices=tuple(parse_device(one) for one in self._wanted_devices(self.device)),
            has_steps=self._has_steps,
            device_prefetch=self.device_prefetch,
            transform=self.transform,
            root=self._root,
        )

    @property
    def _has_steps(self) -> bool:
        """Whether each step is a list of batches, one for each device."""
        return False

    def _snapshot_interval(self, *, is_iterable: bool) -> int:
        """Return after how many batches a worker takes its dataset's state; 0 for never.

        A map-style dataset cannot read again what it gave since: it is asked after every batch.
        """
        if is_iterable:
            return self.snapshot_every_n_steps or 0
        return 1 if self._saves_dataset else 0

    def __iter__(self) -> Any:
        """Begin an epoch.

        Raises:
            ClosedLoaderError: After ``close()``.
        """
        # What an epoch begins with, its iterator finds here: threads begin one after the other.
        with self._begin_lock.held():
            if self._is_closed:
                raise ClosedLoaderError("the loader is closed")
            if getattr(self._iterator, "is_closed", False):
                # Its workers died or were ended; the next epoch gets new ones.
                self._iterator = None
            plan = self._present_plan
            resumed = plan.resumed
            try:
                self._begin_epoch()
                return super().__iter__()
            except BaseException:
                plan.take_back(resumed)
                raise

    def close(self) -> None:
        """End all workers of this loader and free its memory. May be called again.

        Batches that were handed over stay as they are. Further ``iter()`` and ``next()`` raise
        ``ClosedLoaderError``.
        """
        self._is_closed = True
        with contextlib.ExitStack() as stack:  # one that is interrupted keeps none of the others
            for iterator in list(self._open_iterators):
                stack.callback(iterator.close)
        # Last: as garbage, it could not raise what interrupts its end.
        self._iterator = None

    def __enter__(self) -> Self:
        """The loader itself; closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what runs, and what failed: a copy, or a pickle, has no workers."""
        plan = self._present_plan
        if plan.progress.is_ended:
            plan.commit()  # a copy has what was left over
        state = self.__dict__.copy()
        state["_iterator"] = None
        for name in (*_own_parts(), "_parts"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`__getstate__` returned."""
        self.__dict__.update(state)
        self.__dict__.update(_own_parts())
        if self._adapter is not None:
            self.__dict__["_adapter"] = Adapter(self.num_workers, self._adapter.most)
        self._parts = LoaderParts(self._adapter)
        self._unshare_plan()

    def _unshare_plan(self) -> None:
        """Have a plan of its own: copy.copy() passes on the objects that the original uses."""
        plan = self._present_plan
        old = plan.order
        if isinstance(self.batch_sampler, RolloverBatchSampler):
            self.__dict__["batch_sampler"] = copy.copy(self.batch_sampler)
        if isinstance(old, SamplerOrder):
            order: SeededOrder | SamplerOrder = copy.copy(old)
            if isinstance(order.index_sampler, RolloverBatchSampler):
                order.index_sampler = self.batch_sampler
        else:
            sampler = copy.copy(old.own_sampler)
            if sampler is not None:
                self._set_own_sampler(sampler)
            order = old.copy(sampler)
        self._plan = plan.copy(order)
        self._share_carry_over()
