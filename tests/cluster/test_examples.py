"""The examples of clusters do what they say, from the command line."""

import os
import re
import subprocess
import sys

import pytest

from tests.cluster.needed import needed
from tests.process.support import ROOT

pytestmark = pytest.mark.timeout(180)


def run_example(name: str, *arguments: str, limit_s: float = 150) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "package"), [("Dask", "distributed"), ("Ray", "ray")])
def test_an_example_has_the_batches_of_local_workers(name, package) -> None:
    needed(package)
    output = run_example(f"cluster_{name.lower()}.py", limit_s=60)
    assert f"{name} made the batches that local workers make" in output


@pytest.mark.parametrize("arguments", [(), ("--executor",)])
def test_ranks_of_ray_train_continue_from_their_checkpoint_with_each_sample_once(arguments) -> None:
    needed("ray.train")
    output = run_example("cluster_train.py", *arguments)
    assert re.search(r"^2 ranks, continued in epoch 1 after step 10\.$", output, re.MULTILINE)
    assert "All 512 samples of the last epoch were trained on, each once." in output
