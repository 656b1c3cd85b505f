"""``shmloader doctor``: what the machine offers, or what stands in the way of a loader."""

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from shmloader.cli.diagnosis import Diagnosis, Problem, diagnose
from shmloader.cli.target import call, find
from shmloader.grammar import counted, seconds, size
from shmloader.memory.limits import address_space, control_groups, free_memory
from shmloader.memory.system_support import why_unsupported
from shmloader.pools.cores import affinity, core_quota, usable_cores

_WIDTH = 16


def doctor(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 1 if the loader has a problem.

    Raises:
        UsageError: If the argument names no function that returns a loader or a dataset.
    """
    if options.target is None:
        _show_machine(as_json=options.json)
        return 0
    found = diagnose(call(find(options.target), options.target), options.target)
    if options.json:
        print(json.dumps({"target": options.target, **_values(found)}, indent=2))
    else:
        _show(found, options.target)
    return 0 if found.is_healthy else 1


def _show_machine(*, as_json: bool) -> None:
    findings = examine_machine()
    if as_json:
        print(json.dumps({name: [value, meaning] for name, value, meaning in findings}, indent=2))
        return
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} "
        f"{platform.release()}, {platform.machine()}\n"
    )
    for name, value, meaning in findings:
        _print(name, value, meaning)


def _values(found: Diagnosis) -> dict[str, object]:
    return {
        **dataclasses.asdict(found),
        "worker_bytes": found.worker_bytes,
        "slot_bytes": found.slot_bytes,
        "rank_bytes": found.rank_bytes,
        "fitting": found.fitting,
        "is_healthy": found.is_healthy,
    }


def _print(name: str, value: str, meaning: str) -> None:
    print(f"  {name:<{_WIDTH}}{value}")
    if meaning:
        print(f"  {'':<{_WIDTH}}{meaning}")


def _show(found: Diagnosis, target: str) -> None:
    is_threaded = found.method == "threads"
    how = "threads" if is_threaded else f"processes, start method {found.method}"
    print(f"{target}: {found.kind}; workers are {how}\n")
    _print("dataset", *_describe_dataset(found))
    _print("batch", *_describe_batch(found))
    if not is_threaded:
        _print("pickle", *_describe_pickle(found))
        _print("a worker", *_describe_worker(found))
        _print("start methods", *_describe_methods(found))
    _print("further ranks", *_describe_ranks(found))
    print()
    for problem in found.problems:
        if not problem.methods or is_threaded == ("threads" in problem.methods):
            _show_problem(problem)
    if found.is_healthy:
        print("No problem was found.")


def _show_problem(problem: Problem) -> None:
    _print("problem" if problem.matters else "note", f"{problem.path} ({problem.kind})", "")
    where = f"With {' and '.join(problem.methods)}: " if problem.methods else ""
    print(f"  {'':<{_WIDTH}}{where}{problem.what}.")
    print(f"  {'':<{_WIDTH}}Remedy: {problem.remedy}.\n")


def _describe_dataset(found: Diagnosis) -> tuple[str, str]:
    value = (
        f"{size(found.array_bytes)} of tensors and arrays, about {found.objects:,} Python objects "
        f"({size(found.object_bytes)})"
    )
    if found.shared_bytes:
        value += f", {size(found.shared_bytes)} in shared memory or mapped files"
    if not found.is_complete:
        value += "; it was not looked through completely"
    if found.wants_sharing:
        return value, (
            "dataset = shmloader.share(dataset) keeps the objects in memory only once; "
            "share_on_host(build) once for all ranks of a host."
        )
    return value, ""


def _describe_pickle(found: Diagnosis) -> tuple[str, str]:
    if found.pickle_bytes is None or found.pickle_s is None:
        if any("spawn" in problem.methods for problem in found.problems):
            return "not possible, see below", ""
        return "not tried: there is too little free memory for a copy of the dataset", ""
    value = f"{size(found.pickle_bytes)} in {seconds(found.pickle_s)}"
    if found.by_value:
        value += ", by cloudpickle"
    return value, "With spawn and forkserver, sent once for all workers; not sent with fork."


def _describe_batch(found: Diagnosis) -> tuple[str, str]:
    if found.batch_bytes is None or found.batch_s is None:
        return "none", ""
    value = f"{size(found.batch_bytes)}; the first one took {seconds(found.batch_s)}"
    if found.method == "threads":
        return value, "The threads share everything, and batches stay as they are."
    slots = counted(found.slots, "batch", "batches")
    whole = size(found.slot_bytes)
    return value, f"{counted(found.workers, 'worker')}: shared memory for {slots}, {whole}."


def _describe_worker(found: Diagnosis) -> tuple[str, str]:
    if found.worker_bytes is None:
        return "unknown", ""
    meaning = "The Python objects that it uses, and its share of the batches; not the interpreter."
    return size(found.worker_bytes), meaning


def _describe_ranks(found: Diagnosis) -> tuple[str, str]:
    value = f"each takes {size(found.rank_bytes)} more on the same host, for the dataset"
    if found.method == "threads":
        return value, "shmloader.share_on_host(build) keeps one dataset for all of them."
    value += f" and {counted(found.workers, 'worker')}"
    meaning = (
        "shmloader.share_on_host(build) keeps one dataset for all of them, and "
        "ShardedDataLoader(worker_scope='host') one pool of workers."
    )
    if found.slot_bytes:
        meaning += f" Each still takes {size(found.slot_bytes)} for its batches."
    return value, meaning


def _describe_methods(found: Diagnosis) -> tuple[str, str]:
    fitting = found.fitting
    if not fitting:
        return "none works", "Solve the problems below, or use num_workers=0."
    best = fitting[0]
    meaning = {
        "fork": "fork starts workers in milliseconds and copies nothing.",
        "forkserver": "forkserver starts workers in milliseconds, and pickles the dataset once.",
        "spawn": "spawn starts an interpreter for each worker: use persistent_workers=True.",
    }[best]
    return f"{', '.join(fitting)}", meaning


# The machine -------------------------------------------------------------------------------

_ROOT = Path("/")
# With a lower limit, the report says that there are few: a loader with 16 workers takes some
# hundreds.
_FEW_DESCRIPTORS = 1024

Finding = tuple[str, str, str]


def examine_machine() -> Iterator[Finding]:
    """Yield the name, value and meaning of each finding."""
    for check in _CHECKS:
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 - a failing check does not prevent the others
            yield check.__name__.strip("_").replace("_", " "), "unknown", str(error)


def _cores() -> Finding:
    quota = core_quota(_ROOT)
    cores = usable_cores(_ROOT)
    by = f"{affinity()} by affinity, of {os.cpu_count()}"
    by += "" if quota is None else f"; {quota:g} by the quota of the control group"
    meaning = f"If samples keep the CPU busy, up to {cores} workers help; if samples wait, more."
    return "cores", f"{cores} ({by})", meaning


def _memory() -> Finding:
    free = free_memory(_ROOT, control_groups(_ROOT))
    total = size(psutil.virtual_memory().total)
    if free is None:
        return "memory", f"{total}; free memory is unknown", "Memory is not checked before use."
    value = f"{size(free.nbytes)} free ({free.limit}); the machine has {total}"
    return "memory", value, "A batch that does not fit raises SharedMemoryError before it is made."


def _dev_shm() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return "/dev/shm", "missing", "torch's loader needs it; this one does not."
    value = f"{size(usage.total)}, {size(usage.free)} free"
    return "/dev/shm", value, "torch's loader puts batches there; this one does not use it."


def _memfd() -> Finding:
    why = why_unsupported()
    if why is None:
        return "memfd, pidfd", "available", "Worker processes collate into shared memory."
    meaning = "num_workers > 0 uses torch's own workers, with a warning; thread_pool=True works."
    return "memfd, pidfd", why, meaning


def _address_space() -> Finding:
    space = address_space()
    meaning = "Slots may be as large as memory allows."
    if space.limit_bytes is not None:
        meaning = (
            "Each process maps the filled part of all its batches that are in flight or in use. A "
            "batch that does not fit raises SharedMemoryError."
        )
    return "address space", space.describe(), meaning


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = psutil.Process().num_fds()
    meaning = "A loader needs one or two for each slot, and four for each worker."
    if soft < _FEW_DESCRIPTORS:
        meaning += f" There are few: `ulimit -n {hard}` allows more."
    return "descriptors", f"{soft}, of which {used} are used (ulimit -n; at most {hard})", meaning


def _start_method() -> Finding:
    method = multiprocessing.get_context().get_start_method()
    meaning = {
        "fork": "Workers start in milliseconds and share loaded memory; nothing is pickled.",
        "forkserver": "Workers start in milliseconds after a server has imported torch. The "
        "dataset is pickled once for all of them.",
        "spawn": "Each worker starts an interpreter and imports torch, which takes seconds: use "
        "persistent_workers=True.",
    }
    return "start method", method, meaning.get(method, "")


def _gpus() -> Finding:
    if not torch.accelerator.is_available():
        return "GPUs", "none that torch can use", "pin_memory=True has no effect."
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else str(kind)
    return (
        "GPUs",
        f"{count} ({name})",
        "device= brings batches to a GPU with one copy less than pin_memory=True.",
    )


def _locked_pages() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"limit {size(soft)}"
    meaning = "Where page-locking is refused, device= warns, and copies by pinned memory."
    return "locked pages", f"{limit} (ulimit -l)", meaning


def _streaming() -> Finding:
    if importlib.util.find_spec("shmloader.memory._streaming") is not None:
        return "C function", "built", "Copies of large batches bypass the CPU's caches."
    meaning = "Copies of large batches go through the CPU's caches: reinstall with a C compiler."
    return "C function", "not built", meaning


def _threads() -> Finding:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "interpreter", "free-threaded", "thread_pool=True loads on all cores."
    meaning = "thread_pool=True helps if samples wait, or release the interpreter's lock."
    return "interpreter", "with a global lock", meaning


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _cores,
    _memory,
    _dev_shm,
    _memfd,
    _address_space,
    _descriptors,
    _start_method,
    _gpus,
    _locked_pages,
    _streaming,
    _threads,
)
