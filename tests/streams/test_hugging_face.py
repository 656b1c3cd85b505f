"""A streaming dataset of Hugging Face becomes a stream of its files, or says why it cannot."""

import gzip
import json
import re

import numpy as np
import pytest

from shmloader import DataLoader
from shmloader.streams import from_hf

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def without_hub(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # no thread for progress bars


def make_records(shard):
    return [{"id": 10 * shard + each, "text": f"é{each}"} for each in range(2 + shard)]


def write_shards(folder, kind, count=4):
    import pyarrow as pa
    from pyarrow import parquet

    for number in range(count):
        records = make_records(number)
        path = folder / f"{number}.{kind}"
        if kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(records), path)
        else:
            data = "".join(json.dumps(record) + "\n" for record in records).encode()
            path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)


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
    with pytest.raises(ValueError, match=r"column 'image' is decoded.*as Image.*decode\(False\)"):
        from_hf(dataset, seed=0)
    (first, _) = from_hf(dataset.decode(False), seed=0)
    assert isinstance(first["image"]["bytes"], bytes)


STEPS = {
    "map()": lambda dataset: dataset.map(dict),
    "map() or the like": lambda dataset: dataset.rename_column("id", "number"),
    "filter()": lambda dataset: dataset.filter(bool),
    "shuffle()": lambda dataset: dataset.shuffle(seed=1),
    "take()": lambda dataset: dataset.take(1),
    "skip()": lambda dataset: dataset.skip(1),
    "repeat()": lambda dataset: dataset.repeat(2),
    "select_columns()": lambda dataset: dataset.select_columns(["id"]),
    "interleave_datasets()": lambda dataset: datasets.interleave_datasets([dataset, dataset]),
    "concatenate_datasets()": lambda dataset: datasets.concatenate_datasets([dataset, dataset]),
    "reshard()": lambda dataset: dataset.reshard(),
    "with_format()": lambda dataset: dataset.with_format("torch"),
    "cast()": lambda dataset: dataset.cast_column("id", datasets.Value("int32")),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_dataset_that_was_changed_is_refused_with_what_changed_it(name, folder):
    with pytest.raises(ValueError, match=re.escape(name)):
        from_hf(STEPS[name](load(folder)), seed=0)


def test_a_dataset_that_was_divided_for_ranks_is_refused(folder):
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(ValueError, match="split_dataset_by_node"):
        from_hf(split_dataset_by_node(load(folder), 0, 2), seed=0)


def test_an_option_that_leaves_out_records_is_refused(tmp_path):
    write_shards(tmp_path, "parquet")
    with pytest.raises(ValueError, match="filters="):
        from_hf(load(tmp_path, filters=[("id", ">", 3)]), seed=0)


def test_other_sources_are_refused(folder):
    (folder / "a.txt").write_text("a\n")
    with pytest.raises(ValueError, match="builder 'text'"):
        from_hf(load(folder, "txt", "text"), seed=0)
    generated = datasets.IterableDataset.from_generator(lambda: iter([{"a": 1}]))
    with pytest.raises(ValueError, match="not loaded from files"):
        from_hf(generated, seed=0)
    table = datasets.Dataset.from_dict({"a": [1]})
    with pytest.raises(ValueError, match="not loaded from files"):
        from_hf(table.to_iterable_dataset(), seed=0)
    with pytest.raises(TypeError, match="a DataLoader takes as it is"):
        from_hf(table, seed=0)
    with pytest.raises(TypeError, match="choose a split"):
        from_hf(load(folder, split=None), seed=0)
    with pytest.raises(TypeError, match=r"builtins\.list"):
        from_hf([1], seed=0)


def test_a_release_that_does_not_name_its_files_says_what_to_give(folder):
    loaded = load(folder)
    del loaded._ex_iterable.kwargs["files"]
    with pytest.raises(TypeError, match=r"Shards\(files"):
        from_hf(loaded, seed=0)
