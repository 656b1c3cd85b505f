"""Which epoch a loader is in, and where: what makes it go on anywhere else."""

import contextlib
import copy
import logging
import sys
import warnings
from typing import Any, TypeVar, cast

import torch
import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, MapDataPipe

from shmloader.engine.adapting import Adapter
from shmloader.engine.stream_here import DatasetHere, StreamHere
from shmloader.engine.stream_states import StreamStates
from shmloader.errors import ClosedLoaderError
from shmloader.fronts.states import check_state, sealed
from shmloader.memory.slot import is_supported, why_unsupported
from shmloader.options import LastBatch
from shmloader.sampling.checks import whole_number
from shmloader.sampling.draws import Draws
from shmloader.sampling.origin import Origin, describe, has_own_state, size_of_batches
from shmloader.sampling.plan import StepPlan, set_epoch_of
from shmloader.sampling.positions import PositionedStreams
from shmloader.sampling.progress import Progress, numbers_of, runs_of
from shmloader.sampling.rollover import RolloverBatchSampler

_T_co = TypeVar("_T_co", covariant=True)


def describe_unsupported() -> str:
    """Why a loader runs on torch's own workers."""
    return (
        f"shmloader cannot have worker processes of its own here, since {why_unsupported()}; this "
        "loader runs on torch's own workers instead."
    )


_log = logging.getLogger("shmloader")


class _NextEpoch:
    """``loader.epoch``: no property, so that a subclass may have an attribute of that name."""

    def __get__(self, loader: Any, _: object = None) -> Any:
        return self if loader is None else loader._next_epoch


