"""What a loader of a stream does about shards and records that cannot be read."""

import pytest

from shmloader import DataLoader, ShardError
from shmloader.streams import Shards, open_jsonl, open_tar
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


def test_a_broken_and_a_missing_shard_are_left_out(tmp_path):
    paths = [str(tmp_path / f"{name}.tar") for name in "abcd"]
    for path in paths[:3]:
        write(path, tar_bytes([("x.cls", path[-5:].encode()), ("y.cls", b"2" * 2000)]))
    with open(paths[1], "r+b") as file:  # noqa: PTH123
        file.truncate(1500)
    found, failures = load(paths, open_tar, on_error="skip")
    assert [(record["__key__"], record["cls"][:5]) for record in found] == [
        ("x", b"a.tar"), ("y", b"22222"), ("x", b"c.tar"), ("y", b"22222"),
    ]  # fmt: skip
    assert failures.total == 2
    with pytest.raises(ShardError, match=f"shard {paths[1]} cannot be read: after 1 samples"):
        load(paths, open_tar)
