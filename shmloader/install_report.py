"""The report of ``shmloader.install()``: which loaders ran on its engine, and which on torch's."""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("shmloader")


@dataclass(frozen=True, slots=True)
class InstalledLoader:
    """A line of an :class:`InstallReport`: loaders of one kind, and what they ran on.

    Attributes:
        loader: The name of the loaders' class, with its module.
        dataset: The name of the class of their datasets, without its module.
        num_workers: Their number of workers.
        engine: "shmloader", or "torch" if torch's own iterator loads.
        why: With "torch", the reason. With "shmloader", the arguments of :func:`install` that were
            left out and why, or "" if none was.
        epochs: How many epochs such loaders have begun.
    """

    loader: str
    dataset: str
    num_workers: int
    engine: str
    why: str
    epochs: int


class InstallReport:
    """What the loaders of this process ran on since :func:`install`. Any thread may read it.

    ``str(report)`` has a line for each kind of loader. Epochs that were begun in other processes
    are not in the report.
    """

    __module__ = "shmloader"  # users import it from there

    def __init__(self) -> None:
        self._epochs: Counter[tuple[str, str, int, str, str]] = Counter()

    @property
    def loaders(self) -> tuple[InstalledLoader, ...]:
        """The kinds of loaders, in the order of their first epochs."""
        return tuple(InstalledLoader(*key, count) for key, count in self._epochs.copy().items())

    def note(self, kind: type, loader: Any, engine: str, why: str) -> None:
        """Note that an epoch of a loader has begun.

        Args:
            kind: The class of the loader.
            loader: The loader, or its stand-in.
            engine: "shmloader" or "torch".
            why: Why the engine is torch's, or which arguments were left out and why; or "".
        """
        name = f"{kind.__module__}.{kind.__qualname__}"
        key = (name, type(loader.dataset).__qualname__, loader.num_workers, engine, why)
        self._epochs[key] += 1
        # An argument that was left out is logged once as a warning, everything else for debugging.
        is_news = engine == "shmloader" and why and self._epochs[key] == 1
        _log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "a %s of %s with num_workers=%s runs on %s%s",
            *key[:4],
            f": {why}" if why else "",
        )

    def __str__(self) -> str:
        """Return a line for each kind of loader."""
        lines = [
            f"{one.loader} of {one.dataset}, num_workers={one.num_workers}: on {one.engine}, "
            f"{one.epochs} epochs" + (f" ({one.why})" if one.why else "")
            for one in self.loaders
        ]
        return "\n".join(lines) or "no loader has begun an epoch since shmloader.install()"

    __repr__ = __str__
