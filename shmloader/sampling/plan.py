"""The epochs of one loader: its current epoch, the position in it, and its state for resuming.

::

    torch's iterator          EpochPlan                       order
    ────────────────          ─────────                       ─────
                              begin() ──────────────────────▶ begin(epoch, progress, state)
    iter(index_sampler) ────▶ draw() ───────────────────────▶ draw(): index batches, from the
                                                              position on
    a batch is delivered ───▶ progress
                              state_dict() ◀───────────────── dump(): what the order depends on

An *order* yields the index batches of one epoch. There are three: ``SeededOrder``, which depends
only on a seed and the epoch; ``SamplerOrder``, which draws from torch's samplers or the user's; and
``ReaderOrder`` of :mod:`shmloader.streams.order`, which asks for the batches of a stream. Users may
replace the samplers of a loader at any time, so the order of the next epoch may be another one than
that of the newest epoch.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from shmloader.sampling.progress import EpochCounter
from shmloader.sampling.rng import global_rng_state, with_global_rng_state
from shmloader.sampling.sampler_order import EpochDraw
from shmloader.sampling.sampler_state import SamplerState

_log = logging.getLogger("shmloader")


class EpochPlan:
    """The epochs of one loader, one after the other. Used on the user's thread.

    Attributes:
        order: The order of the next epoch, which the loader sets.
        newest: The order of the newest epoch; that of the next one before the first.
        counter: The counter that numbers the epochs; it has the progress of the newest one.
        is_continued: Whether the base seed of the newest epoch was drawn before its state was
            saved, or is not drawn in the run that was resumed.
        is_elsewhere: Whether the process's global generators have been set to the states of the run
            that is resumed, while an epoch begins.
        resumed: The loaded state with which the next epoch begins; None if there is none.
        generator: The loader's generator, which users may replace between epochs.
        sources: What the loader has made the order from.
        tells_dataset: Whether the dataset is told the epochs: ``set_epoch()`` of the loader was
            called here, or in the run whose state was loaded.
    """

    # A program may keep very many loaders.
    __slots__ = (
        "_was_persistent", "counter", "generator", "is_continued", "is_elsewhere", "newest",
        "order", "resumed", "sources", "tells_dataset",
    )  # fmt: skip

    def __init__(self, order: Any, counter: EpochCounter) -> None:
        self.order = self.newest = order
        self.counter = counter
        self.is_continued = self.is_elsewhere = self.tells_dataset = False
        self.resumed: dict[str, Any] | None = None
        self.generator: torch.Generator | None = None
        self.sources: tuple[object, ...] = ()
        # Whether the run that was resumed here had persistent workers; None if none was resumed.
        self._was_persistent: bool | None = None

    @property
    def present_epoch(self) -> int:
        """Number of the epoch that is iterated; if none is, that of the next epoch."""
        iterated = self.counter.iterated
        return self._following_epoch if iterated is None else iterated

    @property
    def _following_epoch(self) -> int:
        """Number of the epoch that :meth:`begin` begins."""
        named = None if self.resumed is not None else self.order.named_epoch()
        return self.counter.next if named is None else named

    def __len__(self) -> int:
        """Return the number of batches of the running epoch, or of the next one if none runs."""
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; a loaded state of another epoch is discarded."""
        self.counter.name(epoch)
        self.tells_dataset = True
        self.drop_state_of_another()
        self.order.set_epoch(self.counter.next)

    def drop_state_of_another(self) -> None:
        """Discard the loaded state if the number of another epoch was set since."""
        resumed, following = self.resumed, self.counter.next
        if resumed is not None and resumed["epoch"] != following:
            _log.warning(
                "the state that was loaded, of epoch %d at batch %d, is discarded, since "
                "set_epoch(%d) was called",
                resumed["epoch"],
                resumed["position"],
                following,
            )
            self.resumed = None

    def begin(self, *, draws_seed: bool) -> None:
        """Begin the next epoch, or continue the one whose state was loaded.

        Args:
            draws_seed: Whether torch draws a base seed for this epoch, which it does not do for
                persistent workers that are running already.
        """
        # The user may have called set_epoch() of a sampler that the loader made.
        self.drop_state_of_another()
        epoch, resumed, self.resumed = self._following_epoch, self.resumed, None
        saved = None
        progress = self.order.load_progress(resumed)
        # Whether torch draws a base seed in the run that is continued here.
        drawn = draws_seed if self._was_persistent is None else not self._was_persistent
        draws_globally = False
        self.is_continued = False
        if resumed is not None:
            epoch, saved = resumed["epoch"], resumed["sampler"]
            self._was_persistent = resumed["persistent"]
            drawn = saved.get("base_seed", draws_seed)
            draws_globally = "global_generators" in saved
            self.is_continued = not saved.get("base_seed")
            if saved["has_started"]:
                with self.counter.telling():
                    self.state.restore_epochs(saved)
            else:  # the generators were set when the state was loaded
                own = {"state": saved["state"]} if "state" in saved else {}
                saved = {"has_started": False, **own}
        if draws_seed and not drawn:
            # The generators are set back to their present states.
            present = self.state.dump(has_started=False).get("generators", [])
            saved = (saved or {"has_started": False}) | {"generators": present}
        elif drawn and not draws_seed and (self.generator is not None or draws_globally):
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self.newest = self.order
        self.order.begin(epoch, progress, saved)
        self.counter.begin(epoch, progress)

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Begin an epoch in the block with the global generators of the run that is resumed.

        They are set only for a state between two epochs, whose next epoch was still to be drawn.
        """
        sampler = {} if self.resumed is None else self.resumed["sampler"]
        saved = sampler.get("global_generators")
        if saved is None or sampler["has_started"] or saved == global_rng_state(saved):
            yield
            return
        with with_global_rng_state(saved):
            self.is_elsewhere = True
            try:
                yield
            finally:
                self.is_elsewhere = False

    def undo_begin(self, resumed: dict[str, Any] | None) -> None:
        """Undo a failed :meth:`begin`: the next epoch still continues from this state."""
        self.counter.iterator = lambda: None
        if resumed is not None:
            self.resumed = resumed
            self.counter.next = resumed["epoch"]

    def draw(self, drawing: Iterator[Any], *, as_arrays: bool = False) -> Iterator[Any]:
        """Return an iterator of the index batches of the epoch that has begun; see the orders."""
        indices: Iterator[Any] = self.newest.draw(drawing, as_arrays=as_arrays)
        if self.is_elsewhere and isinstance(indices, EpochDraw):
            indices.draw_first()  # while the generators have the states for it
        return indices

    @property
    def state(self) -> SamplerState:
        """Takes and restores states of the next epoch's sampler."""
        state: SamplerState = self.order.state()
        return state

    def state_dict(self, *, draws_seed: bool, in_order: bool = True) -> dict[str, Any]:
        """Return the epoch, the position, the order's facts and what it depends on: plain values.

        Args:
            draws_seed: Whether torch will draw a base seed for the next epoch.
            in_order: Whether batches are delivered in order.
        """
        counter = self.counter
        if counter.newest is None or counter.progress.is_ended:
            sampler = {**self.order.dump_next(), "base_seed": draws_seed}
            facts, progress = self.order.facts(), {"epoch": counter.next, "position": 0}
            return {**facts, **progress, "sampler": sampler}
        return {
            **self.newest.facts(),
            "epoch": counter.newest,
            **self.newest.dump_progress(in_order=in_order),
            "sampler": self.newest.dump(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next epoch continue from a state; raise ValueError if it does not fit."""
        self.order.check_progress(state)
        with self.counter.telling():
            self.state.restore(state["sampler"])
        self.tells_dataset |= "tells_dataset" in state
        self.resumed = state
        self.counter.next = state["epoch"]
