"""The epochs of one loader: its current epoch, the position in it, and its state for resuming.

::

    torch's iterator          EpochPlan                       order
    ────────────────          ─────────                       ─────
                              begin() ──────────────────────▶ begin(epoch, progress, state)
    iter(index_sampler) ────▶ draw() ───────────────────────▶ draw(): index batches, from the
                                                              position on
    a batch is delivered ───▶ progress
                              state_dict() ◀───────────────── dump(): what the order depends on
                              commit() ─────────────────────▶ commit(): carry-over

An *order* yields the index batches of one epoch. There are two: :class:`SeededOrder`, which depends
only on a seed and the epoch, and :class:`SamplerOrder`, which draws from torch's samplers or the
user's.
"""

import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch

from shmloader.sampling.checks import whole_number
from shmloader.sampling.progress import Progress, numbers_of, runs_of
from shmloader.sampling.sampler_checkpoint import SamplerCheckpoint
from shmloader.sampling.sampler_order import SamplerOrder
from shmloader.sampling.seeded_order import SeededOrder

_log = logging.getLogger("shmloader")


class EpochPlan:
    """The epochs of one loader, one after the other. Used on the user's thread.

    Args:
        order: Yields the index batches of an epoch.

    Attributes:
        order: The order.
        epoch: Number of the newest epoch; None before the first.
        next_epoch: Number of the epoch that :meth:`begin` begins, unless a sampler's epoch was set
            to another.
        progress: How far the newest epoch has come.
        is_continued: Whether the newest epoch was begun by another run and continues here.
        resumed: The state from which the next epoch continues; None for a new epoch.
        generator: The loader's generator, which users may replace between epochs.
    """

    def __init__(self, order: SeededOrder | SamplerOrder) -> None:
        self.order = order
        self.epoch: int | None = None
        self.next_epoch = 0
        self.progress = Progress()
        self.is_continued = False
        self.resumed: dict[str, Any] | None = None
        self.generator: torch.Generator | None = None
        # Whether the run that was resumed here began its epochs with persistent workers.
        self._was_persistent: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        return {**self.__dict__, "epoch": None, "progress": Progress()}

    def copy(self, order: SeededOrder | SamplerOrder) -> "EpochPlan":
        """Return a copy with another order, in which no epoch runs."""
        other = EpochPlan(order)
        other.__dict__.update(self.__getstate__() | {"order": order})
        return other

    def __len__(self) -> int:
        """Return the number of batches of the running epoch, or of the next one if none runs."""
        if self.progress.is_ended:
            self.commit()
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; a loaded state of another epoch is discarded."""
        self.next_epoch = whole_number(epoch, "epoch", minimum=0)
        resumed = self.resumed
        if resumed is not None and resumed["epoch"] != self.next_epoch:
            _log.warning(
                "the state that was loaded, of epoch %d at batch %d, is discarded, since "
                "set_epoch(%d) was called",
                resumed["epoch"],
                resumed["position"],
                self.next_epoch,
            )
            self.resumed = None
        self.order.set_epoch(self.next_epoch)

    def begin(self, *, draws_seed: bool) -> None:
        """Begin the next epoch, or continue the one whose state was loaded.

        Args:
            draws_seed: Whether torch draws a base seed for this epoch, which it does not do for
                persistent workers that are running already.
        """
        self.commit()
        resumed, self.resumed = self.resumed, None
        self.is_continued = resumed is not None and resumed["origin"]["begun"]
        if resumed is None:
            named = self.order.take_named_epoch()
            self.epoch = self.next_epoch if named is None else named
            self.progress = Progress()
            before = self._was_persistent
            state = None if before is None else self._match_base_seed(draws_seed, drawn=not before)
        else:
            self.epoch = resumed["epoch"]
            self.progress = Progress(resumed["position"], numbers_of(resumed.get("ahead", ())))
            self._was_persistent = resumed["persistent"]
            origin = resumed["origin"]
            if origin["begun"]:
                state = origin
                self.checkpoint.restore_epochs(origin)
            else:  # its generators were set when it was loaded
                state = self._match_base_seed(draws_seed, drawn=origin["base_seed"])
                if "own" in origin:
                    state = {"begun": False, **(state or {}), "own": origin["own"]}
        self.next_epoch = self.epoch + 1
        self.order.begin(self.epoch, self.progress, state)

    def take_back(self, resumed: dict[str, Any] | None) -> None:
        """Undo a failed :meth:`begin`: the next epoch still continues from this state."""
        if resumed is not None:
            self.resumed = resumed
            self.next_epoch = resumed["epoch"]

    def draw(self, drawing: Iterator[Any], *, as_arrays: bool = False) -> Iterator[Any]:
        """Return an iterator of the index batches of the epoch that has begun.

        Args:
            drawing: An iterator of ``order.index_sampler``.
            as_arrays: Whether the batches of torch's samplers may be arrays.
        """
        return self.order.draw(drawing, self.generator, as_arrays=as_arrays)

    def commit(self) -> None:
        """Carry over what the newest epoch leaves over, if the user is done with all of it."""
        progress = self.progress
        # With on_error="skip", the last batches may not be delivered. Then only the end counts.
        self.order.commit(sys.maxsize if progress.is_ended else progress.position)

    @property
    def checkpoint(self) -> SamplerCheckpoint:
        """Takes and restores checkpoints of the next epoch."""
        return self.order.checkpoint(self.generator)

    def _match_base_seed(self, draws_seed: bool, *, drawn: bool) -> dict[str, Any] | None:
        """Give the generator the state that it had in the resumed run when the epoch was drawn.

        torch draws a base seed from it before each epoch, but not where workers are persistent.

        Args:
            draws_seed: Whether a base seed is drawn before this epoch in this run.
            drawn: Whether one was drawn before this epoch in the resumed run.

        Returns:
            The checkpoint to draw the epoch from; None to draw from the generators as they are.
        """
        if draws_seed and not drawn:
            return self.checkpoint.dump(is_begun=False)
        if drawn and not draws_seed and self.generator is not None:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return None

    # States ------------------------------------------------------------------------------

    def state_dict(self, *, draws_seed: bool) -> dict[str, Any]:
        """Return epoch, position and what the order depends on, as plain values.

        Args:
            draws_seed: Whether torch will draw a base seed for the next epoch.
        """
        progress = self.progress
        if self.epoch is None or progress.is_ended:
            self.commit()
            origin = {**self.checkpoint.dump(is_begun=False), "base_seed": draws_seed}
            return {"epoch": self.next_epoch, "position": 0, "origin": origin}
        state = {
            "epoch": self.epoch,
            "position": progress.position,
            "origin": self.order.dump(self.generator),
        }
        if ahead := progress.ahead:
            state["ahead"] = runs_of(ahead)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next epoch continue from a state.

        Raises:
            ValueError: If the state does not fit.
        """
        origin = state["origin"]
        self.order.check_position(state["position"], origin.get("rest", ()))
        self.checkpoint.restore(origin)
        self.resumed = state
        self.next_epoch = state["epoch"]
