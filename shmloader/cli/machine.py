"""Examines what this machine offers to a loader, and says what that means."""

import ctypes
import importlib.util
import mmap
import multiprocessing
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from shmloader.insight.text import size
from shmloader.memory.limits import address_space, control_groups, free_memory
from shmloader.memory.system_support import why_unsupported
from shmloader.pools.cores import affinity, core_quota, usable_cores

_ROOT = Path("/")
# With a lower limit, the report says that there are few: a loader with 16 workers takes some
# hundreds.
_FEW_DESCRIPTORS = 1024
_LOCKED_BYTES = 1 << 20

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
    if _can_lock():
        return "locked pages", f"allowed, {limit} (ulimit -l)", "A GPU can read slots directly."
    meaning = "device= may have to go through torch's pinned memory, which it warns of."
    return "locked pages", f"1 MiB was refused, {limit} (ulimit -l)", meaning


def _can_lock() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, _LOCKED_BYTES) as memory:
        buffer = (ctypes.c_char * _LOCKED_BYTES).from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(buffer))
        is_locked: bool = libc.mlock(address, ctypes.c_size_t(_LOCKED_BYTES)) == 0
        if is_locked:
            libc.munlock(address, ctypes.c_size_t(_LOCKED_BYTES))
        del buffer
    return is_locked


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
