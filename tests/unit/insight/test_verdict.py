"""The rules of the verdict, on measurements that are written down here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from shmloader.insight.figures import (
    ConsumerStats,
    Machine,
    SlotStats,
    Stages,
    StageStats,
    WaitPlaces,
    WaitStats,
    WorkerStats,
)
from shmloader.insight.record import Record
from shmloader.insight.stats import LoaderStats, snapshot
from shmloader.insight.verdict import LITTLE_SHARE, Finding

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
    places = {name: given.pop(name) for name in WaitPlaces._fields if name in given}
    stages = Stages(**{name: StageStats(spent) for name, spent in given.pop("stages", {}).items()})
    each = {**BUSY, **(worker or {})}
    return LoaderStats(
        kind=given.pop("kind", "processes"),
        num_workers=workers,
        batches=100,
        elapsed_s=10.0,
        wait=WaitStats(
            total_s=sum(places.values()) or 10 * share, share=share, places=WaitPlaces(**places)
        ),
        stages=stages,
        workers=tuple(WorkerStats(number, batches=50, **each) for number in range(workers)),
        machine=Machine(cores=cores),
        **given,
    )


STALLED = {"cpu_s": 5.0, "stalled_s": 4.0}
CASES: dict[str, tuple[LoaderStats, Finding, str]] = {
    "in the dataset": (stats_of(fetch=5), Finding.TOO_FEW_WORKERS, "add workers (2 of 4 cores"),
    "behind others": (stats_of(queue=3, send=2), Finding.TOO_FEW_WORKERS, "add workers"),
    "all cores sleep": (stats_of(fetch=5, cores=2), Finding.TOO_FEW_WORKERS, "more than the 2"),
    "all cores compute": (
        stats_of({"cpu_s": 9.0}, fetch=5, cores=2),
        Finding.CORES_BUSY,
        "use most of 2 cores: make `__getitem__`",
    ),
    "more workers than cores": (
        stats_of(STALLED, fetch=5, workers=4, cores=2),
        Finding.TOO_MANY_WORKERS,
        "4 workers compete for 2 cores, with the consumer",
    ),
    "more workers than cores, and others": (
        stats_of({"cpu_s": 2.0, "stalled_s": 7.0}, fetch=5, workers=4, cores=2),
        Finding.TOO_MANY_WORKERS,
        "and perhaps other programs, and often no core was free: lower num_workers",
    ),
    "others have the cores": (
        stats_of(STALLED, fetch=5, cores=2),
        Finding.CORES_TAKEN,
        "often wanted to run when no core was free. Stop other programs",
    ),
    "the consumer has one of the cores": (  # and no other program runs
        stats_of(STALLED, fetch=5, cores=2, consumer=ConsumerStats(process_cpu_s=8.0)),
        Finding.CORES_BUSY,
        "the workers and the consumer use most of 2 cores: make `__getitem__`",
    ),
    "threads are part of the consumer's process": (
        stats_of(
            STALLED, fetch=5, cores=2, kind="threads", consumer=ConsumerStats(process_cpu_s=11.0)
        ),
        Finding.CORES_TAKEN,
        "Stop other programs on this machine (2 cores)",
    ),
    "workers that sleep want no core": (
        stats_of({"cpu_s": 0.1, "stalled_s": 3.5}, fetch=5),
        Finding.TOO_FEW_WORKERS,
        "add workers",
    ),
    "a core was wanted between two batches only": (  # for longer than the workers were busy
        stats_of({"busy_s": 4.0, "busy_share": 0.4, "cpu_s": 3.2, "stalled_s": 6.0}, fetch=5),
        Finding.TOO_FEW_WORKERS,
        "add workers",
    ),
    "a core was wanted by the start only": (  # of six seconds
        stats_of({"busy_s": 4.0, "cpu_s": 4.0, "stalled_s": 6.0}, fetch=5),
        Finding.TOO_FEW_WORKERS,
        "add workers",
    ),
    "collate": (
        stats_of(fetch=1, collate=4, stages={"collate": 12.0, "fetch": 4.0}),
        Finding.SLOW_COLLATE,
        "workers spent 60% of their time in collate_fn: move work",
    ),
    "the others have nothing to do": (
        stats_of({"idle_s": 4.5, "idle_awaited_s": 4.5}, fetch=5, load_p50_s=0.01, load_p99_s=0.2),
        Finding.STRAGGLERS,
        "takes 20 times as long as the median",
    ),
    "a single worker is held up by nobody": (
        stats_of({"idle_s": 0.2, "idle_awaited_s": 0.2}, fetch=5, workers=1),
        Finding.TOO_FEW_WORKERS,
        "add workers",
    ),
    "idle while the consumer works": (
        stats_of({"idle_s": 4.0, "busy_share": 0.6, "busy_s": 6.0}, fetch=5),
        Finding.BURSTS,
        "raise prefetch_factor",
    ),
    "start": (stats_of(start=3, fetch=1), Finding.START_UP, "3.00 s of 4.00 s"),
    "end": (stats_of(end=3, fetch=1), Finding.START_UP, "persistent_workers=True"),
    "start of workers that persist": (
        stats_of(start=3, fetch=1, persistent_workers=True),
        Finding.START_UP,
        "the end of workers: this is paid once.",
    ),
    "sampler": (stats_of(draw=4, fetch=1), Finding.SAMPLER, "for 80% of that"),
    "pinning": (stats_of(pin=4, fetch=1), Finding.PINNING, "being pinned"),
    "device": (stats_of(device=4, fetch=1), Finding.DEVICE_COPY, "copied to the device"),
    "delivery": (
        stats_of(transport=2, build=2, fetch=1),
        Finding.DELIVERY,
        "use a larger batch_size",
    ),
    "copies": (
        stats_of(build=4, fetch=1, slots=SlotStats(lent=20, copied=80)),
        Finding.SLOTS_HELD,
        "80 of 100 batches were copied out",
    ),
    "few copies": (
        stats_of(build=4, fetch=1, slots=SlotStats(lent=80, copied=20)),
        Finding.DELIVERY,
        "use a larger batch_size",
    ),
    "no core to take batches with": (
        stats_of(transport=3, build=1, fetch=1, consumer=ConsumerStats(5.0, 5.0, 4.0)),
        Finding.CORES_TAKEN,
        "workers or the consumer often wanted to run when no core was free",
    ),
    "no core to take batches with, by the workers": (
        stats_of({"cpu_s": 9.0}, transport=4, cores=2, consumer=ConsumerStats(1.0, 1.0, 4.0)),
        Finding.CORES_BUSY,
        "the workers and the consumer use most of 2 cores: make `__getitem__`",
    ),
    "no core to take batches with, by too many workers": (
        stats_of(
            {"cpu_s": 4.0}, transport=4, workers=4, cores=2, consumer=ConsumerStats(1.0, 1.0, 4.0)
        ),
        Finding.TOO_MANY_WORKERS,
        "4 workers compete for 2 cores, with the consumer",
    ),
    "a core was wanted for training": (  # so little that it does not explain the delivery
        stats_of(transport=3, build=1, fetch=1, consumer=ConsumerStats(5.0, 5.0, 1.5)),
        Finding.DELIVERY,
        "use a larger batch_size",
    ),
    "a core was wanted for moments": (  # of an otherwise sleeping consumer
        stats_of(transport=3, build=1, fetch=1, consumer=ConsumerStats(0.1, 0.1, 0.2)),
        Finding.DELIVERY,
        "use a larger batch_size",
    ),
    "copies, with too few cores": (
        stats_of(
            build=4,
            fetch=1,
            slots=SlotStats(lent=20, copied=80),
            consumer=ConsumerStats(5.0, 5.0, 4.0),
        ),
        Finding.SLOTS_HELD,
        "80 of 100 batches were copied out",
    ),
    "errors": (stats_of(other=4, fetch=1), Finding.ERRORS, "on_error="),
    "two causes": (
        stats_of(draw=2.4, pin=2.6),
        Finding.SEVERAL,
        "First, for 48% of that, the batch sampler",
    ),
    "no workers": (
        stats_of(kind="in-process", workers=0, fetch=4, collate=1),
        Finding.IN_PROCESS,
        "mostly in `__getitem__`: give the loader workers",
    ),
    "no workers, pinning": (
        stats_of(kind="in-process", workers=0, pin=4, fetch=1),
        Finding.IN_PROCESS,
        "mostly in pinning: make that cheaper",
    ),
    "no workers, a bit of both": (
        stats_of(kind="in-process", workers=0, pin=2.4, fetch=2.6),
        Finding.IN_PROCESS,
        "mostly in `__getitem__`",
    ),
    "no workers, iter()": (
        stats_of(kind="in-process", workers=0, start=4, fetch=1),
        Finding.START_UP,
        "make the start of the sampler or the dataset cheaper",
    ),
    "no workers, sampler": (
        stats_of(kind="in-process", workers=0, draw=4, fetch=1),
        Finding.SAMPLER,
        "consumer's thread",
    ),
    "threads": (
        stats_of(kind="threads", fetch=5),
        Finding.TOO_FEW_WORKERS,
        "leave out thread_pool=True",
    ),
    "torch's": (stats_of(kind="torch", other=5), Finding.OTHER_LOADER, "data pipe"),
    "an executor that is busy": (
        stats_of(kind="executor", queue=4, fetch=1),
        Finding.EXECUTOR_BUSY,
        "task mostly waited for the executor or was on its way: raise num_workers=",
    ),
    "an executor at work": (
        stats_of(kind="executor", queue=1, fetch=4),
        Finding.TOO_FEW_WORKERS,
        "mostly in `__getitem__`: give the executor more processes",
    ),
    "another": (stats_of(kind="other", other=5), Finding.OTHER_LOADER, "not one of shmloader's"),
    "hardly a wait": (stats_of(fetch=0.2, share=0.02), Finding.NOTHING_TO_GAIN, "waited 2.0%"),
    "no batch": (LoaderStats(), Finding.NOTHING_YET, "No batch"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_verdict_names_cause_and_remedy(case) -> None:
    stats, finding, words = CASES[case]
    assert stats.finding is finding, str(stats)
    assert words in stats.verdict
    assert stats.verdict.endswith(".")


def test_of_two_limits_of_memory_the_near_one_is_named() -> None:
    roomy = SlotStats(nbytes=95, largest_bytes=10, share_bytes=50)
    machine = Machine(4, 5, "limit of the machine")
    short = dataclasses.replace(stats_of(fetch=5, slots=roomy), machine=machine)
    assert short.finding is Finding.MEMORY
    assert "takes 95 B, and 5 B is free (limit of the machine); lower num_workers" in short.verdict
    full = stats_of(fetch=5, slots=SlotStats(largest_bytes=49, share_bytes=50))
    assert full.finding is Finding.MEMORY
    assert (
        "49 B of the 50 B that shm_size leaves for each; raise shm_size, or lower" in full.verdict
    )


def test_a_small_wait_is_said_to_be_one() -> None:
    assert "(there is little to gain)" in stats_of(fetch=5, share=LITTLE_SHARE - 0.01).verdict
    assert "little to gain" not in stats_of(fetch=5, share=LITTLE_SHARE).verdict


def test_two_causes_are_named_alike_whichever_is_the_larger() -> None:
    one, other = stats_of(draw=2.6, pin=2.4), stats_of(draw=2.4, pin=2.6)
    assert one.finding is other.finding is Finding.SEVERAL
    assert one.verdict.index("sampler") < one.verdict.index("pinned")
    assert other.verdict.index("sampler") < other.verdict.index("pinned")


def test_more_and_fewer_workers_are_never_advised_for_similar_epochs() -> None:
    """Any two epochs that differ by a tenth in what their workers did."""
    steps = [number / 20 for number in range(21)]
    for cores, cpu, stalled in itertools.product((1, 2, 4, 8), steps, steps):
        if cpu + stalled > 1:
            continue
        found = set()
        for more, less in itertools.product((0.0, 0.1), repeat=2):
            worker = {"cpu_s": 10 * (cpu + more), "stalled_s": 10 * max(0.0, stalled - less)}
            found.add(stats_of(worker, fetch=5, workers=4, cores=cores).finding)
        assert not {Finding.TOO_FEW_WORKERS, Finding.TOO_MANY_WORKERS} <= found, (cpu, stalled)


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
        work = (began_ns, load_ms * MS, 0, 0, 1)
        times = (worker_id, sent_ns, sent_ns, work, asked_ns, here_ns, here_ns, 1, 0)
        record.add(asked_ns, now_ns, 0, times, None, 0)
        taken.append(now_ns)
        now_ns += use_ms(number) * MS
    return snapshot(record.totals(), 1, Machine(cores=4))


def test_bursts() -> None:
    """Workers could keep up, if they were not held up while the consumer works."""
    stats = run(30, 0, lambda number: 400 if number % 12 == 5 else 0)
    assert stats.finding is Finding.BURSTS, str(stats)
    assert "raise prefetch_factor" in stats.verdict
    assert run(30, 0, lambda _: 0).finding is Finding.TOO_FEW_WORKERS
    assert run(30, 0, lambda _: 33).finding is Finding.NOTHING_TO_GAIN


def test_handing_over() -> None:
    stats = run(1, 10, lambda _: 0)
    assert stats.finding is Finding.DELIVERY, str(stats)
    assert "use a larger batch_size" in stats.verdict
