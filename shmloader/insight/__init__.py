"""Measures where the time goes: the times of each batch, statistics of them, and the verdict.

Modules: ``measurements`` (a batch's times, an engine's counts, the usage of workers),
``core_time`` (CPU time of threads, and their time without a core), ``histogram`` (percentiles in
fixed memory), ``record`` (the sums, on the consumer's thread), ``statistics`` (the records of all
epochs), ``snapshot`` (the frozen statistics), ``verdict`` (one sentence about them), ``text`` (how
they print) and ``trace`` (a file with the times of each batch).
"""

from shmloader.insight.snapshot import (
    ConsumerStats,
    LoaderStats,
    SlotStats,
    Stages,
    StageStats,
    WaitPlaces,
    WaitStats,
    WorkerStats,
)

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
