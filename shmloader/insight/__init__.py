"""Where the time goes: what is noted of each batch, the statistics read of it, and the verdict.

Modules: ``times`` (what is known of one batch), ``histogram`` (percentiles in fixed memory),
``record`` (what is added up, on the consumer's thread), ``snapshot`` (the frozen statistics),
``verdict`` (one sentence on them), ``table`` (how they print) and ``trace`` (each batch by itself).
"""

from shmloader.insight.snapshot import (
    LoaderStats,
    SlotStats,
    Stages,
    StageStats,
    WaitStats,
    WorkerStats,
)

__all__ = ["LoaderStats", "SlotStats", "StageStats", "Stages", "WaitStats", "WorkerStats"]
