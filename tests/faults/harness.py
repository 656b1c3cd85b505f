"""Runs trials, and judges from the outside: how they end, what they print, what they leave.

Each trial is a process in a session of its own, with a hard time limit. At the limit, every process
of the session dumps its stacks, and is killed by its pid.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import actions
from tests.faults.cells import Cell, Effect
from tests.template import Template, environment_of_programs

ROOT = Path(__file__).parents[2]
TRIAL = Path(__file__).with_name("trial.py")

# Seconds that a trial may take; longer is a hang.
LIMIT_S = {"fork": 40.0, "spawn": 120.0, "forkserver": 120.0}
# Within so many seconds after a trial, its processes and multiprocessing's servers must end.
LEFT_S = 2.0
SERVERS_S = 15.0
# How long to wait for a process to write its stacks.
_DUMP_S = 1.0

_ENVIRONMENT = {
    # These warnings come on a machine with one core, and from forks since Python 3.12.
    "PYTHONWARNINGS": "ignore:This DataLoader will create:UserWarning,"
    "ignore:This process:DeprecationWarning",
    "OMP_NUM_THREADS": "1",
}


# From <sched.h> and <sys/mount.h>.
NEW_MOUNTS, PRIVATE_RECURSIVE = 0x20000, 0x44000


def mount_shm() -> None:
    """Give this process a /dev/shm of its own, if it may."""
    libc = ctypes.CDLL(None)
    if libc.unshare(NEW_MOUNTS) == 0:
        libc.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE_RECURSIVE), None)
        libc.mount(b"none", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), None)


def session_of(leader: int) -> list[int]:
    """Return the processes of a session that run, whatever their parent."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - numbers, not paths
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if os.getsid(int(name)) == leader and _state(int(name)) not in "ZX":
                    found.append(int(name))
    return found


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def describe_process(pid: int) -> str:
    """Describe a process in a line: pid, state, what it waits in, command."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        wait = Path(f"/proc/{pid}/wchan").read_text()
        return f"{pid} ({_state(pid)}, in {wait}): {command[:120]}"
    return f"{pid} (gone)"


def _writes_stacks(pid: int) -> bool:
    """Whether a process has a handler of SIGUSR1."""
    with contextlib.suppress(OSError):
        found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return found is not None and bool(int(found[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def is_server(pid: int) -> bool:
    """Whether a process is one of multiprocessing's own servers, or gone."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"multiprocessing.forkserver import" in command or b"resource_tracker" in command
    return True


