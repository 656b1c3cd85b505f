"""The index beside a shard: made once, for this shard, as a whole."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from shmloader.streams import index, open_jsonl, open_tar
from shmloader.streams.index import SUFFIX, arrays_of
from tests.streams.support import write_jsonl, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shmloader" / "indexes"


@pytest.fixture
def made(monkeypatch):
    """The shards whose index was made."""
    made = []

    def make(path):
        made.append(path)
        return {"a": np.arange(3), "b": np.array([7], np.uint8), "c": np.array([0.5])}

    make.made = made
    return make


def write_shard(tmp_path, data=b"shard"):
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    return str(path)


def test_an_index_is_made_once_and_read_then(tmp_path, made):
    path = write_shard(tmp_path)
    for _ in range(3):
        arrays = arrays_of(path, "kind", made)
        assert {name: array.tolist() for name, array in arrays.items()} == {
            "a": [0, 1, 2], "b": [7], "c": [0.5],
        }  # fmt: skip
        assert [array.dtype.str for array in arrays.values()] == ["<i8", "|u1", "<f8"]
    assert made.made == [path]
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.bin", "a.bin" + SUFFIX}


@pytest.mark.parametrize("change", ["size", "time", "kind"])
def test_the_index_of_a_changed_shard_is_made_anew(tmp_path, made, change):
    path = write_shard(tmp_path)
    arrays_of(path, "kind", made)
    status = Path(path).stat()
    if change == "size":
        write_shard(tmp_path, b"a longer shard")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "time":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    arrays_of(path, "other kind" if change == "kind" else "kind", made)
    assert len(made.made) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text"])
def test_a_damaged_index_is_made_anew(tmp_path, made, damage):
    path = write_shard(tmp_path)
    arrays_of(path, "kind", made)
    beside = tmp_path / ("a.bin" + SUFFIX)
    data = bytearray(beside.read_bytes())
    if damage == "flipped":
        data[-20] ^= 1
    beside.write_bytes({"empty": b"", "cut": data[:-9], "text": b"no index " * 9}.get(damage, data))
    assert arrays_of(path, "kind", made)["a"].tolist() == [0, 1, 2]
    assert len(made.made) == 2
    arrays_of(path, "kind", made)
    assert len(made.made) == 2


def test_an_index_is_kept_in_the_cache_if_it_cannot_lie_beside(tmp_path, made, cache):
    path = write_shard(tmp_path)
    (tmp_path / ("a.bin" + SUFFIX)).mkdir()  # root may write in every folder
    for _ in range(2):
        arrays_of(path, "kind", made)
    assert made.made == [path]
    assert len(list(cache.iterdir())) == 1


def test_an_index_that_can_lie_nowhere_is_made_each_time(tmp_path, made, cache):
    path = write_shard(tmp_path)
    (tmp_path / ("a.bin" + SUFFIX)).mkdir()
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        assert arrays_of(path, "kind", made)["b"].tolist() == [7]
    assert len(made.made) == 2


def test_an_index_can_be_read_by_others(tmp_path, made):
    path = write_shard(tmp_path)
    arrays_of(path, "kind", made)
    mask = os.umask(0)
    os.umask(mask)
    mode = stat.S_IMODE(Path(path + SUFFIX).stat().st_mode)
    assert mode == 0o666 & ~mask


def test_an_interrupted_index_leaves_nothing(tmp_path, made, monkeypatch):
    path = write_shard(tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(index.Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        arrays_of(path, "kind", made)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


def test_formats_with_an_index_do_not_read_the_shard_to_count(tmp_path):
    for name, write, format_ in [
        ("a.tar", write_tar, open_tar),
        ("a.jsonl", write_jsonl, open_jsonl),
    ]:
        path = tmp_path / name
        write(str(path), 30)
        assert format_.count(str(path)) == 30
        # As large and as old, but without a record: what counts now is the index.
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert format_.count(str(path)) == 30
