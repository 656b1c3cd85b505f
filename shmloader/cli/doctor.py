"""``shmloader doctor``: what this machine offers a loader, and what that means."""

import ctypes
import importlib.util
import mmap
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

from shmloader.insight.text import size
from shmloader.memory.limits import address_space, control_groups, free_memory
from shmloader.memory.slot import why_unsupported
from shmloader.pools.cores import affinity, core_quota, usable_cores

_ROOT = Path("/")
# A loader of 16 workers takes some hundreds.
_FEW_DESCRIPTORS = 1024
_LOCKED_BYTES = 1 << 20

Finding = tuple[str, str, str]


def doctor() -> None:
    """Print one line for each thing, with a word on what it means."""
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} "
        f"{platform.release()}, {platform.machine()}\n"
    )
    for name, value, meaning in examine():
        print(f"  {name:<16}{value}")
        print(f"  {'':<16}{meaning}")


def examine() -> Iterator[Finding]:
    """Name, value and meaning of each thing."""
    for look in _LOOKS:
        try:
            yield look()
        except Exception as error:  # noqa: BLE001 - one that cannot be found out keeps none back
            yield look.__name__.strip("_").replace("_", " "), "not known", str(error)


def _cores() -> Finding:
    quota = core_quota(_ROOT)
    cores = usable_cores(_ROOT)
    by = f"{affinity()} by affinity, of {os.cpu_count()}"
    by += "" if quota is None else f"; {quota:g} by the quota of the control group"
    meaning = f"num_workers up to {cores} makes sense where samples are work for the CPU; more only"
    return "cores", f"{cores} ({by})", f"{meaning} where they wait."


def _memory() -> Finding:
    free = free_memory(_ROOT, control_groups(_ROOT))
    total = size(psutil.virtual_memory().total)
    if free is None:
        return "memory", f"{total}; what is free is not known", "Nothing is looked at before use."
    value = f"{size(free.nbytes)} free ({free.limit}); the machine has {total}"
    return "memory", value, "A batch that would not fit raises SharedMemoryError before it is made."


def _dev_shm() -> Finding:
    try:
        found = shutil.disk_usage("/dev/shm")
    except OSError:
        return "/dev/shm", "missing", "torch's own loader needs it; this one does not."
    value = f"{size(found.total)}, {size(found.free)} free"
    return "/dev/shm", value, "torch's own loader puts batches there; this one does not use it."


def _memfd() -> Finding:
    why = why_unsupported()
    if why is None:
        return "memfd, pidfd", "there", "Worker processes collate into shared memory."
    meaning = "num_workers > 0 runs on torch's own workers, with a warning; thread_pool=True works."
    return "memfd, pidfd", why, meaning


def _address_space() -> Finding:
    space = address_space()
    meaning = "Slots may be as large as memory allows."
    if space.limit_bytes is not None:
        meaning = (
            "Each process maps all batches that it has in flight or in use, as far as they are "
            "filled; a batch that does not fit raises SharedMemoryError."
        )
    return "address space", space.describe(), meaning


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = psutil.Process().num_fds()
    meaning = "A loader takes one or two for each slot, and four for each worker."
    if soft < _FEW_DESCRIPTORS:
        meaning += f" That is few: `ulimit -n {hard}` gives more."
    return "descriptors", f"{soft}, {used} of them used (ulimit -n; at most {hard})", meaning


def _start_method() -> Finding:
    method = multiprocessing.get_context().get_start_method()
    meaning = {
        "fork": "Workers start in milliseconds and share what is loaded; nothing is pickled.",
        "forkserver": "Workers start in milliseconds once a server has imported torch; the dataset "
        "is pickled once for all of them.",
        "spawn": "Each worker starts an interpreter, seconds with torch: keep them "
        "(persistent_workers=True).",
    }
    return "start method", method, meaning.get(method, "")


def _gpus() -> Finding:
    if not torch.accelerator.is_available():
        return "GPUs", "none that this torch can use", "pin_memory=True has no effect."
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else str(kind)
    return "GPUs", f"{count} ({name})", "device= has batches arrive there, by a copy less."


def _locked_pages() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"limit {size(soft)}"
    if _can_lock():
        return "locked pages", f"yes, {limit} (ulimit -l)", "A GPU can read slots by itself."
    meaning = "device= may have to go by way of torch's pinned memory, with a warning that says so."
    return "locked pages", f"1 MiB was refused, {limit} (ulimit -l)", meaning


def _can_lock() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, _LOCKED_BYTES) as memory:
        place = (ctypes.c_char * _LOCKED_BYTES).from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(place))
        is_locked: bool = libc.mlock(address, ctypes.c_size_t(_LOCKED_BYTES)) == 0
        if is_locked:
            libc.munlock(address, ctypes.c_size_t(_LOCKED_BYTES))
        del place
    return is_locked


def _streaming() -> Finding:
    is_there = importlib.util.find_spec("shmloader.memory._streaming") is not None
    if is_there:
        return "C function", "built", "Copies of large batches go past the caches."
    meaning = (
        "Copies of large batches go through the caches: a compiler, and installing anew, help."
    )
    return "C function", "not built", meaning


def _threads() -> Finding:
    is_free = not getattr(sys, "_is_gil_enabled", lambda: True)()
    if is_free:
        return "interpreter", "free-threaded", "thread_pool=True loads on all cores."
    meaning = "thread_pool=True pays where samples wait, or let go of the interpreter."
    return "interpreter", "with a global lock", meaning


_LOOKS: tuple[Callable[[], Finding], ...] = (
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
