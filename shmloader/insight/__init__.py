"""Measures where the time goes: the times of each batch, statistics of them, and the verdict.

An iterator records a tuple for each call of ``next()``. Everything else is computed when somebody
reads the statistics.

Modules: ``measurements`` (a batch's times, an engine's counts, the usage of workers and threads),
``record`` (what is recorded of an epoch), ``sums`` (the sums over it), ``histogram`` (percentiles
in fixed memory), ``statistics`` (the records of all epochs), ``figures`` and ``snapshot`` (the
frozen statistics), ``verdict`` (one sentence about them), ``table`` and ``text`` (how they print)
and ``trace`` (a file with the times of each batch).
"""

from shmloader.insight.figures import (
    ConsumerStats,
    SlotStats,
    Stages,
    StageStats,
    WaitPlaces,
    WaitStats,
    WorkerStats,
)
from shmloader.insight.snapshot import LoaderStats

__all__ = [
    "ConsumerStats",
    "LoaderStats",
    "SlotStats",
    "StageStats",
    "Stages",
    "WaitPlaces",
    "WaitStats",
    "WorkerStats",
]
