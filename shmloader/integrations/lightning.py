"""Lightning: a callback that keeps seeded loaders in step with the Trainer's epochs."""

import warnings
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import Callback

from shmloader.loader.dataloader import DataLoader


class LoaderCallback(Callback):  # type: ignore[misc] # ships no types
    """Passes the Trainer's epoch to shmloader's loaders, and resumes them from any checkpoint.

    Lightning saves the states of its training loaders in each checkpoint, but loads them only if
    the checkpoint was made in the middle of an epoch, and it begins a loader's epoch before it
    says which one that is. From a checkpoint made after the last step of an epoch, but before its
    end, it begins the following epoch with the iterator of the one that is over. With this
    callback, all of these resume with the following epoch, as the run that saved them did.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Note the states of the loaders, which Lightning may not load itself."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._states = loop.get("state_dict", {}).get("combined_loader", [])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Forget the states if Lightning has loaded them, and leave an epoch that is over."""
        loop = trainer.fit_loop
        if any(map(_rolls_over, loop._combined_loader.flattened)):
            warnings.warn(
                "Lightning ends each epoch after as many batches as the first one has, but with "
                "last_batch='rollover' later ones may have more, whose samples are not trained on: "
                "set last_batch='keep' or 'discard'",
                stacklevel=2,
            )
        if not loop.restarting:
            return
        self._states = []
        has_left_epoch = (
            getattr(loop, "restarted_mid_epoch", False)  # by the names of Lightning 2.5 and later
            and loop.epoch_loop.restarted_on_train_batch_end
            and loop.epoch_loop.batch_progress.is_last_batch
        )
        if has_left_epoch and not loop.done:
            for loader in loop._combined_loader.flattened:
                _set_sampler_epoch(loader, trainer.current_epoch)  # workers draw ahead at once
            iter(loop._data_fetcher)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Make the loaders deliver the epoch that begins."""
        loop, epoch = trainer.fit_loop, trainer.current_epoch
        found = loop._combined_loader.flattened
        stateful = [loader for loader in found if hasattr(loader, "load_state_dict")]
        states, self._states = self._states, []
        if len(states) != len(stateful):
            states = [{}] * len(stateful)
        is_begun = epoch == 0 or getattr(loop, "is_resuming", False) or loop.epoch_loop.restarting
        has_changed = False
        for loader, state in zip(stateful, states, strict=True):
            if not isinstance(loader, DataLoader):
                continue
            if state.get("epoch") == epoch:
                loader.load_state_dict(state)
                has_changed = True
            elif loader.epoch != epoch:
                loader.set_epoch(epoch)
                has_changed = True
        if has_changed and is_begun:  # otherwise, Lightning begins the epoch after this call
            iter(loop._data_fetcher)


def _rolls_over(loader: object) -> bool:
    return isinstance(loader, DataLoader) and loader.last_batch == "rollover"
