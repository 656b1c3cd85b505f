"""A streaming dataset of Hugging Face becomes a stream of its files, or says why it cannot."""

import json
import random

import numpy as np
import pytest

from shmloader import DataLoader, ShardedDataLoader
from shmloader.streams import from_hf
from tests.streams.support import tar_bytes, write, write_columns, write_jsonl

datasets = pytest.importorskip("datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node


@pytest.fixture(autouse=True)
def without_hub(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # no thread for progress bars


def make_records(shard):
    return [{"id": 10 * shard + each, "text": f"é{each}"} for each in range(2 + shard)]


def write_shards(folder, kind, count=4):
    import pyarrow as pa

    for number in range(count):
        records, path = make_records(number), str(folder / f"{number}.{kind}")
        if kind == "parquet":
            write_columns(path, pa.Table.from_pylist(records))
        else:
            write(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def load(folder, kind="parquet", builder=None, **options):
    return datasets.load_dataset(
        builder or kind,
        data_files=str(folder / f"*.{kind}"),
        streaming=True,
        **{"split": "train", **options},
    )


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, "parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "builder"),
    [("parquet", "parquet"), ("jsonl", "json"), ("jsonl.gz", "json")],
)
def test_the_stream_has_the_records_of_the_dataset(kind, builder, tmp_path):
    write_shards(tmp_path, kind)
    dataset = load(tmp_path, kind, builder)
    stream = from_hf(dataset, seed=0, shuffle_shards=False, readers=1)
    assert list(stream) == list(dataset) == [one for n in range(4) for one in make_records(n)]


def test_the_stream_is_one_of_shards(folder):
    loaded = load(folder)
    stream = from_hf(loaded, seed=3)
    assert stream.readers == 4
    expected = [batch["id"].tolist() for batch in stream.shuffle(3).batch(2)]
    with DataLoader(from_hf(loaded, seed=3).shuffle(3).batch(2), None, num_workers=2) as loader:
        assert [batch["id"].tolist() for batch in loader] == expected


def test_a_part_of_the_files_becomes_a_stream_of_these(folder):
    loaded = load(folder)
    ids = [record["id"] for record in from_hf(loaded.shard(2, 0), seed=0)]
    assert sorted(ids) == sorted(record["id"] for record in loaded.shard(2, 0))


def test_columns_are_those_of_the_dataset(tmp_path):
    write_shards(tmp_path, "parquet", 1)
    assert list(from_hf(load(tmp_path, columns=["id"]), seed=0)) == [{"id": 0}, {"id": 1}]


def test_images_are_left_to_a_map(tmp_path):
    image = pytest.importorskip("PIL.Image")
    picture = image.fromarray(np.zeros((4, 4), np.uint8))
    table = datasets.Dataset.from_dict(
        {"image": [picture] * 2}, features=datasets.Features({"image": datasets.Image()})
    )
    table.to_parquet(str(tmp_path / "a.parquet"))
    dataset = load(tmp_path)
    with pytest.raises(TypeError, match="not decoded"):
        from_hf(dataset, seed=0)
    (first, _) = from_hf(dataset.decode(False), seed=0)
    assert isinstance(first["image"]["bytes"], bytes)


CHANGES = {
    "map": lambda dataset: dataset.map(dict),
    "rename": lambda dataset: dataset.rename_column("id", "number"),
    "filter": lambda dataset: dataset.filter(bool),
    "shuffle": lambda dataset: dataset.shuffle(seed=1),
    "take": lambda dataset: dataset.take(1),
    "skip": lambda dataset: dataset.skip(1),
    "repeat": lambda dataset: dataset.repeat(2),
    "select_columns": lambda dataset: dataset.select_columns(["id"]),
    "interleave": lambda dataset: datasets.interleave_datasets([dataset, dataset]),
    "concatenate": lambda dataset: datasets.concatenate_datasets([dataset, dataset]),
    "reshard": lambda dataset: dataset.reshard(),
    "with_format": lambda dataset: dataset.with_format("torch"),
    "cast": lambda dataset: dataset.cast_column("id", datasets.Value("int32")),
    "ranks": lambda dataset: split_dataset_by_node(dataset, 0, 2),
    "not streaming": lambda _: datasets.Dataset.from_dict({"a": [1]}),
    "to_iterable": lambda _: datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset(),
    "generator": lambda _: datasets.IterableDataset.from_generator(lambda: iter([{"a": 1}])),
    "list": lambda _: [1],
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_a_dataset_as_it_was_loaded_is_refused(name, folder):
    with pytest.raises(TypeError, match=r"config\.data_files\['train'\] lists them"):
        from_hf(CHANGES[name](load(folder)), seed=0)


@pytest.mark.parametrize(
    "options", [{"filters": [("id", ">", 3)]}, {"split": None}, {"kind": "txt", "builder": "text"}],
    ids=str,
)  # fmt: skip
def test_options_and_formats_that_a_stream_has_not_are_refused(folder, options):
    (folder / "a.txt").write_text("a\n")
    with pytest.raises(TypeError, match="from_hf takes"):
        from_hf(load(folder, **options), seed=0)


def test_a_release_that_does_not_name_its_files_says_what_to_give(folder):
    loaded = load(folder)
    del loaded._ex_iterable.kwargs["files"]
    with pytest.raises(TypeError, match="Give its files to Shards"):
        from_hf(loaded, seed=0)


# Loaders of other libraries' datasets, as the documentation says ------------------------------

WORKERS = 2


def make_webdataset(folder):
    webdataset = pytest.importorskip("webdataset")
    paths = [str(folder / f"{shard}.tar") for shard in range(4)]
    for shard, path in enumerate(paths):
        write(path, tar_bytes([(f"{shard}{n:03}.cls", b"%d" % (10 * shard + n)) for n in range(9)]))
    # Without an rng, the buffer of webdataset depends on the clock.
    dataset = webdataset.WebDataset(paths, shardshuffle=4, seed=3)
    return dataset.shuffle(10, rng=random.Random(3)).decode().to_tuple("cls")


def make_hugging_face(folder):
    for shard in range(4):
        write_jsonl(str(folder / f"{shard}.jsonl"), 9, seed=shard)
    return load(folder, "jsonl", "json")


def make_shuffled_hugging_face(folder):
    return make_hugging_face(folder).shuffle(seed=1, buffer_size=10)


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
