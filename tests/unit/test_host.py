"""What the environment says of a run and its host."""

import pytest

from shmloader.host import name_of_run, ranks_of_host


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


RUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize("name", RUN)
def test_runs_are_told_apart_by_each_variable_of_theirs(monkeypatch, name):
    for each, value in RUN.items():
        monkeypatch.setenv(each, value)
    before = name_of_run(7)
    assert name_of_run(7) == before
    assert name_of_run(8) != before
    monkeypatch.setenv(name, RUN[name] + "1")
    assert name_of_run(7) != before
    monkeypatch.delenv(name)
    assert name_of_run(7) != before
