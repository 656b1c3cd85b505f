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
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from shmloader.cli.diagnosis import Diagnosis, diagnose
from shmloader.cli.target import call
from shmloader.grammar import counted, seconds, size
from shmloader.memory.limits import describe_address_space, free_memory, soft_limit
from shmloader.memory.system_support import why_unsupported
from shmloader.pools.cores import affinity, core_quota, usable_cores

# From this many Python objects on, the report suggests sharing the dataset.
_MANY_OBJECTS = 100_000

_ROOT = Path("/")
# With a lower limit, the report says that there are few: a loader with 16 workers takes some
# hundreds.
_FEW_DESCRIPTORS = 1024

_METHODS = {
    "fork": "Workers start in milliseconds and share loaded memory; nothing is pickled.",
    "forkserver": "Workers start in milliseconds after a server has imported torch. The dataset is "
    "pickled once for all of them.",
    "spawn": "Each worker starts an interpreter and imports torch, which takes seconds: use "
    "persistent_workers=True.",
}

# A value, and what it means for a loader.
_Finding = tuple[str, str]


def doctor(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 1 if the loader has a problem.

    Raises:
        UsageError: If the argument names no function that returns a loader or a dataset.
    """
    if options.target is None:
        findings = dict(_examine_machine())
        if options.json:
            print(json.dumps(findings, indent=2))
            return 0
        system = f"{platform.system()} {platform.release()}, {platform.machine()}"
        print(f"Python {platform.python_version()}, torch {torch.__version__}, {system}\n")
        for name, (value, meaning) in findings.items():
            _print(name, value, meaning)
        return 0
    found = diagnose(call(options.target), options.target)
    if options.json:
        print(json.dumps({"target": options.target, **dataclasses.asdict(found)}, indent=2))
    else:
        _show(found, options.target)
    return 0 if found.is_healthy else 1


def _print(name: str, *lines: str) -> None:
    for line in filter(None, lines):
        print(f"  {name:<16}{line}")
        name = ""


# A loader ----------------------------------------------------------------------------------


def _show(found: Diagnosis, target: str) -> None:
    is_threaded = found.method == "threads"
    how = "threads" if is_threaded else f"processes, start method {found.method}"
    print(f"{target}: {found.kind}; workers are {how}\n")
    for name, describe in _ROWS.items():
        if not is_threaded or name in {"dataset", "batch", "further ranks"}:
            _print(name, *describe(found))
    print()
    for problem in found.problems:
        if problem.methods and is_threaded != ("threads" in problem.methods):
            continue
        where = f"With {' and '.join(problem.methods)}: " if problem.methods else ""
        _print(
            "problem" if problem.matters else "note",
            f"{problem.path} ({problem.kind})",
            f"{where}{problem.what}.",
            f"Remedy: {problem.remedy}.\n",
        )
    if found.is_healthy:
        print("No problem was found.")


def _describe_dataset(found: Diagnosis) -> _Finding:
    value = (
        f"{size(found.array_bytes)} of tensors and arrays, about {found.objects:,} Python objects "
        f"({size(found.object_bytes)})"
    )
    if found.shared_bytes:
        value += f", {size(found.shared_bytes)} in shared memory or mapped files"
    if not found.is_complete:
        value += "; it was not looked through completely"
    if found.objects < _MANY_OBJECTS:
        return value, ""
    return value, (
        "dataset = shmloader.share(dataset) keeps the objects in memory only once; "
        "share_on_host(build) once for all ranks of a host."
    )


def _describe_batch(found: Diagnosis) -> _Finding:
    if found.batch_bytes is None or found.batch_s is None:
        return "none", ""
    value = f"{size(found.batch_bytes)}; the first one took {seconds(found.batch_s)}"
    if found.method == "threads":
        return value, "The threads share everything, and batches stay as they are."
    return value, (
        f"{counted(found.workers, 'worker')}: shared memory for "
        f"{counted(found.slots, 'batch', 'batches')}, {size(found.slot_bytes)}."
    )


def _describe_pickle(found: Diagnosis) -> _Finding:
    if found.pickle_bytes is None or found.pickle_s is None:
        if "spawn" not in found.fitting:
            return "not possible, see below", ""
        return "not tried: there is too little free memory for a copy of the dataset", ""
    how = ", by cloudpickle" if found.by_value else ""
    value = f"{size(found.pickle_bytes)} in {seconds(found.pickle_s)}{how}"
    return value, "With spawn and forkserver, sent once for all workers; not sent with fork."


def _describe_worker(found: Diagnosis) -> _Finding:
    if found.worker_bytes is None:
        return "unknown", ""
    meaning = "The Python objects that it uses, and its share of the batches; not the interpreter."
    return size(found.worker_bytes), meaning


def _describe_methods(found: Diagnosis) -> _Finding:
    if not found.fitting:
        return "none works", "Solve the problems below, or use num_workers=0."
    return ", ".join(found.fitting), f"{found.fitting[0]}: {_METHODS[found.fitting[0]]}"


def _describe_ranks(found: Diagnosis) -> _Finding:
    value = f"each takes {size(found.rank_bytes)} more on the same host, for the dataset"
    meaning = "shmloader.share_on_host(build) keeps one dataset for all of them"
    if found.method == "threads":
        return value, f"{meaning}."
    meaning += ", and ShardedDataLoader(worker_scope='host') one pool of workers."
    if found.slot_bytes:
        meaning += f" Each still takes {size(found.slot_bytes)} for its batches."
    return f"{value} and {counted(found.workers, 'worker')}", meaning


_ROWS: dict[str, Callable[[Diagnosis], _Finding]] = {
    "dataset": _describe_dataset,
    "batch": _describe_batch,
    "pickle": _describe_pickle,
    "a worker": _describe_worker,
    "start methods": _describe_methods,
    "further ranks": _describe_ranks,
}


# The machine -------------------------------------------------------------------------------


def _examine_machine() -> Iterator[tuple[str, _Finding]]:
    for name, check in _CHECKS.items():
        try:
            yield name, check()
        except Exception as error:  # noqa: BLE001 - a failing check does not prevent the others
            yield name, ("unknown", str(error))


def _cores() -> _Finding:
    quota, cores = core_quota(_ROOT), usable_cores(_ROOT)
    by = f"{affinity()} by affinity, of {os.cpu_count()}"
    if quota is not None:
        by += f"; {quota:g} by the quota of the control group"
    meaning = f"If samples keep the CPU busy, up to {cores} workers help; if samples wait, more."
    return f"{cores} ({by})", meaning


def _memory() -> _Finding:
    free = free_memory(_ROOT)
    total = size(psutil.virtual_memory().total)
    if free is None:
        return f"{total}; free memory is unknown", "Memory is not checked before use."
    return (
        f"{size(free.nbytes)} free ({free.limit}); the machine has {total}",
        "A batch that does not fit raises SharedMemoryError before it is made.",
    )


def _dev_shm() -> _Finding:
    if not Path("/dev/shm").exists():
        return "missing", "torch's loader needs it; this one does not."
    usage = shutil.disk_usage("/dev/shm")
    value = f"{size(usage.total)}, {size(usage.free)} free"
    return value, "torch's loader puts batches there; this one does not use it."


def _memfd() -> _Finding:
    why = why_unsupported()
    if why is None:
        return "available", "Worker processes collate into shared memory."
    return why, "num_workers > 0 uses torch's own workers, with a warning; thread_pool=True works."


def _address_space() -> _Finding:
    if soft_limit(resource.RLIMIT_AS) is None:
        return describe_address_space(), "Slots may be as large as memory allows."
    return describe_address_space(), (
        "Each process maps the filled part of all its batches that are in flight or in use. A "
        "batch that does not fit raises SharedMemoryError."
    )


def _descriptors() -> _Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = psutil.Process().num_fds()
    few = f" There are few: `ulimit -n {hard}` allows more." if soft < _FEW_DESCRIPTORS else ""
    return (
        f"{soft}, of which {used} are used (ulimit -n; at most {hard})",
        f"A loader needs one or two for each slot, and four for each worker.{few}",
    )


def _start_method() -> _Finding:
    method = multiprocessing.get_context().get_start_method()
    return method, _METHODS.get(method, "")


def _gpus() -> _Finding:
    if not torch.accelerator.is_available():
        return "none that torch can use", "pin_memory=True has no effect."
    kind = torch.accelerator.current_accelerator()
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else str(kind)
    return (
        f"{torch.accelerator.device_count()} ({name})",
        "device= brings batches to a GPU with one copy less than pin_memory=True.",
    )


def _locked_pages() -> _Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"limit {size(soft)}"
    return (
        f"{limit} (ulimit -l)",
        "Where page-locking is refused, device= warns, and copies by pinned memory.",
    )


def _streaming() -> _Finding:
    if importlib.util.find_spec("shmloader.memory._streaming") is not None:
        return "built", "Copies of large batches bypass the CPU's caches."
    meaning = "Copies of large batches go through the CPU's caches: reinstall with a C compiler."
    return "not built", meaning


_CHECKS: dict[str, Callable[[], _Finding]] = {
    "cores": _cores,
    "memory": _memory,
    "/dev/shm": _dev_shm,
    "memfd, pidfd": _memfd,
    "address space": _address_space,
    "descriptors": _descriptors,
    "start method": _start_method,
    "GPUs": _gpus,
    "locked pages": _locked_pages,
    "C function": _streaming,
}
