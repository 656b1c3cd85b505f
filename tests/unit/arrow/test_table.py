"""ArrowTable: samples, files, and pickles; the lengths of lists in any table."""

import itertools
import pickle
import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather, parquet
from torch.utils.data import Dataset, default_collate

import shmloader
from shmloader import sample_rng
from shmloader.arrow import ArrowTable, lengths
from shmloader.arrow import columns as reading
from shmloader.batch.arrays import Arrays
from shmloader.batch.collator import Timer
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.sampling.indices import PositionedIndices
from tests import hugging_face as datasets
from tests.hugging_face import Features, LargeList, List, Value
from tests.parity.compare import TorchLoader, assert_same

TABLE = pa.table(
    {
        "ids": pa.chunked_array([[[1, 2], [3]], [[4, 5, 6]]], pa.list_(pa.int32())),
        "pair": pa.array([[1.5, 2], [3, 4], [5, 6]], pa.list_(pa.float64(), 2)),
        "id": pa.array([7, 8, 9], pa.int16()),
        "text": ["a", "bé", ""],
        "is_good": [True, None, False],
    }
)


def write_arrow(path, table=TABLE):
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


def write_stream(path, table=TABLE):
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)


WRITERS = {
    "a.arrow": write_arrow,
    "b.arrow": write_stream,
    "c.feather": lambda path, table=TABLE: feather.write_feather(table, path),
    "d.parquet": lambda path, table=TABLE: parquet.write_table(table, path),
}


def plain(sample):
    return {
        key: value.tolist() if isinstance(value, np.ndarray | np.generic | torch.Tensor) else value
        for key, value in sample.items()
    }


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("form", ["numpy", "torch", None])
def test_samples_are_the_rows_of_a_file(name, form, tmp_path):
    path = tmp_path / name
    WRITERS[name](str(path))
    dataset = ArrowTable(path, format=form)
    assert len(dataset) == 3
    assert [plain(dataset[n]) for n in (0, 1, 2, -1)] == [
        TABLE.to_pylist()[n] for n in (0, 1, 2, -1)
    ]
    copy = pickle.loads(pickle.dumps(dataset))
    assert list(map(plain, copy.__getitems__([2, 0]))) == [TABLE.to_pylist()[n] for n in (2, 0)]


def test_numbers_have_the_table_s_dtypes():
    ids, number = ArrowTable(TABLE)[0]["ids"], ArrowTable(TABLE)[0]["id"]
    assert (type(ids), ids.dtype, ids.flags.writeable) == (np.ndarray, np.int32, True)
    assert type(number) is np.int16
    sample = ArrowTable(TABLE, format="torch")[1]
    assert (sample["ids"].dtype, sample["pair"].dtype) == (torch.int32, torch.float64)
    assert (sample["id"].dtype, sample["id"].shape) == (torch.int16, ())
    assert type(ArrowTable(TABLE, format=None)[0]["id"]) is int


def test_files_follow_each_other_and_columns_are_chosen_in_order(tmp_path):
    for name, write in WRITERS.items():
        write(str(tmp_path / name))
    paths = [tmp_path / name for name in WRITERS]
    dataset = ArrowTable(paths, columns=["text", "id"])
    assert len(dataset) == 12
    assert [list(dataset[n].items()) for n in (4, 11)] == [
        [("text", "bé"), ("id", 8)],
        [("text", ""), ("id", 9)],
    ]
    assert list(ArrowTable(str(paths[3]), ["id"])[0]) == ["id"]


def test_a_table_of_files_is_pickled_as_its_paths(tmp_path, monkeypatch):
    rows = pa.table({"x": np.arange(100_000)})
    write_arrow(tmp_path / "a.arrow", rows)
    monkeypatch.chdir(tmp_path)
    dataset = ArrowTable("a.arrow")
    monkeypatch.undo()
    assert len(pickle.dumps(dataset)) < 1_000
    assert pickle.loads(pickle.dumps(dataset))[99_999] == {"x": 99_999}
    assert pickle.loads(pickle.dumps(ArrowTable(rows, ["x"])))[99_999] == {"x": 99_999}


