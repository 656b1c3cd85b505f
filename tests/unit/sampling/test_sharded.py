"""ShardedSampler: a rank's part of any sampler, for torch's loader as well."""

import pytest
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from shmloader.sampling import ShardedSampler
from shmloader.sampling.samplers import EpochSampler, random_numbers


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
