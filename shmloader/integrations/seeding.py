"""Seeds random transforms whose own generators the ``seed=`` of a loader cannot reach."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from shmloader.batch.sample_rng import sample_rng

# The methods that seed transforms of Albumentations and of MONAI.
_METHODS = ("set_random_seed", "set_random_state")

_Transform = TypeVar("_Transform", bound=Callable[..., Any])


class SeededTransform(Generic[_Transform]):
    """A random transform that is seeded anew before each call, from the ``seed=`` of a loader.

    Its results then depend on the loader's seed, the epoch and the sample's position, and not on
    which worker loads the sample. Outside a loader with a seed, the transform is called without
    being seeded. It is called where samples are loaded: in worker processes, or in the main
    process. With ``thread_pool=True``, give each thread its own transform: otherwise all threads
    seed the same one.

    Args:
        transform: The transform. It is called with the arguments that this object is called with.
        reseed: Called before each call of the transform in a loader with a seed. It gets the
            transform and a whole number from 0 to 2**32 - 1. Must be picklable where workers are
            not forked.

    Attributes:
        transform: The transform.
    """

    def __init__(self, transform: _Transform, reseed: Callable[[_Transform, int], object]) -> None:
        self.transform = transform
        self._reseed = reseed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Seed the transform if a loader with a seed loads, and call it."""
        try:
            rng = sample_rng()
        except RuntimeError:  # no loader with a seed
            rng = None
        if rng is not None:
            self._reseed(self.transform, int(rng.integers(1 << 32)))
        return self.transform(*args, **kwargs)


def seeded(transform: _Transform) -> SeededTransform[_Transform]:
    """Return a transform of Albumentations or MONAI that a loader with ``seed=`` seeds anew.

    Args:
        transform: A ``Compose`` of Albumentations or MONAI, or any other callable with
            ``set_random_seed(seed)`` or ``set_random_state(seed=...)``.

    Raises:
        TypeError: If ``transform`` has neither method.
    """
    if not any(callable(getattr(transform, name, None)) for name in _METHODS):
        raise TypeError(
            "seeded() needs a transform with set_random_seed or set_random_state, such as Compose "
            f"of Albumentations or MONAI, but got {type(transform).__name__}: for any other, use "
            "SeededTransform"
        )
    return SeededTransform(transform, _reseed)


def _reseed(transform: Any, seed: int) -> None:
    if callable(getattr(transform, _METHODS[0], None)):
        transform.set_random_seed(seed)
    else:
        transform.set_random_state(seed=seed)
