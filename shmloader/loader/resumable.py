"""The part of a loader that knows its epochs: their order, the position, saved states, copies.

The module is long because frameworks read and set these attributes on the loader itself, so none of
them can move to another object.
"""

import contextlib
import copy
import logging
import operator
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Sized
from typing import Any, TypeVar, cast

import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from shmloader.engine.dataset_checkpoints import DatasetCheckpoints
from shmloader.errors import LOADER_CLOSED, ClosedLoaderError
from shmloader.loader.arguments import SnapshotInterval, describe_epoch_remedy, is_data_pipe
from shmloader.loader.by_torch import describe_unsupported
from shmloader.loader.config import LoaderParts
from shmloader.loader.rebuilt import warn_of_lightning_epochs, warn_of_lightning_states
from shmloader.loader.states import BatchArgument, check_savable, check_state, sealed
from shmloader.memory.system_support import is_supported
from shmloader.pools.adapting import Adapter
from shmloader.sampling.epoch_counter import EpochCounter
from shmloader.sampling.indices import PositionedStreams
from shmloader.sampling.own_state import has_state_methods
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.rollover import RolloverBatchSampler
from shmloader.sampling.sampler_checkpoint import counts_epochs
from shmloader.sampling.sampler_order import SamplerOrder
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.sampling.seeded_samplers import (
    SeededRandomSampler,
    SeededSampler,
    SeededSequentialSampler,
    SeededShardSampler,
)
from shmloader.sampling.steps import Cut, LastBatch

_T_co = TypeVar("_T_co", covariant=True)

_log = logging.getLogger("shmloader")


class _BeginLock:
    """Lock that a thread holds while it begins an epoch. In a forked child it is free again."""

    __slots__ = ("_lock", "_pid")

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()

    def present(self) -> threading.RLock:
        """Return the lock of this process."""
        if self._pid != os.getpid():  # it may be held by a thread that the child does not have
            self._pid, self._lock = os.getpid(), threading.RLock()
        return self._lock


class _Epoch:
    """``loader.epoch``: not a property, so that a subclass may have an attribute of that name."""

    def __get__(self, loader: Any, _: object = None) -> Any:
        return self if loader is None else loader._plan.present_epoch


