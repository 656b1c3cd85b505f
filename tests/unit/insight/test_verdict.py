"""The rules of the verdict, on measurements that are written down here."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader import DataLoader
from shmloader.insight.measurements import pack_batch, pack_work
from shmloader.insight.record import Record
from shmloader.insight.stats import Finding, LoaderStats, SlotStats, Times, WaitStats, WorkerStats
from shmloader.insight.verdict import judged, snapshot
from tests.wording import long_sentences, sentences_of

# Two workers that are busy all the time, in an epoch of ten seconds.
BUSY = {"busy_s": 10.0, "busy_share": 1.0, "cpu_s": 1.0, "stalled_s": 0.0}


def stats_of(
    worker: dict[str, Any] | None = None,
    *,
    workers: int = 2,
    cores: int = 4,
    share: float = 0.5,
    first: dict[str, Any] | None = None,
    **given: Any,
) -> LoaderStats:
    """Statistics of an epoch of ten seconds; names of places are seconds of waiting there.

    ``worker`` is what each worker did, and ``first`` what the first one did otherwise.
    """
    places = {name: given.pop(name) for name in Times._fields if name in given}
    stages = Times(**given.pop("stages", {}))
    each = [{**BUSY, **(worker or {})} for _ in range(workers)]
    if first is not None:
        each[0] |= first
    stats = LoaderStats(
        kind=given.pop("kind", "processes"),
        num_workers=workers,
        batches=100,
        elapsed_s=10.0,
        wait=WaitStats(
            total_s=sum(places.values()) or 10 * share, share=share, causes=Times(**places)
        ),
        stages=stages,
        workers=tuple(WorkerStats(number, batches=50, **one) for number, one in enumerate(each)),
        cores=cores,
        **given,
    )
    return judged(stats)


STALLED = {"cpu_s": 5.0, "stalled_s": 4.0}
# Batches of 16 samples, each of which takes 12.5 ms.
SAMPLES = {"samples": 1_600, "fetch_concurrency": 1, "stages": {"fetch": 20.0}}
CASES: dict[Finding, dict[str, tuple[LoaderStats, str]]] = {
    Finding.NOTHING_YET: {
        "no batch": (judged(LoaderStats()), "No batch"),
    },
    Finding.NOTHING_TO_GAIN: {
        "hardly a wait": (
            stats_of(fetch=0.2, share=0.02),
            "waited 200 ms (2%) for data, so a faster loader would gain nothing.",
        ),
    },
    Finding.START_UP: {
        "end": (stats_of(end=3, fetch=1), "3.00 s of it while workers started or"),
        "ends of several epochs": (
            stats_of(end=3, fetch=1, epochs=2),
            "Set persistent_workers=True",
        ),
        "a later epoch": (
            stats_of(start=3, fetch=1, epochs=1, epoch=1),
            "Set persistent_workers=True",
        ),
        "workers that persist": (
            stats_of(start=3, fetch=1, epochs=1, epoch=1, persistent_workers=True),
            "while iter() started the sampler and the dataset.",
        ),
        "an end, after which workers persist": (
            stats_of(end=3, start=1, epochs=1, epoch=1, persistent_workers=True),
            "4.00 s of it after the epoch's last batch.",
        ),
        "iter() without workers": (
            stats_of(start=3, fetch=1, kind="in-process", workers=0, epochs=9),
            "while iter() started the sampler and the dataset.",
        ),
    },
    Finding.UNKNOWN: {
        "errors": (stats_of(other=4, fetch=1), "on_error="),
    },
    Finding.COPYING: {
        "no workers, pinning": (
            stats_of(kind="in-process", workers=0, pin=4, fetch=1),
            "being pinned. Give device= in place of pin_memory=True",
        ),
        "copies of large batches": (
            stats_of(device=4, fetch=1, has_transform=True, nbytes=10**10),
            "copied to the device and transformed there. Send smaller types, such as uint8",
        ),
    },
    Finding.SAMPLER: {
        "no workers, sampler": (
            stats_of(kind="in-process", workers=0, draw=4, fetch=1),
            "while the sampler drew indices. Draw faster: a batch_sampler can draw many",
        ),
    },
    Finding.SLOTS_HELD: {
        "copies": (
            stats_of(build=4, fetch=1, slots=SlotStats(lent=20, copied=80)),
            "while 80 of 100 batches were copied, since your loop keeps too many. Keep clones",
        ),
    },
    Finding.DELIVERY: {
        "few copies": (
            stats_of(build=2, transport=2, fetch=1, slots=SlotStats(lent=80, copied=20)),
            "while finished batches were handed over. Have collate_fn return few tensors or arrays",
        ),
        "short batches": (
            stats_of(build=0.006, fetch=0.001),
            "while finished batches were handed over. Raise batch_size: each batch costs about",
        ),
        "batches that threads load in no time": (
            stats_of({"cpu_s": 4.5}, kind="threads", build=0.006, fetch=0.001),
            "Raise batch_size",
        ),
        "no workers, and batches that workers would not make faster": (
            stats_of(kind="in-process", workers=0, fetch=0.004),
            "Raise batch_size",
        ),
        "a transform on the CPU": (
            stats_of(build=4, fetch=1, has_transform=True),
            "while your loop's thread called device_transform. Do its work in the dataset",
        ),
    },
    Finding.TOO_FEW_WORKERS: {
        "an executor": (
            stats_of(kind="executor", queue=4, fetch=1),
            "Raise num_workers above 2, and give the executor more processes.",
        ),
        "half computing, half waiting": (
            stats_of({"cpu_s": 5.0}, fetch=5, cores=2, **SAMPLES),
            "while workers were busy in the dataset. Raise num_workers above 2.",
        ),
        "workers that sleep want no core": (
            stats_of({"cpu_s": 0.1, "stalled_s": 3.5}, fetch=5),
            "Raise num_workers",
        ),
        # Of six seconds.
        "a core was wanted by the start only": (
            stats_of({"busy_s": 4.0, "cpu_s": 4.0, "stalled_s": 6.0}, fetch=5),
            "Raise num_workers",
        ),
        "a single worker is held up by nobody": (
            stats_of({"idle_s": 0.2}, fetch=5, workers=1),
            "Raise num_workers",
        ),
        "collate": (
            stats_of({"cpu_s": 9.0}, fetch=1, collate=4, stages={"collate": 12.0, "fetch": 4.0}),
            "while workers were busy in collate_fn. Raise num_workers above 2",
        ),
        "in the dataset": (stats_of(fetch=5), "Raise num_workers above 2: there are 4"),
        "behind others": (stats_of(queue=3, slot=2), "Raise num_workers"),
        "all cores sleep": (
            stats_of(fetch=5, cores=2),
            "such as for a disk or network. Raise num_workers above 2, also beyond the cores",
        ),
        "samples that wait": (
            stats_of(fetch=5, **SAMPLES),
            "waited in the dataset, such as for a disk or network. Give fetch_concurrency=16, if",
        ),
        "samples of small batches": (
            stats_of(fetch=5, **{**SAMPLES, "samples": 400}),
            "Give fetch_concurrency=4, if several threads may use the dataset at once.",
        ),
        "samples that wait, eight at once": (
            stats_of(fetch=5, **{**SAMPLES, "fetch_concurrency": 8}),
            "Raise fetch_concurrency above 8, if several threads may use",
        ),
        "samples that wait, all of a batch at once": (
            stats_of(fetch=5, **{**SAMPLES, "fetch_concurrency": 16}),
            "Raise num_workers above 2",
        ),
        "samples that wait shortly": (
            stats_of(fetch=5, **{**SAMPLES, "samples": 100_000}),
            "Raise num_workers above 2",
        ),
        "threads that wait": (
            stats_of(kind="threads", fetch=5, cpu_s=2.5, **SAMPLES),
            "Give fetch_concurrency=16",
        ),
        "threads that wait, and lack cores when they wake up": (
            stats_of({"cpu_s": 1.5, "stalled_s": 2.0}, kind="threads", fetch=5, **SAMPLES),
            "Give fetch_concurrency=16",
        ),
    },
    Finding.CORES_BUSY: {
        "others have the cores": (
            stats_of(STALLED, fetch=5, cores=2),
            "while workers had to wait for one of 2 cores. Make the dataset cheaper, or stop other",
        ),
        "the loop's torch has the cores": (
            stats_of(STALLED, fetch=5, cores=3, cpu_s=9.0, consumer_cpu_s=5.0),
            (
                "while workers and your loop's own threads shared the cores. "
                "Call torch.set_num_threads(1)"
            ),
        ),
        "the loop has a core": (
            stats_of(STALLED, fetch=5, cores=2, cpu_s=9.0, consumer_cpu_s=9.0),
            "Make the dataset cheaper",
        ),
        "all cores compute": (
            stats_of({"cpu_s": 9.0}, fetch=5, cores=2),
            "computed in the dataset on 2 cores. Make the dataset cheaper, or stop other programs",
        ),
        "threads whose code runs without the lock": (
            stats_of({"cpu_s": 9.0}, kind="threads", fetch=5, cores=2),
            "Make the dataset cheaper",
        ),
    },
    Finding.TOO_FEW_AHEAD: {
        "the others have nothing to do": (
            stats_of({"idle_s": 4.5}, fetch=5, stages={"reorder": 6.0, "ready": 1.0}),
            "for a slow batch, while other workers had nothing to do. Raise prefetch_factor.",
        ),
        "one worker has all slow batches": (
            stats_of({"idle_s": 9.0}, fetch=5, first={"idle_s": 0.0}, stages={"reorder": 6.0}),
            "while other workers had nothing to do. Set in_order=False, if the order may change.",
        ),
        "one worker has all slow batches, in any order": (
            stats_of(
                {"idle_s": 9.0},
                fetch=5,
                first={"idle_s": 0.0},
                stages={"reorder": 6.0},
                in_order=False,
            ),
            "Raise prefetch_factor.",
        ),
        "idle while the consumer works": (
            stats_of({"idle_s": 4.0, "busy_share": 0.6, "busy_s": 6.0}, fetch=5),
            "in bursts, between which workers had nothing to do. Raise prefetch_factor.",
        ),
    },
    Finding.INTERPRETER_LOCK: {
        "threads that take turns": (
            stats_of({"cpu_s": 4.5}, kind="threads", fetch=5),
            "while threads took turns at running Python code. Leave out thread_pool=",
        ),
        "threads that take turns on a busy machine": (
            stats_of({"cpu_s": 1.4, "stalled_s": 3.0}, kind="threads", fetch=5, workers=3),
            "Leave out thread_pool=True",
        ),
        "threads that keep the consumer from taking batches": (
            stats_of({"cpu_s": 4.5}, kind="threads", fetch=1, build=4),
            "took turns",
        ),
        "threads that other programs hold up, too": (
            stats_of(STALLED, kind="threads", fetch=5, cores=1),
            "Leave out thread_pool=True",
        ),
    },
}


@pytest.mark.parametrize(
    ("finding", "case"), [(finding, case) for finding, cases in CASES.items() for case in cases]
)
def test_a_verdict_names_cause_and_remedy(finding, case) -> None:
    stats, words = CASES[finding][case]
    assert stats.finding is finding, str(stats)
    assert words in stats.verdict
    assert stats.verdict.endswith(".")


ARGUMENTS = {*inspect.signature(DataLoader.__init__).parameters} - {"self", "dataset"}
SECONDS = st.one_of(st.just(0.0), st.floats(0, 20))
SIZES = st.sampled_from([0, 1, 999, 10**6, 10**9, 10**12])


def times() -> st.SearchStrategy[Times]:
    return st.builds(Times, *[SECONDS] * len(Times._fields))


@st.composite
def statistics(draw: st.DrawFn) -> LoaderStats:
    """Statistics of every kind of loader, as long as they fit together."""
    kind = draw(st.sampled_from(["processes", "threads", "executor", "in-process"]))
    count = 0 if kind == "in-process" else draw(st.integers(1, 128))
    epoch = draw(st.sampled_from([None, 0, 1, 40]))
    causes = draw(times())._replace(**{draw(st.sampled_from(Times._fields)): draw(SECONDS) * 9})
    total_s = sum(causes)
    elapsed_s = total_s + draw(SECONDS) + 1e-3
    numbers = draw(st.lists(st.integers(0, 200), max_size=3))
    workers = [
        WorkerStats(number, None, batches, *(draw(SECONDS) for _ in range(5)), draw(SIZES))
        for number, batches in enumerate(numbers)
    ]
    return LoaderStats(
        kind=kind,
        num_workers=count,
        epoch=epoch,
        epochs=draw(st.integers(1, 50)) if epoch is None else 1,
        persistent_workers=draw(st.booleans()) and count > 0,
        in_order=draw(st.booleans()),
        fetch_concurrency=draw(st.sampled_from([0, 1, 16])) if count else 0,
        has_transform=draw(st.booleans()),
        batches=draw(st.integers(0, 10_000)),
        samples=draw(st.integers(0, 10**6)),
        cpu_s=draw(SECONDS),
        consumer_cpu_s=draw(SECONDS),
        elapsed_s=elapsed_s,
        wait=WaitStats(total_s=total_s, share=total_s / elapsed_s, causes=causes),
        stages=draw(times()),
        workers=tuple(workers) if count else (),
        slots=SlotStats(*(draw(SIZES) for _ in range(4))) if kind == "processes" else SlotStats(),
        cores=draw(st.integers(1, 256)),
    )


@settings(max_examples=300, deadline=None)
@given(statistics())
def test_a_verdict_is_a_cause_and_mostly_an_action_that_names_an_argument(measured) -> None:
    stats = judged(measured)
    cause, *actions = sentences_of(stats.verdict)
    assert not long_sentences(stats.verdict), stats.verdict
    assert len(actions) <= 1
    for action in actions:
        assert ARGUMENTS.intersection(re.findall(r"\w+", action)), action
        assert "gain" not in cause
    if stats.finding is not Finding.NOTHING_YET:
        row = next(line for line in str(stats).splitlines() if line.startswith("  waited "))
        waited = re.search(r"waited +(\S+ \S+ \(\d+%\)),", row)
        assert waited is not None
        assert cause.startswith(f"Your loop waited {waited[1]} for data, ")
        assert cause.count("%") == 1, "the only share is that of the wait"
    if (stats.epochs == 1 and not stats.epoch) or stats.persistent_workers:
        assert "persistent_workers" not in stats.verdict
    if stats.kind == "in-process":
        assert not re.search("workers (started|were|had)|threads", stats.verdict)
    ran_s = sum(worker.cpu_s for worker in stats.workers if worker.batches)
    if stats.kind == "threads" and stats.num_workers > 1 and ran_s <= stats.elapsed_s:
        assert "other programs" not in stats.verdict


MS = 1_000_000


def run(load_ms: int, use_ms: Callable[[int], int], count: int = 36) -> LoaderStats:
    """Statistics of an epoch with two workers that have two batches each ahead, without a clock."""
    record = Record(0, "processes", 2, begin_ns=MS)
    now_ns, free_ns, taken = MS, [0, 0], [MS] * 4
    for number in range(count):
        worker_id, asked_ns, sent_ns = number % 2, now_ns, taken[-4]
        began_ns = max(sent_ns, free_ns[worker_id])
        end_ns = free_ns[worker_id] = began_ns + load_ms * MS
        now_ns = here_ns = max(asked_ns, end_ns)
        work = pack_work(began_ns, load_ms * MS, 0, 0, 1)
        times = pack_batch(worker_id, sent_ns, sent_ns, asked_ns, here_ns, here_ns, 1, 0) + work
        record.add(asked_ns, now_ns, 0, times, None)
        taken.append(now_ns)
        now_ns += use_ms(number) * MS
    return snapshot(record.sums(), 1, 4)


def test_bursts() -> None:
    """Workers could keep up, if they were not held up while the consumer works."""
    stats = run(30, lambda number: 400 if number % 12 == 5 else 0)
    assert stats.finding is Finding.TOO_FEW_AHEAD, str(stats)
    assert "Raise prefetch_factor" in stats.verdict
    assert run(30, lambda _: 0).finding is Finding.TOO_FEW_WORKERS
    assert run(30, lambda _: 33).finding is Finding.NOTHING_TO_GAIN
