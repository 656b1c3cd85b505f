"""``worker_scope="host"`` with the other arguments: as with workers of each rank, or refused."""

import contextlib
import functools
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from shmloader import ShardedDataLoader, TooManyFailures
from tests.late import compile_library, reason_to_skip, switched_on, to_host
from tests.process.host_loaders import (
    COUNT,
    WORKERS,
    Samples,
    contents,
    expected,
    loader,
    owner_of,
)
from tests.process.ranks import LONG_S, meet
from tests.process.support import wait_until

pytestmark = pytest.mark.usefixtures("quick_spawn")


def refuse(index: int) -> None:
    raise ValueError(f"no sample {index}")


def bad(*indices: int) -> Samples:
    return Samples(at={index: functools.partial(refuse, index) for index in indices})


def collate(samples: list[Any]) -> Any:
    indices, drawn, makers = zip(*reversed(samples), strict=True)
    return torch.tensor(indices), torch.stack(drawn)[:, :1], torch.tensor(makers)


def replace(index: int, error: Exception) -> Any:
    return 1000 + index, torch.rand(2), os.getpid()


class Note:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker_id: int) -> None:
        (self.folder / f"{worker_id} {os.getpid()}").touch()


GOOD, BAD = Samples(), bad(3, 8, 20)

OPTIONS: dict[str, dict[str, Any]] = {
    "collate_fn": {"collate_fn": collate},
    "persistent_workers": {"persistent_workers": True},
    "prefetch_factor": {"prefetch_factor": 1},
    "many in flight": {"prefetch_factor": 4},
    "in_order": {"in_order": False},
    "batch_sampler": {"batch_sampler": BatchSampler(SequentialSampler(range(COUNT)), 4, False)},
    "sampler": {"sampler": range(COUNT - 1, -1, -1)},
    "discard": {"last_batch": "discard"},
    "skip": {"dataset": BAD, "on_error": "skip"},
    "replaced": {"dataset": BAD, "on_error": replace},
    "few failures": {"dataset": BAD, "on_error": "skip", "max_failures": 5},
    "fetch_concurrency": {"fetch_concurrency": 2},
    "timeouts": {"timeout": 50, "sample_timeout": 50.0},
    "shm_size": {"shm_size": "2MiB"},
    "restarts": {"worker_restarts": 2},
}


def two_epochs(scope: str, **options: Any) -> Any:
    options = {"dataset": GOOD, **options, "worker_scope": scope}
    if "sampler" in options or "batch_sampler" in options:  # which are the order, not shuffled
        one = ShardedDataLoader(num_workers=WORKERS, **options)
    else:
        one = loader(**options)
    found = []
    with one:
        for _ in range(2):
            batches = contents(list(one))
            if one.fetch_concurrency is not None:  # threads share the generators of torch
                batches = [(indices, []) for indices, _ in batches]
            found.append(batches if one.in_order else sorted(batches))
        return found, sorted(failure.index for failure in one.failures)


@pytest.mark.slow
def test_each_option_does_what_it_does_with_the_ranks_own_workers(run):
    def all_of_them() -> Any:
        with loader(GOOD) as one, loader(BAD, on_error="skip") as other:  # they keep the pools
            list(one)
            list(other)
            return {
                name: (two_epochs("host", **options), two_epochs("rank", **options))
                for name, options in OPTIONS.items()
            }

    for found in run.results(all_of_them, 2):
        assert not isinstance(found, BaseException), found
        for name, (shared, own) in found.items():
            assert shared == own, name


@pytest.mark.slow
def test_too_many_failures_end_the_epoch_of_their_rank_alone(run):
    def both() -> Any:
        # The workers have the dataset of the rank that comes first, so that is the same for both.
        dataset = bad(*range(0, COUNT, 2))
        found = []
        for scope in ("host", "rank"):
            share = Fraction(1, 4) if os.environ["RANK"] == "0" else Fraction(9, 10)
            with loader(dataset, worker_scope=scope, on_error="skip", max_failures=share) as one:
                try:
                    found.append(contents(one))
                except TooManyFailures:
                    found.append("too many")
        return found

    first, second = run.results(both, 2)
    assert first == ["too many"] * 2
    assert second[0] == second[1] != "too many"


@pytest.mark.slow
def test_worker_init_fn_is_called_once_in_each_worker_of_the_host(run, tmp_path):
    workers = tmp_path / "workers"
    workers.mkdir()

    def have_all_begun() -> bool:
        return {path.name.split()[0] for path in workers.iterdir()} == {*map(str, range(WORKERS))}

    def epochs() -> Any:
        # One worker alone may load all batches before the other begins: the first sample waits.
        dataset = Samples(at={0: functools.partial(wait_until, have_all_begun, LONG_S)})
        with loader(dataset, worker_init_fn=Note(workers)) as one:
            found = [contents(one) for _ in range(2)]
            meet(tmp_path)  # the last one to leave ends the workers
            return found

    assert run.results(epochs, 2) == [expected(rank, epochs=2) for rank in range(2)]
    called = sorted(path.name.split()[0] for path in workers.iterdir())
    assert called == [str(worker_id) for worker_id in range(WORKERS)]


class Stateful(Samples):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Counting(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


def test_datasets_that_are_streams_or_have_a_state_are_refused_at_construction():
    with pytest.raises(ValueError, match="let the dataset choose its part by rank, in a DataLoad"):
        loader(Counting())
    with pytest.raises(ValueError, match=r"state_dict\(\) cannot be combined.*snapshot_every_n_st"):
        loader(Stateful(), rank=0, world_size=1)


def files_of(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"pin_memory": True}, {"device": "late"}], ids=str)
def test_batches_reach_a_device_and_the_workers_have_nothing_of_it(run, tmp_path, options):
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    library = compile_library().name
    driver = tmp_path / "device"
    driver.touch()

    def epoch() -> Any:
        with switched_on(), driver.open() as opened:
            os.set_inheritable(opened.fileno(), True)  # as drivers do not all close theirs
            torch.zeros(1, device="late")
            with loader(**options) as one:
                iterator = iter(one)
                first = next(iterator)
                owner = owner_of(one)
                workers = [child.pid for child in psutil.Process(owner).children()]
                has_it = [
                    library in Path(f"/proc/{pid}/maps").read_text() or str(driver) in files_of(pid)
                    for pid in (os.getpid(), owner, *workers)
                ]
                found = contents(map(to_host, [first, *iterator]))
        with loader(worker_scope="rank") as own:
            return found == contents(own), has_it, first[1].device.type

    kind = "late" if "device" in options else "cpu"
    for is_alike, has_it, device in run.results(epoch, 2):
        assert is_alike
        assert has_it == [True] + [False] * (1 + WORKERS)
        assert device == kind
