"""Shards of Parquet: the values of pyarrow, and lists of numbers as arrays."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader import ShardError
from shmloader.streams import ParquetFormat, open_parquet
from tests.streams.support import rest_of_shard, write_columns

NUMBERS = [pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()]
INTS = st.integers(0, 100)


def plain(value):
    """Return a value with lists in place of arrays."""
    return value.tolist() if isinstance(value, np.ndarray) else value


@st.composite
def columns(draw):
    """A column of 12 rows: of lists of numbers of any kind, or of something else."""
    kind = draw(st.sampled_from(NUMBERS))
    lists = draw(
        st.sampled_from([pa.list_(kind), pa.large_list(kind), pa.list_(kind, 3), kind, pa.string()])
    )
    if lists == kind:
        values = INTS
    elif lists == pa.string():
        values = st.text(max_size=3)
    else:
        size = (
            {"min_size": 3, "max_size": 3}
            if pa.types.is_fixed_size_list(lists)
            else {"max_size": 5}
        )
        values = st.lists(INTS if draw(st.booleans()) else INTS | st.none(), **size)
    if draw(st.booleans()):
        values = values | st.none()
    return pa.array(draw(st.lists(values, min_size=12, max_size=12)), lists)


@settings(max_examples=40)
@given(
    column=columns(),
    rows=st.integers(1, 13),
    batch_rows=st.integers(1, 13),
    start=st.integers(0, 13),
)
def test_values_are_those_of_pyarrow(tmp_path_factory, column, rows, batch_rows, start):
    table = pa.table({"id": range(12), "x": column})
    path = str(tmp_path_factory.mktemp("columns") / "a.parquet")
    write_columns(path, table, rows)
    expected = table.to_pylist()
    format_ = ParquetFormat(batch_rows=batch_rows)
    found = list(rest_of_shard(format_, path, start))
    assert [{key: plain(value) for key, value in row.items()} for row in found] == expected[start:]
    for row in found:
        if isinstance(row["x"], np.ndarray):
            assert row["x"].dtype == np.dtype(column.type.value_type.to_pandas_dtype())
            assert row["x"].flags.writeable
            assert row["x"].flags.owndata
    at = [0, 7, 11]
    found = [{key: plain(value) for key, value in row.items()} for row in format_.read(path, at)]
    assert found == [expected[row] for row in at]


def test_lists_of_numbers_are_arrays_and_all_else_is_pythons(tmp_path):
    day = dt.date(2024, 2, 29)
    record = {
        "tokens": [1, 2], "none": None, "empty": [], "text": "é", "bytes": b"\xff", "flag": True,
        "words": ["a", None], "nested": [[1], []], "struct": {"a": 1, "b": [2]}, "day": day,
    }  # fmt: skip
    schema = pa.schema(
        [
            ("tokens", pa.list_(pa.int32())), ("none", pa.list_(pa.int32())),
            ("empty", pa.list_(pa.float32())), ("text", pa.string()), ("bytes", pa.binary()),
            ("flag", pa.bool_()), ("words", pa.list_(pa.string())),
            ("nested", pa.list_(pa.list_(pa.int64()))),
            ("struct", pa.struct([("a", pa.int8()), ("b", pa.list_(pa.int8()))])),
            ("day", pa.date32()),
        ]
    )  # fmt: skip
    path = str(tmp_path / "a.parquet")
    write_columns(path, pa.Table.from_pylist([record] * 3, schema))
    for found in open_parquet(path):
        assert {name for name, value in found.items() if isinstance(value, np.ndarray)} == {
            "tokens", "empty",
        }  # fmt: skip
        assert {name: plain(value) for name, value in found.items()} == record
        assert list(found) == list(record)


def test_lists_of_one_length_are_found_in_the_middle_of_a_batch(tmp_path):
    path = str(tmp_path / "a.parquet")
    rows = [[1, 2, 3], None, [7, 8, 9], [10, 11, 12]]
    write_columns(path, pa.table({"x": pa.array(rows, pa.list_(pa.int32(), 3))}))
    assert [plain(row["x"]) for row in rest_of_shard(open_parquet, path, 2)] == rows[2:]
    write_columns(path, pa.table({"x": pa.array(rows[2:], pa.list_(pa.int32(), 3))}))
    (row,) = rest_of_shard(open_parquet, path, 1)
    assert row["x"].tolist() == rows[3]


def test_columns_are_chosen_in_their_order(tmp_path):
    path = str(tmp_path / "a.parquet")
    write_columns(path, pa.table({"a": [1, 2], "b": [3, 4], "c": [5, 6]}))
    chosen = ParquetFormat(columns=["c", "a"])
    assert [list(row.items()) for row in chosen(path)] == [
        [("c", 5), ("a", 1)], [("c", 6), ("a", 2)],
    ]  # fmt: skip
    assert list(chosen.read(path, [1])) == [{"c": 6, "a": 2}]
    with pytest.raises(ShardError, match=r"has no column 'd', but \['a', 'b', 'c'\]"):
        next(ParquetFormat(columns=["a", "d"])(path))


def test_a_shard_without_rows_has_no_records(tmp_path):
    path = str(tmp_path / "a.parquet")
    write_columns(path, pa.table({"a": pa.array([], pa.int64())}))
    assert (list(open_parquet(path)), open_parquet.count(path)) == ([], 0)
    assert list(open_parquet.read(path, [0])) == []


@pytest.mark.parametrize("damage", ["empty", "text", "cut"])
def test_a_damaged_shard_is_named(tmp_path, damage):
    path = tmp_path / "a.parquet"
    write_columns(str(path), pa.table({"a": range(2000)}), rows=2000)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"text " * 9, "cut": data[: len(data) // 2]}[damage])
    with pytest.raises(ShardError, match=f"shard {path} cannot be read") as info:
        list(open_parquet(str(path)))
    assert (info.value.shard, info.value.record) == (str(path), None)
    assert "\n" not in str(info.value)


def test_row_groups_without_a_wanted_record_are_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    write_columns(str(path), pa.table({"a": np.arange(40_000)}), rows=10_000)
    data = bytearray(path.read_bytes())
    # The pages of the first two groups are damaged.
    data[4 : len(data) // 2 - 2_000] = bytes(len(data) // 2 - 2_004)
    path.write_bytes(data)
    with pytest.raises(ShardError):
        next(open_parquet.read(str(path), [0]))
    assert next(rest_of_shard(open_parquet, str(path), 30_001)) == {"a": 30_001}
    assert list(open_parquet.read(str(path), [30_000, 39_999])) == [{"a": 30_000}, {"a": 39_999}]


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="columns should be a list of names, but is 'text'"):
        ParquetFormat(columns="text")
    with pytest.raises(ValueError, match="columns should have a name"):
        ParquetFormat(columns=[])
    with pytest.raises(ValueError, match="batch_rows should be 1 or more, but got batch_rows=0"):
        ParquetFormat(batch_rows=0)
    assert repr(ParquetFormat(["a"])) == "ParquetFormat(columns=['a'], batch_rows=256)"
