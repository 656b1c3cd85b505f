"""The lengths of lists, from the offsets alone."""

import numpy as np
import pyarrow as pa
import pytest

from shmloader.arrow import ArrowTable, lengths
from tests import hugging_face as datasets
from tests.hugging_face import Features, LargeList, List, Value

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