def test_what_cannot_be_opened_is_said(tmp_path):
    with pytest.raises(ValueError, match='format is "numpy", "torch" or None, but it is \'jax\''):
        ArrowTable(TABLE, format="jax")
    with pytest.raises(ValueError, match="at least one file"):
        ArrowTable([])
    with pytest.raises(KeyError, match="there is no column 'idz': the columns are"):
        ArrowTable(TABLE, ["idz"])
    with pytest.raises(FileNotFoundError, match=r"none\.arrow"):
        ArrowTable(tmp_path / "none.arrow")
    (tmp_path / "odd.arrow").write_text("no table, but a text that is long enough")
    with pytest.raises(ValueError, match=r"odd\.arrow cannot be read"):
        ArrowTable(tmp_path / "odd.arrow")
    write_arrow(tmp_path / "one.arrow", TABLE.select(["id"]))
    write_arrow(tmp_path / "other.arrow", pa.table({"id": [1]}))
    with pytest.raises(ValueError, match=r"other\.arrow has other columns or types than"):
        ArrowTable([tmp_path / "one.arrow", tmp_path / "other.arrow"])
    for wrong in (5, TABLE.to_batches()[0]):
        with pytest.raises(TypeError, match=r"a path, several paths or a pyarrow\.Table, but the"):
            ArrowTable(wrong)
    for columns in ("id", [1]):
        with pytest.raises(TypeError, match="columns should be a list of names"):
            ArrowTable(TABLE, columns)
    for columns in ([], ["id", "id"]):
        with pytest.raises(ValueError, match="columns should be different names, at least one"):
            ArrowTable(TABLE, columns)
    with pytest.raises(IndexError, match="there is no row 3: the table has 3"):
        ArrowTable(TABLE)[3]


NUMBERS = [
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
]


@settings(max_examples=40)
@given(
    st.sampled_from(NUMBERS),
    st.sampled_from(NUMBERS),
    st.sampled_from(["numpy", "torch", None]),
    st.lists(st.integers(0, 7), min_size=1, max_size=9),
)
def test_batches_are_those_of_torch(number, item, form, indices):
    numbers = np.arange(8).astype(number)
    items = pa.array(np.arange(24).astype(item))
    table = pa.table(
        {
            "number": numbers,
            "list": pa.ListArray.from_arrays(pa.array(range(0, 25, 3), pa.int32()), items),
            "text": ["a", "b\0", "c", "d", "e", "f", "g", "h"],
        }
    )
    dataset = ArrowTable(table, format=form)
    options = {"dataset": dataset, "batch_size": len(indices), "sampler": indices}
    try:
        (theirs,) = TorchLoader(**options)
    except TypeError as error:  # of NumPy's numbers of uint64
        with pytest.raises(TypeError, match=re.escape(str(error))):
            list(shmloader.DataLoader(**options))
        return
    (ours,) = shmloader.DataLoader(**options)
    assert_same(ours, theirs)
    assert_same(ours, default_collate([dataset[index] for index in indices]))


