"""Measure one loader on one workload, in this process, and print the figures as JSON.

``throughput.py`` starts this file in a fresh process for each run; it can be started
by hand too, beneath a profiler for instance::

    python benchmarks/_measure.py shmloader a --seconds 10

A run is: make the samples, take the content hash in a pass of its own, start the
loader, warm up, then consume for a fixed time. The consumer is the process's main
thread; "workers" are all its child processes.

Assumes: Linux (``/proc``), the fork start method.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing as mp
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from _usage import Meter, Usage, cpu_s_of_machine
from _workloads import (
    WORKLOADS,
    Batch,
    ContentHash,
    Samples,
    Workload,
    byte_count,
    smallest,
    stacker,
    touch,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

LOADERS = ("shmloader", "torch", "ceiling")

# Twice what two workers hold ahead by default (prefetch_factor 2), plus some: every
# slot or segment has been written at least once.
WARMUP_BATCHES = 12


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run measured. Names carry the unit; None means that a figure does not apply.

    Attributes:
        batches: Batches in the timed part.
        elapsed_s: Wall time of the timed part.
        batch_bytes: Bytes of one batch's tensors.
        main_cpu_s: CPU time of the consuming process, all its threads.
        workers_cpu_s: CPU time of all worker processes.
        others_cpu_s: CPU time that the machine spent on anything else meanwhile: a run
            with much of it was disturbed.
        minor_faults: Minor page faults, consumer and workers.
        first_batch_s: From before the loader is made until its first batch has come.
        touch_us: What the consumer's own read of one batch costs, part of main_cpu_s.
        content_hash: Digest of the first batches.
    """

    batches: int
    elapsed_s: float
    batch_bytes: int
    main_cpu_s: float | None
    workers_cpu_s: float
    others_cpu_s: float
    minor_faults: int
    first_batch_s: float | None
    touch_us: float | None
    content_hash: str


def consume(
    batches: Iterator[Batch], seconds: float, at_least: int, clock_stride: int
) -> tuple[int, float]:
    """Touch at least so many batches, for at least so many seconds; return count and time."""
    count = 0
    start = time.perf_counter()
    deadline = start + seconds
    for batch in batches:
        touch(batch)
        count += 1
        if count % clock_stride == 0 and count >= at_least and time.perf_counter() >= deadline:
            return count, time.perf_counter() - start
    raise RuntimeError(f"the loader ended after {count} batches, in the middle of the dataset")


def _touch_us(batch: Batch) -> float:
    repeats = 100
    return min(timeit.repeat(lambda: touch(batch), number=repeats, repeat=5)) / repeats * 1e6


def measure_loader(module: str, work: Workload, worker_count: int, seconds: float) -> Figures:
    """Run ``module.DataLoader`` with default collate and persistent workers.

    Args:
        module: Name of the module that holds the DataLoader.
        work: What to load.
        worker_count: num_workers.
        seconds: Length of the timed part.

    Returns:
        The figures of this run.
    """
    make_loader = importlib.import_module(module).DataLoader
    dataset = Samples(work)
    options = {
        "batch_size": work.batch_size,
        "num_workers": worker_count,
        "multiprocessing_context": "fork",
    }

    content = ContentHash()
    for batch in make_loader(dataset.first(work.batch_size * work.hash_batches), **options):
        content.add(batch)
    batch_bytes = byte_count(batch)
    touch_us = _touch_us(batch)
    del batch

    start = time.perf_counter()
    loader = make_loader(dataset, persistent_workers=True, **options)
    batches = iter(loader)
    touch(next(batches))
    first_batch_s = time.perf_counter() - start
    consume(batches, min(0.3, seconds), WARMUP_BATCHES, work.clock_stride)

    meter = Meter()
    count, elapsed_s = consume(batches, seconds, 1, work.clock_stride)
    spent = meter.read()
    return Figures(
        batches=count,
        elapsed_s=elapsed_s,
        batch_bytes=batch_bytes,
        **spent._asdict(),
        first_batch_s=first_batch_s,
        touch_us=touch_us,
        content_hash=content.hexdigest(),
    )


