"""Metrics of real loaders, as a server of Prometheus would see them."""

import gc
import threading
import weakref
from typing import Any

import psutil
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import shmloader.integrations.prometheus as exporting
from shmloader import DataLoader, Pipeline, PipelineBuilder, ShardedDataLoader
from tests.process.support import Calls, in_thread

pytestmark = pytest.mark.timeout(120)

KINDS: dict[str, dict[str, Any]] = {
    "in-process": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "thread_pool": True},
}


def fails_once(index: int) -> int:
    if index == 5:
        raise ValueError("of mine")
    return index


def loader_of(**options: Any) -> DataLoader:
    return DataLoader(Calls(int, 24), batch_size=4, **options)


def scraped(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """The values of a scrape, by name, loader, and cause or stage, if the metric has one."""
    values = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for name, labels, value, *_ in family.samples:
            part = [labels[key] for key in ("cause", "stage") if key in labels]
            values[name.removeprefix("shmloader_"), labels["loader"], *part] = value
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_counters_add_up_all_epochs(kind) -> None:
    registry = CollectorRegistry()
    with loader_of(**KINDS[kind]) as loader:
        exporting.export(loader, "train", registry=registry)
        assert scraped(registry)["batches_total", "train"] == 0
        for _ in range(3):
            list(loader)
        values = scraped(registry)
        stats = loader.stats("total")
    assert values["epochs_total", "train"] == 3
    assert values["batches_total", "train"] == 18
    assert values["samples_total", "train"] == 72
    assert values["delivered_bytes_total", "train"] == stats.nbytes
    assert values["elapsed_seconds_total", "train"] == stats.elapsed_s
    waits = {key[2]: value for key, value in values.items() if key[0] == "wait_seconds_total"}
    assert waits == stats.wait.causes._asdict()
    assert sum(waits.values()) == pytest.approx(stats.wait.total_s)
    stages = {key[2]: value for key, value in values.items() if key[0] == "stage_seconds_total"}
    assert stages == stats.stages._asdict()
    assert values["workers", "train"] == stats.num_workers
    assert values["shared_memory_max_bytes", "train"] == stats.slots.nbytes
    assert (stats.slots.nbytes > 0) == (kind == "processes")


def test_failures_and_restarts_are_counted_over_epochs() -> None:
    registry = CollectorRegistry()
    with DataLoader(Calls(fails_once, 24), batch_size=4, num_workers=1, on_error="skip") as loader:
        exporting.export(loader, "train", registry=registry)
        for epoch in (1, 2):
            list(loader)
            assert scraped(registry)["failures_total", "train"] == epoch
    with loader_of(num_workers=1, worker_restarts=1, prefetch_factor=1) as loader:
        exporting.export(loader, "killed", registry=registry)
        for epoch in (1, 2):
            batches = iter(loader)
            next(batches)
            psutil.Process(batches._workers[0].pid).kill()
            list(batches)
            assert scraped(registry)["worker_restarts_total", "killed"] == epoch


def test_a_scrape_on_another_thread_never_sees_a_counter_go_back() -> None:
    registry, seen, is_over = CollectorRegistry(), [], threading.Event()
    with loader_of(num_workers=2) as loader:
        exporting.export(loader, "train", registry=registry)

        def scrape() -> None:
            while not is_over.is_set():
                seen.append(scraped(registry))

        with in_thread(scrape):
            try:
                for _ in range(3):
                    assert len(list(loader)) == 6
            finally:
                is_over.set()
    seen.append(scraped(registry))
    assert seen[-1]["batches_total", "train"] == 18
    counters = [key for key in seen[-1] if key[0].endswith("_total")]
    assert len(counters) > 30
    for key in counters:
        values = [each[key] for each in seen]
        assert values == sorted(values), key


def test_a_value_that_shrinks_does_not_take_its_counter_back(monkeypatch) -> None:
    registry, loader = CollectorRegistry(), loader_of()
    list(loader)
    exporting.export(loader, "train", registry=registry)
    before = scraped(registry)
    monkeypatch.setattr(loader, "stats", lambda _: shmloader_stats())
    after = scraped(registry)
    assert after["batches_total", "train"] == before["batches_total", "train"] == 6
    assert after["workers", "train"] == 7
    assert after["free_memory_bytes", "train"] > 0


def shmloader_stats() -> Any:
    from shmloader.insight.stats import LoaderStats

    return LoaderStats(num_workers=7)


def test_a_scrape_starts_no_worker() -> None:
    registry, loader = CollectorRegistry(), loader_of(num_workers=2)
    before = {each.pid for each in psutil.Process().children()}
    exporting.export(loader, "train", registry=registry)
    assert scraped(registry)["workers", "train"] == 0
    assert {each.pid for each in psutil.Process().children()} == before


def test_an_export_does_not_keep_its_loader_alive() -> None:
    registry, loader = CollectorRegistry(), loader_of()
    exporting.export(loader, "train", registry=registry)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert scraped(registry) == {}
    again = loader_of()
    exporting.export(again, "train", registry=registry)  # the name is free
    assert scraped(registry)["batches_total", "train"] == 0


def test_loaders_of_one_registry_are_told_apart_and_unregistered() -> None:
    registry, train, test = CollectorRegistry(), loader_of(), loader_of()
    exporting.export(train, "train", registry=registry)
    handle = exporting.export(test, "test", registry=registry)
    list(test)
    values = scraped(registry)
    assert (values["batches_total", "train"], values["batches_total", "test"]) == (0, 6)
    # Each metric is described once, which the format asks for.
    assert generate_latest(registry).count(b"# TYPE shmloader_batches_total counter") == 1
    with pytest.raises(ValueError, match="another loader is exported as name='train'"):
        exporting.export(test, "train", registry=registry)
    handle.unregister()
    handle.unregister()
    assert ("batches_total", "test") not in scraped(registry)
    exporting.export(train, "test", registry=registry)
    handle.unregister()  # which is not the present one
    assert ("batches_total", "test") in scraped(registry)


def test_the_default_registry_and_the_rank(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    loader, sharded = loader_of(), ShardedDataLoader([0], rank=1, world_size=2)
    handles = [exporting.export(loader, "plain"), exporting.export(sharded, "sharded")]
    try:
        for name, rank in (("plain", "3"), ("sharded", "1")):
            labels = {"loader": name, "rank": rank}
            assert REGISTRY.get_sample_value("shmloader_batches_total", labels) == 0
    finally:
        for handle in handles:
            handle.unregister()


def test_what_is_no_loader_is_refused() -> None:
    pipeline: Pipeline = PipelineBuilder().add_source([1]).add_sink(1).build()
    with pytest.raises(TypeError, match=r"needs a shmloader\.DataLoader, but got a Pipeline"):
        exporting.export(pipeline, "train")