class ResumableLoader(torch.utils.data.DataLoader[_T_co]):
    """The part of a loader that counts epochs, and saves and loads its state.

    Used on the user's thread.
    """

    thread_pool: bool
    last_batch: LastBatch | None
    snapshot_every_n_steps: int | None
    _adapter: Adapter | None
    _is_closed = False

    # Draws in place of torch's samplers, where there is a seed.
    _plan: StepPlan | PositionedStreams | None = None
    _sample_seed: int | None = None

    # The newest epoch: its number, how far it has come, and what it comes of.
    _epoch: int | None = None
    _progress: Progress
    _draws: Draws | None = None
    _found: dict[str, Any] | None = None
    _streams: StreamStates | StreamHere | DatasetHere | None = None

    # The next one: its number, and the state that it goes on from. Where the streams of an iterable
    # dataset go on, in the next iterator that is made.
    _next_epoch = 0
    _loaded: dict[str, Any] | None = None
    _resume_streams: StreamStates | None = None

    # Whether the newest epoch was begun elsewhere, and goes on here.
    _goes_on = False

    # Whether the epochs of the run that goes on here were begun by workers that stayed.
    _was_persistent: bool | None = None

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterators draw."""
        return super()._index_sampler if self._plan is None else self._plan

    epoch = _NextEpoch()

    def set_epoch(self, epoch: int) -> None:
        """Name the next epoch; without it, each ``iter()`` counts one, from 0.

        With a ``seed``, order and random streams are those of that epoch. A sampler, or batch
        sampler, that has ``set_epoch`` is told: with a seed at each epoch, else now. A state that
        was loaded goes on if it is of that epoch, and is given up if not.

        With a ``seed``, to call the ``set_epoch`` of the sampler itself names the next epoch as
        well, if the sampler says in an attribute ``epoch`` what it was told.
        """
        self._next_epoch = whole_number(epoch, "epoch", minimum=0)
        if isinstance(self._plan, StepPlan):
            self._plan.take_named_epoch()
        loaded = self._loaded
        if loaded is not None and loaded["epoch"] != self._next_epoch:
            _log.warning(
                "the state that was loaded, of epoch %d at batch %d, is given up: epoch %d is to "
                "come next",
                loaded["epoch"],
                loaded["position"],
                self._next_epoch,
            )
            self._loaded = None
        if self._plan is None:
            set_epoch_of(
                self.sampler if self.batch_sampler is None else self.batch_sampler, self._next_epoch
            )

    def _begin_epoch(self) -> None:
        self._settle_epoch()
        loaded, self._loaded = self._loaded, None
        self._goes_on = loaded is not None and loaded["origin"]["begun"]
        if loaded is None:
            named = self._plan.take_named_epoch() if isinstance(self._plan, StepPlan) else None
            self._epoch = self._next_epoch if named is None else named
            self._progress = Progress()
            before = self._was_persistent
            self._found = None if before is None else self._match_base_seed(drawn=not before)
        else:
            self._epoch = loaded["epoch"]
            self._progress = Progress(loaded["position"], numbers_of(loaded.get("ahead", ())))
            self._was_persistent = loaded["persistent"]
            origin = loaded["origin"]
            self._begin_streams(loaded)
            if origin["begun"]:
                self._found = origin
                self._origin.restore_epochs(origin)
            else:  # its generators were set when it was loaded
                self._found = self._match_base_seed(drawn=origin["base_seed"])
                if "own" in origin:
                    self._found = {"begun": False, **(self._found or {}), "own": origin["own"]}
        self._next_epoch = self._epoch + 1
        plan = self._plan
        if isinstance(plan, StepPlan):
            plan.begin(self._epoch, self._progress, self._found)
        elif plan is not None:
            plan.epoch = self._epoch

    def _take_back(self, loaded: dict[str, Any] | None) -> None:
        """The epoch that was to go on from a state has not begun: the state is still to come."""
        if loaded is not None:
            self._loaded = loaded
            self._next_epoch = loaded["epoch"]

    def _begin_streams(self, loaded: dict[str, Any]) -> None:
        """Have a new iterator go on with the workers' datasets, where these have places."""
        if not self._saves_dataset:
            return
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
        if "streams" in loaded:
            self._resume_streams = StreamStates.load(loaded["streams"], self.num_workers)
            again = sum(place.skip for place in self._resume_streams.places)
            if again and isinstance(self.dataset, IterableDataset):
                _log.info(
                    "epoch %d goes on at batch %d: %d batches that were delivered before are read "
                    "again and discarded",
                    self._epoch,
                    self._progress.position,
                    again,
                )

    @property
    def _saves_dataset(self) -> bool:
        """Whether a state has the place of each worker's dataset, or its own state."""
        if isinstance(self.dataset, IterableDataset):
            return True
        return has_own_state(self.dataset) and self._can_save_dataset

    @property
    def _can_save_dataset(self) -> bool:
        """Whether the own states of a map-style dataset can be saved."""
        wants = bool(self.snapshot_every_n_steps)
        return wants and not self.thread_pool and self._adapter is None

    @property
    def _origin(self) -> Origin:
        """What the next epoch will come of."""
        plan = self._index_sampler
        if isinstance(plan, StepPlan):
            return plan.origin
        return Origin(plan, generator=self.generator)

    def _match_base_seed(self, *, drawn: bool) -> dict[str, Any] | None:
        """Have the generator be, when the sampler draws, where it was in the run that goes on here.

        torch draws a base seed from it before each epoch, but not where workers stay.

        Args:
            drawn: Whether one was drawn before this epoch there.

        Returns:
            What the sampler is to draw from, if not from what there will be.
        """
        will_draw = self._iterator is None
        if will_draw and not drawn:
            return self._origin.dump(is_begun=False)
        if drawn and not will_draw and self.generator is not None:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return None

    def _begin_draws(self, drawing: Any) -> Any:
        """What an iterator draws, given what ``iter()`` of its index sampler gave."""
        if isinstance(self._index_sampler, StepPlan):
            return drawing
        if isinstance(self.dataset, IterableDataset):
            # The base seed of these workers was drawn by now, and is not the one that counts.
            self._origin.restore_generators(self._found or {})
            return drawing
        self._draws = Draws(
            self._index_sampler, drawing, self._progress, self._found, self.generator
        )
        return self._draws

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
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        progress = self._progress
        state = {**self._facts(), "persistent": bool(self.persistent_workers)}
        if self._epoch is None or progress.is_ended:
            self._settle_epoch()
            state |= {"epoch": self._next_epoch, "position": 0}
            state["origin"] = self._dump_next_origin()
        else:
            state |= {"epoch": self._epoch, "position": progress.position}
            state["origin"] = self._dump_origin()
            if ahead := progress.ahead:
                state["ahead"] = runs_of(ahead)
        return sealed(self._with_streams(copy.deepcopy(state)))

    def _with_streams(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same, and where the workers' datasets are."""
        streams = self._streams
        is_iterable = isinstance(self.dataset, IterableDataset)
        if has_own_state(self.dataset) and not (is_iterable or self._can_save_dataset):
            self._warn_of_dataset()
        if streams is None or not self._saves_dataset:
            return state
        is_mid = self._epoch is not None and not self._progress.is_ended
        is_persistent = self.num_workers == 0 or self._iterator is not None
        if is_mid:
            state["streams"] = streams.dump()
            if is_iterable:
                state["position"] = sum(stream["given"] for stream in state["streams"]["streams"])
        elif is_persistent:
            ended = StreamStates.load(streams.dump(), self.num_workers)
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

    def _dump_origin(self) -> dict[str, Any]:
        """What the newest epoch comes of."""
        plan = self._index_sampler
        if isinstance(plan, StepPlan):
            return plan.dump()
        if self._draws is None:
            return {**self._origin.dump(is_begun=False), "begun": True}
        return self._draws.dump()

    def _dump_next_origin(self) -> dict[str, Any]:
        """What the next epoch comes of, as far as that is known."""
        will_restart = self._iterator is not None and not getattr(self._iterator, "is_closed", True)
        return {**self._origin.dump(is_begun=False), "base_seed": not will_restart}

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
        if isinstance(self._plan, StepPlan):
            self._plan.check_position(loaded["position"], loaded["origin"].get("rest", ()))
        self._origin.restore(loaded["origin"])
        self._loaded = loaded
        self._next_epoch = loaded["epoch"]

    def _check_streams(self, loaded: dict[str, Any]) -> None:
        """Raise ValueError where what it says of the workers' datasets does not fit."""
        if "streams" in loaded:
            if not self._saves_dataset:
                raise ValueError(
                    "the state contains states of the dataset, which this loader cannot load: its "
                    "dataset needs state_dict() and load_state_dict(), and the loader worker "
                    "processes of a fixed number, or none, and snapshot_every_n_steps of 1 or more"
                )
            StreamStates.load(loaded["streams"], self.num_workers)  # whether it fits
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
        """What a state and its loader must have in common."""
        is_iterable = isinstance(self.dataset, IterableDataset)
        length: int | None = None
        if not is_iterable:
            with contextlib.suppress(TypeError, NotImplementedError):  # it need not have one
                length = len(self.dataset)  # type: ignore[arg-type]
        plan = self._index_sampler
        if isinstance(plan, StepPlan):
            return {"length": length, **plan.facts()}
        drops = self.drop_last or (type(plan) is BatchSampler and plan.drop_last)
        tail = "drop" if drops else self.last_batch or "keep"
        return {
            "length": length,
            "global_batch": self.batch_size or size_of_batches(plan),
            "sampler": None if is_iterable else describe(plan),
            "tail": tail,
            "seed": self._sample_seed,
        }

    def _unbegun(self) -> dict[str, Any]:
        """Of a copy's attributes: its epoch has not begun. What it is to go on from, it has."""
        return {"_epoch": None, "_progress": Progress(), "_draws": None, "_streams": None}

    def _settle_epoch(self) -> None:
        """Note what an epoch has left over for the next one, if it was complete."""
        progress = self._progress
        # Nothing may be left of the last batches (on_error="skip"): then only the end tells.
        position = sys.maxsize if progress.is_ended else progress.position
        if isinstance(self._plan, StepPlan):
            self._plan.settle(position)
        elif self.last_batch == "rollover":
            cast("RolloverBatchSampler", self.batch_sampler).settle(position)

    def __len__(self) -> int:
        """Batches of the epoch that runs, or of the next one if none does; see torch's."""
        if self._progress.is_ended:
            self._settle_epoch()
        return super().__len__()
