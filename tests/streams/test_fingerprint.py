"""The fingerprint of a list of shards: what changes it, and what does not."""

import random
import shutil

import pytest

from shmloader import ShardError
from shmloader.streams import fingerprint


def write(folder, sizes):
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    return [str(folder / name) for name in sizes]


def test_it_depends_on_names_sizes_and_order(tmp_path):
    shards = write(tmp_path / "a", {"1.tar": 10, "2.tar": 20, "3.tar": 30})
    found = {
        "all": fingerprint(shards),
        "fewer": fingerprint(shards[:2]),
        "other order": fingerprint(shards[::-1]),
        "twice": fingerprint(shards + shards),
        "none": fingerprint([]),
        "size": fingerprint(write(tmp_path / "b", {"1.tar": 10, "2.tar": 21, "3.tar": 30})),
        "name": fingerprint(write(tmp_path / "c", {"1.tar": 10, "4.tar": 20, "3.tar": 30})),
    }
    assert len(set(found.values())) == len(found)
    assert {len(value) for value in found.values()} == {16}
    assert fingerprint(list(shards)) == found["all"]


def test_shards_may_be_moved_and_touched_as_a_whole(tmp_path, monkeypatch):
    shards = write(tmp_path / "a", {"1.tar": 10, "2.tar": 20})
    before = fingerprint(shards)
    shutil.copytree(tmp_path / "a", tmp_path / "far" / "away")
    for folder in (tmp_path / "far" / "away", f"file://{tmp_path}/a"):
        assert fingerprint([f"{folder}/1.tar", f"{folder}/2.tar"]) == before
    monkeypatch.chdir(tmp_path / "a")
    assert fingerprint(["1.tar", "2.tar"]) == before


def test_of_remote_shards_the_names_count():
    near = [f"s3://bucket/data/{number}.tar" for number in range(3)]
    far = [f"https://server/{number}.tar" for number in range(3)]
    assert fingerprint(near) == fingerprint(far) != fingerprint(far[:2])


def test_a_long_list_is_that_of_its_parts_in_order(tmp_path):
    shards = write(tmp_path / "a", {f"{number}.tar": number % 7 for number in range(2500)})
    first = fingerprint(shards)
    assert fingerprint(shards) == first
    random.Random(0).shuffle(shards)
    assert fingerprint(shards) != first


@pytest.mark.parametrize("count", [3, 2500])
def test_the_first_missing_file_is_named(tmp_path, count):
    shards = write(tmp_path / "a", {f"{number}.tar": 0 for number in range(count)})
    shards.insert(count - 1, f"{tmp_path}/a/none.tar")
    shards.append("gone.tar")
    with pytest.raises(
        ShardError, match=r"shard .*/a/none\.tar cannot be read: No such file"
    ) as info:
        fingerprint(shards)
    assert info.value.shard == f"{tmp_path}/a/none.tar"
