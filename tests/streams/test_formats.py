"""Every format gives the records of a list: from any number on, counted, and at any numbers."""

import datetime as dt
import json
import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader import ShardError
from shmloader.streams import ParquetFormat, as_format, open_jsonl, open_parquet, open_tar
from shmloader.streams.formats import CallableFormat, Format
from tests.streams.support import (
    rest_of_shard,
    write,
    write_columns,
    write_jsonl,
    write_table,
    write_tar,
)

COMPRESSIONS = ["", ".gz", ".zst"]


def lines_of(path):
    with Path(path).open(encoding="utf-8") as file:
        yield from map(json.loads, file)


SHARDS = [
    *(("tar" + ending, open_tar) for ending in COMPRESSIONS),
    *(("jsonl" + ending, open_jsonl) for ending in COMPRESSIONS),
    ("parquet", ParquetFormat(batch_rows=4)),
    ("parquet", open_parquet),
    ("jsonl", as_format(lines_of)),
]


@pytest.fixture(params=SHARDS, ids=lambda param: f"{param[0]}-{param[1]!r}"[:20], scope="module")
def shard(request, tmp_path_factory):
    """A shard of 30 records, its format, and the records."""
    ending, format_ = request.param
    path = str(tmp_path_factory.mktemp("shards") / f"shard.{ending}")
    writers = {"tar": write_tar, "jsonl": write_jsonl, "parquet": write_table}
    return path, format_, writers[ending.partition(".")[0]](path, 30)


@settings(max_examples=40)
@given(
    st.sets(st.integers(0, 31), max_size=12).map(sorted)
    | st.integers(0, 40).map(lambda start: range(start, sys.maxsize))
)
def test_records_are_counted_and_found_by_their_numbers_or_from_one_on(shard, numbers):
    path, format_, records = shard
    expected = [records[number] for number in range(30) if number in numbers]
    assert list(format_.read(path, numbers)) == expected
    assert format_.count(path) == 30


def test_a_format_can_be_pickled_and_is_one(shard):
    path, format_, records = shard
    copied = pickle.loads(pickle.dumps(format_))
    assert isinstance(copied, Format)
    assert as_format(copied) is copied
    assert list(rest_of_shard(copied, path)) == records


def test_a_missing_shard_is_named(shard):
    path, format_, _ = shard
    for read in (format_.count, lambda it: next(format_.read(it, [0]))):
        with pytest.raises((ShardError, FileNotFoundError)) as info:
            read(f"{path[:-20]}/not-there.tar")
        assert "not-there.tar" in str(info.value)
        if not isinstance(format_, CallableFormat):
            assert info.value.record is None
            assert isinstance(info.value.__cause__, FileNotFoundError)


class Watched:
    """Records that say whether they were closed, and that fail at number 5."""

    def __init__(self, count=20):
        self.count, self.opened, self.closed = count, 0, 0
        self.kept = []

    def __call__(self, path):
        self.opened += 1
        # An iterator that is garbage would be closed by itself.
        self.kept.append(self.records())
        return self.kept[-1]

    def records(self):
        try:
            for number in range(self.count):
                if number == 5:
                    raise KeyError("number five")
                yield number
        finally:
            self.closed += 1


def test_a_users_iterator_is_closed_and_its_error_has_shard_and_record():
    watched = Watched()
    records = as_format(watched).read("one.bin", range(9))
    assert [next(records), next(records)] == [0, 1]
    records.close()
    assert watched.closed == 1
    with pytest.raises(KeyError) as info:
        list(rest_of_shard(as_format(watched), "one.bin", 3))
    assert info.value.__notes__ == ["This was raised at record 5 of shard one.bin."]
    assert watched.closed == watched.opened == 2
    assert list(as_format(watched).read("one.bin", [0, 4])) == [0, 4]
    assert watched.closed == watched.opened == 3


def test_what_is_no_format_is_refused():
    with pytest.raises(TypeError, match="open should be a format such as open_tar, or a function"):
        as_format("tar")


# JSON Lines ----------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
BREAKS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \t\r\n", b"\n\x0b\n", b"  \n"])


@settings(max_examples=60)
@given(
    records=st.lists(VALUES, max_size=8),
    breaks=st.lists(BREAKS, min_size=8, max_size=8),
    has_end=st.booleans(),
    begin=st.sampled_from([b"", b"\n", b"\xef\xbb\xbf"]),
    is_ascii=st.booleans(),
)
def test_records_are_the_lines_that_are_not_blank(
    tmp_path_factory, records, breaks, has_end, begin, is_ascii
):
    lines = [
        json.dumps(record, ensure_ascii=is_ascii).encode("utf-8", "replace") for record in records
    ]
    expected = [json.loads(line) for line in lines]
    text = b"".join(line + end for line, end in zip(lines, breaks, strict=False))
    if lines:
        text = begin + (text if has_end else text.rstrip())
    path = str(tmp_path_factory.mktemp("jsonl") / "a.jsonl")
    write(path, text)
    assert list(open_jsonl(path)) == expected
    assert open_jsonl.count(path) == len(expected)
    for start in range(len(expected) + 1):
        assert list(rest_of_shard(open_jsonl, path, start)) == expected[start:]
    assert list(open_jsonl.read(path, range(len(expected)))) == expected


def test_what_json_takes_is_taken(tmp_path):
    path = str(tmp_path / "a.jsonl")
    write(path, b'[NaN, -Infinity, 1e400]\n"\\ud800"\n')
    (numbers, text) = open_jsonl(path)
    assert math.isnan(numbers[0])
    assert (numbers[1:], text) == ([-math.inf, math.inf], "\ud800")


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("line", [b"{", b"{} {}", b'"\xff"', b"[" * 100_000, b"text"])
def test_a_bad_line_is_named_and_the_next_ones_can_be_read(tmp_path, line, ending):
    path = str(tmp_path / f"a.jsonl{ending}")
    write(path, b"1\n\n2\n" + line + b"\n4\n")
    records = open_jsonl(path)
    assert [next(records), next(records)] == [1, 2]
    with pytest.raises(
        ShardError, match=f"record 2 of shard {path} cannot be read: it is no JSON"
    ) as info:
        next(records)
    assert (info.value.shard, info.value.record) == (path, 2)
    assert list(rest_of_shard(open_jsonl, path, 3)) == [4]
    assert open_jsonl.count(path) == 4
    assert list(open_jsonl.read(path, [0, 3])) == [1, 4]
    with pytest.raises(ShardError, match="record 2 of shard"):
        list(open_jsonl.read(path, [0, 2]))


# Parquet: the values of pyarrow, and lists of numbers as arrays --------------------------------

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
