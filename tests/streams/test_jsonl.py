"""JSON Lines shards: the records of json, and lines that are none."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader import ShardError
from shmloader.streams import open_jsonl
from tests.streams.support import rest_of_shard, write

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