def _is_ending(pid: int) -> bool:
    """Whether a process has no memory any more: it is ending, slowly on a busy machine."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/statm").read_text().split()[0] == "0"
    return True


def stacks_of(session: int, directory: Path) -> str:
    """Return the stacks of all processes of a session, as text."""
    texts = []
    for pid in session_of(session):
        texts.append(describe_process(pid))
        stacks = directory / "stacks"
        size = stacks.stat().st_size if stacks.exists() else 0
        if not _writes_stacks(pid):
            texts.append("  (does not write its stacks)")
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        while stacks.stat().st_size == size and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # the rest of it
        texts.append(stacks.read_text(errors="replace")[size:])
    return "\n".join(texts)


def end_session(leader: int) -> list[str]:
    """Wait for the processes of a session, kill those that are left, and describe these."""
    began = time.monotonic()
    while left := session_of(leader):
        elapsed_s = time.monotonic() - began
        # multiprocessing's own servers end by themselves, once they have imported torch.
        if elapsed_s > LEFT_S and (
            elapsed_s > SERVERS_S or not all(is_server(pid) or _is_ending(pid) for pid in left)
        ):
            break
        time.sleep(0.01)
    words = [describe_process(pid) for pid in left]
    for _ in range(5):  # a killed process may have just started another
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            time.sleep(0.05)
        left = session_of(leader)
    return words


@dataclass
class Ended:
    """How a program ended.

    Attributes:
        code: Its exit code; None if it had to be killed.
        out: What it wrote to stdout.
        err: What it wrote to stderr.
        left: Processes of its session that had not ended two seconds later, in words.
        stacks: Stacks of all its processes, if it had to be killed.
        files: Names of the files that it left in ``/dev/shm``.
    """

    code: int | None
    out: str
    err: str
    left: list[str]
    stacks: str = ""
    files: list[str] = field(default_factory=list)


class Starter:
    """Starts programs and waits for them; one at a time.

    Args:
        is_fresh: Whether each program is a new interpreter. If not, it is forked from one that has
            imported torch, but not shmloader.
    """

    def __init__(self, *, is_fresh: bool) -> None:
        self._is_fresh = is_fresh
        self._template: Template | None = None

    def start(
        self, arguments: list[str], directory: Path
    ) -> tuple[int, Callable[[float], int | None]]:
        """Start ``trial.py``; return its pid, and a function that waits for its exit code."""
        environment = environment_of_programs() | _ENVIRONMENT
        environment[actions.DIRECTORY] = str(directory)
        environment.pop("SHMLOADER_FAULT", None)
        with (
            Path(os.devnull).open() as null,
            (directory / "out").open("wb") as out,
            (directory / "err").open("wb") as err,
        ):
            if not self._is_fresh:
                self._template = self._template or Template(_ENVIRONMENT)
                forked = self._template.start(
                    [str(TRIAL), *arguments],
                    environment=environment,
                    directory=ROOT,
                    files=(null.fileno(), out.fileno(), err.fileno()),
                )
                return forked.pid, forked.wait
            process = subprocess.Popen(
                [sys.executable, str(TRIAL), *arguments],
                stdin=null,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )

        def wait(limit_s: float) -> int | None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(limit_s)
            return None

        return process.pid, wait

    def ended(
        self, pid: int, directory: Path, code: int | None, wait: Callable[[float], int | None]
    ) -> Ended:
        """Return how a program ended. If it still runs (``code`` is None), it is killed."""
        stacks = ""
        if code is None:
            stacks = stacks_of(pid, directory)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait(10)
        left = end_session(pid)
        out, err = ((directory / name).read_text(errors="replace") for name in ("out", "err"))
        files = [path.name for path in Path("/dev/shm").iterdir() if f"_{pid}_" in path.name]
        return Ended(code, out, err, left, stacks, files)

    def close(self) -> None:
        """End the template."""
        if self._template is not None:
            self._template.close()


@dataclass
class Verdict:
    """What a trial showed.

    Attributes:
        cell: The trial's cell.
        problems: What is not as it must be; empty if all is right.
        elapsed_s: How long the trial took.
        measured: What the trial measured itself.
    """

    cell: Cell
    problems: list[str]
    elapsed_s: float
    measured: dict[str, Any]


def run_trial(cell: Cell, starter: Starter) -> Verdict:
    """Run a cell and judge it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shmloader-trial-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        pid, wait = starter.start([cell.id], directory)
        ended = starter.ended(pid, directory, wait(LIMIT_S[cell.method]), wait)
        was_taken = (directory / "taken").exists()
    problems = []
    measured: dict[str, Any] = {}
    if ended.code is None:
        problems.append(f"a hang: still running after its limit\n{ended.stacks}")
    else:
        if not was_taken:
            problems.append("the fault was not taken")
        if ended.code != cell.exit_code:
            problems.append(f"exit code {ended.code}, not {cell.exit_code}")
        if ended.out:
            measured = json.loads(ended.out.splitlines()[-1])
            problems += measured.pop("problems")
        elif cell.effect is not Effect.ENDED:
            problems.append("no verdict")
    if ended.left:
        problems.append(f"processes left after {LEFT_S:g} s: {ended.left}")
    if ended.files:
        problems.append(f"files left in /dev/shm: {ended.files}")
    if noise := _without_what_is_meant(cell, ended.err):
        problems.append(f"on stderr: {noise}")
    return Verdict(cell, problems, time.monotonic() - began, measured)


_TRACEBACK = re.compile(
    r"(?:^Process shmloader worker \d+:\n)?"
    r"^Traceback \(most recent call last\):\n(?:^(?: .*)?\n)+^(.*)\n",
    re.MULTILINE,
)
_IN_EXIT = re.compile(r"^Exception ignored in atexit callback: .*\n", re.MULTILINE)


def _without_what_is_meant(cell: Cell, err: str) -> str:
    """Return what stderr has beyond what the user should see of this fault."""
    err = err.replace("\0", "")
    if cell.fault.noise:
        err = re.sub(cell.fault.noise, "", err)
    if cell.is_interrupt_at_exit:
        err = _IN_EXIT.sub("", err, count=1)
    found = _TRACEBACK.search(err)
    if cell.traceback and found is not None and found[1].startswith(cell.traceback):
        err = err[: found.start()] + err[found.end() :]
    return err.strip()


def options_of(
    program: str, doc: str | None, *, has_docs: bool = True, **numbers: tuple[float, str]
) -> argparse.Namespace:
    """Read the command line of a program that makes random choices, and print their seed.

    Args:
        program: Name of its module.
        doc: The module's docstring, whose first paragraph describes it.
        has_docs: Whether it has ``--docs``.
        numbers: Its other options, each with the default and a text.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.faults.{program}", description=(doc or "").split("\n\n")[0]
    )
    for name, (default, text) in numbers.items():
        help_text = f"{text} ({default})"
        kind = type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=help_text)
    parser.add_argument("--seed", type=int, default=None, help="seed of all choices; printed")
    if has_docs:
        parser.add_argument("--docs", action="store_true", help="write the result into the docs")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 32)
    print(f"--seed {options.seed}", flush=True)
    return options
