"""Random transforms that have generators of their own, which ``seed=`` of a loader cannot reach."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from shmloader.batch.sample_rng import sample_rng

_Transform = TypeVar("_Transform", bound=Callable[..., Any])


class SeededTransform(Generic[_Transform]):
    """A random transform that is seeded anew for each sample, by a loader with ``seed=``.

    Its results then depend on the loader's seed, the epoch and the sample's position, and not on
    which worker loads the sample. Where no loader with a seed loads, it is the transform as it is.
    It is called where samples are loaded: in worker processes, or in the main process. With
    ``thread_pool=True``, give each thread a transform of its own: threads would seed the same one.

    Args:
        transform: The transform, which is called with whatever this object is called with.
        reseed: Called with the transform and a whole number from 0 to 2**32 - 1, before each call
            of the transform. It has to be picklable where workers are not forked.

    Attributes:
        transform: The transform.
    """

    def __init__(self, transform: _Transform, reseed: Callable[[_Transform, int], object]) -> None:
        self.transform = transform
        self._reseed = reseed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Seed the transform, and call it."""
        try:
            rng = sample_rng()
        except RuntimeError:  # no loader with a seed
            rng = None
        if rng is not None:
            self._reseed(self.transform, int(rng.integers(1 << 32)))
        return self.transform(*args, **kwargs)
