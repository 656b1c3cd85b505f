"""Runs random loaders in one process for long: ``python -m tests.faults.soak``; see ``--help``.

Loaders of all sorts are made, used and dropped, one after the other, in a single process, and
workers are killed at random. From time to time, between two loaders, the process is measured:
memory, descriptors, threads, mappings. The program fails if one of these keeps growing, if a batch
is wrong, or if nothing happens for long.
"""

import contextlib
import faulthandler
import gc
import itertools
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from tests.faults import actions
from tests.faults.hammered import BATCH_SIZE, Hammered, Samples, make_sample
from tests.faults.harness import is_server, options_of

# Without a step for so long, it hangs. A worker that is spawned imports torch first.
_STALL_S = 120.0
# Within so many seconds after a loader, its processes must have ended.
_LEFT_S = 5.0
_PRINT_EVERY_S = 15.0
# This part of the time is not judged: caches fill, and torch starts its threads.
_WARM_UP = 0.3
# A line is drawn through so many points, each the least value in its part of the time.
_POINTS = 40
_KILL_SHARE = 0.01
_FAIL_SHARE = 0.05
_METHODS = ["fork"] * 18 + ["spawn", "forkserver"]


class Measured(NamedTuple):
    """What this process holds while nothing runs."""

    memory_mib: float
    descriptors: int
    threads: int
    mappings: int

    @classmethod
    def now(cls) -> "Measured":
        gc.collect()
        usage = Path("/proc/self/smaps_rollup").read_text()
        return cls(
            int(usage.partition("\nPss:")[2].split()[0]) / 1024,
            len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - numbers, not paths
            len(os.listdir("/proc/self/task")),  # noqa: PTH208 - as above
            Path("/proc/self/maps").read_text().count("\n"),
        )


# How much a line may rise after the warm-up, however long the run is.
ALLOWED = Measured(memory_mib=24.0, descriptors=2, threads=2, mappings=40)


def rise(times: Sequence[float], values: Sequence[float]) -> float:
    """Return how much a straight line through the values rises after the warm-up.

    Its slope is the median of the slopes between all pairs of points, so that a few outliers do
    not matter. Each point is the least value in a part of the time, since what goes away again is
    no leak.
    """
    begin = times[0] + _WARM_UP * (times[-1] - times[0])
    length = times[-1] - begin
    points: dict[int, float] = {}
    for when, value in zip(times, values, strict=True):
        if when >= begin and length > 0:
            part = min(int((when - begin) / length * _POINTS), _POINTS - 1)
            points[part] = min(value, points.get(part, value))
    slopes = [
        (later - earlier) / (b - a)
        for (a, earlier), (b, later) in itertools.combinations(sorted(points.items()), 2)
    ]
    return statistics.median(slopes) * _POINTS if slopes else 0.0


def too_steep(times: Sequence[float], measured: Sequence[Measured]) -> list[str]:
    """Return what keeps growing, in words."""
    found = []
    for name, allowed in ALLOWED._asdict().items():
        rises = rise(times, [getattr(one, name) for one in measured])
        if rises > allowed:
            found.append(f"slope: {name} rose by {rises:.1f}, and {allowed:g} is allowed")
    return found


class Failing(Samples):
    """Samples of which some raise."""

    def __getitem__(self, index: int) -> Any:
        if random.random() < _FAIL_SHARE:
            raise LookupError(f"no sample {index}")
        return super().__getitem__(index)


