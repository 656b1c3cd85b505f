"""The examples of clusters do what they say, from the command line."""

import os
import subprocess
import sys

import pytest

from tests.process.support import ROOT

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("name", "package"), [("Dask", "distributed"), ("Ray", "ray")])
def test_an_example_has_the_batches_of_local_workers(name, package) -> None:
    pytest.importorskip(package)
    program = ROOT / "examples" / f"cluster_{name.lower()}.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert f"{name} made the batches that local workers make" in done.stdout, done.stderr
    assert done.returncode == 0
