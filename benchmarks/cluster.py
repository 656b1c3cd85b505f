"""What does it cost to have a cluster make the batches (``executor=``), on Dask and on Ray?

The clusters are started on this machine, anew for each run; kinds take turns.

=====  =============================================================================================
train  JPEG files of 500×375 pixels, a common size in ImageNet, decoded by Pillow, and a random part
       of each resized to 224×224, batch 32, two processes: samples a second on Dask and on Ray,
       beside two workers of our own, all with four batches in flight. On Dask also with a client
       that gets results from the workers, as docs/howto/cluster.md advises
jpeg   the same with files of some 300×300 pixels and the centre of each, as in row D of
       ``peers.py``: a batch takes a third of the time, and a task costs as much
bytes  batches of 3 MB and 38 MB without work on Ray: GB/s, beside Ray Data's
       ``iter_torch_batches`` on the same cluster, in turns; without a seed, since Ray Data seeds
       no samples. Ray Data makes the same batches by ``map_batches``, or has them in its store
       already (``materialize``); then nothing is made, and nothing is copied within the cluster
waits  samples that wait 50 ms, 64 of them at once: four nodes (Ray's ``cluster_utils.Cluster``,
       Dask's ``LocalCluster``) of one process with ``fetch_concurrency=16``, two batches for each
       node in flight, of 64 samples and of 16: share of the ideal
main   batches of four tiny samples, four in flight: CPU time of the main process, all its threads,
       for a batch, beside a bare loop that submits calls with arguments and results of the same
       size, which take as long in the cluster; both in turns on the same executor.
       Dask's scheduler is a process of its own here, as on a real cluster
=====  =============================================================================================

Every run is recorded at once, and a campaign that was interrupted continues where it was. A full
run replaces its section of ``RESULTS.md``.

Exit code: 0; 2 if a run failed; 130 if it was interrupted. No figure is a pass or a fail.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import gc
import importlib.metadata
import os
import pickle
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import distributed
import ray
import ray.data
import torch
from _campaign import Campaign, Cells
from _cluster_work import Tiny, Training, Waiting, answer, pack_bare, take
from _fresh import in_turn
from _measure import WARMUP_BATCHES, consume
from _record import Run, select
from _rows import Settings, _photographs
from _sections import judge, write_table
from _spread import with_spread
from _workloads import WORKLOADS, Samples, smallest, touch
from PIL import Image
from ray.cluster_utils import Cluster
from sklearn.datasets import load_sample_images

from shmloader import DataLoader
from shmloader.cluster import DaskExecutor, RayExecutor
from shmloader.insight.measurements import work_of

_HERE = Path(__file__).parent
_STORE_BYTES = 1 << 30


class Size(NamedTuple):
    """How much a run measures."""

    seconds: float = 3.0  # of a timed stretch
    wait_samples: int = 6400
    waiting_s: float = 0.05
    main_batches: int = 1000
    main_turns: int = 3
    is_smallest: bool = False


SMALLEST = Size(0.1, 128, 0.001, 20, 1, is_smallest=True)


# ---------------------------------------------------------------- clusters


@contextlib.contextmanager
def on_dask(
    nodes: int, *, is_apart: bool = False, is_direct: bool = False
) -> Iterator[concurrent.futures.Executor]:
    """Start a Dask cluster, of processes with one thread each.

    Args:
        nodes: Number of processes.
        is_apart: Whether the scheduler is a process of its own; else it is in this one.
        is_direct: Whether the client gets results from the workers, not through the scheduler.
    """
    make = distributed.SubprocessCluster if is_apart else distributed.LocalCluster
    with (
        make(n_workers=nodes, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster, direct_to_workers=is_direct or None) as client,
    ):
        client.wait_for_workers(nodes)
        yield DaskExecutor(client)


@contextlib.contextmanager
def on_ray(nodes: int) -> Iterator[concurrent.futures.Executor]:
    """Start a Ray cluster: one node for two processes, else one node for each process."""
    options = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    with contextlib.ExitStack() as stack:
        if nodes <= 2:
            ray.init(num_cpus=nodes, log_to_driver=False, **options)
        else:
            one = {"num_cpus": 1, **options}
            cluster = Cluster(initialize_head=True, head_node_args=one)
            stack.callback(cluster.shutdown)
            for _ in range(nodes - 1):
                cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
            ray.init(address=cluster.address, log_to_driver=False)
            cluster.wait_for_nodes()
        stack.callback(ray.shutdown)
        yield RayExecutor()


@contextlib.contextmanager
def on_pool(nodes: int) -> Iterator[concurrent.futures.Executor]:
    """Start a pool of processes of the standard library."""
    with concurrent.futures.ProcessPoolExecutor(nodes) as executor:
        yield executor


CLUSTERS: dict[str, Callable[..., Any]] = {
    "Dask": on_dask,
    "Dask, direct": partial(on_dask, is_direct=True),
    "Ray": on_ray,
    "ProcessPoolExecutor": on_pool,
}


# ---------------------------------------------------------------- runs


def _centres(folder: Path, size: Size) -> tuple[Any, int]:
    """Write small photographs, and return the dataset of row D with its batch size."""
    task = _photographs(Settings(2, size.seconds, size.is_smallest), folder).task
    return task.dataset, task.batch_size


def _training(folder: Path, size: Size) -> tuple[Any, int]:
    """Write photographs of 500×375 pixels, and return a training dataset with its batch size."""
    photographs = load_sample_images().images
    source = random.Random(0)
    paths = [folder / f"{number:04}.jpg" for number in range(5 if size.is_smallest else 127)]
    for number, path in enumerate(paths):
        photograph = photographs[number % len(photographs)]
        height, width, _ = photograph.shape
        top, left = source.randint(0, height - 375), source.randint(0, width - 500)
        Image.fromarray(photograph[top : top + 375, left : left + 500]).save(path, quality=90)
    return Training(paths, 1 << 20), 4 if size.is_smallest else 32


def run_jpeg(
    make: Callable[[Path, Size], tuple[Any, int]],
    name: str,
    kind: str,
    round_: int,  # noqa: ARG001 - one kind a process
    size: Size,
) -> Cells:
    """Measure how fast one kind of processes decodes JPEG files."""
    seconds = size.seconds * (1 if size.is_smallest else 1.5)
    with contextlib.ExitStack() as stack:
        dataset, batch_size = make(Path(stack.enter_context(tempfile.TemporaryDirectory())), size)
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
        if kind != "our own":
            executor = stack.enter_context(CLUSTERS[kind](2))
            options = {"num_workers": 4, "executor": executor}
        loader = DataLoader(dataset, batch_size, seed=0, **options)
        batches = iter(loader)
        consume(batches, seconds / 3, WARMUP_BATCHES, 1)
        count, elapsed_s = consume(batches, seconds, 1, 1)
        batches = None
        loader.close()
    return [(name, kind, {"figure": count * batch_size / elapsed_s})]


def run_bytes(kind: str, round_: int, size: Size) -> Cells:  # noqa: ARG001 - on Ray only
    """Take batches of two sizes from Ray, and from Ray Data on the same cluster."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    cells: list[tuple[str, str, dict[str, float]]] = []
    with on_ray(2) as executor:
        for key, name in (("c", "3 MB"), ("a", "38 MB")):
            work = smallest(WORKLOADS[key]) if size.is_smallest else WORKLOADS[key]
            # More than can be taken in the time, and as many as fit in the store.
            streamed = work.batch_size * (2_000 if size.is_smallest else 20_000)
            stored = work.batch_size * (8 if size.is_smallest else {"c": 100, "a": 10}[key])
            sources: dict[str, Callable[[], Iterator[Any]]] = {
                "shmloader": lambda work=work: _loaded(Samples(work), work.batch_size, executor),
                "Ray Data": partial(_streamed, key, work.batch_size, streamed, size),
                "Ray Data, in the store": partial(_stored, key, work.batch_size, stored, size),
            }
            for peer in in_turn(tuple(sources), round_):
                batches = sources[peer]()
                first = next(batches)
                nbytes = first.numel() * first.element_size()
                assert first.shape[0] == work.batch_size, first.shape
                del first
                consume(batches, size.seconds / 3, WARMUP_BATCHES if peer == "shmloader" else 4, 1)
                count, elapsed_s = consume(batches, size.seconds, 1, 1)
                batches.close()  # type: ignore[attr-defined]
                del batches
                gc.collect()
                cells.append((name, peer, {"figure": count * nbytes / 1e9 / elapsed_s}))
    return cells


