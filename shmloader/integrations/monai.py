"""MONAI: transforms that ``seed=`` of a loader makes repeatable."""

from typing import Any

from shmloader.integrations.seeding import SeededTransform


def seeded(transform: Any) -> SeededTransform[Any]:
    """Return a transform that a loader with ``seed=`` seeds anew for each sample.

    Args:
        transform: A ``Compose`` of MONAI, or any ``Randomizable``.

    Raises:
        TypeError: If it has no ``set_random_state``.
    """
    if not callable(getattr(transform, "set_random_state", None)):
        raise TypeError(
            "seeded() needs a transform with set_random_state, such as monai.transforms.Compose, "
            f"but got {type(transform).__name__}"
        )
    return SeededTransform(transform, _reseed)


def _reseed(transform: Any, seed: int) -> None:
    transform.set_random_state(seed=seed)
