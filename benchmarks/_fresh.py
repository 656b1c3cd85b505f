"""Runs a benchmark's own file in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence


def run_anew(file: str, arguments: Sequence[str], limit_s: float) -> dict[str, float]:
    """Run a file anew, and read what it prints; exits with 2 if it fails."""
    done = subprocess.run(
        [sys.executable, file, *arguments],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode != 0:
        print(f"{' '.join(arguments)} failed:\n{done.stderr}", file=sys.stderr)
        sys.exit(2)
    return json.loads(done.stdout.splitlines()[-1])
