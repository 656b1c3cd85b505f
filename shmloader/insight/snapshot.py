"""The statistics of a loader, with a verdict and as a table."""

import dataclasses

from shmloader.insight.figures import (
    ConsumerStats,
    Figures,
    Machine,
    SlotStats,
    Stages,
    StageStats,
    WaitPlaces,
    WaitStats,
    WorkerStats,
)
from shmloader.insight.measurements import Counts
from shmloader.insight.record import Totals
from shmloader.insight.sums import WorkerSums
from shmloader.insight.table import write_line, write_table
from shmloader.insight.text import as_html
from shmloader.insight.verdict import Finding, judge

_NS = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderStats(Figures):
    """Where the time of a loader goes. ``print`` shows it as a table.

    Attributes:
        epoch: Number of the epoch; None for all epochs together.
        epochs: Number of epochs begun, for all epochs together; otherwise 1, or 0 before the first.
        is_over: Whether the epoch has ended or was given up.
        kind: What loads: "processes", "threads", "executor", "in-process", "torch" (torch's own
            iterator) or, in ``shmloader bench``, "other" (a loader that is not ours); "" before
            the first epoch.
        num_workers: Number of workers.
        persistent_workers: Whether the workers persist after an epoch.
        batches: Number of batches delivered.
        samples: Number of samples in these batches.
        nbytes: Bytes of these batches: of slots, or of tensors and arrays.
        elapsed_s: Seconds from ``iter()`` to the last return of ``next()``, summed over the epochs.
        samples_per_s: Samples per second of ``elapsed_s``.
        wait: How long the consumer waited.
        stages: Where batches spent their time.
        load_p50_s: Median seconds that a worker took for a batch; accurate to 7 %.
        load_p99_s: 99th percentile of these seconds.
        workers: The statistics of each worker.
        consumer: What the process that takes the batches used.
        slots: The use of shared memory.
        restarts: Number of workers that were replaced.
        failures: Number of samples that were left out or replaced, and of batches that raised.
        machine: What the machine offers this process.
    """

    __module__ = "shmloader"  # users import it from there

    @property
    def finding(self) -> Finding:
        """The rule that made the verdict: a member of ``shmloader.insight.verdict.Finding``."""
        return judge(self)[0]

    @property
    def verdict(self) -> str:
        """What limits the speed and what to change, in one sentence or two.

        It names the cause of most of the wait; two causes if the second has at least three quarters
        of the first's weight. Nearly full memory comes before all others.
        """
        return judge(self)[1]

    def __str__(self) -> str:
        """Return a table and the verdict."""
        return write_table(self, self.verdict)

    def __repr__(self) -> str:
        """Return one short line: epoch, batches, samples per second and the consumer's wait."""
        return f"<LoaderStats: {write_line(self)}>"

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return as_html(str(self))


def snapshot(totals: Totals | None, epochs: int, machine: Machine) -> LoaderStats:
    """Return the statistics of what was recorded.

    Args:
        totals: The totals; None before the first epoch.
        epochs: Number of epochs in them.
        machine: What the machine offers this process.
    """
    if totals is None:
        return LoaderStats(machine=machine)
    sums, counts = totals.sums, totals.counts or Counts()
    elapsed_ns = max(1, totals.elapsed_ns)
    waits, waited_ns = sums.waits, sums.iter_ns + sums.waits.total_ns
    consumer = totals.consumer
    return LoaderStats(
        epoch=totals.epoch,
        epochs=epochs,
        is_over=totals.is_over,
        kind=totals.kind,
        num_workers=totals.worker_count,
        persistent_workers=totals.keeps_workers,
        batches=sums.batches,
        samples=sums.samples,
        nbytes=sums.nbytes,
        elapsed_s=elapsed_ns / _NS,
        samples_per_s=sums.samples / (elapsed_ns / _NS),
        wait=WaitStats(
            waited_ns / _NS,
            min(1.0, waited_ns / elapsed_ns),
            waits.percentile(50) / _NS,
            waits.percentile(90) / _NS,
            waits.percentile(99) / _NS,
            waits.max_ns / _NS,
            sums.startup_ns / _NS,
            WaitPlaces(**{name: spent_ns / _NS for name, spent_ns in sums.places().items()}),
        ),
        stages=Stages(
            **{
                name: StageStats(spent_ns / _NS, spent_ns / _NS / max(1, sums.batches))
                for name, spent_ns in sums.stages.items()
            }
        ),
        load_p50_s=sums.loads.percentile(50) / _NS,
        load_p99_s=sums.loads.percentile(99) / _NS,
        workers=tuple(_worker_stats(*each) for each in sorted(sums.workers.items())),
        consumer=ConsumerStats(*(None if ns is None else ns / _NS for ns in consumer)),  # type: ignore[arg-type]
        slots=SlotStats(
            counts.slot_count,
            counts.most_bytes,
            counts.lent,
            counts.copied,
            counts.grown,
            counts.largest_bytes,
            counts.share_bytes,
        ),
        restarts=counts.restarts,
        failures=totals.failures,
        machine=machine,
    )


def _worker_stats(worker_id: int, sums: WorkerSums) -> WorkerStats:
    return WorkerStats(
        worker_id,
        sums.pid,
        sums.batches,
        sums.busy_ns / _NS,
        min(1.0, sums.busy_ns / sums.span_ns) if sums.span_ns else 0.0,
        sums.fetch_ns / _NS,
        sums.collate_ns / _NS,
        sums.idle_ns / _NS,
        sums.idle_awaited_ns / _NS,
        sums.cpu_ns / _NS,
        None if sums.stalled_ns is None else sums.stalled_ns / _NS,
        sums.pss_bytes,
    )
