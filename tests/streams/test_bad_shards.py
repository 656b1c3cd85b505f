"""What a loader of a stream does about shards and records that cannot be read."""

import json
import random
from pathlib import Path

import pytest

from shmloader import DataLoader, ShardError, TooManyFailures
from shmloader.streams import ShardCache, Shards, open_jsonl, open_tar
from tests.streams.support import tar_bytes, write


def failing(path):
    """Yield five records, or two and an error."""
    for number in range(5):
        if path == "1" and number == 2:
            raise KeyError("two")
        yield path, number


def load(paths, open_, **options):
    stream = Shards(paths, open_, seed=0, readers=1, shuffle_shards=False).batch(2, collate=list)
    loader = DataLoader(stream, batch_size=None, **options)
    return [record for batch in loader for record in batch], loader.failures


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_users_iterator_that_raises_ends_its_shard(num_workers):
    found, failures = load(["0", "1", "2"], failing, num_workers=num_workers, on_error="skip")
    expected = [("0", number) for number in range(5)] + [("1", 0), ("1", 1)]
    assert found == expected + [("2", number) for number in range(5)]
    assert failures.total == 1
    assert failures[0].index == "record 2 of shard 1"


def test_a_bad_line_is_left_out_and_the_rest_of_its_shard_is_read(tmp_path):
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    write(paths[0], b"1\n2\n{\n4\nx\n6\n")
    write(paths[1], b"7\n")
    found, failures = load(paths, open_jsonl, on_error="skip")
    assert found == [1, 2, 4, 6, 7]
    assert [each.index for each in failures] == [f"record {n} of shard {paths[0]}" for n in (2, 4)]


def test_the_next_shard_is_asked_for_once_though_records_fail(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ShardCache, "prefetch", lambda _, url: asked.append(url))
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    write(paths[0], b"1\n{\n{\n4\nx\n6\n")
    write(paths[1], b"7\n")
    assert load(paths, open_jsonl, on_error="skip")[0] == [1, 4, 6, 7]
    assert asked == paths[1:]


class Stuck:
    """Names record 0 in every error, so that it cannot be gone past."""

    seeks = False

    def count(self, path):
        raise NotImplementedError

    def read(self, path, numbers):
        if path == "1":
            yield from [(path, 0), (path, 1)][numbers[0] :]
            raise ShardError("broken", path, 0)
        yield path, 0


def test_an_error_about_an_earlier_record_ends_its_shard():
    found, failures = load(["0", "1", "2"], Stuck(), on_error="skip")
    assert found == [("0", 0), ("1", 0), ("1", 1), ("2", 0)]
    assert [each.index for each in failures] == ["record 2 of shard 1"]


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("size", [0, 5, 1_000, -3])
def test_a_cut_compressed_shard_is_no_end_of_the_shard(tmp_path, ending, size):
    paths = [str(tmp_path / f"a.jsonl.{ending}"), str(tmp_path / "b.jsonl")]
    lines = [random.Random(number).randbytes(40).hex() for number in range(500)]
    write(paths[0], "\n".join(map(json.dumps, lines)).encode())
    data = Path(paths[0]).read_bytes()
    Path(paths[0]).write_bytes(data[:size])
    write(paths[1], b"7\n")
    found, failures = load(paths, open_jsonl, on_error="skip")
    assert found == [7]
    assert [each.index for each in failures] == [f"record 0 of shard {paths[0]}"]
    assert "it is no JSON" not in str(failures[0].error)


def test_messages_name_a_record_by_its_shard(tmp_path, caplog):
    path = str(tmp_path / ("a long name " * 9 + ".jsonl"))
    write(path, b"1\nx\ny\n")
    with pytest.raises(TooManyFailures, match=f"The last was record 2 of shard {path} "):
        load([path], open_jsonl, on_error="skip", max_failures=1)
    (line,) = caplog.messages
    assert line.startswith(f"record 1 of shard {path} failed and is left out (this process")


@pytest.mark.parametrize("name", ["a b", "ä", "a%20b", "a#b", "a?b", "a:b"])
def test_a_shard_may_be_a_file_url_of_any_name(tmp_path, name):
    path = tmp_path / f"{name}.jsonl"
    write(str(path), b"1\n2\n")
    assert load([path.as_uri()], open_jsonl)[0] == [1, 2]
    if "%" not in name:  # as people write it
        assert load([f"file://{path}"], open_jsonl)[0] == [1, 2]


def test_shards_that_are_missing_or_cut_in_or_after_a_file_are_left_out(tmp_path):
    paths = [str(tmp_path / f"{name}.tar") for name in "abcde"]
    for path, size in zip(paths[:4], (None, 1500, 1024, None), strict=True):
        files = [("x.cls", path[-5:].encode()), ("y.cls", b"2" * 2000)]
        write(path, tar_bytes(files)[:size])
    found, failures = load(paths, open_tar, on_error="skip")
    assert [(record["__key__"], record["cls"][:5]) for record in found] == [
        ("x", b"a.tar"), ("y", b"22222"), ("x", b"d.tar"), ("y", b"22222"),
    ]  # fmt: skip
    assert [each.index for each in failures] == [
        f"record 0 of shard {paths[number]}" for number in (1, 2, 4)
    ]
    with pytest.raises(ShardError, match=f"shard {paths[1]} cannot be read: at the file"):
        load(paths, open_tar)
    with pytest.raises(ShardError, match="neither a file nor a block of zeros"):
        load(paths[2:], open_tar)
