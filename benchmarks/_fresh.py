"""Runs a benchmark's own file in a fresh process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import psutil

# What the interpreter prints about an exception in a destructor.
_IGNORED = re.compile(
    r"^Exception ignored in.*\n(?:Traceback .*\n(?: .*\n)*\S.*\n?)?", re.MULTILINE
)

_T = TypeVar("_T")


def in_turn(names: Sequence[_T], round_: int) -> tuple[_T, ...]:
    """Return the names in the order of a round. Each round begins with the next name."""
    turn = round_ % len(names)
    return (*names[turn:], *names[:turn])


def try_anew(file: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any] | str:
    """Run a file in a fresh process, and read the JSON that it prints last.

    Processes that the run has started and left behind are killed. If it ends with an error, what
    it wrote to standard error is written to this process's standard error.

    Returns:
        The value that was read, or a line that says what went wrong.
    """
    process = subprocess.Popen(
        [sys.executable, file, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"no end after {limit_s:.0f} s"
    finally:
        _end(process)
    if process.returncode != 0:
        told = _IGNORED.sub("", stderr).strip() or stderr.strip()
        sys.stderr.write(told and f"{told}\n")
        last_line = (told.splitlines() or ["no message"])[-1]
        return f"exit code {process.returncode}: {last_line}"
    return json.loads(stdout.splitlines()[-1])


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a run and the processes that it has started.

    Some of these may have a session of their own, as torchrun's ranks have. They are found only
    while the processes above them are alive, so while the run is.
    """
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.returncode is None:
            below = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.communicate()


def run_anew(file: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a file in a fresh process, and read the JSON that it prints last.

    If the run fails, this process exits with 2.
    """
    found = try_anew(file, arguments, limit_s)
    if isinstance(found, str):
        print(f"{' '.join(arguments)} failed: {found}", file=sys.stderr)
        sys.exit(2)
    return found
