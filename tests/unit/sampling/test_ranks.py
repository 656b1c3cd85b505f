"""Where rank and world size come from, and a rank's part of any sampler."""

import signal
import types

import numpy as np
import pytest
import torch.distributed
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from shmloader.host import ranks_of_host
from shmloader.sampling import ShardedSampler
from shmloader.sampling.arguments import Ranks, rank_of, resolve_ranks
from shmloader.sampling.samplers import EpochSampler, random_numbers

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


# ShardedSampler, for torch's loader as well ----------------------------------------------------


def ranks(
    world_size: int, make=lambda: RandomSampler(range(50)), **options
) -> list[ShardedSampler]:
    return [
        ShardedSampler(make(), rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def flat(runs):
    return [index for run in runs for index in run]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("last_batch", ["pad", "discard", "keep"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_share_one_order(batch_size, last_batch, world_size) -> None:
    (order,) = [list(one) for one in ranks(1, last_batch="keep")]
    count = batch_size * world_size
    parts = [list(one) for one in ranks(world_size, batch_size=batch_size, last_batch=last_batch)]
    assert [len(part) for part in parts] == [
        len(one) for one in ranks(world_size, batch_size=batch_size, last_batch=last_batch)
    ]
    steps = range(0, max(map(len, parts)), batch_size)
    runs = flat(part[at : at + batch_size] for at in steps for part in parts)
    missing = -len(order) % count
    if last_batch == "pad":
        assert runs == order + order[:missing]
    elif last_batch == "discard":
        assert runs == order[: len(order) // count * count]
    else:
        assert runs == order


def test_a_batch_samplers_batches_stay_whole() -> None:
    def make() -> BatchSampler:
        return BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)

    assert [list(one) for one in ranks(2, make)] == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9]]]
    assert [len(one) for one in ranks(3, make, last_batch="keep")] == [2, 1, 1]


class Numbered(EpochSampler):
    def _draw(self, epoch):
        return random_numbers(self.seed, epoch).permutation(20).tolist()


@pytest.mark.parametrize("wrap", [lambda own: own, lambda own: BatchSampler(own, 2, False)])
def test_a_sampler_that_counts_epochs_is_told_the_epoch(wrap) -> None:
    one, other = (
        ShardedSampler(wrap(Numbered(0)), rank=0, world_size=2, last_batch="discard")
        for _ in range(2)
    )
    orders = [list(one) for _ in range(3)]
    for epoch in (2, 2, 0, 1):
        other.set_epoch(epoch)
        assert list(other) == orders[epoch]


@pytest.mark.parametrize(
    "sampler",
    [
        DistributedSampler(range(8), 2, 0),
        BatchSampler(DistributedSampler(range(8), 2, 0), 2, drop_last=False),
        ShardedSampler(range(8), rank=0, world_size=2),
    ],
)
def test_a_part_of_a_rank_is_not_cut_again(sampler) -> None:
    with pytest.raises(ValueError, match="Sampler yields only one rank's share of the samples"):
        ShardedSampler(sampler, rank=0, world_size=2)


@pytest.mark.parametrize("sampler", [3, None])
def test_what_yields_no_indices_is_refused(sampler):
    with pytest.raises(TypeError, match="sampler should yield") as raised:
        ShardedSampler(sampler)
    assert str(raised.value) == (
        f"sampler should yield the indices of all samples, but got sampler={sampler}"
    )


def test_ranks_are_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = ShardedSampler([1, 2])
    assert (sampler.rank, sampler.world_size) == (1, 2)


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("batch_size", 0, "1 or more"),
        ("last_batch", "divide", ""),
        ("seed", -1, "0 or more"),
        ("rank", 0, "be given both or not"),
    ],
)
def test_arguments_that_cannot_be_are_refused(argument, value, text):
    with pytest.raises(ValueError, match=rf"^{argument}\b.* should (be )?{text}"):
        ShardedSampler([1, 2], **{argument: value})
