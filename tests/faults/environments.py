"""Loaders where the system gives less: limits, sandboxes, and a container without the usual mounts.

Each trial is a forked child, in a session of its own, that enters its environment for good and
loads an epoch there. In every environment, the outcome must be one of these, and never a hang:

* WORKS: all batches come, right and in order.
* FALLS_BACK: they come from torch's own workers, after a warning that says why.
* TELLS: an error says why, and no process is left. The batches before and after it are right.

``python -m tests.faults.environments`` runs all trials, also with torch's loader. ``--docs`` writes
the table.
"""

import argparse
import contextlib
import ctypes
import enum
import errno
import faulthandler
import fnmatch
import functools
import itertools
import json
import multiprocessing.popen_fork  # noqa: F401 - another user may be unable to read it
import os
import platform
import re
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils.data

# Imported here: another user may be unable to read it.
from shmloader import DataLoader, SharedMemoryError
from tests.faults import docs
from tests.faults.harness import (
    NEW_MOUNTS,
    PRIVATE_RECURSIVE,
    end_session,
    mount_shm,
    session_of,
)

MIB = 1 << 20

# A trial that takes longer hangs; its stacks are written a moment before.
LIMIT_S = 20.0
_DUMP_S = LIMIT_S - 2
# Within so many seconds after a trial, its processes must have ended, by whether torch loaded:
# torch's workers check only every 5 s whether their parent is still there.
_LEFT_S = {False: 2.0, True: 8.0}

BATCHES = 12

#: How batches are loaded: by an engine on the user's thread, by one on its own thread, by torch.
LOADERS = ("plain", "seed", "torch")


class Outcome(enum.Enum):
    """What came of a trial."""

    WORKS = "works"
    FALLS_BACK = "falls back"
    TELLS = "says why"
    UNCLEAR = "fails without a reason"
    WRONG = "wrong batches"
    HANGS = "hangs"
    DIES = "dies"
    LEAVES = "leaves processes"
    UNTRIED = "could not be tried"


RIGHT = (Outcome.WORKS, Outcome.FALLS_BACK, Outcome.TELLS)


class Environment(NamedTuple):
    """Where a loader has to get along."""

    name: str  # in tables; with its variant, after a space, if there are several of a kind
    enter: Callable[[], object]  # puts this process there; NotImplementedError where it cannot
    reasons: tuple[str, ...]  # an error, or the output, must have one of these in its text


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


def _leave_address_space(nbytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, used + nbytes)


def _forbid_processes() -> None:
    if os.getuid() == 0:  # root is not limited
        os.setresuid(65534, 65534, 65534)
    _limit(resource.RLIMIT_NPROC, 1)


def _limits() -> Iterator[Environment]:
    memory = ("Cannot allocate memory", "can't allocate memory", "MemoryError")
    for mebibytes in (32_000, 1000, 300, 30):
        enter = functools.partial(_leave_address_space, mebibytes * MIB)
        yield Environment(f"RLIMIT_AS +{mebibytes}MiB", enter, (*memory, "ulimit -v"))
    for count in (256, 48, 32, 24, 16, 12):
        enter = functools.partial(_limit, resource.RLIMIT_NOFILE, count)
        yield Environment(f"RLIMIT_NOFILE {count}", enter, ("open files", "ulimit -n"))
    text = "Resource temporarily unavailable"
    yield Environment("RLIMIT_NPROC 1", _forbid_processes, (text, "can't start new thread"))
    for nbytes in (MIB, 4096, 0):
        enter = functools.partial(_limit, resource.RLIMIT_FSIZE, nbytes)
        yield Environment(f"RLIMIT_FSIZE {nbytes}", enter, ("File too large", "ulimit -f"))


class Call(NamedTuple):
    """A system call that is used, and which uses of it are denied."""

    number: int  # on x86-64
    argument: int | None = None  # index of the argument that is tested; None: each use is denied
    mask: int = 0xFFFFFFFF  # bits of the argument that are tested
    value: int = 0  # a use is denied if the bits have this value


# System calls of a loader, as strace shows them, except those that the interpreter needs.
_CALLS = """
memfd_create 319, ftruncate 77, madvise 28, munmap 11, pidfd_open 434, pidfd_send_signal 424,
eventfd2 290, socketpair 53, sendmsg 46, recvmsg 47, sendto 44, recvfrom 45, shutdown 48,
getsockname 51, poll 7, pipe2 293, clone3 435, wait4 61, kill 62, prctl 157, prlimit64 302,
sched_yield 24, sched_getaffinity 204, sigaltstack 131, rt_sigprocmask 14, ioctl 16, getrandom 318,
sysinfo 99, statfs 137
"""
CALLS = {name: Call(int(number)) for name, number in map(str.split, _CALLS.split(","))} | {
    "fcntl(F_ADD_SEALS)": Call(72, 1, value=1033),
    "fcntl(F_SETSIG)": Call(72, 1, value=10),
    "mmap(MAP_SHARED)": Call(9, 3, mask=1, value=1),
    "clone (of a process)": Call(56, 0, mask=0x10000),
}
ERRORS = (errno.ENOSYS, errno.EPERM, errno.EACCES)

