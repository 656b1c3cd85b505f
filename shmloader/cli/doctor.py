"""``shmloader doctor``: what the machine offers, or what stands in the way of a loader."""

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
from pathlib import Path

import psutil
import torch

from shmloader.cli.diagnosis import METHODS, Row, diagnose
from shmloader.cli.target import call
from shmloader.grammar import size
from shmloader.memory.limits import describe_address_space, free_memory, why_unsupported
from shmloader.pools.cores import affinity, core_quota, usable_cores


def doctor(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 1 if the loader has a problem.

    Raises:
        UsageError: If the argument names no function that returns a loader or a dataset.
    """
    if options.target is None:
        system = f"{platform.system()} {platform.release()}, {platform.machine()}"
        title = f"Python {platform.python_version()}, torch {torch.__version__}, {system}"
        rows = _machine()
        _print(title, rows, rows if options.json else None)
        return 0
    found = diagnose(call(options.target), options.target)
    title = f"{options.target}: {found.kind}; start method: {found.method}"
    about = {"target": options.target, **dataclasses.asdict(found)}
    _print(title, found.rows, about if options.json else None)
    if not options.json:
        for word, problems in (("problem", found.problems), ("note", found.notes)):
            for one in problems:
                where = f"With {' and '.join(one.methods)}: " if one.methods else ""
                print(f"\n  {word:<16}{one.path} ({one.kind})\n{'':<18}{where}{one.what}.")
                print(f"{'':<18}Remedy: {one.remedy}.")
        print("\nA problem was found." if found.problems else "\nNo problem was found.")
    return 1 if found.problems else 0


def _print(title: str, rows: dict[str, Row], as_json: object) -> None:
    if as_json is not None:
        print(json.dumps(as_json, indent=2))
        return
    print(f"{title}\n")
    for name, (value, meaning) in rows.items():
        print(f"  {name:<16}{value}" + f"\n{'':<18}{meaning}" * bool(meaning))


def _machine() -> dict[str, Row]:
    """Return what the machine offers to loaders, and what that means."""
    root = Path("/")
    quota, cores, free, why = core_quota(root), usable_cores(root), free_memory(root), None
    by = f"{affinity()} by affinity, of {os.cpu_count()}"
    if quota is not None:
        by += f"; {quota:g} by the quota of the control group"
    why = why_unsupported()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    method = multiprocessing.get_context().get_start_method()
    has_device = torch.accelerator.is_available()
    streaming = importlib.util.find_spec("shmloader.memory._streaming")
    return {
        "cores": (
            f"{cores} ({by})",
            f"If samples keep the CPU busy, up to {cores} workers help; if samples wait, more.",
        ),
        "memory": (
            f"{size(free.nbytes)} free ({free.limit})" if free else "unknown",
            (
                f"The machine has {size(psutil.virtual_memory().total)}. A batch that does not fit "
                "raises SharedMemoryError before it is made."
            ),
        ),
        "shared memory": (
            why or "available",
            "num_workers > 0 uses torch's own workers, with a warning; thread_pool=True works."
            if why
            else "Workers collate into it (memfd); /dev/shm is not used.",
        ),
        "address space": (
            describe_address_space(),
            "Each process maps the filled part of all its batches that are in flight or in use.",
        ),
        "descriptors": (
            f"{soft}, of which {psutil.Process().num_fds()} are used (ulimit -n; at most {hard})",
            "A loader needs a few, and three for each worker.",
        ),
        "start method": (method, METHODS[method]),
        "devices": (
            f"{torch.accelerator.device_count()} ({torch.accelerator.current_accelerator()})"
            if has_device
            else "none that torch can use",
            "device= brings batches to a GPU with one copy less than pin_memory=True.",
        ),
        "locked pages": (
            "no limit" if locked == resource.RLIM_INFINITY else f"limit {size(locked)}",
            "Where page-locking is refused (ulimit -l), device= copies by pinned memory.",
        ),
        "C function": (
            "not built" if streaming is None else "built",
            "Copies of large batches bypass the CPU's caches if it is built.",
        ),
    }
