"""Runs Python programs to their ends, in new interpreters that import this checkout."""

import subprocess
import sys
from pathlib import Path

from tests.template import ROOT, environment_of_programs


def run_python(
    *arguments: object, limit_s: float = 150, folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in a folder, with further variables in its environment.

    Raises:
        subprocess.TimeoutExpired: If it has not ended after so many seconds.
    """
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment_of_programs() | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def output_of(*arguments: object, limit_s: float = 150, folder: Path = ROOT, **more: str) -> str:
    """Run a program as :func:`run_python` does. It must succeed; return what it printed."""
    done = run_python(*arguments, limit_s=limit_s, folder=folder, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
