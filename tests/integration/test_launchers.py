"""What ranks of a host share, under what starts them: torchrun, torch's spawn, and Slurm.

Lightning and accelerate are among the frameworks.
"""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.test_torchrun import LIMIT_S, Run, on_ranks, write_program
from tests.process import one_dataset
from tests.process.one_pool import check

pytestmark = pytest.mark.timeout(2 * LIMIT_S)

#: What says to a process that it is a rank, which the launchers below set or do not.
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch) -> None:
    for name in [*VARIABLES, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)


def run(folder: Path, text: str, *arguments: str) -> None:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(text))
    with Run([sys.executable, str(program), *arguments], folder) as run:
        done = run.finish()
    assert done.returncode == 0, done.stderr


SPAWNED = """
    import sys

    import torch.multiprocessing

    from tests.integration.launched import join_by_store, run_rank


    def main(rank, ranks, shared):
        join_by_store(rank, ranks)
        run_rank(shared)


    if __name__ == "__main__":
        torch.multiprocessing.spawn(main, (2, *sys.argv[1:]), nprocs=2)
"""

RANKS = """
    import sys

    import torch.distributed

    from tests.integration.launched import run_rank

    if __name__ == "__main__":
        torch.distributed.init_process_group("gloo")
        run_rank(sys.argv[1])
"""

CHECKS = {"workers": check, "dataset": one_dataset.check}

SRUN = """
    import os, subprocess, sys
    from pathlib import Path

    RANK = '''
    import os, sys

    from tests.integration.launched import join_by_store, run_rank

    if __name__ == "__main__":
        rank, ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        shared, *cores = sys.argv[1:]
        if cores:  # --cpu-bind=cores
            os.sched_setaffinity(0, {int(cores[rank])})
        join_by_store(rank, ranks)
        run_rank(shared)
    '''

    if __name__ == "__main__":
        import textwrap

        Path("rank.py").write_text(textwrap.dedent(RANK))
        # Each task has a parent of its own, as under slurmstepd.
        tasks = [
            subprocess.Popen(
                ["sh", "-c", f"{sys.executable} rank.py {' '.join(sys.argv[1:])}; exit $?"],
                env={
                    **os.environ,
                    "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(rank),
                    "SLURM_NTASKS": "2",
                    "SLURM_STEP_NUM_TASKS": "2",
                    "SLURM_NODEID": "0",
                    "SLURM_STEP_TASKS_PER_NODE": "2",
                },
            )
            for rank in range(2)
        ]
        sys.exit(max([task.wait() for task in tasks]))
"""


@pytest.mark.parametrize("program", [SPAWNED, SRUN], ids=["torch's spawn", "a step of Slurm"])
@pytest.mark.parametrize("shared", CHECKS)
def test_ranks_share_workers_and_a_dataset(tmp_path, shared, program) -> None:
    run(tmp_path, program, shared)
    CHECKS[shared](tmp_path, 2)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shared", CHECKS)
def test_ranks_of_torchrun_share_workers_and_a_dataset(tmp_path, shared, ranks) -> None:
    with on_ranks(ranks, tmp_path, write_program(tmp_path, RANKS), shared) as started:
        started.succeed()
    CHECKS[shared](tmp_path, ranks)


def test_the_workers_run_on_the_cores_of_all_ranks(tmp_path) -> None:
    """Slurm may bind each rank to cores of its own, and a process inherits those it may run on."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("there is one core")
    run(tmp_path, SRUN, "workers", *map(str, cores))
    for rank in check(tmp_path, 2):
        assert rank["cores"] == [cores] * 2
