"""Lightning: a callback that keeps loaders in step with the Trainer's epochs."""

from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the same class, in a package of its own
    from pytorch_lightning.callbacks import Callback

from shmloader.loader.dataloader import DataLoader


class LoaderCallback(Callback):  # type: ignore[misc] # ships no types
    """Passes the Trainer's epoch to shmloader's loaders, and resumes them from any checkpoint.

    Lightning saves the states of its training loaders in each checkpoint, but loads them only if
    the checkpoint was made in the middle of an epoch. It also begins a loader's epoch before it
    tells the loader the epoch's number. From a checkpoint made after the last step of an epoch, but
    before the epoch's end, it begins the following epoch with the iterator of the epoch that is
    over. With this callback, a run that resumes from any of these checkpoints gets the batches that
    the saved run got next.

    The callback uses attributes of Lightning's training loop, since no public interface begins an
    epoch anew, or says where a run continues. Lightning 2.5 and 2.6 have all of them.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Keep the states of the loaders, because Lightning does not always load them itself."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._states = loop.get("state_dict", {}).get("combined_loader", [])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Forget the states if Lightning has loaded them, and leave an epoch that is over."""
        loop = trainer.fit_loop
        if not loop.restarting:
            return
        self._states = []
        has_left_epoch = (
            loop.restarted_mid_epoch
            and loop.epoch_loop.restarted_on_train_batch_end
            and loop.epoch_loop.batch_progress.is_last_batch
        )
        if has_left_epoch and not loop.done:
            for loader in _loaders(loop):
                _set_epoch_of_samplers(loader, trainer.current_epoch)  # iter() draws at once
            iter(loop._data_fetcher)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Make the loaders deliver the epoch that begins."""
        loop, epoch = trainer.fit_loop, trainer.current_epoch
        stateful = [loader for loader in _loaders(loop) if hasattr(loader, "load_state_dict")]
        states, self._states = self._states, []
        if len(states) != len(stateful):
            states = [{}] * len(stateful)
        # Lightning 2.6 has is_resuming, and earlier ones do as if it were False.
        has_started = (
            epoch == 0 or getattr(loop, "is_resuming", False) or loop.epoch_loop.restarting
        )
        has_changed = False
        for loader, state in zip(stateful, states, strict=True):
            if not isinstance(loader, DataLoader):
                continue
            if state.get("epoch") == epoch:
                loader.load_state_dict(state)
                has_changed = True
            elif loader.epoch != epoch:
                plan = loader._present_plan
                tells = plan.tells_dataset  # only the user decides whether the dataset is told
                loader.set_epoch(epoch)
                plan.tells_dataset = tells
                has_changed = True
        if has_changed and has_started:  # otherwise, Lightning begins the epoch after this call
            iter(loop._data_fetcher)


def _loaders(loop: Any) -> list[Any]:
    """Return the training loaders."""
    loaders: list[Any] = loop._data_fetcher.combined_loader.flattened
    return loaders


def _set_epoch_of_samplers(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader's sampler and of its batch sampler's, as Lightning does."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = [getattr(each, "sampler", None) for each in (loader, batches)]
    for sampler in {id(sampler): sampler for sampler in samplers}.values():
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
