"""Warnings for users of frameworks that rebuild our loaders, and a correction for Lightning.

Some frameworks read the arguments of a loader and build another one of torch's class from them. The
new loader runs without shmloader, and without the arguments that torch does not have. Our loader
can see only that a module of such a framework reads ``worker_init_fn``. These modules do that for
no other purpose.

Lightning saves the state of a loader and begins its epochs in ways that only our callback for
Lightning can correct. The module of a caller shows whether a call comes from Lightning.
"""

import sys
import warnings
from typing import Any

from shmloader.probing import probe
from shmloader.sampling.seeded_samplers import SeededShardSampler

# The modules that rebuild loaders, each with its framework's name and the adapter for it.
_ACCELERATE = ("accelerate", "shmloader.integrations.accelerate.prepare(accelerator, loader)")
_RAY = ("Ray Train", "shmloader.integrations.ray.prepare_data_loader(loader)")
_READERS = {
    "accelerate.data_loader": _ACCELERATE,
    "ray.train.torch.train_loop_utils": _RAY,
    "ray.train.v2.torch.train_loop_utils": _RAY,
}


class RebuiltLoaderWarning(UserWarning):
    """A framework builds a loader of torch's class in place of a loader of shmloader's."""


class ReadByFrameworks:
    """An attribute of a loader that is read where a framework builds another loader.

    The value is kept in the loader's ``__dict__``, as without this descriptor.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, _: object = None) -> Any:
        if loader is None:
            return self
        reader = _READERS.get(sys._getframe(1).f_globals.get("__name__", ""))
        if reader is not None:
            self._warn(loader, *reader)
        try:
            return vars(loader)[self._name]
        except KeyError:
            raise AttributeError(
                f"{type(loader).__name__!r} object has no attribute {self._name!r}"
            ) from None

    def __set__(self, loader: Any, value: object) -> None:
        vars(loader)[self._name] = value

    @staticmethod
    def _warn(loader: Any, framework: str, adapter: str) -> None:
        if not vars(loader).get("_has_warned_of_rebuilding"):
            vars(loader)["_has_warned_of_rebuilding"] = True
            warnings.warn(
                f"{framework} builds a loader of torch's class from the attributes of this "
                f"{type(loader).__name__}, so it runs without shmloader and its arguments. To keep "
                f"both, call {adapter}; or call shmloader.install() with the arguments",
                RebuiltLoaderWarning,
                stacklevel=4,
            )


# Lightning's two packages, and their modules that combine the loaders of a Trainer.
_PACKAGES = ("lightning", "pytorch_lightning")
_COMBINING = (
    "lightning.pytorch.utilities.combined_loader",
    "pytorch_lightning.utilities.combined_loader",
)
# Between Lightning's frame and ours there may be frames of a user's overriding methods.
_MOST_FRAMES = 4

_CALLBACK = "shmloader.integrations.lightning.LoaderCallback()"


def note_callback(loader: Any) -> None:
    """Note that the callback for Lightning takes care of a loader."""
    vars(loader)["_has_lightning_callback"] = True


def warn_of_lightning_states(loader: Any) -> None:
    """Warn, once for each loader, if Lightning saves its state and the callback is missing.

    Called by the loader's ``state_dict``.
    """
    if _is_called_by_lightning(loader):
        _warn_once(
            loader,
            "_has_warned_of_states",
            f"Lightning saves the state of this {type(loader).__name__}, but where it resumes from "
            "a checkpoint that was made at an epoch's end, it skips the next epoch or repeats an "
            f"order: add {_CALLBACK} to the callbacks of the Trainer, also of the one that resumes",
        )


def warn_of_lightning_epochs(loader: Any) -> None:
    """Warn, once for each loader that rolls over, if Lightning would cut its later epochs short.

    Called when the loader begins an epoch.
    """
    if vars(loader).get("_is_begun_by_lightning"):
        if _is_called_by_lightning(loader):
            _warn_once(
                loader,
                "_has_warned_of_epochs",
                "Lightning ends each epoch after as many batches as the first one has, but with "
                "last_batch='rollover' later ones may have more, which are left out: add "
                f"{_CALLBACK} to the callbacks of the Trainer for the loader that it trains with, "
                "and set last_batch='keep' or 'discard' for others",
            )
    elif _is_called_by_lightning(loader):
        vars(loader)["_is_begun_by_lightning"] = True


def _is_called_by_lightning(loader: Any) -> bool:
    """Whether Lightning called the loader's method that called this module.

    False if the callback for Lightning takes care of the loader.
    """
    if vars(loader).get("_has_lightning_callback"):
        return False
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__") in _COMBINING:
            return True
    return False


def _warn_once(loader: Any, flag: str, text: str) -> None:
    if not vars(loader).get(flag):
        vars(loader)[flag] = True
        warnings.warn(text, stacklevel=4)


def leave_out_repeats(batch_sampler: Any) -> None:
    """Make the sharded loader with which Lightning predicts deliver each sample once.

    For training, all ranks need equally many batches, so the order of a sharded loader is padded
    with repeated samples. For predicting, Lightning builds another loader. Its batch sampler wraps
    one over the padded order, so Lightning would predict the repeated samples twice. This function
    leaves them out of that order.

    Args:
        batch_sampler: The batch sampler of the new loader, or None.
    """
    if type(batch_sampler).__module__.partition(".")[0] not in _PACKAGES:
        return
    for batches in vars(batch_sampler).values():
        order = probe(batches, "sampler")
        if isinstance(order, SeededShardSampler):
            batches.sampler = batch_sampler.sampler = order.without_repeats()
            return
    if isinstance(probe(batch_sampler, "sampler"), SeededShardSampler):
        warnings.warn(
            "this release of Lightning is not known to shmloader: where it predicts with a "
            "ShardedDataLoader, there may be two predictions for samples that fill up the last "
            "batches, or none for samples that are discarded: predict with a DataLoader",
            stacklevel=3,
        )
