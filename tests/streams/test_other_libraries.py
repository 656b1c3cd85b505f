"""Iterable datasets of webdataset and Hugging Face load and resume as the documentation says."""

import random

import pytest

from shmloader import DataLoader, ShardedDataLoader
from tests.streams.support import tar_bytes, write, write_jsonl

WORKERS = 2


def make_webdataset(folder):
    webdataset = pytest.importorskip("webdataset")
    paths = [str(folder / f"{shard}.tar") for shard in range(4)]
    for shard, path in enumerate(paths):
        write(path, tar_bytes([(f"{shard}{n:03}.cls", b"%d" % (10 * shard + n)) for n in range(9)]))
    # Without an rng, the buffer of webdataset depends on the clock.
    dataset = webdataset.WebDataset(paths, shardshuffle=4, seed=3)
    return dataset.shuffle(10, rng=random.Random(3)).decode().to_tuple("cls")


def make_hugging_face(folder, *, shuffles=False):
    datasets = pytest.importorskip("datasets")
    datasets.utils.tqdm.monitor_interval = 0  # else a thread watches progress bars, and stays
    for shard in range(4):
        write_jsonl(str(folder / f"{shard}.jsonl"), 9, seed=shard)
    dataset = datasets.load_dataset(
        "json",
        data_files=str(folder / "*.jsonl"),
        streaming=True,
        split="train",
        cache_dir=str(folder / "cache"),
    )
    return dataset.shuffle(seed=1, buffer_size=10) if shuffles else dataset


def make_shuffled_hugging_face(folder):
    return make_hugging_face(folder, shuffles=True)


def make_loader(dataset, num_workers=WORKERS, **options):
    return DataLoader(dataset, batch_size=2, num_workers=num_workers, collate_fn=str, **options)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_webdataset, {}),
        (make_hugging_face, {}),
        # datasets does not save its buffer, so the loader has to read again and discard.
        (make_shuffled_hugging_face, {"snapshot_every_n_steps": 0}),
    ],
)
def test_it_resumes_exactly_on_the_same_number_of_workers(make, options, tmp_path):
    with make_loader(make(tmp_path), **options) as loader:
        expected = list(loader)
        assert len(expected) == 18
    with make_loader(make(tmp_path), **options) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(5)]
        state = loader.state_dict()
    with make_loader(make(tmp_path), **options) as loader:
        loader.load_state_dict(state)
        assert [*first, *loader] == expected
    with (
        make_loader(make(tmp_path), WORKERS - 1, **options) as loader,
        pytest.raises(ValueError, match=r"num_workers: 2 in the state, 1 in this loader"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("make", [make_webdataset, make_hugging_face])
def test_a_sharded_loader_says_that_it_cannot_divide_it(make, tmp_path):
    with pytest.raises(ValueError, match=r"cannot divide.*streams\.Shards"):
        ShardedDataLoader(make(tmp_path), rank=0, world_size=2)
