"""Where rank and world size come from, how many of the ranks a host has, and what is refused."""

import signal
import types

import numpy as np
import pytest
import torch.distributed

from shmloader.host import ranks_of_host
from shmloader.sampling.arguments import Ranks, rank_of, resolve_ranks

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
)


@pytest.fixture(autouse=True)
def set_variables(monkeypatch):
    """Delete the variables of whoever runs the tests; return a function that sets others."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.fixture
def default_group():
    """A default group in which this process is rank 2 of 5, and which talks to nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=5)
    yield
    torch.distributed.destroy_process_group()


TORCHRUN = {"RANK": "3", "WORLD_SIZE": " 16 "}
NO_INTS = True, False, 1.0, "1"
STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("variables", "arguments", "expected"),
    [
        ({}, (None, None), (0, 1)),  # alone
        ({}, (5, 10**6), (5, 10**6)),
        ({}, (np.int64(1), np.int32(2)), (1, 2)),
        (TORCHRUN, (None, None), (3, 16)),
        (STEP, (None, None), (1, 2)),
        (TORCHRUN | STEP, (None, None), (3, 16)),  # torchrun that a step has started
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, (None, None), (0, 1)),  # a batch script
        ({"RANK": "three"}, (0, 2), (0, 2)),
    ],
)
def test_rank_and_world_size_come_from_arguments_or_the_environment(
    variables, arguments, expected, set_variables
):
    set_variables(**variables)
    found = resolve_ranks(*arguments)
    assert found == expected
    assert [type(number) for number in found] == [int, int]


@pytest.mark.usefixtures("default_group")
def test_the_default_group_goes_before_the_environment_and_after_arguments(set_variables):
    set_variables(**TORCHRUN)
    assert resolve_ranks(None, None) == (2, 5)
    assert resolve_ranks(0, 2) == (0, 2)


def test_torch_without_distributed_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    for name in ("is_initialized", "get_rank", "get_world_size"):  # it has none of them
        monkeypatch.delattr(torch.distributed, name)
    assert resolve_ranks(None, None) == (0, 1)


@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_the_arguments_that_override_the_environment_are_named(variables, set_variables):
    set_variables(**variables)
    with pytest.raises(ValueError, match=r"; rank= and world_size= override the environment$"):
        resolve_ranks()


@pytest.mark.parametrize(
    "function", [lambda: resolve_ranks(None, None), lambda: Ranks(None, None).known]
)
def test_a_signal_handler_s_exception_is_not_taken_for_one_of_the_variables(function, monkeypatch):
    class AlarmError(ValueError):
        pass

    def alarm(signum: int, frame: object) -> None:
        raise AlarmError

    def interrupted() -> None:
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(torch.distributed, "is_available", interrupted)
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        with pytest.raises(AlarmError):
            function()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 1), (True, None)])
def test_one_of_the_two_alone_is_refused(rank, world_size):
    with pytest.raises(ValueError, match="both or not at all") as caught:
        resolve_ranks(rank, world_size)
    assert f"but got rank={rank}, world_size={world_size}" in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [
        *((value, 2, f"rank should be an int, but got rank={value!r}") for value in NO_INTS),
        *((0, value, f"world_size should be an int, .*world_size={value!r}") for value in NO_INTS),
        *((0, n, f"world_size should be 1 or more, but got world_size={n}") for n in (0, -1)),
        (-1, 2, "rank should be 0 or more, but got rank=-1"),
        *((n, 2, f"rank should be below world_size=2, but got rank={n}") for n in (2, 7)),
    ],
)
def test_numbers_that_cannot_be_are_refused(rank, world_size, text):
    with pytest.raises(TypeError if "an int" in text else ValueError, match=f"^{text}$"):
        resolve_ranks(rank, world_size)


@pytest.mark.parametrize(
    ("name", "other"),
    [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")],
)
def test_one_variable_alone_is_refused(set_variables, name, other):
    set_variables(**{name: "1"})
    with pytest.raises(ValueError, match="both or not at all") as caught:
        resolve_ranks(None, None)
    assert f"{name}='1'" in str(caught.value)
    assert f"{other}=None" in str(caught.value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("text", ["", " ", "one", "1.0", "-1", "+1", "1_0", "0x1", "1 2", "١", "²"])
def test_variables_that_are_no_numbers_are_refused(set_variables, name, text):
    set_variables(**{"RANK": "1", "WORLD_SIZE": "2", name: text})
    with pytest.raises(ValueError, match=r"RANK and WORLD_SIZE should be whole numbers") as caught:
        resolve_ranks(None, None)
    assert f"{name}={text!r}" in str(caught.value)


@pytest.mark.parametrize(("rank", "world_size"), [("2", "2"), ("0", "0")])
@pytest.mark.parametrize("names", [list(TORCHRUN), list(STEP)])
def test_variables_that_cannot_be_are_refused(set_variables, names, rank, world_size):
    set_variables(**dict(zip(names, (rank, world_size), strict=True)))
    with pytest.raises(ValueError, match=f"first below the second, but got {names[0]}='{rank}'"):
        resolve_ranks()


@pytest.mark.parametrize(
    ("attributes", "rank"),
    [
        ([{"rank": 2, "num_replicas": 3}], 2),
        ([{"rank": np.int64(1), "world_size": 2}], 1),
        ([{}, {"rank": 0, "num_replicas": 2}], 0),
        ([{"process_index": 1, "num_processes": 2}], 1),
        ([{"process_index": 0, "num_processes": 1}], None),
        ([{"rank": 0, "process_index": 1, "num_processes": 2}], 1),
        ([{"rank": 0, "num_replicas": 1}], None),
        ([{"rank": "0", "num_replicas": 2}], None),
        ([{"num_replicas": 2}], None),
        ([{}], None),
        ([], None),
    ],
)
def test_the_rank_is_that_of_the_first_sampler_cut_for_ranks(attributes, rank):
    assert rank_of([types.SimpleNamespace(**each) for each in attributes]) == rank


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
def test_how_many_of_the_ranks_this_host_has(set_variables, variables, count):
    set_variables(**variables)
    assert ranks_of_host(8) == count
