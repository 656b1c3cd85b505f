"""The part of a loader that knows its epochs: their order, the position, saved states, copies.

The module is long because frameworks read and set these attributes on the loader itself, so none of
them can move to another object.
"""

import contextlib
import copy
import operator
import pickle
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Self, TypeVar, cast

import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind

from shmloader.batch.dataset_state import Saved, save_dataset
from shmloader.engine.delivery import DatasetCheckpoints
from shmloader.errors import LOADER_CLOSED, ClosedLoaderError
from shmloader.grammar import warn_user
from shmloader.loader.config import LoaderParts
from shmloader.loader.options import (
    WRAPPED_DATA_PIPES,
    SnapshotInterval,
    WorkerScope,
    describe_unsupported,
)
from shmloader.loader.states import check_facts, check_state, versioned
from shmloader.memory.limits import why_unsupported
from shmloader.messages import Unsaved
from shmloader.pools.adapting import Adapter
from shmloader.sampling.hooks import (
    check_planned,
    has_state_methods,
    set_dataset_epoch,
)
from shmloader.sampling.loader_samplers import (
    SeededRandomSampler,
    SeededSampler,
    SeededSequentialSampler,
)
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.progress import EpochCounter
from shmloader.sampling.rng import changed, global_rng_state, set_global_rng_state
from shmloader.sampling.sampler_order import SamplerOrder
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.sampling.steps import LastBatch
from shmloader.streams.order import ReaderOrder
from shmloader.streams.stream import Stream

_T_co = TypeVar("_T_co", covariant=True)


# The samplers of torch's that are replaced by the order that is delivered, with a seed.
_SEEDED = {RandomSampler: SeededRandomSampler, SequentialSampler: SeededSequentialSampler}


class FixedArgument:
    """An attribute that only the constructor sets. A user's class may have one of the same name.

    A ``__setattr__`` of the loader would be called for each attribute that torch sets.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, _: type | None = None) -> Any:
        return None if loader is None else loader.__dict__.get(self._name)

    def __set__(self, loader: Any, value: object) -> None:
        kind = type(loader)
        if kind.__module__.partition(".")[0] == "shmloader":
            raise ValueError(
                f"{self._name} attribute should not be set after {kind.__name__} is initialized"
            )
        loader.__dict__[self._name] = value


class _Epoch(FixedArgument):
    """``loader.epoch``; the attribute of a user's class if that has set one."""

    def __get__(self, loader: Any, kind: type | None = None) -> Any:
        if loader is None or "epoch" in loader.__dict__:
            return super().__get__(loader, kind)
        return loader._present_plan.present_epoch


