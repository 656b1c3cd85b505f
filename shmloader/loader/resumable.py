"""The part of a loader that counts epochs, and saves and loads its state."""

import contextlib
import copy
import logging
import warnings
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from shmloader.engine.adapting import Adapter
from shmloader.engine.iterable_checkpoints import IterableCheckpoints
from shmloader.errors import ClosedLoaderError
from shmloader.loader.config import LoaderParts
from shmloader.loader.states import check_state, sealed
from shmloader.memory.slot import is_supported, why_unsupported
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.sampler_checkpoint import has_own_state

_T_co = TypeVar("_T_co", covariant=True)

_log = logging.getLogger("shmloader")


def describe_unsupported() -> str:
    """Return why a loader runs on torch's own workers."""
    return (
        f"shmloader cannot have worker processes of its own here, since {why_unsupported()}; this "
        "loader runs on torch's own workers instead."
    )


class _NextEpoch:
    """``loader.epoch``: not a property, so that a subclass may have an attribute of that name."""

    def __get__(self, loader: Any, _: object = None) -> Any:
        return self if loader is None else loader._plan.next_epoch


class ResumableLoader(torch.utils.data.DataLoader[_T_co]):
    """A loader whose state can be saved and loaded. Used on the user's thread.

    The order of the samples and the position in it belong to the :class:`EpochPlan`; what is added
    here are the states of the dataset, and whether a state fits the loader.
    """

    thread_pool: bool
    snapshot_every_n_steps: int | None
    _adapter: Adapter | None
    _is_closed = False

    # Set at the end of the constructor.
    _plan: EpochPlan | None = None

    _parts: LoaderParts

    @property
    def _index_sampler(self) -> Any:
        """The sampler that torch's iterators iterate."""
        plan = self._plan
        return super()._index_sampler if plan is None else plan.order.index_sampler

    epoch = _NextEpoch()

    @property
    def _present_plan(self) -> EpochPlan:
        """The plan, with the generator that the loader has now: users may replace it."""
        plan = self._plan
        assert plan is not None
        plan.generator = self.generator
        return plan

    def set_epoch(self, epoch: int) -> None:
        """Name the next epoch; without it, each ``iter()`` counts one, from 0.

        With a ``seed``, order and random numbers are those of that epoch. A sampler, or batch
        sampler, that has ``set_epoch`` is told: with a seed at each epoch, otherwise now. A state
        that was loaded goes on if it is of that epoch, and is given up if not.

        With a ``seed``, calling the ``set_epoch`` of the sampler itself names the next epoch as
        well, if the sampler has an attribute ``epoch`` with what it was told.
        """
        self._present_plan.set_epoch(epoch)

    def _begin_epoch(self) -> None:
        plan = self._present_plan
        if plan.resumed is not None:
            self._begin_streams(plan.resumed)
        plan.begin(draws_seed=self._iterator is None)

    def _begin_streams(self, state: dict[str, Any]) -> None:
        """Have a new iterator go on with the workers' datasets, if the state has theirs."""
        if not self._saves_dataset:
            return
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
        if "streams" in state:
            resumed = IterableCheckpoints.load(state["streams"], self.num_workers)
            self._parts.resume_streams = resumed
            again = sum(checkpoint.skip for checkpoint in resumed.checkpoints)
            if again and isinstance(self.dataset, IterableDataset):
                _log.info(
                    "epoch %d goes on at batch %d: %d batches that were delivered before are read "
                    "again and discarded",
                    state["epoch"],
                    state["position"],
                    again,
                )

    @property
    def _saves_dataset(self) -> bool:
        """Whether a state has the position of each worker's dataset, or its own state."""
        if isinstance(self.dataset, IterableDataset):
            return True
        return has_own_state(self.dataset) and self._can_save_dataset

    @property
    def _can_save_dataset(self) -> bool:
        """Whether the own states of a map-style dataset can be saved."""
        wants = bool(self.snapshot_every_n_steps)
        return wants and not self.thread_pool and self._adapter is None

    # States ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the newest epoch is: what was handed over, and nothing that is prefetched.

        May be called between any two batches, on the thread that takes them. After the last
        batch's StopIteration it is the beginning of the next epoch.

        Returns:
            Plain values, a few hundred bytes and the states of generators, that go through
            ``json``, ``pickle`` and ``torch.save``, and never change. Of a dataset that has
            ``state_dict`` and ``load_state_dict``, with what these gave.

        Raises:
            RuntimeError: If torch's own iterator loads: a data pipe, or where there are no
                workers of ours.
        """
        self._check_has_state()
        plan = self._present_plan
        if plan.resumed is not None:
            return copy.deepcopy(plan.resumed)
        will_restart = self._iterator is not None and not getattr(self._iterator, "is_closed", True)
        state = {
            **self._facts(),
            "persistent": bool(self.persistent_workers),
            **plan.state_dict(draws_seed=not will_restart),
        }
        return sealed(self._with_streams(copy.deepcopy(state)))

    def _with_streams(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with where the workers' datasets are."""
        plan, streams = self._present_plan, self._parts.streams
        is_iterable = isinstance(self.dataset, IterableDataset)
        if has_own_state(self.dataset) and not (is_iterable or self._can_save_dataset):
            self._warn_of_dataset()
        if streams is None or not self._saves_dataset:
            return state
        is_mid = plan.epoch is not None and not plan.progress.is_ended
        is_persistent = self.num_workers == 0 or self._iterator is not None
        if is_mid:
            state["streams"] = streams.dump()
            if is_iterable:
                state["position"] = sum(stream["given"] for stream in state["streams"]["streams"])
        elif is_persistent:
            ended = IterableCheckpoints.load(streams.dump(), self.num_workers)
            state["streams"] = ended.next_epoch(is_iterable=is_iterable).dump()
        return state

    def _warn_of_dataset(self) -> None:
        """Say that a state lacks the map-style dataset's own, unless that is what the user wants.

        Threads share one dataset, which is ahead of what was delivered; with "auto", a state of
        each worker would ask for as many of them again.
        """
        if self.snapshot_every_n_steps:
            how = "thread_pool=True" if self.thread_pool else 'num_workers="auto"'
            warnings.warn(
                f"the dataset has state_dict() and load_state_dict(), but with {how} the loader's "
                "state does not contain the dataset's: save it yourself, use a fixed number of "
                "worker processes, or set snapshot_every_n_steps=0 if it need not be saved",
                stacklevel=4,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next ``iter()`` go on from a state: with the very next batch.

        Args:
            state: What ``state_dict()`` of such a loader returned, in this process or another.

        Raises:
            ValueError: If it does not fit this loader, and says what was found and what
                expected; or if it is damaged.
            TypeError: If it is no dict.
            ClosedLoaderError: After ``close()``.
        """
        self._check_has_state()
        if self._is_closed:
            raise ClosedLoaderError("the loader is closed")
        loaded = copy.deepcopy(check_state(state, self._facts()))
        self._check_streams(loaded)
        self._present_plan.load_state_dict(loaded)

    def _check_streams(self, loaded: dict[str, Any]) -> None:
        """Raise ValueError where what it says of the workers' datasets does not fit."""
        if "streams" in loaded:
            if not self._saves_dataset:
                raise ValueError(
                    "the state contains states of the dataset, which this loader cannot load: its "
                    "dataset needs state_dict() and load_state_dict(), and the loader worker "
                    "processes of a fixed number, or none, and snapshot_every_n_steps of 1 or more"
                )
            IterableCheckpoints.load(loaded["streams"], self.num_workers)  # whether it fits
        elif self._saves_dataset and loaded["position"]:
            raise ValueError(
                f"the state is of batch {loaded['position']}, and lacks the place or the state "
                "of the dataset; it was saved by a loader whose dataset had no state_dict(), or "
                'with snapshot_every_n_steps=0, thread_pool=True or num_workers="auto"'
            )

    def _check_has_state(self) -> None:
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            raise RuntimeError("a data pipe, which torch's own iterator loads, has no state here")
        if self.num_workers and not self.thread_pool and not is_supported():
            raise RuntimeError(f"{describe_unsupported()} It has no state_dict().")

    def _facts(self) -> dict[str, Any]:
        """Return what a state and its loader must have in common."""
        length: int | None = None
        if not isinstance(self.dataset, IterableDataset):
            with contextlib.suppress(TypeError, NotImplementedError):  # it need not have one
                length = len(self.dataset)  # type: ignore[arg-type]
        return {"length": length, **self._present_plan.order.facts()}

    def __len__(self) -> int:
        """Batches of the epoch that runs, or of the next one if none does; see torch's."""
        plan = self._present_plan
        if plan.progress.is_ended:
            plan.commit()
        return super().__len__()
