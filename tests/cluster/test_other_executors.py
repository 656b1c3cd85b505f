"""Executors that are used as they are: loky's, and that of mpi4py under mpiexec."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shmloader import DataLoader, WorkerDiedError
from tests.cluster.datasets import Killing, Mixed
from tests.cluster.needed import needed
from tests.parity.compare import assert_same
from tests.process.support import ROOT

loky = needed("loky")
needed("mpi4py")

pytestmark = pytest.mark.timeout(120)


def test_loky_makes_the_batches_of_local_workers() -> None:
    executor = loky.ProcessPoolExecutor(2)
    try:
        options = {"batch_size": 4, "seed": 3, "timeout": 60}
        there = DataLoader(Mixed(uses_random=True), num_workers=4, executor=executor, **options)
        local = DataLoader(Mixed(uses_random=True), num_workers=2, **options)
        for _ in range(2):
            assert_same(list(there), list(local))
    finally:
        executor.shutdown(kill_workers=True)


def test_after_the_loss_of_a_process_of_loky_s_a_new_executor_goes_on(tmp_path) -> None:
    dataset, options = Killing(tmp_path / "killed"), {"batch_size": 4, "seed": 3, "timeout": 60}
    expected = list(DataLoader(Mixed(24), num_workers=2, **options))
    first = loky.ProcessPoolExecutor(2)
    try:
        loader = DataLoader(dataset, num_workers=3, executor=first, **options)
        batches, seen = iter(loader), []
        with pytest.raises(WorkerDiedError, match="TerminatedWorkerError"):
            seen.extend(batches)
        state = loader.state_dict()
    finally:
        first.shutdown(kill_workers=True)
    second = loky.ProcessPoolExecutor(2)
    try:
        again = DataLoader(dataset, num_workers=3, executor=second, **options)
        again.load_state_dict(state)
        assert_same([*seen, *again], expected)
    finally:
        second.shutdown(kill_workers=True)


PROGRAM = """
from mpi4py.futures import MPIPoolExecutor

from shmloader import DataLoader
from tests.cluster.datasets import Mixed
from tests.parity.compare import assert_same

if __name__ == "__main__":
    options = {"batch_size": 4, "seed": 3, "timeout": 60}
    local = DataLoader(Mixed(uses_random=True), num_workers=2, **options)
    with MPIPoolExecutor() as executor:
        assert executor.num_workers == 2
        there = DataLoader(Mixed(uses_random=True), num_workers=4, executor=executor, **options)
        for _ in range(2):
            assert_same(list(there), list(local))
    print("the same")
"""


def test_mpi_makes_the_batches_of_local_workers(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    assert mpiexec is not None
    with subprocess.Popen(
        [mpiexec, "-n", "3", sys.executable, "-W", "ignore", "-m", "mpi4py.futures", str(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as run:  # fmt: skip
        try:
            told, _ = run.communicate(timeout=100)
        except BaseException:
            os.killpg(run.pid, signal.SIGKILL)
            raise
    assert (run.returncode, told) == (0, "the same\n")
