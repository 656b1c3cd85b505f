"""What the environment says of a host."""

import pytest

from shmloader.host import ranks_of_host


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "16"}, 8),
        ({"LOCAL_WORLD_SIZE": "many"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,3", "SLURM_NODEID": "0"}, 5),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,3"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "7"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "?", "SLURM_NODEID": "0"}, 8),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "0"}, 2),
    ],
)
def test_how_many_of_the_ranks_this_host_has(monkeypatch, variables, count):
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks_of_host(8) == count
