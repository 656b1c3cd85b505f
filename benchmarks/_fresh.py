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

# What an interpreter says of a destructor, when all is over already.
_IGNORED = re.compile(
    r"^Exception ignored in.*\n(?:Traceback .*\n(?: .*\n)*\S.*\n?)?", re.MULTILINE
)

_T = TypeVar("_T")


def in_turn(names: Sequence[_T], round_: int) -> tuple[_T, ...]:
    """What a round runs, in order: each round begins with another, so none always follows one."""
    turn = round_ % len(names)
    return (*names[turn:], *names[:turn])


def try_anew(file: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any] | str:
    """Run a file anew, and read what it prints last; or say in a line what went wrong.

    Whatever the run has started and left behind ends with it. What a run that failed by itself has
    written to standard error is written to this process's.
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
    """Kill a run and what it has started.

    Some of that may have a session of its own, as torchrun's ranks have. It is found only while the
    processes above it live, so while the run does.
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
    """Run a file anew, and read what it prints last; exits with 2 if it fails."""
    found = try_anew(file, arguments, limit_s)
    if isinstance(found, str):
        print(f"{' '.join(arguments)} failed: {found}", file=sys.stderr)
        sys.exit(2)
    return found