class Plain(Dataset):
    """The same samples, one by one."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


def drawing(samples):
    return [sample["id"].item() for sample in samples], sample_rng().random(), torch.rand(())


def test_a_collate_function_draws_the_same_numbers_as_for_samples_that_were_loaded():
    config = FetchConfig(False, True, False, seed=5)
    batch = PositionedIndices([2, 0, 1], epoch=1, first=6)
    made = []
    for dataset in (ArrowTable(TABLE), Plain(ArrowTable(TABLE))):
        arrays = Arrays(dataset) if type(dataset) is ArrowTable else None
        maker = BatchMaker(
            config, dataset, drawing, where="here", timer=Timer(), restores_rngs=True, arrays=arrays
        )
        made.append(maker.make(batch))
    assert made[0] == made[1]
    assert made[0][0] == [9, 7, 8]


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists_are_found_in_any_chunk(kind, is_compiled, monkeypatch):
    """The compiled part searches the chunks, which have any number of rows, or are slices."""
    if not is_compiled:
        monkeypatch.setattr(reading, "find_lists", None)
    elif reading.find_lists is None:
        pytest.skip("installed without a compiler")
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 99, length).tolist() for length in rng.integers(0, 6, 60)]
    whole = pa.array(lists, kind(pa.int32()))
    cuts = [0, 1, 1, 9, 10, 31, 47, 60]
    chunks = [whole[start:stop] for start, stop in itertools.pairwise(cuts)]
    copies = [pa.array(chunk.to_pylist(), chunk.type) for chunk in chunks]
    for column in (pa.chunked_array(chunks), pa.chunked_array(copies), pa.chunked_array([whole])):
        reader = reading.ListField(column)
        rows = rng.permutation(60)
        starts, counts, count = reader.find(rows)
        assert count is None
        found = [
            reader.values[start : start + count].tolist()
            for start, count in zip(starts, counts, strict=True)
        ]
        assert found == [lists[row] for row in rows]
        alike = np.array([row for row in range(60) if len(lists[row]) == 3])
        assert reader.find(alike)[2] == 3
        assert reader.find(rows[:0])[2] is None


# Lengths of lists, from the offsets alone ----------------------------------------------------

LISTS = [[1, 2], [], [3], [4, 5, 6], [7]]


@pytest.mark.parametrize("feature", [List, LargeList])
def test_lengths_follow_the_mapping_of_a_dataset(feature):
    dataset = datasets.Dataset.from_dict(
        {"ids": LISTS, "id": range(5)}, Features(ids=feature(Value("int32")), id=Value("int8"))
    )
    for one in (dataset, dataset.shuffle(seed=3), dataset.select([4, 0, 0, 3]), dataset.select([])):
        expected = [len(ids) for ids in one["ids"]]
        found = lengths(one, "ids")
        assert found.dtype == np.int64
        assert found.tolist() == expected


@pytest.mark.parametrize("size", [{}, {"length": 2}])
def test_rows_that_are_none_do_not_matter_once_they_are_dropped(size):
    features = Features(ids=List(Value("int32"), **size))
    lists = [[1, 2], None, [3, 4], None]
    whole = datasets.Dataset.from_dict({"ids": lists}, features)
    dataset = whole.select([0, 2])  # filter() makes such a mapping, too
    assert lengths(dataset, "ids").tolist() == [2, 2]
    with pytest.raises(ValueError, match="1 of 2 lists are None"):
        lengths(whole.select([0, 3]), "ids")


def test_lengths_of_chunks_and_of_lists_of_one_length():
    chunks = [pa.array(LISTS).slice(1, 3), pa.array([], pa.list_(pa.int64())), pa.array(LISTS)]
    fixed = pa.array([[1, 2, 3]] * 8, pa.list_(pa.int8(), 3))
    table = ArrowTable(pa.table({"ids": pa.chunked_array(chunks), "fixed": fixed}))
    assert lengths(table, "ids").tolist() == [0, 1, 3, 2, 0, 1, 3, 1]
    assert lengths(table, "fixed").tolist() == [3] * 8


def test_what_has_no_lengths_is_said():
    table = ArrowTable(pa.table({"ids": [[1], None], "id": [1, 2], "text": ["a", "b"]}))
    with pytest.raises(ValueError, match="1 of 2 lists are None"):
        lengths(table, "ids")
    with pytest.raises(TypeError, match="has int64"):
        lengths(table, "id")
    with pytest.raises(TypeError, match="has string"):
        lengths(table, "text")
    with pytest.raises(KeyError, match=r"no column 'idz': the columns are \['ids', 'id', 'text'\]"):
        lengths(table, "idz")
    with pytest.raises(TypeError, match="but the dataset is a list"):
        lengths([[1]], "ids")
