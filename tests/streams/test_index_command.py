"""The command `shmloader index`."""

from pathlib import Path

import pytest

from shmloader.cli import index as command
from shmloader.cli.main import main
from shmloader.streams import open_jsonl, open_tar
from tests.streams.support import write_jsonl, write_table, write_tar


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)
