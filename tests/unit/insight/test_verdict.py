"""The rules of the verdict, on measurements that are written down here."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from shmloader.insight.measurements import pack_batch, pack_work
from shmloader.insight.record import Record
from shmloader.insight.stats import (
    Finding,
    LoaderStats,
    Machine,
    SlotStats,
    Times,
    WaitStats,
    WorkerStats,
)
from shmloader.insight.verdict import judged, snapshot

# Two workers that are busy all the time, in an epoch of ten seconds.
BUSY = {"busy_s": 10.0, "busy_share": 1.0, "cpu_s": 1.0, "stalled_s": 0.0}


def stats_of(
    worker: dict[str, Any] | None = None,
    *,
    workers: int = 2,
    cores: int = 4,
    share: float = 0.5,
    **given: Any,
) -> LoaderStats:
    """Statistics of an epoch of ten seconds; names of places are seconds of waiting there."""
    places = {name: given.pop(name) for name in Times._fields if name in given}
    stages = Times(**given.pop("stages", {}))
    each = {**BUSY, **(worker or {})}
    stats = LoaderStats(
        kind=given.pop("kind", "processes"),
        num_workers=workers,
        batches=100,
        elapsed_s=10.0,
        wait=WaitStats(
            total_s=sum(places.values()) or 10 * share, share=share, causes=Times(**places)
        ),
        stages=stages,
        workers=tuple(WorkerStats(number, batches=50, **each) for number in range(workers)),
        machine=given.pop("machine", Machine(cores=cores)),
        **given,
    )
    return judged(stats)


STALLED = {"cpu_s": 5.0, "stalled_s": 4.0}
CASES: dict[str, tuple[LoaderStats, Finding, str]] = {
    "no batch": (judged(LoaderStats()), Finding.NOTHING_YET, "No batch"),
    "hardly a wait": (stats_of(fetch=0.2, share=0.02), Finding.NOTHING_TO_GAIN, "waited 2.0%"),
    "end": (stats_of(end=3, fetch=1), Finding.START_UP, "persistent_workers=True"),
    "errors": (stats_of(other=4, fetch=1), Finding.UNKNOWN, "on_error="),
    "no workers, pinning": (
        stats_of(kind="in-process", workers=0, pin=4, fetch=1),
        Finding.COPYING,
        "being pinned",
    ),
    "no workers, sampler": (
        stats_of(kind="in-process", workers=0, draw=4, fetch=1),
        Finding.SAMPLER,
        "consumer's thread",
    ),
    "copies": (
        stats_of(build=4, fetch=1, slots=SlotStats(lent=20, copied=80)),
        Finding.SLOTS_HELD,
        "80 of 100 batches were copied out",
    ),
    "few copies": (
        stats_of(build=2, transport=2, fetch=1, slots=SlotStats(lent=80, copied=20)),
        Finding.DELIVERY,
        "use a larger batch_size",
    ),
    "an executor": (
        stats_of(kind="executor", queue=4, fetch=1),
        Finding.TOO_FEW_WORKERS,
        "raise num_workers=, and give the executor more processes",
    ),
    "others have the cores": (
        stats_of(STALLED, fetch=5, cores=2),
        Finding.CORES_BUSY,
        "none of 2 cores is free: end other programs",
    ),
    "more workers than cores": (
        stats_of(STALLED, fetch=5, workers=4, cores=2),
        Finding.CORES_BUSY,
        "none of 2 cores is free: lower num_workers",
    ),
    "all cores compute": (
        stats_of({"cpu_s": 9.0}, fetch=5, cores=2),
        Finding.CORES_BUSY,
        "none of 2 cores is free: end other programs",
    ),
    "workers that sleep want no core": (
        stats_of({"cpu_s": 0.1, "stalled_s": 3.5}, fetch=5),
        Finding.TOO_FEW_WORKERS,
        "add workers",
    ),
    "a core was wanted by the start only": (  # of six seconds
        stats_of({"busy_s": 4.0, "cpu_s": 4.0, "stalled_s": 6.0}, fetch=5),
        Finding.TOO_FEW_WORKERS,
        "add workers",
    ),
    "the others have nothing to do": (
        stats_of({"idle_s": 4.5}, fetch=5),
        Finding.TOO_FEW_AHEAD,
        "in_order=False",
    ),
    "idle while the consumer works": (
        stats_of({"idle_s": 4.0, "busy_share": 0.6, "busy_s": 6.0}, fetch=5),
        Finding.TOO_FEW_AHEAD,
        "Raise prefetch_factor",
    ),
    "a single worker is held up by nobody": (
        stats_of({"idle_s": 0.2}, fetch=5, workers=1),
        Finding.TOO_FEW_WORKERS,
        "add workers",
    ),
    "collate": (
        stats_of(fetch=1, collate=4, stages={"collate": 12.0, "fetch": 4.0}),
        Finding.TOO_FEW_WORKERS,
        "mostly in `collate_fn`: add workers",
    ),
    "in the dataset": (stats_of(fetch=5), Finding.TOO_FEW_WORKERS, "add workers (2 for 4 cores)"),
    "behind others": (stats_of(queue=3, slot=2), Finding.TOO_FEW_WORKERS, "add workers"),
    "all cores sleep": (stats_of(fetch=5, cores=2), Finding.TOO_FEW_WORKERS, "(2 for 2 cores)"),
    "threads": (
        stats_of(kind="threads", fetch=5),
        Finding.TOO_FEW_WORKERS,
        "leave out thread_pool=True",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_verdict_names_cause_and_remedy(case) -> None:
    stats, finding, words = CASES[case]
    assert stats.finding is finding, str(stats)
    assert words in stats.verdict
    assert stats.verdict.endswith(".")


def test_more_and_fewer_workers_are_never_advised_for_similar_epochs() -> None:
    """Any two epochs that differ by a tenth in what their workers did."""
    steps = [number / 20 for number in range(21)]
    for cores, cpu, stalled in itertools.product((1, 2, 4, 8), steps, steps):
        if cpu + stalled > 1:
            continue
        said = ""
        for more, less in itertools.product((0.0, 0.1), repeat=2):
            worker = {"cpu_s": 10 * (cpu + more), "stalled_s": 10 * max(0.0, stalled - less)}
            said += stats_of(worker, fetch=5, workers=4, cores=cores).verdict
        assert "add workers" not in said or "lower num_workers" not in said, (cpu, stalled)


MS = 1_000_000


def run(load_ms: int, build_ms: int, use_ms: Callable[[int], int], count: int = 36) -> LoaderStats:
    """Statistics of an epoch with two workers that have two batches each ahead, without a clock."""
    record = Record(0, "processes", 2, begin_ns=MS)
    now_ns, free_ns, taken = MS, [0, 0], [MS] * 4
    for number in range(count):
        worker_id, asked_ns, sent_ns = number % 2, now_ns, taken[-4]
        began_ns = max(sent_ns, free_ns[worker_id])
        end_ns = free_ns[worker_id] = began_ns + load_ms * MS
        here_ns = max(asked_ns, end_ns)
        now_ns = here_ns + build_ms * MS
        work = pack_work(began_ns, load_ms * MS, 0, 0, 1)
        times = pack_batch(worker_id, sent_ns, sent_ns, asked_ns, here_ns, here_ns, 1, 0) + work
        record.add(asked_ns, now_ns, 0, times, None)
        taken.append(now_ns)
        now_ns += use_ms(number) * MS
    return snapshot(record.sums(), 1, Machine(cores=4))


def test_bursts() -> None:
    """Workers could keep up, if they were not held up while the consumer works."""
    stats = run(30, 0, lambda number: 400 if number % 12 == 5 else 0)
    assert stats.finding is Finding.TOO_FEW_AHEAD, str(stats)
    assert "Raise prefetch_factor" in stats.verdict
    assert run(30, 0, lambda _: 0).finding is Finding.TOO_FEW_WORKERS
    assert run(30, 0, lambda _: 33).finding is Finding.NOTHING_TO_GAIN


def test_handing_over() -> None:
    stats = run(1, 10, lambda _: 0)
    assert stats.finding is Finding.DELIVERY, str(stats)
    assert "use a larger batch_size" in stats.verdict
