"""What a type checker knows of the loaders: ``make lint`` checks this file, too."""

import inspect
from typing import assert_type

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shmloader import DataLoader, ShardedDataLoader


class Words(Dataset[str]):
    def __getitem__(self, index: int) -> str:
        return "word"

    def __len__(self) -> int:
        return 4


class Keyed:
    def __getitem__(self, key: str) -> bytes:
        return key.encode()


def test_a_loader_has_the_type_of_its_datasets_samples() -> None:
    assert_type(DataLoader(Words()), DataLoader[str])
    assert_type(ShardedDataLoader(Words()), ShardedDataLoader[str])
    assert_type(ShardedDataLoader([1, 2]), ShardedDataLoader[int])
    assert_type(ShardedDataLoader(Keyed(), sampler=["a"]), ShardedDataLoader[bytes])
    assert_type(ShardedDataLoader(torch.arange(4)), ShardedDataLoader[torch.Tensor])
    assert len(ShardedDataLoader(np.arange(4), 2)) == 2


def test_a_wrong_argument_is_an_error_of_types() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        ShardedDataLoader(Words(), nonsense=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        ShardedDataLoader(Words(), 2, False, [0, 1])  # type: ignore[call-arg]


def test_the_sharded_loader_has_each_argument_of_the_other_by_name() -> None:
    ours = dict(inspect.signature(ShardedDataLoader).parameters)
    theirs = dict(inspect.signature(DataLoader).parameters)
    assert [name for name, one in ours.items() if one.kind is not one.KEYWORD_ONLY] == [
        "dataset",
        "batch_size",
        "shuffle",
    ]
    assert theirs.keys() <= ours.keys()
    assert ours.keys() - theirs.keys() == {*("last_batch", "rank", "world_size", "worker_scope")}
    others = {"shuffle": (False, None), "seed": (0, None)}
    for name in theirs.keys() & ours.keys():
        defaults = ours[name].default, theirs[name].default
        assert defaults == others.get(name, (theirs[name].default,) * 2), name


def test_the_sharded_loader_passes_each_argument_on() -> None:
    given = {
        "pin_memory": True, "timeout": 3, "worker_init_fn": print, "prefetch_factor": 5,
        "persistent_workers": True, "in_order": False, "shm_size": "64MiB", "num_workers": 2,
        "worker_restarts": 1, "device": "cpu", "device_transform": list, "device_prefetch": 3,
        "on_error": "skip", "max_failures": 3, "snapshot_every_n_steps": 4, "collate_fn": list,
        "fetch_concurrency": 2, "pin_memory_device": "cpu",
    }  # fmt: skip
    loader = ShardedDataLoader(Words(), **given)  # type: ignore[arg-type]
    assert {name: getattr(loader, name) for name in given} == given
    context = torch.multiprocessing.get_context("spawn")
    loader = ShardedDataLoader(Words(), num_workers=1, multiprocessing_context=context)
    assert loader.multiprocessing_context is context