class ResumableLoader(torch.utils.data.DataLoader[_T_co]):
    """A loader whose state can be saved and loaded. Used on the user's thread.

    The order of the samples and the position in it belong to the :class:`EpochPlan`. This class
    makes the plan, saves the states of the dataset as well, and checks whether a state fits.
    """

    thread_pool: bool
    executor: Any
    seed: Any
    snapshot_every_n_steps: SnapshotInterval

    #: Whether the workers are this rank's own, or shared by the ranks of its host.
    worker_scope: WorkerScope = "rank"
    #: The :class:`Ranks` that the order is divided among; None if it is not.
    _ranks: Any = None
    #: Decides how many workers there are, with ``num_workers="auto"``.
    _adapter: Adapter | None = None
    #: The seed that samples and order depend on, as the constructor got it.
    _sample_seed: int | None
    #: Without a seed, it is made when it is needed.
    _plan: EpochPlan | None = None
    #: With a seed, numbers the plan's epochs.
    _counter: EpochCounter | None = None
    _is_closed = False

    _own_parts: LoaderParts | None = None

    @property
    def _parts(self) -> LoaderParts:
        """What iterators share. It is made when it is needed; a copy of the loader has its own."""
        parts = self._own_parts
        if parts is None:  # another thread may do this at the same time
            parts = self.__dict__.setdefault("_own_parts", LoaderParts(self._adapter))
        return parts

    @property
    def as_torch_sees_it(self) -> Any:
        """The loader that torch's base class of iterators reads: under install(), torch's own."""
        return self

    @property
    def _is_iterable(self) -> bool:
        """Whether the dataset is an IterableDataset, as torch's constructor found."""
        is_iterable = self._dataset_kind == _DatasetKind.Iterable
        return is_iterable and Stream not in type(self.dataset).__mro__

    @property
    def _stream(self) -> Stream | None:
        """The stream of shards whose batches are loaded; None for any other dataset."""
        # isinstance() would call functions of abc.
        if Stream not in type(self.dataset).__mro__:
            return None
        stream = cast("Stream", self.dataset)
        size = self.batch_size
        if size is None or stream.is_batched:
            return stream
        return stream.batch(size, collate=self.collate_fn, drop_last=self.drop_last)

    # The order -----------------------------------------------------------------------------

    @property
    def _present_plan(self) -> EpochPlan:
        """The plan, with the generator and the order of the attributes that the loader has now.

        Users may replace them, or what they consist of, in ways that ``__setattr__`` cannot see.
        """
        plan = self._plan
        if plan is None:
            plan = self._set_plan(EpochCounter())
        else:
            sources = self._order_sources()
            if not all(map(operator.is_, sources, plan.sources)):
                plan.order, plan.sources = self._make_order(), sources
        plan.generator = plan.order.generator = self.generator
        return plan

    def _order_sources(self) -> tuple[object, ...]:
        """Return what the order is made from: equally many values for one index sampler."""
        batches, inner = self._index_sampler, tuple[Any, ...]()
        if type(batches) is BatchSampler:
            inner = batches.sampler, batches.batch_size, batches.drop_last
        return batches, self.batch_size, *inner

    def _make_plan(
        self, sampler: Iterable[Any] | None, batch_sampler: Iterable[list[Any]] | None
    ) -> None:
        """Prepare the samplers; called by the constructor with the user's, or None."""
        check_planned(None if self.batch_size is None else sampler, batch_sampler, self.dataset)
        if self._sample_seed is None:
            return
        counter = self._counter = EpochCounter()
        own = self._make_own_sampler(counter) if sampler is batch_sampler is None else None
        if own is not None:
            self._set_own_sampler(own)
        self._set_plan(counter)  # now, since it records the epochs of the user's samplers

    def _make_own_sampler(self, counter: EpochCounter) -> SeededSampler | None:
        """Return what yields the order that is delivered, in place of torch's sampler."""
        kind, seed, sampler = _SEEDED.get(type(self.sampler)), self._sample_seed, self.sampler
        return kind and kind(sampler.data_source, seed, counter)  # type: ignore[attr-defined, arg-type]

    def _set_plan(self, counter: EpochCounter) -> EpochPlan:
        plan = self.__dict__["_plan"] = EpochPlan(self._make_order(), counter)
        plan.sources = self._order_sources()
        return plan

    def _make_order(self) -> SeededOrder | SamplerOrder | ReaderOrder:
        """Return the order of the samplers that the loader has now."""
        if (stream := self._stream) is not None:
            return ReaderOrder(stream, self._sample_seed)
        seed, batches, is_iterable = self._sample_seed, self._index_sampler, self._is_iterable
        if seed is None or is_iterable:
            return SamplerOrder(batches, is_iterable, seed)
        sampler, batch_size = self._batching()
        drops_last = batch_size is not None and batches.drop_last
        return self._seeded_order(
            sampler,
            batch_size,
            "discard" if drops_last else "keep",
            shuffle=isinstance(sampler, RandomSampler),
        )

    def _batching(self) -> tuple[Any, int | None]:
        """Return the sampler that is cut into batches, and their size; None if it is not cut."""
        batches = self._index_sampler
        if type(batches) is not BatchSampler or self.batch_size is None:
            return batches, None
        return batches.sampler, batches.batch_size

    def _seeded_order(
        self,
        sampler: Any,
        batch_size: int | None,
        last_batch: LastBatch,
        **more: Any,
    ) -> SeededOrder:
        """Return the order of a sampler's items, which depends on the seed."""
        length = self._source_of(sampler)
        # The counter is for a sampler that was put in place of the loader's, and may wrap it.
        has_own = isinstance(self.sampler, SeededSampler) and self.sampler.epochs is self._counter
        assert self._sample_seed is not None
        return SeededOrder(
            batch_size,
            last_batch,
            self._sample_seed,
            length=length,
            items=sampler if length is None else None,
            counter=self._counter if has_own and sampler is not self.sampler else None,
            **more,
        )

    def _source_of(self, sampler: object) -> Sized | None:
        """Return what has the indices that a seeded order yields itself; None to draw a sampler."""
        if isinstance(sampler, SeededSampler) and sampler.epochs is self._counter:
            return sampler.data_source
        return None

    def _set_own_sampler(self, sampler: SeededSampler) -> None:
        """Set ``sampler``, which torch's __setattr__ refuses, in the batch sampler as well."""
        self.__dict__["sampler"] = sampler
        batches: Any = self.batch_sampler  # torch's constructor has made it
        if batches is not None:
            # Set on the instance: frameworks take a subclass of torch's for one of the user's.
            batches.sampler, batches.set_epoch = sampler, sampler.set_epoch

    # Epochs --------------------------------------------------------------------------------

    #: Number of the epoch that is iterated; see the class of the loader.
    epoch = _Epoch("epoch")

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; without this call, epochs are numbered from 0.

        An epoch that is being iterated keeps its number.

        With a ``seed``, order and random numbers are those of that epoch. If a sampler or batch
        sampler has ``set_epoch``, that is called with the number: at the beginning of each epoch
        with a ``seed``, otherwise now. A loaded state of that epoch is kept, and a state of another
        epoch is discarded.

        With a ``seed``, calling ``set_epoch`` of the sampler itself sets the number of the next
        epoch as well, if the sampler has an attribute ``epoch`` with that number.

        From this call on, the dataset's ``set_epoch``, if it has one, is called with the number of
        each epoch when that begins: in this process, before iterators or workers are made, and in
        workers that have the dataset already. So it is after the state of such a run was loaded.
        The datasets in torch's ``Subset``, ``ConcatDataset`` and ``ChainDataset`` count, too.

        Without a seed, such a sampler or such a dataset, nothing depends on the number.

        Args:
            epoch: The number, 0 or more.

        Raises:
            TypeError: If it is not a whole number.
            ValueError: If it is negative.
        """
        self._present_plan.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches of the running epoch, or of the next one if none runs."""
        if self._stream is not None:
            plan = self._present_plan
            assert isinstance(plan.order, ReaderOrder)
            return plan.order.count(plan.present_epoch)
        if self._sample_seed is None or self._is_iterable:
            return super().__len__()
        return len(self._present_plan)

    def _begin_epoch(self, plan: EpochPlan, *, draws_seed: bool) -> None:
        """Begin the next epoch, for an iterator. Raises ValueError if its state does not fit."""
        if plan.resumed is not None:
            check_facts(plan.resumed, plan.order.facts())
            if self._saves_dataset and "datasets" in plan.resumed:
                loaded = DatasetCheckpoints.load(plan.resumed["datasets"], self.num_workers)
                self._parts.resumed_checkpoints = loaded
        plan.begin(draws_seed=draws_seed)
        if plan.tells_dataset:
            epoch = self._parts.told_epoch = plan.counter.newest
            assert epoch is not None
            set_dataset_epoch(self.dataset, epoch)

    @contextlib.contextmanager
    def _resuming(self, plan: EpochPlan) -> Iterator[None]:
        """Begin an epoch in the block from the state that was loaded.

        If that is a state between two epochs which has the dataset's own, the dataset loads it
        first: workers start with the dataset as it is in this process. After the block, the
        process's global generators have the states that loading has set and the block has drawn
        from, but not with workers, which have generators of their own.
        """
        assert plan.resumed is not None
        loaded: tuple[str, ...] = ()
        if "dataset" in plan.resumed:
            before = global_rng_state()
            self.dataset.load_state_dict(copy.deepcopy(plan.resumed["dataset"]))  # type: ignore[attr-defined]
            if self.num_workers:
                set_global_rng_state(before)
            loaded = tuple(changed(before))
        self._parts.loaded_generators = loaded
        with plan.beginning():
            yield
            left = global_rng_state(loaded)
        set_global_rng_state(left)

    @property
    def _snapshot_interval(self) -> int:
        """After how many batches a dataset's state is saved; 0 for never."""
        every = self.snapshot_every_n_steps
        if every == "auto":  # the state of a module is its weights
            return 0 if isinstance(self.dataset, torch.nn.Module) else 1
        return operator.index(every or 0)

    @property
    def _saves_dataset(self) -> bool:
        """Whether a state contains the position of each worker's dataset, or its own state.

        Threads share one dataset, which is ahead of the delivered batches. With "auto", resuming
        from the states of all workers would need the same number of workers again.
        """
        is_fixed = not self.thread_pool and self.executor is None and self._adapter is None
        return self._is_iterable or (is_fixed and self._asks_for_state)

    @property
    def _asks_for_state(self) -> bool:
        """Whether the dataset is asked for its state."""
        return has_state_methods(self.dataset) and self._snapshot_interval > 0

    # States --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state: its position after the batches delivered so far.

        Batches that are only prefetched do not count. May be called between any two batches, on the
        thread that takes them. Once the epoch has ended with StopIteration, the state is that of
        the beginning of the next epoch.

        Returns:
            A dict of plain values that never change: a few hundred bytes, and up to 13 KB for the
            states of random generators. ``json``, ``pickle`` and ``torch.save`` can save it. If the
            dataset has ``state_dict`` and ``load_state_dict``, the dict also has what its
            ``state_dict`` returned.

        Raises:
            RuntimeError: If torch's own iterator loads: for a data pipe, or with worker processes
                on a system without memfd and pidfd. Also if the state of the dataset, its iterator
                or the sampler cannot be taken or pickled.
        """
        self._check_has_state()
        plan = self._present_plan
        if plan.resumed is not None:
            return copy.deepcopy(plan.resumed)
        in_order = self.in_order or not self.num_workers
        state = {
            "length": self._length,
            "persistent": bool(self.persistent_workers),
            **plan.state_dict(draws_seed=not self._has_workers, in_order=in_order),
        }
        if plan.tells_dataset:
            state["tells_dataset"] = True
        self._add_checkpoints(state, plan)
        return versioned(state)

    @property
    def _has_workers(self) -> bool:
        """Whether persistent workers run already, which the next epoch will use."""
        return self._iterator is not None and not getattr(self._iterator, "is_closed", True)

    def _add_checkpoints(self, state: dict[str, Any], plan: EpochPlan) -> None:
        """Add the positions or states of the workers' datasets to a state."""
        checkpoints = self._parts.checkpoints
        if not self._saves_dataset:
            is_apart = self.thread_pool or self.executor is not None or self._adapter is not None
            if is_apart and self._asks_for_state:
                warn_user(
                    "with threads, an executor or num_workers='auto', the loader's state does not "
                    "contain that of the dataset. Use a fixed number of worker processes, or save "
                    "it yourself. snapshot_every_n_steps=0 stops this warning."
                )
            return
        is_mid = plan.counter.newest is not None and not plan.counter.progress.is_ended
        if checkpoints is not None and (is_mid or self._has_workers):
            state["datasets"] = checkpoints.dump(self._save_dataset)
            if is_mid and self._is_iterable:
                state["position"] = sum(each["given"] for each in state["datasets"]["checkpoints"])
        elif not is_mid:
            saved = self._save_dataset()
            if isinstance(saved, Unsaved):
                raise RuntimeError(saved.text)
            if saved is not None:
                state["dataset"] = saved.state

    def _save_dataset(self) -> Saved | Unsaved | None:
        """Return the state of the dataset in this process, with which workers start."""
        return save_dataset(self.dataset, copy.deepcopy) if self._asks_for_state else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next ``iter()`` delivers the batch that followed it.

        Iterators that were made before raise RuntimeError at their next ``next()``: the state says
        which batches were delivered, and does not count theirs.

        Args:
            state: What ``state_dict()`` of such a loader returned, in this process or another.

        Raises:
            ValueError: If the state does not fit this loader; the message says what was found and
                what was expected.
            TypeError: If it is not a dict.
            ClosedLoaderError: After ``close()``.
        """
        self._check_has_state()
        if self._is_closed:
            raise ClosedLoaderError(LOADER_CLOSED)
        facts = {"length": self._length, **self._present_plan.order.facts()}
        # As versioned() has copied it: faster than copy.deepcopy().
        loaded = pickle.loads(pickle.dumps(check_state(state, facts), pickle.HIGHEST_PROTOCOL))
        self._check_checkpoints(loaded)
        self._present_plan.load_state_dict(loaded)
        iterators = self._parts.open_iterators()
        for iterator in iterators:
            iterator.replace()
        if self._saves_dataset and self._iterator in iterators:
            # Workers load the states of their datasets when they start.
            kept: Any = self._iterator
            self._iterator = None
            kept.close()

    def _check_checkpoints(self, loaded: dict[str, Any]) -> None:
        """Raise ValueError if the states of the workers' datasets in a state do not fit."""
        saves, needs = self._saves_dataset, self._saves_dataset and loaded["position"]
        if "dataset" in loaded:
            saves = saves and self._asks_for_state
        if "datasets" in loaded and saves:
            DatasetCheckpoints.load(loaded["datasets"], self.num_workers)  # or it raises
        elif needs or (not saves and ("datasets" in loaded or "dataset" in loaded)):
            one, other = ("needs", "does not contain") if needs else ("cannot load", "contains")
            raise ValueError(
                f"the state does not fit this loader: it {other} the states of the dataset, which "
                f"this loader {one}. Give the dataset and the arguments with which the state was "
                "saved. If no state of the dataset is needed, set snapshot_every_n_steps=0 in both."
            )

    def _check_has_state(self) -> None:
        if type(self.dataset) in WRAPPED_DATA_PIPES:
            raise RuntimeError("a data pipe, which torch's own iterator loads, has no state here")
        if self.num_workers and not self.thread_pool and why_unsupported() is not None:
            raise RuntimeError(f"{describe_unsupported()} It has no state_dict().")

    @property
    def _needs_torchs_workers(self) -> bool:
        """Whether torch's own workers load, as this system has no memory for ours."""
        return self.num_workers > 0 and not self.thread_pool and why_unsupported() is not None

    @property
    def _length(self) -> int | None:
        """The length of a map-style dataset; None if it has none, and for streams.

        A stream would count the records of all shards.
        """
        if self._dataset_kind == _DatasetKind.Iterable:
            return None
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # it need not have a length
            return None

    # Copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle: no iterators, failures or statistics."""
        state = self.__dict__.copy()
        state["_iterator"] = None
        state.pop("_own_parts", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes that :meth:`__getstate__` returned."""
        self.__dict__.update(state)
        if self._adapter is not None:
            self._adapter = Adapter(self.num_workers, self._adapter.most)
        plan = self._plan
        if plan is None:
            return
        before, plan.sources = plan.order, self._order_sources()
        order = plan.order = plan.newest = self._make_order()
        if isinstance(order, SeededOrder) and isinstance(before, SeededOrder):
            order.known_epochs = before.known_epochs

    def __copy__(self) -> Self:
        """Return a copy with a plan and samplers of its own. No epoch runs in it."""
        plan, own = self._plan, {id(self._plan), id(self._counter)}
        if isinstance(self.sampler, SeededSampler) and self.sampler.epochs is self._counter:
            own |= {id(self.sampler), id(self.batch_sampler)}
        memo = {id(one): one for one in vars(self).values() if id(one) not in own}
        if plan is not None:  # the copy makes these itself
            memo |= dict.fromkeys(map(id, (plan.order, plan.newest, plan.sources)), plan.order)
        other = object.__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other
