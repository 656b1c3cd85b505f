"""Every format gives the records of a list: from any number on, counted, and at any numbers."""

import json
import math
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader import ShardError
from shmloader.streams import ParquetFormat, as_format, open_jsonl, open_parquet, open_tar
from shmloader.streams.formats import CallableFormat, Format
from tests.streams.support import rest_of_shard, write, write_jsonl, write_table, write_tar

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
