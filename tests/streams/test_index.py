"""The index beside a shard: made once, for this shard, as a whole; and `shmloader index`."""

import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest

from shmloader.cli import index as command
from shmloader.cli.main import main
from shmloader.streams import index, open_jsonl, open_tar
from shmloader.streams.index import SUFFIX, arrays_of
from tests.streams.support import write_jsonl, write_table, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shmloader" / "indexes"


@pytest.fixture
def made():
    """A function that makes indexes, and the paths of their shards."""

    def make(path):
        make.made.append(path)
        return {"a": np.arange(3), "b": np.array([7], np.uint8), "c": np.array([0.5])}

    make.made = []
    return make


@pytest.fixture
def path(tmp_path):
    """A shard."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"shard")
    return str(path)


def test_an_index_is_made_once_and_read_then(tmp_path, path, made):
    for _ in range(3):
        arrays = arrays_of(path, "kind", made)
        assert {name: array.tolist() for name, array in arrays.items()} == {
            "a": [0, 1, 2], "b": [7], "c": [0.5],
        }  # fmt: skip
        assert [array.dtype.str for array in arrays.values()] == ["<i8", "|u1", "<f8"]
    assert made.made == [path]
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.bin", "a.bin" + SUFFIX}


@pytest.mark.parametrize("change", ["size", "time", "kind"])
def test_the_index_of_a_changed_shard_is_made_anew(path, made, change):
    arrays_of(path, "kind", made)
    status = Path(path).stat()
    if change == "size":
        Path(path).write_bytes(b"a longer shard")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "time":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    arrays_of(path, "other kind" if change == "kind" else "kind", made)
    assert len(made.made) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text"])
def test_a_damaged_index_is_made_anew(tmp_path, path, made, damage):
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


def test_an_index_is_kept_in_the_cache_if_it_cannot_lie_beside(tmp_path, path, made, cache):
    (tmp_path / ("a.bin" + SUFFIX)).mkdir()  # root may write in every folder
    for _ in range(2):
        arrays_of(path, "kind", made)
    assert made.made == [path]
    assert len(list(cache.iterdir())) == 1


def test_an_index_that_can_lie_nowhere_is_made_each_time(tmp_path, path, made, cache):
    (tmp_path / ("a.bin" + SUFFIX)).mkdir()
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        assert arrays_of(path, "kind", made)["b"].tolist() == [7]
    assert len(made.made) == 2


def test_an_index_can_be_read_by_others(path, made):
    arrays_of(path, "kind", made)
    mask = os.umask(0)
    os.umask(mask)
    mode = stat.S_IMODE(Path(path + SUFFIX).stat().st_mode)
    assert mode == 0o666 & ~mask


def test_an_interrupted_index_leaves_nothing(tmp_path, path, made, monkeypatch):

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


# The command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [[], ["--jobs", "1"], ["--jobs", "3"]])
def test_each_shard_gets_an_index(capsys, jobs):
    for name, count, write in [
        ("a.tar", 3, write_tar), ("b.tgz", 4, write_tar), ("c.jsonl", 5, write_jsonl),
        ("d.jsonl.zst", 6, write_jsonl), ("e.parquet", 1000, write_table),
    ]:  # fmt: skip
        write(name, count)
    assert main(["index", *jobs, "a.tar", "b.tgz", "c.jsonl", "d.jsonl.zst", "e.parquet"]) == 0
    assert capsys.readouterr().out == "5 shards with 1,018 records\n"
    indexes = sorted(path.name for path in Path.cwd().glob("*.shmidx"))
    assert indexes == ["a.tar.shmidx", "b.tgz.shmidx", "c.jsonl.shmidx", "d.jsonl.zst.shmidx"]
    assert (open_tar.count("a.tar"), open_jsonl.count("c.jsonl")) == (3, 5)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_bad_shard_is_named_and_the_others_are_indexed(capsys, jobs):
    write_tar("a.tar", 3)
    Path("b.tar").write_bytes(b"no archive" * 99)
    assert main(["index", "--jobs", jobs, "b.tar", "a.tar", "none.jsonl"]) == 1
    *problems, last = capsys.readouterr().out.splitlines()
    assert [problem.partition(":")[0] for problem in problems] == [
        "shard b.tar cannot be read", "shard none.jsonl cannot be read",
    ]  # fmt: skip
    assert last == "1 shard with 3 records"


def test_a_name_that_says_no_format_is_refused(capsys):
    assert main(["index", "a.tar", "b.bin"]) == 2
    assert capsys.readouterr().err == (
        "shmloader index: error: b.bin: its name should end in .tar, .tgz, .tzst, .jsonl, "
        ".ndjson, .parquet, .gz or .zst\n"
    )
    with pytest.raises(SystemExit) as info:
        main(["index"])
    assert info.value.code == 2


def test_a_killed_process_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(command, "_result", kill_me)
    assert main(["index", "--jobs", "2", "a.tar", "b.tar"]) == 2
    assert "a process was killed: try fewer than --jobs 2" in capsys.readouterr().err


def kill_me(_):
    os.kill(os.getpid(), signal.SIGKILL)