class ResumableLoader(torch.utils.data.DataLoader[_T_co]):
    """A loader whose state can be saved and loaded. Used on the user's thread.

    The order of the samples and the position in it belong to the :class:`EpochPlan`. This class
    makes the plan, saves the states of the dataset as well, and checks whether a state fits.
    """

    thread_pool: bool
    executor: Any
    last_batch: LastBatch | None
    snapshot_every_n_steps: SnapshotInterval

    #: Decides how many workers there are, with ``num_workers="auto"``.
    _adapter: Adapter | None = None
    #: The seed that samples and order depend on, as the constructor got it.
    _sample_seed: int | None
    #: Set at the end of the constructor.
    _plan: EpochPlan | None = None
    _is_closed = False
    _has_warned_of_epoch = False

    # Not shared or copied: a copy or a pickle of the loader gets new ones.
    _parts: LoaderParts
    _open_iterators: weakref.WeakSet[Any]
    _begin_lock: _BeginLock

    def _make_own_parts(self) -> None:
        self._open_iterators = weakref.WeakSet()
        self._begin_lock = _BeginLock()
        self._parts = LoaderParts(self._adapter)

    # The order -----------------------------------------------------------------------------

    @property
    def _index_sampler(self) -> Any:
        """The sampler that torch's iterators iterate."""
        plan = self._plan
        return super()._index_sampler if plan is None else plan.order.index_sampler

    @property
    def _present_plan(self) -> EpochPlan:
        """The plan, with the generator that the loader has now: users may replace it."""
        plan = self._plan
        assert plan is not None
        plan.generator = self.generator
        return plan

    def _make_plan(
        self, sampler: Iterable[Any] | None, batch_sampler: Iterable[list[Any]] | None
    ) -> None:
        """Set the plan; called by the constructor with the user's samplers, or None."""
        if self.last_batch == "rollover" and batch_sampler is None:
            assert self.batch_size is not None
            # Set in __dict__, since torch's __setattr__ refuses to change this attribute.
            self.__dict__["batch_sampler"] = RolloverBatchSampler(self.sampler, self.batch_size)
        seed, counter = self._sample_seed, None
        if seed is not None and sampler is None and batch_sampler is None:
            counter = self._use_seeded_sampler(seed)
        self._set_plan(EpochPlan(self._make_order(sampler, batch_sampler), counter))

    def _make_order(
        self, sampler: Iterable[Any] | None, batch_sampler: Iterable[list[Any]] | None
    ) -> SeededOrder | SamplerOrder:
        seed, index_sampler = self._sample_seed, super()._index_sampler
        is_iterable = isinstance(self.dataset, IterableDataset)
        if seed is None or is_iterable:
            return SamplerOrder(
                index_sampler if seed is None else PositionedStreams(index_sampler),
                is_iterable=is_iterable,
                batch_size=self.batch_size,
                last_batch=self._last_batch_of(batch_sampler),
                seed=seed,
            )
        items = sampler if batch_sampler is None else batch_sampler
        return SeededOrder(
            self.batch_size,
            0,
            Cut(self.batch_size or 1),
            self._last_batch_of(batch_sampler),
            seed,
            length=cast("Sized", self.dataset) if items is None else None,
            shuffle=isinstance(self.sampler, RandomSampler),
            items=items,
            may_shard=False,
            is_positioned=True,
        )

    def _last_batch_of(self, batch_sampler: object) -> LastBatch:
        """Return what this loader does with samples that do not fill the last batch."""
        if self.drop_last:
            return "discard"
        return "keep" if batch_sampler is not None else self.last_batch or "keep"

    def _set_plan(self, plan: EpochPlan) -> None:
        """Set the plan; the batch sampler begins with the samples that the plan carries over."""
        self._plan = plan
        carry_over = plan.order.carry_over
        if carry_over is not None and isinstance(self.batch_sampler, RolloverBatchSampler):
            self.batch_sampler.carry_over = carry_over

    def _use_seeded_sampler(self, seed: int) -> EpochCounter:
        """Replace torch's sampler by the order that is delivered, and return its counter."""
        counter = EpochCounter()
        if type(self.sampler) is RandomSampler:
            self._set_own_sampler(SeededRandomSampler(self.sampler.data_source, seed, counter))
        elif type(self.sampler) is SequentialSampler:
            self._set_own_sampler(SeededSequentialSampler(self.sampler.data_source, seed, counter))
        return counter

    def _set_own_sampler(self, sampler: SeededSampler) -> None:
        """Set ``sampler`` and the batch sampler over it, which torch's __setattr__ refuses."""
        own = self.__dict__
        own["sampler"] = sampler
        batches = own["batch_sampler"]
        if type(batches) is BatchSampler:
            own["batch_sampler"] = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        elif isinstance(batches, RolloverBatchSampler):
            batches.sampler = sampler
        if own["batch_sampler"] is not None:
            # Set on the instance: frameworks take a subclass of torch's for one of the user's.
            own["batch_sampler"].set_epoch = sampler.set_epoch

    # Epochs --------------------------------------------------------------------------------

    #: Number of the epoch that is iterated; see the class of the loader.
    epoch = _Epoch()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; without this call, epochs are numbered from 0.

        An epoch that is being iterated keeps its number.

        With a ``seed``, order and random numbers are those of that epoch. If a sampler or batch
        sampler has ``set_epoch``, that is called with the number: at the beginning of each epoch
        with a ``seed``, otherwise now. A loaded state of that epoch is kept, and a state of another
        epoch is discarded.

        With a ``seed``, calling ``set_epoch`` of the sampler itself sets the number of the next
        epoch as well, if the sampler has an attribute ``epoch`` with that number. Before the first
        batch of the present epoch is asked for, that call sets the number of the present epoch.

        Without a seed or such a sampler, nothing depends on the number: a warning says so, once.

        Args:
            epoch: The number, 0 or more.

        Raises:
            TypeError: If it is not a whole number.
            ValueError: If it is negative.
        """
        plan = self._present_plan
        plan.set_epoch(epoch)
        has_effect = self._sample_seed is not None or counts_epochs(plan.order.index_sampler)
        if not (has_effect or self._has_warned_of_epoch):
            self._has_warned_of_epoch = True
            warnings.warn(
                f"set_epoch({epoch}) changes neither the order nor the random numbers of this "
                "loader: it has no seed, and no sampler with set_epoch. "
                + describe_epoch_remedy(self.dataset, has_generator=self.generator is not None),
                stacklevel=2,
            )

    def __len__(self) -> int:
        """Return the number of batches of the running epoch, or of the next one if none runs."""
        plan = self._present_plan
        if plan.progress.is_ended:
            plan.commit()
        return super().__len__()

    def _begin_epoch(self) -> None:
        if self.last_batch == "rollover":
            warn_of_lightning_epochs(self)
        plan = self._present_plan
        if plan.resumed is not None:
            self._resume_checkpoints(plan.resumed)
        plan.begin(draws_seed=self._iterator is None)

    def _resume_checkpoints(self, state: dict[str, Any]) -> None:
        """Make a new iterator resume the workers' datasets, if the state contains theirs."""
        if not self._saves_dataset:
            return
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
        if "streams" in state:
            resumed = DatasetCheckpoints.load(state["streams"], self.num_workers)
            self._parts.resumed_checkpoints = resumed
            again = sum(checkpoint.skip for checkpoint in resumed.checkpoints)
            if again and isinstance(self.dataset, IterableDataset):
                _log.info(
                    "epoch %d resumes at batch %d: %d batches that were delivered before are "
                    "re-read and discarded",
                    state["epoch"],
                    state["position"],
                    again,
                )

    @property
    def _saves_dataset(self) -> bool:
        """Whether a state contains the position of each worker's dataset, or its own state."""
        if isinstance(self.dataset, IterableDataset):
            return True
        return has_state_methods(self.dataset) and self._can_save_dataset

    @property
    def _snapshot_interval(self) -> int:
        """After how many batches a dataset's state is saved; 0 for never."""
        every = self.snapshot_every_n_steps
        if every == "auto":  # the state of a module is its weights
            return 0 if isinstance(self.dataset, torch.nn.Module) else 1
        return operator.index(every or 0)

    @property
    def _can_save_dataset(self) -> bool:
        """Whether the own states of a map-style dataset can be saved."""
        wants = self._snapshot_interval > 0
        shares = self.thread_pool or self.executor is not None
        return wants and not shares and self._adapter is None

    # States --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state: its position after the batches delivered so far.

        Batches that are only prefetched do not count. May be called between any two batches, on the
        thread that takes them. Once the epoch has ended with StopIteration, the state is that of
        the beginning of the next epoch.

        Returns:
            A dict of plain values that never change: a few hundred bytes, and the states of random
            generators. ``json``, ``pickle`` and ``torch.save`` can save it. If the dataset has
            ``state_dict`` and ``load_state_dict``, the dict also has what its ``state_dict``
            returned.

        Raises:
            RuntimeError: If torch's own iterator loads: for a data pipe, or with worker processes
                on a system without memfd and pidfd. Also if the state of the dataset, its iterator
                or the sampler cannot be taken or pickled.
        """
        self._check_has_state()
        warn_of_lightning_states(self)
        plan = self._present_plan
        if plan.resumed is not None:
            return copy.deepcopy(plan.resumed)
        will_restart = self._iterator is not None and not getattr(self._iterator, "is_closed", True)
        state = {
            **self._facts(),
            "persistent": bool(self.persistent_workers),
            **plan.state_dict(
                draws_seed=not will_restart, in_order=self.in_order or not self.num_workers
            ),
        }
        state = self._with_checkpoints(copy.deepcopy(state))
        check_savable(state)
        return sealed(state)

    def _with_checkpoints(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with the positions or states of the workers' datasets."""
        plan, checkpoints = self._present_plan, self._parts.checkpoints
        is_iterable = isinstance(self.dataset, IterableDataset)
        if has_state_methods(self.dataset) and not (is_iterable or self._can_save_dataset):
            self._warn_of_dataset()
        if checkpoints is None or not self._saves_dataset:
            return state
        is_mid = plan.epoch is not None and not plan.progress.is_ended
        is_persistent = self.num_workers == 0 or self._iterator is not None
        if is_mid:
            state["streams"] = checkpoints.dump()
            if is_iterable:
                state["position"] = sum(stream["given"] for stream in state["streams"]["streams"])
        elif is_persistent:
            ended = DatasetCheckpoints.load(checkpoints.dump(), self.num_workers)
            state["streams"] = ended.next_epoch(is_iterable=is_iterable).dump()
        return state

    def _warn_of_dataset(self) -> None:
        """Warn that a state lacks the map-style dataset's own, unless the user wants that.

        Threads share one dataset, which is ahead of the delivered batches. With "auto", resuming
        from the states of all workers would need the same number of workers again.
        """
        if self._snapshot_interval:
            how = "thread_pool=True" if self.thread_pool else 'num_workers="auto"'
            if self.executor is not None:
                how = "executor="
            warnings.warn(
                f"the dataset has state_dict() and load_state_dict(), but with {how} the loader's "
                "state does not contain the dataset's: save it yourself, use a fixed number of "
                "worker processes, or set snapshot_every_n_steps=0 if it need not be saved",
                stacklevel=4,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next ``iter()`` delivers the batch that followed it.

        Iterators that were made before raise RuntimeError at their next ``next()``: the state says
        which batches were delivered, and does not count theirs.

        Args:
            state: What ``state_dict()`` of such a loader returned, in this process or another.

        Raises:
            ValueError: If the state is damaged or does not fit this loader; the message says what
                was found and what was expected.
            TypeError: If it is not a dict.
            ClosedLoaderError: After ``close()``.
        """
        self._check_has_state()
        if self._is_closed:
            raise ClosedLoaderError(LOADER_CLOSED)
        loaded = copy.deepcopy(check_state(state, self._facts(), self._batch_argument))
        self._check_checkpoints(loaded)
        self._present_plan.load_state_dict(loaded)
        for iterator in list(self._open_iterators):
            iterator.replace()

    def _check_checkpoints(self, loaded: dict[str, Any]) -> None:
        """Raise ValueError if the states of the workers' datasets in a state do not fit."""
        if "streams" in loaded:
            if not self._saves_dataset:
                raise ValueError(
                    "the state does not fit this loader: the state contains the states of the "
                    f"dataset, which this loader cannot load: {self._describe_unsaved()}"
                )
            DatasetCheckpoints.load(loaded["streams"], self.num_workers)  # raises if it does not
        elif self._saves_dataset and loaded["position"]:
            what = "position" if isinstance(self.dataset, IterableDataset) else "state"
            raise ValueError(
                f"the state does not fit this loader: the state, after {loaded['position']} "
                f"batches, does not contain the {what} of the dataset, which this loader needs. It "
                "was saved with a dataset without state_dict(), or with snapshot_every_n_steps=0, "
                "thread_pool=True, executor= or num_workers='auto': set snapshot_every_n_steps=0 "
                "to resume without it"
            )

    def _describe_unsaved(self) -> str:
        """Say why this loader does not save the states of its dataset, and what to set."""
        if not has_state_methods(self.dataset):
            return "its dataset has no state_dict() and load_state_dict()"
        if self.thread_pool:
            return "thread_pool=True; set thread_pool=False"
        if self.executor is not None:
            return "executor=; set executor=None"
        if self._adapter is not None:
            return "num_workers='auto'; set the number of workers with which the state was saved"
        return f"snapshot_every_n_steps={self.snapshot_every_n_steps!r}; set it to 1 or more"

    @property
    def _batch_argument(self) -> BatchArgument:
        """The argument that decides the size of the batches that a state counts."""
        makes_batches = self.batch_size is None and self.batch_sampler is not None
        return "batch_sampler" if makes_batches else "batch_size"

    def _check_has_state(self) -> None:
        if is_data_pipe(self.dataset):
            raise RuntimeError("a data pipe, which torch's own iterator loads, has no state here")
        if self.num_workers and not self.thread_pool and not is_supported():
            raise RuntimeError(f"{describe_unsupported()} It has no state_dict().")

    def _facts(self) -> dict[str, Any]:
        """Return the values that a state and its loader must have in common."""
        length: int | None = None
        if not isinstance(self.dataset, IterableDataset):
            with contextlib.suppress(TypeError, NotImplementedError):  # it need not have a length
                length = len(self.dataset)  # type: ignore[arg-type]
        return {"length": length, **self._present_plan.order.facts()}

    # Copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle: no iterators, failures or statistics."""
        plan = self._present_plan
        if plan.progress.is_ended:
            plan.commit()  # a copy begins with the samples that were left over
        state = self.__dict__.copy()
        state["_iterator"] = None
        for name in ("_parts", "_open_iterators", "_begin_lock"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes that :meth:`__getstate__` returned."""
        self.__dict__.update(state)
        if self._adapter is not None:
            self._adapter = Adapter(self.num_workers, self._adapter.most)
        self._make_own_parts()
        self._unshare_plan()

    def _unshare_plan(self) -> None:
        """Copy the plan and the samplers, which copy.copy() has shared with the original."""
        plan = self._present_plan
        order, counter = copy.copy(plan.order), copy.copy(plan.counter)
        if isinstance(self.batch_sampler, RolloverBatchSampler):
            self.__dict__["batch_sampler"] = copy.copy(self.batch_sampler)
            if isinstance(order, SamplerOrder):
                order.index_sampler = self.batch_sampler
        if isinstance(self.sampler, SeededSampler) and self.sampler.epochs is plan.counter:
            sampler = copy.copy(self.sampler)
            sampler.epochs = counter
            if isinstance(sampler, SeededShardSampler) and isinstance(order, SeededOrder):
                sampler.order = order
            self._set_own_sampler(sampler)
        self._set_plan(plan.copy(order, counter))