def _step_until(
    make_step: Callable[[], Callable[[int], object]],
    seconds: float,
    clock_stride: int,
    numbers: Iterator[int],
    start: Barrier,
    results: Connection,
) -> None:
    """Run one process of a ceiling: warm up, wait for the others, work, report."""
    torch.set_num_threads(1)  # as in a torch worker
    step = make_step()
    for number in range(WARMUP_BATCHES):
        step(number)
    start.wait()
    before = Usage.of_self()
    began = time.perf_counter()
    deadline = began + seconds
    for count, number in enumerate(numbers, start=1):
        step(number)
        if count % clock_stride == 0 and time.perf_counter() >= deadline:
            break
    elapsed_s = time.perf_counter() - began
    after = Usage.of_self()
    results.send(
        (count, elapsed_s, after.cpu_s - before.cpu_s, after.minor_faults - before.minor_faults)
    )


def run_processes(
    make_step: Callable[[], Callable[[int], object]],
    process_count: int,
    seconds: float,
    clock_stride: int,
) -> dict[str, Any]:
    """Run processes that do the bare work of batches and nothing else.

    Nothing is sent, no index is drawn and no batch is consumed. A loader with as many
    workers cannot be faster as long as its workers alone are the limit.

    Args:
        make_step: Called in each process. Returns a function that does the work of one
            batch, given the batch's number.
        process_count: Number of processes.
        seconds: Length of the timed part, which starts at a barrier.
        clock_stride: Batches between two looks at the clock.

    Returns:
        Those fields of :class:`Figures` that apply, for all processes together.
    """
    context = mp.get_context("fork")
    start = context.Barrier(process_count + 1)
    pipes = [context.Pipe(duplex=False) for _ in range(process_count)]
    processes = [
        context.Process(
            target=_step_until,
            args=(make_step, seconds, clock_stride, itertools.count(first, process_count), start,
                  sender),
            daemon=True,
        )
        for first, (_, sender) in enumerate(pipes)
    ]  # fmt: skip
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    start.wait()
    machine_before = cpu_s_of_machine()
    results = [receiver.recv() for receiver, _ in pipes]
    machine_cpu_s = cpu_s_of_machine() - machine_before
    for process in processes:
        process.join()
    workers_cpu_s = sum(cpu_s for _, _, cpu_s, _ in results)
    return {
        "batches": sum(count for count, *_ in results),
        "elapsed_s": max(elapsed_s for _, elapsed_s, *_ in results),
        "workers_cpu_s": workers_cpu_s,
        "others_cpu_s": max(0.0, machine_cpu_s - workers_cpu_s),
        "minor_faults": sum(faults for *_, faults in results),
    }


def measure_ceiling(work: Workload, worker_count: int, seconds: float) -> Figures:
    """Run processes that stack into resident buffers and do nothing else.

    Args:
        work: What to stack.
        worker_count: Number of processes.
        seconds: Length of the timed part.

    Returns:
        The figures of this run, of all processes together.
    """
    dataset = Samples(work)
    content = ContentHash()
    stack = stacker(work, dataset)
    for number in range(work.hash_batches):
        content.add(stack(number))
    batch_bytes = byte_count(stack(0))
    del stack
    found = run_processes(lambda: stacker(work, dataset), worker_count, seconds, work.clock_stride)
    return Figures(
        **found,
        batch_bytes=batch_bytes,
        main_cpu_s=None,
        first_batch_s=None,
        touch_us=None,
        content_hash=content.hexdigest(),
    )


def main() -> None:
    """Measure what the command line names; the result is the last line of stdout."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("loader", choices=LOADERS)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--samples", type=int, help="different samples held in memory")
    parser.add_argument("--smallest", action="store_true")
    options = parser.parse_args()

    work = WORKLOADS[options.workload]
    if options.smallest:
        work = smallest(work)
    if options.samples is not None:
        work = replace(work, sample_count=options.samples)
    if options.loader == "ceiling":
        figures = measure_ceiling(work, options.workers, options.seconds)
    else:
        module = {"torch": "torch.utils.data"}.get(options.loader, options.loader)
        figures = measure_loader(module, work, options.workers, options.seconds)
    print(json.dumps(asdict(figures)), flush=True)


if __name__ == "__main__":
    main()
