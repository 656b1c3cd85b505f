"""ShardedDataLoader with real workers: ranks, batches, tails."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    TensorDataset,
    default_collate,
)

from shmloader import DataLoader, ShardedDataLoader, TooManyFailures
from shmloader.loader import resumable
from shmloader.loader.options import OPTIONS
from shmloader.sampling import ShardedSampler
from tests.parity.compare import assert_same
from tests.process.support import Calls, Gate, Streams, wait_until

# Elements of int32 in a sample: above 64 KiB, so that a batch is lent, not copied out.
LENGTH = 17_000


def sample(index: int) -> tuple[torch.Tensor, int]:
    return torch.full((LENGTH,), index, dtype=torch.int32), index


def numbers(batch: Any) -> list[int]:
    images, labels = batch
    assert images.shape == (len(labels), LENGTH)
    assert bool((images == labels[:, None]).all())
    return labels.tolist()


def values(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_what_collate_makes_of_each_index_list(workers) -> None:
    dataset = TensorDataset(torch.rand(20, 5), torch.arange(20), torch.rand(20, 2, 40, 300))

    plan = [[3, 1], [7, 8, 9], [4, 4, 4], [0], [19, 18, 5]]
    seen = list(ShardedDataLoader(dataset, batch_sampler=plan, num_workers=workers))
    assert_same(seen, [default_collate([dataset[index] for index in batch]) for batch in plan])


def test_one_rank_is_the_plain_loader() -> None:
    dataset = Calls(sample, 23)
    plain = DataLoader(dataset, 4, num_workers=2)
    loader = ShardedDataLoader(dataset, 4, num_workers=2, last_batch="keep")
    assert list(map(numbers, loader)) == list(map(numbers, plain))
    assert len(loader) == len(plain)
    assert isinstance(loader, torch.utils.data.DataLoader)


def test_threads_make_the_same_batches() -> None:
    options: dict[str, Any] = {"shuffle": True, "rank": 1, "world_size": 2}
    expected = list(map(numbers, ShardedDataLoader(Calls(sample, 40), 3, **options)))
    loader = ShardedDataLoader(
        Calls(sample, 40), 3, num_workers=3, prefetch_factor=1, thread_pool=True, **options
    )
    assert loader.thread_pool is True
    assert list(map(numbers, loader)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_padding_tells_of_the_batch_that_was_given_last(workers) -> None:
    for rank, last, padding in ((0, 12, 0), (1, 16, 0), (2, 0, 4)):
        options = {"rank": rank, "world_size": 3, "num_workers": workers}
        loader = ShardedDataLoader(torch.arange(20), 4, **options)
        assert loader.padding == 0
        seen = [(batch[0].item(), loader.padding) for batch in loader]
        assert seen == [(4 * rank, 0), (last, padding)]


def test_padding_is_refused_where_the_order_is_not_known() -> None:
    loader = ShardedDataLoader(torch.arange(20), 4, num_workers=1, in_order=False)
    with pytest.raises(RuntimeError, match="only with in_order=True"):
        _ = loader.padding


def test_a_generator_shuffles_as_with_torch_on_one_rank() -> None:
    theirs = torch.utils.data.DataLoader(
        torch.arange(30), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    ours = ShardedDataLoader(
        torch.arange(30), 4, shuffle=True, last_batch="keep",
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    for _ in range(2):
        assert values(ours) == values(theirs)
    with pytest.raises(ValueError, match="generator cannot be given for more than one"):
        ShardedDataLoader(torch.arange(9), 2, generator=torch.Generator(), rank=0, world_size=2)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"on_error": "skip"}])
def test_indices_of_a_sampler_may_be_tuples(options) -> None:
    class Crops:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, key: tuple[int, int]) -> int:
            index, size = key
            return index * 100 + size

    keys = [(index, size) for index in (1, 2) for size in (3, 4)]
    steps = values(ShardedDataLoader(Crops(), 2, sampler=keys, **options))
    assert steps == [[103, 104], [203, 204]]
    steps = values(ShardedDataLoader(Crops(), batch_sampler=[keys[:2], keys[2:]], **options))
    assert steps == [[103, 104], [203, 204]]


@pytest.mark.parametrize(
    "make",
    [
        lambda size: ShardedSampler(range(8), 2, rank=0, world_size=size),
        lambda size: DistributedSampler(range(8), size, 0),
    ],
)
def test_a_sampler_that_gives_a_ranks_part_is_refused_and_its_batches_keep_their_size(make) -> None:
    def failing(index: int) -> int:
        if bad.add(index) or len(bad) == 1:
            raise ValueError("the first one")
        return index

    batches = BatchSampler(make(2), 2, drop_last=False)
    for options in ({"batch_size": 2, "sampler": make(2)}, {"batch_sampler": batches}):
        with pytest.raises(ValueError, match="gives a part of the samples to each rank"):
            ShardedDataLoader(torch.arange(8), **options)
    for size in (1, 2):
        bad: set[int] = set()
        loader = DataLoader(Calls(failing, 8), 2, sampler=make(size), on_error="skip")
        assert len(next(iter(loader))) == size


def test_keep_and_discard_are_what_they_say() -> None:
    data = torch.arange(10)
    assert values(ShardedDataLoader(data, 4, last_batch="keep"))[-1] == [8, 9]
    discard = {"last_batch": "discard"}
    for options in (discard, {"drop_last": True}, {"drop_last": True, **discard}):
        loader = ShardedDataLoader(data, 4, **options)
        assert loader.drop_last is True
        assert values(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert len(loader) == len(loader.batch_sampler) == 2


def test_prefetch_factor_decides_the_number_of_steps_in_flight() -> None:
    gate = Gate()

    def tell(index: int) -> int:
        gate.open()
        return index

    for factor, workers in ((1, 2), (3, 2), (None, 3)):
        loader = ShardedDataLoader(
            Calls(tell, 20), 1, num_workers=workers, prefetch_factor=factor, last_batch="discard"
        )
        steps = iter(loader)
        count = (factor or 2) * workers
        for _ in range(count):
            gate.wait_until_open()
        wait_until(functools.partial(idle, steps))
        with pytest.raises(AssertionError):
            gate.wait_until_open(0)
        assert values(steps) == [[n] for n in range(20)]
        for _ in range(20 - count):
            gate.wait_until_open()


def idle(steps: Any) -> bool:
    from shmloader.pools.status_page import Phase

    count = len(steps._workers)
    return all(steps._pool.was_at(worker).phase is Phase.IDLE for worker in range(count))


def failing_at(*bad: int) -> Calls:
    def sample(index: int) -> int:
        if index in bad:
            raise ValueError(f"bad {index}")
        return index

    return Calls(sample, 12)


WAYS = pytest.mark.parametrize(
    "way", [{}, {"num_workers": 2}, {"num_workers": 2, "thread_pool": True}], ids=str
)


@WAYS
def test_a_skipped_sample_is_replaced_by_a_good_one_of_its_batch(way) -> None:
    options = {"on_error": "skip", "rank": 0, "world_size": 2, **way}
    loader = ShardedDataLoader(failing_at(1, 6), 3, **options)
    assert values(loader) == [[0, 0, 2], [7, 7, 8]]
    assert [failed.index for failed in loader.failures] == [1, 6]
    loader = ShardedDataLoader(failing_at(0, 1, 2), 3, **options)
    with pytest.raises(TooManyFailures) as raised:  # nothing is left of a batch
        list(loader)
    assert "bad" in str(raised.value.__cause__)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [[], [[1], [2]]])
def test_a_batch_that_is_empty_or_a_list_of_batches_is_named(workers, batch) -> None:
    loader = ShardedDataLoader(torch.arange(9), batch_sampler=[[1], batch], num_workers=workers)
    with pytest.raises(ValueError, match="lists of indices, none of them empty, but batch 1 is"):
        list(loader)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": None}, ValueError, "batch_size is needed"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": 2, "shuffle": True, "sampler": [1]}, ValueError, "shuffle"),
        ({"batch_size": 2, "batch_sampler": [[1]]}, ValueError, "batch_sampler"),
        ({"shuffle": True, "batch_sampler": [[1]]}, ValueError, "batch_sampler"),
        (
            {"batch_size": 2, "device": "gpu0"},
            ValueError,
            r"^device should name a .* device='gpu0'",
        ),
        *(
            ({"last_batch": rule, "batch_sampler": [[1]]}, ValueError, "combined with batch_samp")
            for rule in ("keep", "discard", "pad")
        ),
        ({"shuffle": "no"}, TypeError, "shuffle should be True or False, but got shuffle='no'"),
        ({"shuffle": 2}, TypeError, "shuffle=2"),
        *(
            (
                {"last_batch": wrong},
                ValueError,
                f"^last_batch should be 'keep', 'discard' or 'pad', but got last_batch={wrong!r}$",
            )
            for wrong in ("", "rollover", 3)
        ),
        ({"last_batch": "pad", "drop_last": True}, ValueError, "cannot be combined with drop_last"),
        ({"drop_last": True, "batch_sampler": [[1]]}, ValueError, "batch_sampler"),
        ({"batch_size": 2, "nonsense": True}, TypeError, "nonsense"),
    ],
)
def test_wrong_arguments_are_told_by_the_constructor(options, error, text) -> None:
    with pytest.raises(error, match=text):
        ShardedDataLoader(torch.arange(8), **options)


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="choose its part by rank"):
        ShardedDataLoader(Streams(lambda: iter([1])), 2)


def as_if_present(device: Any) -> torch.device | None:
    return None if device in {None, "cpu"} else torch.device("meta", device)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (DataLoader, {"shm_size": "1GiB"}, "shm_size"),
        (DataLoader, {"worker_restarts": 1}, "worker_restarts"),
        (DataLoader, {"on_error": "skip"}, "on_error"),
        (DataLoader, {"seed": 0}, "seed"),
        (DataLoader, {"device": 0}, "device"),
        (ShardedDataLoader, {}, "ShardedDataLoader"),
    ],
)
def test_where_torchs_workers_have_to_do_our_own_arguments_are_refused(
    kind, options, named, monkeypatch
) -> None:
    monkeypatch.setattr(resumable, "why_unsupported", lambda: "so")
    device = dataclasses.replace(OPTIONS["device"], read=as_if_present)
    monkeypatch.setitem(OPTIONS, "device", device)
    loader = kind(torch.arange(8), 2, num_workers=1, **options)
    with pytest.raises(RuntimeError, match=f"cannot be combined with {named}"):
        iter(loader)
    plain = DataLoader(torch.arange(8), 2, num_workers=1, device="cpu")  # asks for no copy
    with pytest.warns(RuntimeWarning, match="runs on torch's own workers"):
        assert values(plain) == [[0, 1], [2, 3], [4, 5], [6, 7]]
