"""Samples that fail: left out, replaced, counted, and too many of them."""

import asyncio
import logging
import multiprocessing
import os
import pickle
import re
import threading
import traceback
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Subset, get_worker_info

from shmloader import ClosedLoaderError, DataLoader, ShardedDataLoader, TooManyFailures
from shmloader.sampling import ShardedSampler, TokenBatches
from tests.process.support import Bad, Calls, Gate, ListsAlone, Numbers, Switch, outcomes

# How samples are loaded: the number of workers; by threads; or by several coroutines of a worker.
BOTH = pytest.mark.parametrize("workers", [0, 2])
ALL = pytest.mark.parametrize("workers", [0, 2, "threads", "coroutines"])


class Lists(Numbers):
    """The same by ``__getitems__``, too; a batch without bad ones carries a mark."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] + 1000 for index in indices]


class Awaited:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return self.dataset[index]


def load(dataset: Any, workers: int | str = 2, **options: Any) -> DataLoader:
    options = {"batch_size": 4, "collate_fn": list, "on_error": "skip", **options}
    if workers == "threads":
        return DataLoader(dataset, num_workers=2, thread_pool=True, **options)
    if workers == "coroutines":
        return DataLoader(Awaited(dataset), num_workers=2, fetch_concurrency=3, **options)
    return DataLoader(dataset, num_workers=workers, **options)


def listed(loader: DataLoader) -> list[Any]:
    return [failed.index for failed in loader.failures]


@pytest.mark.sampled(10)
@ALL
@pytest.mark.parametrize(
    ("bad", "batches"),
    [
        ((), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        ((0,), [[1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        ((3, 4, 9), [[0, 1, 2], [5, 6, 7], [8]]),
        ((4, 5, 6, 7), [[0, 1, 2, 3], [8, 9]]),
        ((0, 1, 2, 3, 8, 9), [[4, 5, 6, 7]]),
        ((0, 1, 2, 3, 4, 5, 6, 7, 9), [[8]]),
    ],
)
def test_a_batch_comes_without_what_failed_and_an_empty_one_not_at_all(workers, bad, batches):
    loader = load(Numbers(10, *bad), workers)
    assert list(loader) == batches
    assert (listed(loader), loader.failures.total) == (list(bad), len(bad))


def test_a_batch_of_tensors_comes_without_what_failed_in_shared_memory():
    numbers = Numbers(12, 1, 4, 7, 10)
    loader = load(Calls(lambda n: torch.full((50_000,), float(numbers[n])), 12), collate_fn=None)
    kept = list(loader)
    assert [batch[:, 7].tolist() for batch in kept] == [[0, 2, 3], [5, 6], [8, 9, 11]]
    assert all(torch.equal(batch, batch[:, :1].expand(-1, 50_000)) for batch in kept)


@pytest.mark.slow
def test_workers_that_are_spawned_skip_and_replace():
    options = {"multiprocessing_context": "spawn"}
    # A function that pickles by value.
    on_error = lambda index, error: (index, type(error).__name__, get_worker_info().id)  # noqa: E731
    loader = load(Numbers(8, 1, 6), on_error=on_error, **options)
    assert list(loader) == [[0, (1, "Bad", 0), 2, 3], [4, 5, (6, "Bad", 1), 7]]
    assert [type(failed.error) for failed in loader.failures] == [Bad, Bad]


@BOTH
@pytest.mark.parametrize("in_order", [True, False])
def test_more_empty_batches_than_may_be_in_flight(workers, in_order):
    bad = [*range(2, 97), 98]
    loader = load(Numbers(100, *bad), workers, batch_size=1, in_order=in_order)
    assert sorted(loader) == [[0], [1], [97], [99]]
    assert (sorted(listed(loader)), loader.failures.total) == (bad, 96)


@BOTH
@pytest.mark.parametrize(
    ("on_error", "batches"),
    [("skip", [1, 2, 5, 6, 7]), (lambda index, error: -index, [0, 1, 2, -3, -4, 5, 6, 7])],
)
def test_without_batching_what_fails_is_left_out_or_replaced(workers, on_error, batches):
    options = {"batch_size": None, "collate_fn": None, "on_error": on_error}
    loader = load(Numbers(8, 0, 3, 4), workers, **options)
    assert list(loader) == batches
    assert listed(loader) == [0, 3, 4]


@BOTH
def test_an_epoch_counts_in_tickets_whether_they_gave_a_batch_or_not(workers):
    """The number in an error's note is the sampler's, not that of what came before."""

    def collate(samples: list[int]) -> list[int]:
        if 9 in samples:
            raise ZeroDivisionError
        return samples

    loader = load(Numbers(10, 0, 1, 2, 3, 8), workers, batch_size=2, collate_fn=collate)
    assert len(loader) == 5
    first, second, error = outcomes(loader)
    assert (first, second, type(error)) == ([4, 5], [6, 7], ZeroDivisionError)
    if workers:
        assert "batch 4 (indices 8 to 9)" in error.__notes__[0]
    notes = [failed.error.__notes__[0].rpartition(" of ")[2] for failed in loader.failures]
    assert notes == [f"batch {number}." for number in (0, 0, 1, 1, 4)]


@ALL
def test_a_function_gives_a_sample_in_its_place(workers):
    def instead(index: int, error: Exception) -> tuple[Any, ...]:
        assert type(error) is Bad
        return -index, str(error)

    loader = load(Numbers(8, 1, 4, 5, 6, 7), workers, on_error=instead)
    assert list(loader) == [
        [0, (-1, "no 1"), 2, 3],
        [(-index, f"no {index}") for index in range(4, 8)],
    ]
    assert listed(loader) == [1, 4, 5, 6, 7]
    bad = Numbers(2, 0, 1)
    assert list(load(bad, workers, on_error=lambda index, _: -index)) == [[0, -1]]  # no good one


@BOTH
def test_what_the_function_raises_is_raised_and_the_epoch_goes_on(workers):
    def instead(index: int, error: Exception) -> int:
        if index == 5:
            raise ZeroDivisionError("in place of 5")
        return -index

    loader = load(Numbers(10, 1, 5, 9), workers, on_error=instead)
    first, error, last = outcomes(loader)
    assert (first, last) == ([0, -1, 2, 3], [8, -9])
    assert type(error) is ZeroDivisionError
    assert "in place of 5" in str(error)
    assert listed(loader) == [1, 5, 9]


def in_ranks(dataset: Any, kind: str, replicas: int = 2) -> dict[str, Any]:
    sampler = DistributedSampler(dataset, num_replicas=replicas, rank=0, shuffle=False)
    if kind == "sampler":
        return {"sampler": sampler}
    return {"batch_size": 1, "batch_sampler": BatchSampler(sampler, 4, drop_last=False)}


@BOTH
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("numbers", [Numbers, Lists])
def test_in_ranks_the_first_good_sample_takes_the_place_of_a_bad_one(workers, kind, numbers):
    dataset = numbers(20, 0, 2, 12)
    loader = load(dataset, workers, **in_ranks(dataset, kind))
    mark = 1000 if numbers is Lists else 0
    assert list(loader) == [[4, 4, 4, 6], [8, 10, 8, 14], [16 + mark, 18 + mark]]
    assert listed(loader) == [0, 2, 12]
    alone = load(dataset, workers, **in_ranks(dataset, kind, replicas=1))
    assert next(iter(alone)) == [1, 3]  # it need not be equal to others


@BOTH
@pytest.mark.parametrize("make", [ShardedDataLoader, DataLoader])
def test_in_ranks_a_bad_sample_of_a_planned_batch_is_left_out(workers, make, caplog):
    dataset = Numbers(24, 3)
    plan = TokenBatches([40, *[1] * 11] * 2, 51, shuffle=False, window=12)
    ranks = {"rank": 0, "world_size": 2}
    options = {"batch_sampler": plan, **ranks}
    if make is DataLoader:
        options = {"batch_sampler": ShardedSampler(plan, **ranks)}
    loader = make(dataset, collate_fn=list, num_workers=workers, on_error="skip", **options)
    with caplog.at_level("WARNING", logger="shmloader"):
        # A copy of the first sample would have 40 tokens.
        assert list(loader) == [[0, 1, 2, *range(4, 12)]]
    assert "index 3 failed and is left out" in caplog.text
    loader.close()
    dataset = Numbers(2, 0)
    options["batch_sampler"] = TokenBatches([5, 5], 5, shuffle=False)
    if make is ShardedDataLoader:
        with pytest.raises(TooManyFailures, match="all samples of batch 0"):
            list(make(dataset, collate_fn=list, num_workers=workers, on_error="skip", **options))


@BOTH
def test_in_ranks_a_batch_of_which_nothing_is_left_raises(workers):
    dataset = Numbers(24, 8, 10, 12, 14)
    loader = load(dataset, workers, **in_ranks(dataset, "sampler"))
    first, error = outcomes(loader)
    assert first == [0, 2, 4, 6]
    assert type(error) is TooManyFailures
    assert "all samples of batch 1 (indices 8, 10, 12, 14) failed" in str(error)
    assert error.__cause__ is loader.failures[-1].error
    assert listed(loader) == [8, 10, 12, 14]


@BOTH
def test_in_ranks_without_batching_a_bad_sample_raises(workers):
    dataset = Numbers(8, 2)
    options = {"batch_size": None, "collate_fn": None, **in_ranks(dataset, "sampler")}
    first, error = outcomes(load(dataset, workers, **options))
    assert (first, type(error)) == (0, TooManyFailures)


@pytest.mark.sampled(2)
@BOTH
@pytest.mark.parametrize("who", ["collate", "on_error"])
def test_a_stop_out_of_the_users_functions_does_not_end_the_epoch(workers, who):
    def stop(*_: object) -> Any:
        raise StopIteration

    options = {"on_error": stop} if who == "on_error" else {"collate_fn": stop}
    seen = outcomes(load(Numbers(8, 0, 4), workers, **options))
    assert [type(step) for step in seen] == [RuntimeError, RuntimeError]
    assert all("StopIteration" in str(step) for step in seen)


def test_failures_are_named_in_the_order_of_their_batches_whoever_is_first():
    gate = Gate()

    def sample(index: int) -> int:
        if index == 0:
            gate.pass_through()  # until batch 1 is done
        if index == 3:
            gate.open()
        raise Bad(f"no {index}")

    loader = load(Calls(sample, 4), batch_size=2)
    (error,) = outcomes(loader)
    assert type(error) is TooManyFailures
    assert [(failed.index, failed.worker) for failed in loader.failures] == [
        (0, 0), (1, 0), (2, 1), (3, 1),
    ]  # fmt: skip


@ALL
def test_an_error_in_the_list_has_one_line_and_its_traceback_beside_it(workers):
    loader = load(Numbers(4, 2), workers)
    list(loader)
    (failed,) = loader.failures
    worker = failed.worker
    assert worker in ([0, 1] if workers == "threads" else [0 if workers else None])
    assert str(failed.error) == "no 2"
    assert repr(failed) == f"FailedSample(index=2, error=Bad('no 2'), worker={worker})"
    first, *frames, last = failed.traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert any(frame.endswith("in __getitem__") for frame in frames)
    assert last.endswith("Bad: no 2")
    who = {0: "This process", "threads": f"Worker thread {worker}"}.get(workers, "Worker 0 (pid N)")
    note = re.sub("pid [0-9]+", "pid N", failed.error.__notes__[0])
    assert note == f"{who} was loading index 2 of batch 0."
    assert failed.error.__traceback__ is None
    with pytest.raises(Bad, match="no 2"):
        raise failed.error


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_the_list_is_kept_over_epochs_and_after_close(workers, persistent):
    loader = load(Numbers(10, 3, 8), workers, persistent_workers=persistent)
    for epoch in range(1, 4):
        assert list(loader) == [[0, 1, 2], [4, 5, 6, 7], [9]]
        assert (listed(loader), loader.failures.total) == ([3, 8] * epoch, 2 * epoch)
    loader.close()
    assert listed(loader) == [3, 8] * 3


@pytest.mark.sampled(1)
@ALL
def test_the_newest_100_are_listed_and_all_are_counted(workers):
    loader = load(Numbers(400, *range(1, 400)), workers, batch_size=150)
    assert list(loader) == [[0]]
    assert (listed(loader), loader.failures.total) == (list(range(300, 400)), 399)


def test_an_epoch_left_early_counts_what_was_handed_over():
    loader = load(Numbers(100, *range(1, 100, 2)), persistent_workers=True)
    for batch in loader:
        assert batch == [0, 2]
        break
    assert listed(loader) == [1, 3]
    assert next(iter(loader)) == [0, 2]
    assert listed(loader) == [1, 3, 1, 3]


class Locks:
    """A sampler that pickles; one of its indices does not."""

    def __iter__(self) -> Any:
        return iter([1, threading.Lock(), 0])


def test_a_loader_pickles_whatever_has_failed():
    loader = load([10, 20], 0, sampler=Locks())
    assert list(loader) == [[20, 10]]
    assert loader.failures.total == 1
    assert list(pickle.loads(pickle.dumps(loader))) == [[20, 10]]


@BOTH
def test_an_index_of_any_kind_is_listed_as_it_is(workers):
    def sample(key: Any) -> Any:
        if key != ("a", 1):
            raise Bad
        return key

    keys = ["text", ("a", 1), ("a", (2, None)), 1.5]
    loader = load(Calls(sample, 4), workers, sampler=keys)
    assert list(loader) == [[("a", 1)]]
    assert listed(loader) == [keys[0], *keys[2:]]


@pytest.mark.parametrize("size", [8, 200])
def test_failures_are_listed_though_the_batch_fills_its_slot(size):
    """A slot of 64 KiB that the batch fills nearly."""
    nbytes = 64_000

    def sample(index: int) -> torch.Tensor:
        if index % size:
            raise Bad("m" * 10_000)
        return torch.zeros(nbytes, dtype=torch.uint8)

    loader = load(
        Calls(sample, 2 * size), batch_size=size, collate_fn=None, prefetch_factor=1,
        shm_size=6 * 64 * 1024,
    )  # fmt: skip
    assert [batch.shape for batch in loader] == [(1, nbytes)] * 2
    assert loader.failures.total == 2 * (size - 1)
    assert len(loader.failures) == min(2 * (size - 1), 100)


def test_the_first_failure_of_an_epoch_is_logged_and_no_other(caplog):
    loader = load(Numbers(20, 5, 6, 17), persistent_workers=True)
    with caplog.at_level(logging.DEBUG, "shmloader"):
        for _ in range(2):
            list(loader)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "index 5 failed and is left out (worker 1" in caplog.text
    assert "Bad: no 5" in caplog.text


@pytest.mark.sampled(2)
@ALL
@pytest.mark.parametrize(("on_error", "left"), [("skip", [3, 3]), (lambda *_: -1, [4, 4])])
def test_more_failures_than_max_failures_end_the_iterator(workers, on_error, left):
    loader = load(Numbers(16, 1, 6, 8, 13), workers, max_failures=2, on_error=on_error)
    batches = iter(loader)
    assert [len(next(batches)) for _ in range(2)] == left
    with pytest.raises(TooManyFailures, match=r"3 of the 12 samples .* max_failures=2") as caught:
        next(batches)
    cause = caught.value.__cause__
    assert type(cause) is Bad
    assert "no 8" in str(cause)
    assert cause is loader.failures[-1].error
    with pytest.raises(ClosedLoaderError, match=r"3 of the 12 samples"):
        next(batches)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_after_too_many_failures_a_new_epoch_starts_anew(workers, persistent):
    is_bad = Switch(is_on=False)

    def sample(index: int) -> int:
        if is_bad or index == 3:
            raise Bad
        return index

    loader = load(Calls(sample, 8), workers, max_failures=1, persistent_workers=persistent)
    for turn_bad in (False, True, True, False, False):
        is_bad.turn(on=turn_bad)
        if turn_bad:
            with pytest.raises(TooManyFailures, match="4 of the 4"):
                list(loader)
        else:
            assert list(loader) == [[0, 1, 2], [4, 5, 6, 7]]
    assert loader.failures.total == 1 + 4 + 4 + 1 + 1


@BOTH
@pytest.mark.parametrize("share", [Fraction(1, 5), 0.2])
def test_a_share_is_judged_from_the_hundredth_sample_on(workers, share):
    loader = load(Numbers(200, *range(24)), workers, batch_size=25, max_failures=share)
    batches = iter(loader)
    assert [len(next(batches)) for _ in range(3)] == [1, 25, 25]
    with pytest.raises(TooManyFailures, match=r"24 of the 100 .* max_failures=1/5"):
        next(batches)


@pytest.mark.sampled(2)
@BOTH
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("most", [None, 1000, Fraction(1)])
def test_an_epoch_in_which_all_failed_raises(workers, in_order, batch_size, most):
    options = {"batch_size": batch_size, "max_failures": most, "in_order": in_order}
    loader = load(Numbers(30, *range(30)), workers, **options)
    with pytest.raises(TooManyFailures, match="all 30 samples of the epoch failed") as caught:
        list(loader)
    assert type(caught.value.__cause__) is Bad
    if in_order:
        assert "no 29" in str(caught.value.__cause__)
    assert loader.failures.total == 30


def test_failures_of_a_batch_that_cannot_be_sent_are_counted():
    loader = load(Numbers(8, 1), collate_fn=lambda samples: [threading.Lock(), samples])
    assert [type(step) for step in outcomes(loader)] == [TypeError, TypeError]
    assert listed(loader) == [1]


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"fetch_concurrency": 2}], ids=str)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrap", [lambda lists: lists, lambda lists: Subset(lists, range(8))])
def test_a_dataset_of_lists_alone_loads_its_samples_one_by_one(
    wrap: Any, workers: int, options: Any
) -> None:
    options = {"batch_size": 4, "num_workers": workers, "on_error": "skip", **options}
    loader = DataLoader(wrap(ListsAlone(8, 5)), **options)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 6, 7]]
    assert listed(loader) == [5]


class ColumnsAlone(ListsAlone):
    """Loads columns of samples, of which none can be told from the others."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": torch.tensor(super().__getitems__(indices))}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_bad_sample_of_a_dataset_of_columns_alone_takes_no_good_ones_with_it(
    is_wrapped: bool, workers: int
) -> None:
    dataset: Any = ColumnsAlone(8, 5)
    if is_wrapped:
        dataset = Subset(dataset, range(8))
    options = {"batch_size": 4, "num_workers": workers, "collate_fn": dict}
    batches = iter(DataLoader(dataset, on_error="skip", **options))
    assert next(batches)["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="returned a dict for a list of one index") as caught:
        next(batches)
    text = "".join(traceback.format_exception(caught.value))
    assert "no 5" in text
    with pytest.raises(TypeError, match=r"one by one .*seed=.* needs a __getitem__"):
        next(iter(DataLoader(dataset, seed=1, **options)))


def test_a_child_that_a_bad_sample_forks_loads_no_further_samples() -> None:
    loaded = multiprocessing.get_context("fork").Value("i", 0)

    def fork(index: int) -> int:
        with loaded.get_lock():
            loaded.value += 1
        if os.fork() == 0:
            raise ValueError("of the child")
        os.wait()
        return index

    with DataLoader(Calls(fork, 8), batch_size=4, num_workers=1, on_error="skip") as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loaded.value == 8