def _loaded(dataset: Any, batch_size: int, executor: Any) -> Iterator[Any]:
    loader = DataLoader(dataset, batch_size, num_workers=4, executor=executor)
    try:
        yield from loader
    finally:
        loader.close()


def _ray_dataset(key: str, batch_size: int, length: int, size: Size) -> Any:
    made = partial(take, key=key, is_smallest=size.is_smallest)
    blocks = max(2, length // batch_size // 8)
    return ray.data.range(length, override_num_blocks=blocks).map_batches(
        made, batch_size=batch_size
    )


def _iterate(dataset: Any, batch_size: int) -> Iterator[Any]:
    found = dataset.iter_torch_batches(batch_size=batch_size, prefetch_batches=4, drop_last=True)
    for batch in found:
        yield batch["image"]


def _streamed(key: str, batch_size: int, length: int, size: Size) -> Iterator[Any]:
    yield from _iterate(_ray_dataset(key, batch_size, length, size), batch_size)


def _stored(key: str, batch_size: int, length: int, size: Size) -> Iterator[Any]:
    dataset = _ray_dataset(key, batch_size, length, size).materialize()
    while True:
        yield from _iterate(dataset, batch_size)


def run_waits(kind: str, round_: int, size: Size) -> Cells:  # noqa: ARG001 - one kind a process
    """Load an epoch of samples that wait, after some batches with which all nodes start up."""
    nodes, at_once = 4, 16
    cells: list[tuple[str, str, dict[str, float]]] = []
    with CLUSTERS[kind](nodes) as executor:
        for name, batch_size in (("waits", at_once), ("waits, 64", 4 * at_once)):
            length = size.wait_samples
            loader = DataLoader(
                Waiting(length, size.waiting_s), batch_size, num_workers=2 * nodes,
                executor=executor, seed=0, fetch_concurrency=at_once,
            )  # fmt: skip
            for _ in range(1 if size.is_smallest else 3):
                batches = iter(loader)
                for _ in range(min(32, len(loader))):
                    next(batches)
                del batches
            began_s = time.perf_counter()
            count = sum(1 for _ in loader)
            elapsed_s = time.perf_counter() - began_s
            assert count == length // batch_size
            loader.close()
            ideal_s = length * size.waiting_s / (nodes * at_once)
            cells.append((name, kind, {"figure": ideal_s / elapsed_s}))
    return cells


class _Watched(concurrent.futures.Executor):
    """Passes calls on to an executor; keeps the last call's arguments and all futures."""

    def __init__(self, inner: concurrent.futures.Executor) -> None:
        self.inner = inner
        self.arguments: tuple[Any, ...] = ()
        self.futures: list[Any] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.arguments = args
        self.futures.append(self.inner.submit(fn, *args, **kwargs))
        return self.futures[-1]


def _busy_ns(packed: bytes) -> int:
    """Return how long the process of a task took to load, collate and pack its batch."""
    work = work_of(pickle.loads(packed).times)
    return work.fetch_ns + work.collate_ns + work.encode_ns


def run_main(kind: str, round_: int, size: Size) -> Cells:
    """Measure the CPU time of this process, with our loader and with a bare loop, in turns."""
    in_flight, count = 4, size.main_batches
    start = partial(on_dask, is_apart=True) if kind == "Dask" else CLUSTERS[kind]
    with start(2) as executor:
        watched = _Watched(executor)
        loader = DataLoader(Tiny(4 * 200), 4, num_workers=in_flight, executor=watched, seed=0)
        collections.deque(loader, 0)
        version, shared, _, _, indices, *_ = watched.arguments
        results = [future.result(60) for future in watched.futures]
        answers = [found[1:] for found in results if len(found) > 1]
        body, _, arrays, _ = answers[-1][1]
        contents_bytes = sum(array.nbytes for array in arrays)
        busy_ns = round(statistics.median(_busy_ns(packed) for packed, _ in answers))
        bare = pack_bare(len(indices), len(body), contents_bytes, busy_ns)
        loader.close()
        loader = DataLoader(Tiny(4 * count), 4, num_workers=in_flight, executor=executor, seed=0)
        turns: dict[str, Callable[[], None]] = {
            "bare": partial(_take_bare, executor, (version, shared, bare), in_flight, count),
            "shmloader": lambda: collections.deque(map(touch, loader), 0) and None,
        }
        for turn in turns.values():
            turn()
        spent: dict[str, list[float]] = {name: [] for name in turns}
        for turn_number in range(size.main_turns):
            for name in in_turn(tuple(turns), round_ + turn_number):
                before_s = time.process_time()
                turns[name]()
                spent[name].append((time.process_time() - before_s) / count * 1e6)
        loader.close()
    beyond = [ours - bare for ours, bare in zip(spent["shmloader"], spent["bare"], strict=True)]
    figures = {
        "figure": statistics.median(beyond),
        "bare_us": statistics.median(spent["bare"]),
        "ours_us": statistics.median(spent["shmloader"]),
        "argument_bytes": len(pickle.dumps((shared, indices))),
        "result_bytes": len(pickle.dumps(results[-1])),
        "busy_us": busy_ns / 1e3,
    }
    return [("main", kind, figures)]


def _take_bare(
    executor: Any, arguments: tuple[str, bytes, bytes], in_flight: int, count: int
) -> None:
    """Keep so many calls in flight, and take their results in order."""
    futures: collections.deque[Any] = collections.deque()
    for attempt in range(count):
        futures.append(executor.submit(answer, *arguments, attempt))  # no two calls are alike
        if len(futures) == in_flight:
            futures.popleft().result()
    while futures:
        futures.popleft().result()


# ---------------------------------------------------------------- the campaign


_PACKAGES = ("distributed", "ray", "pyarrow", "pillow")


class Case(NamedTuple):
    """A case, of which each kind is run in a process of its own.

    Attributes:
        run: Does one run.
        kinds: The kinds of the case.
    """

    run: Callable[[str, int, Size], Cells]
    kinds: tuple[str, ...]


_DECODERS = ("our own", "Dask", "Dask, direct", "Ray")
CASES = {
    "train": Case(partial(run_jpeg, _training, "train"), _DECODERS),
    "jpeg": Case(partial(run_jpeg, _centres, "jpeg"), _DECODERS),
    "bytes": Case(run_bytes, ("Ray",)),
    "waits": Case(run_waits, ("Dask", "Ray")),
    "main": Case(run_main, ("ProcessPoolExecutor", "Dask", "Ray")),
}


def _run(name: str, kind: str, round_: int, is_smallest: bool) -> Cells:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return CASES[name].run(kind, round_, SMALLEST if is_smallest else Size())


class Goal(NamedTuple):
    """A row of the table.

    Attributes:
        case: The case of the record.
        peer: What is measured.
        other: What it is compared with; None if the figure stands alone.
        title: What a table calls it.
        spec: How the figure is written, with its unit.
        wanted: What the ratio, or the figure, should be; None if nothing was asked.
        is_most: Whether that is the most; else it is the least.
    """

    case: str
    peer: str
    other: str | None
    title: str
    spec: str
    wanted: float | None
    is_most: bool = False


GOALS = (
    *(
        Goal(case, kind, "our own", f"{files} on {where}, to our own processes", ",.0f", 0.85)
        for case, files in (
            ("train", "JPEG files of 500×375 pixels"),
            ("jpeg", "JPEG files of some 300×300"),
        )
        for kind, where in (
            ("Dask", "Dask"),
            ("Dask, direct", "Dask with `direct_to_workers=True`"),
            ("Ray", "Ray"),
        )
    ),
    Goal("3 MB", "shmloader", "Ray Data", "3 MB on Ray, to Ray Data", ".2f", 2),
    Goal("38 MB", "shmloader", "Ray Data", "38 MB on Ray, to Ray Data", ".2f", 2),
    Goal("3 MB", "shmloader", "Ray Data, in the store",
        "3 MB on Ray, to Ray Data that has them in its store", ".2f", None),
    Goal("38 MB", "shmloader", "Ray Data, in the store",
        "38 MB on Ray, to Ray Data that has them in its store", ".2f", None),
    *(
        Goal(case, kind, None, f"samples that wait, {size} a batch, on {kind}: share of the ideal",
            ".3f", 0.9)
        for case, size in (("waits, 64", 64), ("waits", 16))
        for kind in ("Dask", "Ray")
    ),
    Goal("main", "Dask", None, "main process beyond submit, Dask: µs a batch", ".0f", 60, True),
    Goal("main", "Ray", None, "main process beyond submit, Ray: µs a batch", ".0f", 60, True),
    Goal("main", "ProcessPoolExecutor", None,
        "main process beyond submit, ProcessPoolExecutor: µs a batch", ".0f", 60, True),
)  # fmt: skip

_UNITS = {"train": "samples/s", "jpeg": "samples/s", "3 MB": "GB/s", "38 MB": "GB/s"}


def _by_round(runs: Sequence[Run], case: str, peer: str, key: str = "figure") -> dict[int, float]:
    return {run.round: run.figures[key] for run in select(runs, case, peer) if run.figures}


def _row(runs: Sequence[Run], goal: Goal) -> list[str]:
    """Return a row: figure, what it is compared with, the ratio, the goal, the verdict."""
    ours = _by_round(runs, goal.case, goal.peer)
    if not ours:
        errors = [run.error for run in select(runs, goal.case, goal.peer) if run.error]
        return [goal.title, errors[0] if errors else "not run", "", "", "", ""]
    unit = _UNITS.get(goal.case, "")
    cells = [goal.title, f"{with_spread(list(ours.values()), goal.spec)} {unit}".strip()]
    judged = list(ours.values())
    if goal.other is not None:
        others = _by_round(runs, goal.case, goal.other)
        judged = [ours[round_] / others[round_] for round_ in ours if round_ in others]
        if not judged:
            return [*cells, "not run", "", "", ""]
        cells += [with_spread(list(others.values()), goal.spec), with_spread(judged, ".2f")]
    elif goal.case == "main":
        bare = _by_round(runs, goal.case, goal.peer, "bare_us")
        cells += [f"submit alone: {with_spread(list(bare.values()), ',.0f')}", ""]
    else:
        cells += ["", ""]
    if goal.wanted is None:
        return [*cells, "", ""]
    return [*cells, *judge(judged, goal.wanted, is_most=goal.is_most)]


def report(
    runs: Sequence[Run],
    machine: Mapping[str, str],
    is_smallest: bool,  # noqa: ARG001 - the rows are the same
) -> list[str]:
    """Return the lines of the section of RESULTS.md."""
    rows = [_row(runs, goal) for goal in GOALS]
    short = [row[0] for row in rows if row[-1].startswith("**")]
    heading = ["what", "shmloader", "beside", "ratio of rounds", "goal", ""]
    lines = ["## On clusters of Dask and Ray", ""]
    lines += [
        "Made by `make bench-cluster` (`benchmarks/cluster.py`, whose head says what each row is).",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += ["", *write_table(heading, rows), ""]
    told = "; ".join(short) if short else "none"
    return [*lines, f"Rows that fall short: {told}."]


def main() -> int:
    """Compare, or do one run for a comparison."""
    # The clusters' processes import modules beside this file, and shmloader.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(_HERE), str(_HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    kinds = {name: case.kinds for name, case in CASES.items()}
    campaign = Campaign(
        file=__file__,
        about=str(__doc__).partition("\n")[0],
        kinds=kinds,
        smallest=kinds,
        rounds=5,
        limit_s=170.0,
        run=_run,
        report=report,
        options="2 processes (waits: 4)",
        more={name: importlib.metadata.version(name) for name in _PACKAGES},
    )
    return campaign.main()


if __name__ == "__main__":
    raise SystemExit(main())
