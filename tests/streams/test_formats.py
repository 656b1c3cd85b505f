"""Every format gives the records of a list: from any number on, counted, and at any numbers."""

import json
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader import ShardError
from shmloader.streams import ParquetFormat, as_format, open_jsonl, open_parquet, open_tar
from shmloader.streams.formats import CallableFormat, Format
from tests.streams.support import rest_of_shard, write_jsonl, write_table, write_tar

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
    write = {"tar": write_tar, "jsonl": write_jsonl, "parquet": write_table}
    return path, format_, write[ending.partition(".")[0]](path, 30)


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