class Soak(Hammered):
    """Runs mixes until the time is over. A mix is a short use of one loader.

    Attributes:
        problems: What must not happen, in words.

    Args:
        seed: Decides all but the times at which things happen.
        duration_s: How long it runs.
    """

    def __init__(self, seed: int, duration_s: float) -> None:
        super().__init__(str(seed), "fork")
        self._began = time.monotonic()
        self._ends = self._began + duration_s
        self._printed = 0.0
        # Not after each mix: collecting all garbage and reading all mappings take as long as one.
        self._measures_every_s = duration_s / 400
        self.problems: list[str] = []
        self._times: list[float] = []
        self._measured: list[Measured] = []
        self._mixes: list[Callable[[], None]] = [
            *[self.run_loader] * 6,
            self._run_here,
            self._run_failing,
            self._run_shared,
            self._run_prefetched,
            self._run_pipeline,
        ]

    def run(self) -> None:
        """Run mixes until the time is over, and judge the measurements."""
        resource_tracker.ensure_running()
        forkserver.set_forkserver_preload(["torch"])
        forkserver.ensure_running()
        self._measure()
        while not self._must_stop():
            faulthandler.dump_traceback_later(_STALL_S, exit=True)
            self._method = self._random.choice(_METHODS)
            mix = self._random.choice(self._mixes)
            self._words = mix.__name__
            try:
                mix()
            except Exception as error:
                self._problem(repr(error), "other problem")
            self._settle()
            if time.monotonic() - self._times[-1] > self._measures_every_s:
                self._measure()
        self._measure()
        faulthandler.cancel_dump_traceback_later()
        self.problems += too_steep(self._times, self._measured)
        self._print()

    def _must_stop(self) -> bool:
        return time.monotonic() > self._ends

    def _problem(self, text: str, sort: str = "wrong batch") -> None:
        self.problems.append(f"{sort}: {text} ({self._words})")
        print(self.problems[-1], flush=True)

    def _step(self, what: str) -> None:
        super()._step(what)
        faulthandler.dump_traceback_later(_STALL_S, exit=True)
        is_hurt = what == "batches" and self._random.random() < _KILL_SHARE
        if is_hurt and (workers := self._workers()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(workers), signal.SIGKILL)
                self.counts["workers killed"] += 1

    def _workers(self) -> list[int]:
        """Return this process's descendants, with those of the fork server, without servers."""
        children = psutil.Process().children(recursive=True)
        return [child.pid for child in children if not is_server(child.pid)]

    def _settle(self) -> None:
        """Wait until no worker of the last mix is left."""
        deadline = time.monotonic() + _LEFT_S
        while left := self._workers():
            if time.monotonic() > deadline:
                self._problem(f"processes live on: {left}", "leak")
                break
            time.sleep(0.01)

    def _measure(self) -> None:
        self._times.append(time.monotonic())
        self._measured.append(Measured.now())
        if self._times[-1] - self._printed > _PRINT_EVERY_S:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        memory_mib, descriptors, threads, mappings = self._measured[-1]
        epochs = self.counts["whole epochs"] + self.counts["epochs left"]
        print(
            f"{self._printed - self._began:7.0f} s {epochs:6} epochs "
            f"{self.counts['workers killed']:5} kills {memory_mib:7.0f} MiB "
            f"{descriptors:4} descriptors {threads:3} threads {mappings:5} mappings",
            flush=True,
        )

    def _epochs(self, batches: Any, check: Callable[[Any], None], *, leaves: bool = True) -> None:
        """Take some epochs of an iterable of batches, each of which may be left early."""
        for _ in range(self._random.randint(1, 3)):
            stop = self._random.randint(1, 8) if leaves and self._random.random() < 0.3 else None
            for batch in itertools.islice(batches, stop):
                check(batch)
                self._step("batches")
            self._step("whole epochs" if stop is None else "epochs left")

    def _run_here(self) -> None:
        """Use a loader with threads of this process, or without workers."""
        from shmloader import DataLoader

        threads = self._random.randint(0, 3)
        loader = DataLoader(
            Samples(self._random.randint(2, 24) * BATCH_SIZE),
            batch_size=BATCH_SIZE,
            num_workers=threads,
            thread_pool=threads > 0,
        )
        self._epochs(loader, self._number_of)

    def _run_failing(self) -> None:
        """Use samples that raise: either they are skipped, or their errors are raised."""
        from shmloader import DataLoader

        skips = self._random.random() < 0.5
        loader = DataLoader(
            Failing(10 * BATCH_SIZE),
            batch_size=BATCH_SIZE,
            num_workers=self._random.randint(0, 2),
            on_error="skip" if skips else "raise",
        )
        with contextlib.suppress(LookupError, RuntimeError):  # also of a killed worker
            self._epochs(loader, self._check_samples)
        self._step("epochs left")

    def _run_shared(self) -> None:
        """Move batches to torch's shared memory while views of them are in use."""
        from shmloader import DataLoader, WorkerDiedError

        loader = DataLoader(Samples(10 * BATCH_SIZE), batch_size=BATCH_SIZE, num_workers=2)
        views: list[tuple[Any, int]] = []

        def share(batch: Any) -> None:
            views.append((batch[0].numpy(), int(batch[1][0])))
            batch[0].share_memory_()
            if len(views) > 5:
                views.pop(self._random.randrange(5))
            for view, index in views:
                if not torch.equal(torch.from_numpy(view[0]), self._known[index]):
                    self._problem(f"a view of sample {index} has changed")

        with contextlib.suppress(WorkerDiedError):
            self._epochs(loader, share)

    def _run_prefetched(self) -> None:
        """Read a sequence whose items are computed ahead, with jumps."""
        from shmloader import WorkerDiedError
        from shmloader.sequence import prefetch, smap

        method: Any = self._random.choice(["thread", "process"])
        items = prefetch(smap(make_sample, range(40)), 2, method, max_buffered=4)
        with contextlib.suppress(WorkerDiedError):
            for _ in range(3):
                start = self._random.randrange(30)
                for index in range(start, start + 8):
                    if not torch.equal(items[index], self._known[index]):
                        self._problem(f"wrong bytes in item {index}")
                    self._step("batches")

    def _run_pipeline(self) -> None:
        """Use a pipeline on threads."""
        from shmloader import PipelineBuilder

        builder = PipelineBuilder().add_source(range(40)).pipe(make_sample, concurrency=2)
        pipeline = builder.aggregate(BATCH_SIZE).add_sink().build()
        self._epochs(pipeline, lambda _: None)

    def _check_samples(self, batch: Any) -> None:
        for sample, index in zip(batch[0], batch[1].tolist(), strict=True):
            if not torch.equal(sample, self._known[index]):
                self._problem(f"wrong bytes in sample {index}")


def main() -> None:
    """Run as long as the command line says; exit with 1 if anything was wrong."""
    options = options_of("soak", __doc__, has_docs=False, minutes=(20.0, "duration"))
    # Warnings of few cores or no accelerator, and logs of killed workers, are expected.
    warnings.simplefilter("ignore")
    logging.getLogger("shmloader").setLevel(logging.CRITICAL)
    random.seed(options.seed)
    with tempfile.TemporaryDirectory(prefix="shmloader-soak-") as directory:
        os.environ[actions.DIRECTORY] = directory
        soak = Soak(options.seed, options.minutes * 60)
        soak.run()
    print(f"--seed {options.seed}: {options.minutes:g} minutes: {dict(soak.counts)}")
    print(*soak.problems, f"{len(soak.problems)} problems", sep="\n")
    sys.exit(bool(soak.problems))


if __name__ == "__main__":
    main()
