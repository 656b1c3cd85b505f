"""Lightning: a callback that keeps loaders in step with the Trainer's epochs."""

import operator
import warnings
from typing import Any

try:
    from lightning import __version__
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the same by the name of its own package
    from pytorch_lightning import __version__
    from pytorch_lightning.callbacks import Callback

from shmloader.loader.dataloader import DataLoader
from shmloader.loader.rebuilt import note_callback

# Nothing public begins an epoch anew, or says where a run continues: what of the training loop is
# read here, all of which Lightning 2.5 and 2.6 have.
_NEEDED = (
    "_data_fetcher",
    "done",
    "max_batches",
    "restarting",
    "restarted_mid_epoch",
    "epoch_loop.restarting",
    "epoch_loop.restarted_on_train_batch_end",
    "epoch_loop.batch_progress.is_last_batch",
)


class LoaderCallback(Callback):  # type: ignore[misc] # ships no types
    """Passes the Trainer's epoch to shmloader's loaders, and resumes them from any checkpoint.

    Lightning saves the states of its training loaders in each checkpoint, but loads them only if
    the checkpoint was made in the middle of an epoch, and it begins a loader's epoch before it
    says which one that is. From a checkpoint made after the last step of an epoch, but before its
    end, it begins the following epoch with the iterator of the one that is over. With this
    callback, all of these resume with the following epoch, as the run that saved them did.

    Lightning also ends each epoch after as many batches as the first one has. With this callback,
    an epoch has all batches of a training loader with ``last_batch="rollover"``.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        # The number of batches of the epoch that begins, once Lightning may know it.
        self._later_count: int | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Check, before training, that the callback knows this release of Lightning.

        Raises:
            RuntimeError: If it is not.
        """
        missing = [name for name in _NEEDED if not _has(trainer.fit_loop, name)]
        if stage == "fit" and missing:
            raise RuntimeError(
                f"LoaderCallback does not know Lightning {__version__}, whose training loop has no "
                f"{', '.join(missing)}: install Lightning 2.5 or 2.6, or leave out the callback "
                "and resume only from checkpoints that were made in the middle of an epoch"
            )

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Note the states of the loaders, which Lightning may not load itself."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._states = loop.get("state_dict", {}).get("combined_loader", [])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Forget the states if Lightning has loaded them, and leave an epoch that is over."""
        loop = trainer.fit_loop
        loaders = _loaders(loop)
        if len(loaders) > 1 and any(map(_rolls_over, loaders)):
            warnings.warn(
                "Lightning ends each epoch after as many batches as the first one has, but with "
                "last_batch='rollover' later ones may have more, whose samples are not trained on "
                "where several loaders are combined: set last_batch='keep' or 'discard'",
                stacklevel=2,
            )
        if not loop.restarting:
            return
        self._states = []
        has_left_epoch = (
            loop.restarted_mid_epoch
            and loop.epoch_loop.restarted_on_train_batch_end
            and loop.epoch_loop.batch_progress.is_last_batch
        )
        if has_left_epoch and not loop.done:
            for loader in loaders:
                _set_epoch_of_samplers(loader, trainer.current_epoch)  # workers draw ahead at once
            iter(loop._data_fetcher)
        # Lightning still compares the epoch that is over with its number of batches.
        self._match_length(trainer, is_later=has_left_epoch)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Make the loaders deliver the epoch that begins."""
        loop, epoch = trainer.fit_loop, trainer.current_epoch
        stateful = [loader for loader in _loaders(loop) if hasattr(loader, "load_state_dict")]
        states, self._states = self._states, []
        if len(states) != len(stateful):
            states = [{}] * len(stateful)
        # Lightning 2.6 has is_resuming, and earlier ones do as if it were False.
        is_begun = epoch == 0 or getattr(loop, "is_resuming", False) or loop.epoch_loop.restarting
        has_changed = False
        for loader, state in zip(stateful, states, strict=True):
            if not isinstance(loader, DataLoader):
                continue
            if state.get("epoch") == epoch:
                loader.load_state_dict(state)
                has_changed = True
            elif loader.epoch != epoch:
                loader._has_warned_of_epoch = True  # the user did not ask for it
                loader.set_epoch(epoch)
                has_changed = True
        if has_changed and is_begun:  # otherwise, Lightning begins the epoch after this call
            iter(loop._data_fetcher)
        self._match_length(trainer)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Tell Lightning the number of batches that it was not to know before."""
        if self._later_count is not None:
            _set_count(trainer, self._later_count)
            self._later_count = None

    def _match_length(self, trainer: Any, *, is_later: bool = False) -> None:
        """Give Lightning the number of batches of the epoch that begins, if it may have changed.

        Args:
            trainer: The Trainer.
            is_later: Whether the loop has to keep the former number until the first batch.
        """
        fetcher = trainer.fit_loop._data_fetcher
        loaders = fetcher.combined_loader.flattened
        if len(loaders) > 1 or not _rolls_over(loaders[0]):
            return
        loaders[0]._present_plan.commit()  # now it has the length of the next epoch, if one is over
        limit = trainer.limit_train_batches
        try:
            count = len(loaders[0])
        except (TypeError, NotImplementedError):  # then Lightning takes all batches itself
            return
        count = int(count * limit) if isinstance(limit, float) else min(count, limit)
        fetcher.combined_loader.limits = count
        fetcher.length = count
        if is_later:
            self._later_count = count
        else:
            _set_count(trainer, count)


def _has(owner: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(owner)
    except AttributeError:
        return False
    return True


def _loaders(loop: Any) -> list[Any]:
    """Return the training loaders, of which those of shmloader learn that this callback is here."""
    loaders: list[Any] = loop._data_fetcher.combined_loader.flattened
    for loader in loaders:
        if isinstance(loader, DataLoader):
            note_callback(loader)
    return loaders


def _rolls_over(loader: object) -> bool:
    return isinstance(loader, DataLoader) and loader.last_batch == "rollover"


def _set_epoch_of_samplers(loader: Any, epoch: int) -> None:
    """Tell the epoch to a loader's sampler, and to that of its batch sampler, as Lightning does."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = [getattr(each, "sampler", None) for each in (loader, batches)]
    for sampler in {id(sampler): sampler for sampler in samplers}.values():
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _set_count(trainer: Any, count: int) -> None:
    trainer.fit_loop.max_batches = count
    interval = trainer.val_check_interval
    if isinstance(interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(count * interval))
