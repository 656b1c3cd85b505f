"""What frameworks make of the attributes of our loaders: a warning, and a correction.

Some frameworks read the arguments of a loader and make another one of torch's class with them. That
one runs without shmloader, and without the arguments that torch does not have. All that can be seen
of it is the reading: of ``worker_init_fn``, which nothing else in these modules reads.
"""

import sys
import warnings
from typing import Any

from shmloader.sampling.seeded_samplers import SeededShardSampler

# The modules that read, with the framework's name and its adapter.
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

    The value is an entry of the loader's ``__dict__``, as without this descriptor.
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


def leave_out_repeats(batch_sampler: Any) -> None:
    """Make a sharded loader by which Lightning predicts deliver each sample once.

    To train, ranks need as many batches as the others, and the order of a sharded loader is padded.
    To predict, Lightning makes a loader with a batch sampler of its own over that order, which
    would have a prediction for each of the samples that were added.

    Args:
        batch_sampler: The batch sampler of a loader, or None.
    """
    if type(batch_sampler).__name__ != "_IndexBatchSamplerWrapper":
        return
    batches = batch_sampler._batch_sampler
    if isinstance(batches.sampler, SeededShardSampler):
        batches.sampler = batch_sampler.sampler = batches.sampler.without_repeats()