# <linux/bpf_common.h>, <linux/seccomp.h>, <linux/prctl.h>, <linux/audit.h>.
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_SET_SECCOMP, _SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_NUMBER_AT, _ARGUMENTS_AT = 0, 16


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def deny(call: Call, number: int) -> None:
    """Let uses of a system call fail in this process, and in all that it starts.

    Args:
        call: The system call.
        number: The error (errno) with which it fails.

    Raises:
        NotImplementedError: If this machine does not allow it.
    """
    if platform.machine() != "x86_64":
        raise NotImplementedError("system calls have other numbers here")
    tests = [(_LOAD, _NUMBER_AT), (_EQUAL, call.number)]
    if call.argument is not None:
        place = _ARGUMENTS_AT + 8 * call.argument
        tests += [(_LOAD, place), (_AND, call.mask), (_EQUAL, call.value)]
    # A test that does not hold goes to the last instruction, which allows.
    code = [
        (kind, 0, len(tests) - at if kind == _EQUAL else 0, value)
        for at, (kind, value) in enumerate(tests)
    ]
    code += [(_RETURN, 0, 0, _ERRNO | number), (_RETURN, 0, 0, _ALLOW)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(code), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise NotImplementedError(f"no filter: {os.strerror(ctypes.get_errno())}")


def _filters() -> Iterator[Environment]:
    for name, call in CALLS.items():
        for number in ERRORS:
            enter = functools.partial(deny, call, number)
            reasons = (os.strerror(number), name.partition("(")[0])
            if name.startswith("clone"):
                reasons += ("can't start new thread",)
            yield Environment(f"{name} {errno.errorcode[number]}", enter, reasons)


_NEW_USERS = 0x10000000


def _enter_container(*, has_proc: bool) -> None:
    """Become root of a new user namespace, with 1 MB of /dev/shm."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: Any, *arguments: Any) -> None:
        if function(*arguments):
            raise NotImplementedError(f"no namespace: {os.strerror(ctypes.get_errno())}")

    uid, gid = os.getuid(), os.getgid()
    call(libc.unshare, NEW_MOUNTS | _NEW_USERS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    call(libc.mount, b"none", b"/", None, ctypes.c_ulong(PRIVATE_RECURSIVE), None)
    call(libc.mount, b"none", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=1m")
    if not has_proc:
        call(libc.mount, b"none", b"/proc", b"tmpfs", ctypes.c_ulong(0), b"size=1m")


def environments() -> list[Environment]:
    """Return all environments."""
    here = Environment("no limit", lambda: None, ())
    small = functools.partial(_enter_container, has_proc=True)
    bare = functools.partial(_enter_container, has_proc=False)
    # torch's workers are killed by SIGBUS there.
    shm = Environment("user namespace, 1 MB /dev/shm", small, ("shm",))
    no_proc = Environment("user namespace, 1 MB /dev/shm, no /proc", bare, ("shm", "/proc"))
    return [here, *_limits(), *_filters(), shm, no_proc]


class _Data:
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((50_000,), float(index)), index


def _load(kind: str) -> tuple[Outcome, str, bool]:
    """Load an epoch.

    Returns:
        The outcome, the text of a warning or an error, and whether torch's workers loaded.
    """
    options: dict[str, Any] = {"num_workers": 2, "batch_size": 1}
    make: Any = torch.utils.data.DataLoader
    if kind != "torch":
        make = DataLoader
        options |= {"seed": 1} if kind == "seed" else {}
    told: list[str] = []
    came: list[int] = []
    failed = 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            loader = make(_Data(), **options)
            batches = iter(loader)
            while len(came) + failed <= BATCHES:
                try:
                    values, labels = next(batches)
                except StopIteration:
                    break
                except SharedMemoryError as error:  # in place of a batch
                    told.append(f"{type(error).__name__}: {error}")
                    failed += 1
                    continue
                index = int(labels[0])
                if not bool((values == index).all()):
                    return Outcome.WRONG, f"batch {index} is not itself", False
                came.append(index)
            del batches
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    texts = [str(warning.message) for warning in warned if "torch's own" in str(warning.message)]
    is_torch = kind == "torch" or bool(texts)
    if came != sorted(set(came)) or (not told and len(came) != BATCHES):
        return Outcome.WRONG, f"batches {came}", is_torch
    if told:
        return Outcome.TELLS, " ".join([*texts, told[0]]), is_torch
    if texts:
        return Outcome.FALLS_BACK, texts[0], is_torch
    return Outcome.WORKS, "", is_torch


def _child(environment: Environment, kind: str, said: int) -> None:
    """Run a trial, and write its outcome to the pipe ``said``."""
    torch.set_num_threads(1)  # OpenMP ends the process if it cannot start a thread for a comparison
    mount_shm()  # torch leaves files there where it may not make them long enough
    try:
        environment.enter()
        with contextlib.suppress(RuntimeError):  # it takes a thread
            faulthandler.dump_traceback_later(_DUMP_S)
        outcome, text, is_torch = _load(kind)
    except NotImplementedError as error:
        outcome, text, is_torch = Outcome.UNTRIED, str(error), False
    except BaseException:
        outcome, text, is_torch = Outcome.UNCLEAR, traceback.format_exc(), False
    os.write(said, json.dumps([outcome.name, text[:4000], is_torch]).encode())


def run_trial(environment: Environment, kind: str) -> tuple[Outcome, str]:
    """Run a trial.

    Args:
        environment: Where it runs.
        kind: How batches are loaded, one of ``LOADERS``.

    Returns:
        The outcome, and details, with the output of the child if the outcome is not right.
    """
    with tempfile.TemporaryFile() as noise:
        read, write = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                os.close(read)
                os.dup2(noise.fileno(), 2)
                os.dup2(noise.fileno(), 1)
                _child(environment, kind, write)
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        outcome, text = _judge(pid, read)
        noise.seek(0)
        heard = noise.read().decode(errors="replace")
    has_reason = any(one in text + heard for one in environment.reasons)
    if outcome is Outcome.TELLS and not has_reason:
        outcome = Outcome.UNCLEAR
    if outcome not in RIGHT and outcome is not Outcome.UNTRIED:
        text += "\n" + heard
    return outcome, text


def _judge(pid: int, read: int) -> tuple[Outcome, str]:
    pidfd = os.pidfd_open(pid)
    has_ended = bool(select.select([pidfd], [], [], LIMIT_S)[0])
    os.close(pidfd)
    if not has_ended:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.set_blocking(read, False)
    with os.fdopen(read, "rb") as file:
        name, text, is_torch = json.loads(file.read() or '["DIES", "", false]')
    deadline = time.monotonic() + _LEFT_S[is_torch]
    while session_of(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = end_session(pid)
    if not has_ended:
        return Outcome.HANGS, f"for {LIMIT_S:.0f} s"
    if code:
        return Outcome.DIES, f"exit code {code}"
    return (Outcome.LEAVES, "\n".join(left)) if left else (Outcome[name], text)


def main() -> None:
    """Run what the command line names; exit with 1 if our loader is not right in a trial."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.environments")
    parser.add_argument("patterns", nargs="*", metavar="NAME, LOADER", help="* allowed; or all")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    failed = 0
    found: dict[str, dict[str, Outcome]] = {}
    for environment, kind in itertools.product(environments(), LOADERS):
        name = f"{environment.name}, {kind}"
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.patterns or "*"):
            continue
        outcome, text = run_trial(environment, kind)
        found.setdefault(environment.name, {})[kind] = outcome
        is_right = outcome in (*RIGHT, Outcome.UNTRIED) or kind == "torch"
        failed += not is_right
        if is_right:
            text = text.strip().rpartition("\n")[2]
        print(f"{name}: {'' if is_right else 'FAILED: '}{outcome.value} {text}", flush=True)
    print(f"{failed} of {sum(map(len, found.values()))} failed")
    if options.docs:
        _write_docs(found)
    sys.exit(bool(failed))


def _write_docs(found: dict[str, dict[str, Outcome]]) -> None:
    """Write the table. Environments that differ only in an error at the end share a row."""
    rows: dict[str, dict[str, list[str]]] = {}
    for name, outcomes in found.items():
        kind, _, variant = name.rpartition(" ") if re.search(r" E[A-Z]+$", name) else (name, "", "")
        for loader, outcome in outcomes.items():
            rows.setdefault(kind, {}).setdefault(f"{loader} {outcome.value}", []).append(variant)

    def field(row: dict[str, list[str]], loader: str) -> str:
        variants = {
            outcome: names
            for key, names in row.items()
            for of_loader, _, outcome in [key.partition(" ")]
            if of_loader == loader
        }
        if len(variants) == 1:
            return next(iter(variants))
        return "; ".join(f"{outcome} ({', '.join(names)})" for outcome, names in variants.items())

    docs.write(
        "environments",
        f"{docs.where_and_when()}, workers by fork.",
        "",
        *docs.table(
            ["where", *LOADERS],
            [[kind, *[field(row, loader) for loader in LOADERS]] for kind, row in rows.items()],
        ),
    )


if __name__ == "__main__":
    main()
