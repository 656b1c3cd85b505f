"""Albumentations: transforms that ``seed=`` of a loader makes repeatable."""

from typing import Any

from shmloader.integrations.seeding import SeededTransform


def seeded(transform: Any) -> SeededTransform[Any]:
    """Return a transform that a loader with ``seed=`` seeds anew for each sample.

    Args:
        transform: A ``Compose`` of Albumentations, or any object with ``set_random_seed``.

    Raises:
        TypeError: If it has no ``set_random_seed``.
    """
    if not callable(getattr(transform, "set_random_seed", None)):
        raise TypeError(
            "seeded() needs a transform with set_random_seed, such as albumentations.Compose, but "
            f"got {type(transform).__name__}"
        )
    return SeededTransform(transform, _reseed)


def _reseed(transform: Any, seed: int) -> None:
    transform.set_random_seed(seed)
