"""Runs programs in processes of their own, which a cluster's library may end."""

import os
import subprocess
import sys

from tests.process.support import ROOT


def run_fresh(
    source: str, *arguments: str, timeout_s: float = 150
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
