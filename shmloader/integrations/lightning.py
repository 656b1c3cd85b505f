"""Lightning: a callback that keeps loaders in step with the Trainer's epochs."""

import operator
import warnings
from typing import Any

try:
    from lightning import __version__
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the same classes, in a package of their own
    from pytorch_lightning import __version__
    from pytorch_lightning.callbacks import Callback

from shmloader.loader.dataloader import DataLoader

# Attributes of the training loop that this module uses, since no public interface begins an epoch
# anew, or says where a run continues. Lightning 2.5 and 2.6 have all of them.
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
    the checkpoint was made in the middle of an epoch. It also begins a loader's epoch before it
    tells the loader the epoch's number. From a checkpoint made after the last step of an epoch, but
    before the epoch's end, it begins the following epoch with the iterator of the epoch that is
    over. With this callback, a run that resumes from any of these checkpoints gets the batches that
    the saved run got next.

    Lightning also ends each epoch after as many batches as the first epoch has. With this callback,
    each epoch has all batches of a training loader with ``last_batch="rollover"``, unless several
    loaders are combined.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        # The number of batches of the epoch that begins, until Lightning may be told it.
        self._later_count: int | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Check, before training, that the callback knows this release of Lightning.

        Raises:
            RuntimeError: If the training loop lacks an attribute that the callback needs.
        """
        missing = [name for name in _NEEDED if not _has(trainer.fit_loop, name)]
        if stage == "fit" and missing:
            raise RuntimeError(
                f"LoaderCallback does not know Lightning {__version__}, whose training loop has no "
                f"{', '.join(missing)}: install Lightning 2.5 or 2.6, or leave out the callback "
                "and resume only from checkpoints that were made in the middle of an epoch"
            )

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Keep the states of the loaders, because Lightning does not always load them itself."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        self._states = loop.get("state_dict", {}).get("combined_loader", [])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Forget the states if Lightning has loaded them, and leave an epoch that is over.

        Warns if several loaders are combined and one of them has ``last_batch="rollover"``.
        """
        loop = trainer.fit_loop
        loaders = _loaders(loop)
        if len(loaders) > 1 and any(map(_rolls_over, loaders)):
            warnings.warn(
                "Lightning ends each epoch after as many batches as the first one has, but with "
                "last_batch='rollover' later epochs may have more. Where several loaders are "
                "combined, the additional batches are not trained on: set last_batch='keep' or "
                "'discard'",
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
                _set_epoch_of_samplers(loader, trainer.current_epoch)  # iter() draws at once
            iter(loop._data_fetcher)
        # Lightning still compares the number of batches taken in the epoch that is over with its
        # length.
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
        """Tell Lightning the epoch's number of batches, if that could not be done earlier."""
        if self._later_count is not None:
            _set_count(trainer, self._later_count)
            self._later_count = None

    def _match_length(self, trainer: Any, *, is_later: bool = False) -> None:
        """Give Lightning the number of batches of the epoch that begins, if it may have changed.

        Args:
            trainer: The Trainer.
            is_later: Whether the loop has to keep the previous number until the first batch.
        """
        fetcher = trainer.fit_loop._data_fetcher
        loaders = fetcher.combined_loader.flattened
        if len(loaders) > 1 or not _rolls_over(loaders[0]):
            return
        loaders[0]._present_plan.commit()  # if an epoch is over, the length is now the next one's
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
    """Return the training loaders."""
    loaders: list[Any] = loop._data_fetcher.combined_loader.flattened
    return loaders


def _rolls_over(loader: object) -> bool:
    return isinstance(loader, DataLoader) and loader.last_batch == "rollover"


def _set_epoch_of_samplers(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader's sampler and of its batch sampler's, as Lightning does."""
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
