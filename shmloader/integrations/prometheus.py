"""Prometheus: what loaders have delivered, and how long the training loop waited for them.

One line exports a loader. The program itself serves the metrics, for instance by
``prometheus_client.start_http_server(8000)``. ``docs/howto/metrics.md`` lists the metrics.

Guarantees:
    * A scrape only reads what the loader records: it starts no worker, and takes no lock of the
      loader. It may come on any thread and at any time, also after ``close()``.
    * A loader's counters cover all its epochs, and never go backwards.
    * An export does not keep its loader alive. The metrics end with the loader.
"""

import weakref
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from shmloader.grammar import described_type
from shmloader.insight.stats import LoaderStats
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.sharded import ShardedDataLoader
from shmloader.memory.limits import free_memory
from shmloader.process_state import PROCESS
from shmloader.sampling.arguments import Ranks

_LABELS = ("loader", "rank")

# The metrics: names without "shmloader_" and "_total", texts, and attributes of the statistics, of
# which those of workers are added up. A value of several parts is a tuple with a name for each,
# which is the value of one more label.
_COUNTERS = {
    "epochs": ("Epochs begun.", "epochs"),
    "batches": ("Batches delivered.", "batches"),
    "samples": ("Samples delivered.", "samples"),
    "delivered_bytes": ("Bytes of the delivered batches.", "nbytes"),
    "elapsed_seconds": ("Seconds from iter() to the last next(), over all epochs.", "elapsed_s"),
    "wait_seconds": ("Seconds that the consumer waited, by the next batch's place.", "wait.causes"),
    "stage_seconds": ("Seconds of batches in each stage; its rate is a queue's length.", "stages"),
    "worker_busy_seconds": ("Seconds that workers were loading.", "workers.busy_s"),
    "copied_batches": ("Batches copied, since the consumer held too many.", "slots.copied"),
    "failures": ("Samples left out or replaced, and batches that raised.", "failures"),
    "worker_restarts": ("Workers that were replaced.", "restarts"),
}
_GAUGES = {
    "workers": ("Number of workers.", "num_workers"),
    "slots": ("Most slots of an epoch.", "slots.count"),
    "shared_memory_max_bytes": ("Most memory that all slots of an epoch took.", "slots.nbytes"),
    "worker_memory_bytes": ("Memory of workers, with parts of shared pages.", "workers.pss_bytes"),
    "free_memory_bytes": ("Memory that the process may still take.", "free"),
}
_PARTS = {"wait_seconds": "cause", "stage_seconds": "stage"}


def _value_of(stats: LoaderStats, path: str) -> Any:
    part, _, name = path.partition(".")
    if part == "free":
        free = free_memory(Path("/"))
        return None if free is None else free.nbytes
    if part == "workers":
        return sum(getattr(worker, name) or 0 for worker in stats.workers)
    return attrgetter(path)(stats)


class Export:
    """A loader whose metrics are exported. Made by :func:`export`.

    Attributes:
        loader: A weak reference to the loader.
    """

    def __init__(self, loader: DataLoader[Any], name: str, exports: dict[str, "Export"]) -> None:
        self.loader, self._name, self._exports = weakref.ref(loader), name, exports
        # The largest values of counters so far. What is measured of a running epoch may shrink.
        self._counted: dict[Any, float] = {}

    def unregister(self) -> None:
        """Export the loader no longer. May be called again."""
        if self._exports.get(self._name) is self:
            del self._exports[self._name]

    def read(self) -> tuple[tuple[str, str], LoaderStats] | None:
        """Return the values of the labels, and the statistics; None if the loader is gone."""
        loader = self.loader()
        if loader is None:
            return None
        if isinstance(loader, ShardedDataLoader):
            rank = loader.rank
        else:
            rank = (Ranks(None, None).known or (None,))[0]
        return (self._name, "" if rank is None else str(rank)), loader.stats("total")

    def count(self, key: Any, value: float) -> float:
        """Return a counter's value, which never goes backwards."""
        counted = self._counted[key] = max(value, self._counted.get(key, 0))
        return counted


class LoaderCollector(Collector):
    """The exported loaders of one registry: their metrics are families of several loaders."""

    def __init__(self) -> None:
        self.exports: dict[str, Export] = {}

    def describe(self) -> Iterator[Any]:
        """Yield the metrics without values, when the collector is registered."""
        return self._collect([])

    def collect(self) -> Iterator[Any]:
        """Yield all metrics, on the thread that serves a scrape."""
        read = [(export, export.read()) for export in [*self.exports.values()]]
        return self._collect([(export, *found) for export, found in read if found is not None])

    def _collect(self, read: list[tuple[Export, tuple[str, str], LoaderStats]]) -> Iterator[Any]:
        for name, (text, path) in _COUNTERS.items():
            part = _PARTS.get(name)
            labels = (*_LABELS, part) if part else _LABELS
            counter = CounterMetricFamily(f"shmloader_{name}", text, labels=labels)
            for export, of, stats in read:
                value = _value_of(stats, path)
                for which, one in value._asdict().items() if part else [("", value)]:
                    labelled = [*of, which][: len(labels)]
                    counter.add_metric(labelled, export.count((name, which), one))
            yield counter
        for name, (text, path) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"shmloader_{name}", text, labels=_LABELS)
            for _, of, stats in read:
                if (value := _value_of(stats, path)) is not None:
                    gauge.add_metric(of, value)
            yield gauge


def export(loader: DataLoader[Any], name: str, *, registry: CollectorRegistry = REGISTRY) -> Export:
    """Export the metrics of a loader, with the labels ``loader`` and ``rank``.

    .. code-block:: python

        import torch
        import shmloader.integrations.prometheus
        from shmloader import DataLoader

        loader = DataLoader(torch.arange(64), batch_size=8)
        shmloader.integrations.prometheus.export(loader, name="train")

    Args:
        loader: The loader, which is not kept alive.
        name: The value of the label ``loader``, such as "train".
        registry: A registry of ``prometheus_client``; by default, the one that its servers show.

    Returns:
        An object whose ``unregister()`` ends the export.

    Raises:
        TypeError: If ``loader`` is not one of shmloader's loaders.
        ValueError: If another loader is exported by this name.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"export() needs a shmloader.DataLoader, but got {described_type(loader)}")
    collector = PROCESS.exporters.get(registry)
    if collector is None:
        collector = PROCESS.exporters[registry] = LoaderCollector()
        registry.register(collector)
    before = collector.exports.get(name)
    if before is not None and before.loader() not in (None, loader):
        raise ValueError(
            f"another loader is exported as name={name!r}: give another name, or call "
            "unregister() of what its export() returned"
        )
    made = collector.exports[name] = Export(loader, name, collector.exports)
    return made
