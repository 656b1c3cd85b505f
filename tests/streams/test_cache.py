"""The cache of remote shards: one download, room, processes that are killed, and a web server."""

import contextlib
import errno
import multiprocessing
import os
import pickle
import random
import re
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest

from shmloader import ShardError
from shmloader.streams import ShardCache, download, open_jsonl
from shmloader.streams import cache as cache_module
from tests.streams.web_server import WebServer

DEADLINE_S = 60
fork = multiprocessing.get_context("fork")


def data_of(url):
    """Return the bytes of a file."""
    size = int(url.rpartition("/")[2].partition("-")[0])
    return random.Random(url.rpartition("/")[2]).randbytes(size)


class FakeFiles(fsspec.AbstractFileSystem):
    """Files that are made up: ``fake://shards/40-a.tar`` has 40 bytes.

    Tests change what it does by replacing ``before_read``. Whichever process reads a file writes
    its name to the file ``log``.
    """

    protocol = "fake"
    cachable = False

    log: Path
    knows_size = True

    @staticmethod
    def before_read(name, path):
        """Runs when a file is read, before its bytes are written to a path."""

    def info(self, path, **_):
        return {"name": path, "type": "file"} | (
            {"size": len(data_of(path))} if self.knows_size else {}
        )

    def get_file(self, rpath, lpath, **_):
        with self.log.open("a") as log:
            log.write(rpath.rpartition("/")[2] + "\n")
        FakeFiles.before_read(rpath.rpartition("/")[2], lpath)
        Path(lpath).write_bytes(data_of(rpath))


fsspec.register_implementation("fake", FakeFiles, clobber=True)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The fake file system, with a log of its own. Waits between tries take no time."""
    monkeypatch.setattr(FakeFiles, "log", tmp_path / "reads.log", raising=False)
    (tmp_path / "reads.log").touch()
    waits = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    FakeFiles.waits = waits
    return FakeFiles


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "cache"


def reads():
    """Return the names of the files that were read, in order."""
    return FakeFiles.log.read_text().split()


def names(directory):
    """Return the names of the shards that are there, and of what else is."""
    return sorted(
        entry.name.partition("-")[2] if entry.name[0] != "." else entry.name
        for entry in directory.iterdir()
        if not entry.name.startswith(".lock-")
    )


def fetch(cache, name):
    """Read a shard as if that were long ago, and return its bytes."""
    path = Path(cache.path(f"fake://shards/{name}"))
    data, long_ago_s = path.read_bytes(), time.time() - 1_000
    with contextlib.suppress(FileNotFoundError):  # another process has made room
        os.utime(path, (long_ago_s, long_ago_s))
    return data


@contextlib.contextmanager
def running(function, *args):
    """Run a function in a forked process, and kill the process in the end."""
    process = fork.Process(target=function, args=args)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(DEADLINE_S)
        process.close()


def in_children(function, count):
    """Run ``function(number)`` in forked processes; return what each returned, or its error."""
    results = fork.SimpleQueue()

    def run(number):
        try:
            results.put((number, function(number)))
        except Exception as error:
            results.put((number, error))

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(running(run, number)) for number in range(count)]
        found = dict(results.get() for _ in processes)
        for process in processes:
            process.join(DEADLINE_S)
    results.close()
    return [found[number] for number in range(count)]


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_file_of_this_machine_is_taken_as_it_is(tmp_path, directory, prefix):
    path = tmp_path / "a b.tar"
    url = prefix + str(path).replace(" ", "%20" if prefix else " ")
    assert ShardCache(directory).path(url) == str(path)
    assert not directory.exists()


def test_a_shard_is_downloaded_once_and_keeps_its_name(directory):
    cache = ShardCache(directory)
    for _ in range(3):
        path = cache.path("fake://shards/40-a.jsonl.gz")
        assert Path(path).read_bytes() == data_of("40-a.jsonl.gz")
        assert path.endswith("-40-a.jsonl.gz")
    assert ShardCache(directory).path("fake://shards/40-a.jsonl.gz") == path
    assert reads() == ["40-a.jsonl.gz"]
    assert names(directory) == ["40-a.jsonl.gz"]


def test_shards_of_one_name_in_different_folders_are_different(directory):
    cache = ShardCache(directory)
    paths = {cache.path(f"fake://{folder}/9-a.tar") for folder in "ab"}
    assert len(paths) == 2


def test_room_is_made_by_the_shards_whose_use_is_the_oldest(directory):
    cache = ShardCache(directory, limit=100)
    for name in ["30-a", "30-b", "30-c"]:
        fetch(cache, name)
    fetch(cache, "30-a")
    fetch(cache, "35-d")
    assert names(directory) == ["30-a", "30-c", "35-d"]
    fetch(cache, "100-e")
    assert names(directory) == ["100-e"]
    assert reads() == ["30-a", "30-b", "30-c", "35-d", "100-e"]


def test_a_shard_that_was_used_just_now_is_not_removed_and_an_open_one_can_be_read(directory):
    cache = ShardCache(directory, limit=100)
    path = Path(cache.path("fake://shards/60-a"))
    fetch(cache, "60-b")
    fetch(cache, "60-c")
    assert names(directory) == ["60-a", "60-c"]
    with path.open("rb") as file:
        fetch(cache, "60-a")
        fetch(cache, "60-b")
        assert names(directory) == ["60-b"]
        assert file.read() == data_of("60-a")


def test_a_shard_larger_than_the_limit_can_be_read(directory):
    cache = ShardCache(directory, limit=50)
    assert fetch(cache, "20-a") == data_of("20-a")
    for _ in range(2):
        assert fetch(cache, "60-b") == data_of("60-b")
    assert (names(directory), reads()) == (["60-b"], ["20-a", "60-b"])
    fetch(cache, "20-a")
    assert names(directory) == ["20-a"]


def test_shards_of_unknown_size_keep_the_limit(directory, files, monkeypatch):
    monkeypatch.setattr(files, "knows_size", False)
    cache = ShardCache(directory, limit=50)
    for name in ["30-a", "30-b", "30-c"]:
        assert fetch(cache, name) == data_of(name)
        assert names(directory) == [name]


def test_the_index_of_a_shard_stays_valid_and_goes_with_it(directory):
    cache, indexes = ShardCache(directory, limit=5_000), set()
    for _ in range(2):
        path = cache.path("fake://shards/4000-a.jsonl")
        assert open_jsonl.count(path) == data_of("4000-a.jsonl").count(b"\n") + 1
        indexes.add(Path(path + ".shmidx").stat().st_ino)
    assert len(indexes) == 1
    fetch(cache, "4000-a.jsonl")
    fetch(cache, "3000-b.jsonl")
    assert names(directory) == ["3000-b.jsonl"]


# Failures -----------------------------------------------------------------------------------


def failing(*errors):
    """Return a function that raises these errors, one after another, and then nothing."""
    left = list(errors)

    def before_read(_name, path):
        if left:
            Path(path).write_bytes(b"part")
            raise left.pop(0)

    return before_read


def test_a_download_is_tried_again_with_longer_and_longer_waits(directory, files, monkeypatch):
    errors = [ConnectionError("reset"), TimeoutError(), RuntimeError("503"), EOFError()]
    monkeypatch.setattr(files, "before_read", failing(*errors))
    assert fetch(ShardCache(directory), "40-a") == data_of("40-a")
    assert reads() == ["40-a"] * 5
    assert len(files.waits) == 4
    for wait_s, longest_s in zip(files.waits, [0.1, 0.2, 0.4, 0.8], strict=True):
        assert longest_s / 2 <= wait_s <= longest_s


def test_too_few_bytes_are_no_shard(directory, files, monkeypatch):
    written = [b"", data_of("40-a")[:39], data_of("40-a") + b"1"]

    def get_file(self, _, path, **__):
        Path(path).write_bytes(written.pop(0) if written else data_of("40-a"))

    monkeypatch.setattr(files, "get_file", get_file)
    assert fetch(ShardCache(directory), "40-a") == data_of("40-a")
    assert not written


def test_after_the_last_try_the_error_names_the_shard_and_the_cause(directory, files, monkeypatch):
    errors = [ConnectionError(f"reset {number}") for number in range(8)]
    monkeypatch.setattr(files, "before_read", failing(*errors))
    with pytest.raises(ShardError) as info:
        fetch(ShardCache(directory), "40-a")
    assert str(info.value) == (
        "shard fake://shards/40-a could not be downloaded in 8 tries (ConnectionError: reset 7). "
        "Check the address, the server and the network, or leave the shard out with "
        "on_error='skip'"
    )
    assert info.value.__cause__ is errors[-1]
    assert info.value.shard == "fake://shards/40-a"
    assert (len(reads()), len(files.waits), names(directory)) == (8, 7, [])
    assert sum(files.waits) <= 12


def test_an_unknown_kind_of_address_is_an_error(directory):
    with pytest.raises(ShardError, match="Protocol not known: nothing"):
        ShardCache(directory).path("nothing://a")
    assert names(directory) == []


def test_a_full_disk_is_named_with_the_limit(directory, files, monkeypatch):
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(files, "before_read", failing(error))
    with pytest.raises(ShardError) as info:
        fetch(ShardCache(directory, limit=1_000_000), "40-a")
    assert str(info.value) == (
        f"shard fake://shards/40-a does not fit on the disk of {directory}, where shards may take "
        "1.0 MB. Lower the cache's limit=, or choose another directory="
    )
    assert (reads(), names(directory)) == (["40-a"], [])


def test_a_directory_that_is_none_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ShardError, match=f"cannot be kept in {tmp_path}/file"):
        ShardCache(tmp_path / "file").path("fake://shards/40-a")


def test_an_interrupted_download_leaves_nothing(directory, files, monkeypatch):
    monkeypatch.setattr(files, "before_read", failing(KeyboardInterrupt()))
    cache = ShardCache(directory)
    with pytest.raises(KeyboardInterrupt):
        fetch(cache, "40-a")
    assert names(directory) == []
    assert fetch(cache, "40-a") == data_of("40-a")


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="limit should be a number of bytes, but is -1"):
        ShardCache(limit=-1)
    with pytest.raises(TypeError, match="limit should be a number of bytes, but is '1'"):
        ShardCache(limit="1")


# Processes ----------------------------------------------------------------------------------


def test_processes_that_ask_at_once_download_once(directory):
    cache, begin = ShardCache(directory), fork.Barrier(8)
    wanted = [f"{1000 + number}-a" for number in range(20)]

    def read_all(_):
        begin.wait(DEADLINE_S)
        return [fetch(cache, name) == data_of(name) for name in wanted]

    assert in_children(read_all, 8) == [[True] * 20] * 8
    assert sorted(reads()) == wanted


def test_processes_with_too_little_room_read_every_shard(directory):
    cache = ShardCache(directory, limit=3_000)

    def read_all(seed):
        order = [f"{1000 + number}-a" for number in range(12)] * 3
        random.Random(seed).shuffle(order)
        paths = ((name, Path(cache.path(f"fake://shards/{name}"))) for name in order)
        return all(path.read_bytes() == data_of(name) for name, path in paths)

    assert in_children(read_all, 4) == [True] * 4
    for entry in directory.iterdir():
        os.utime(entry, (1, 1))
    fetch(cache, "10-b")
    assert sum(entry.stat().st_size for entry in directory.iterdir()) <= 3_000


@pytest.fixture
def pipe():
    reader, writer = fork.Pipe(duplex=False)
    with reader, writer:
        yield reader, writer


@pytest.fixture
def stalled(files, monkeypatch, pipe):
    """Have downloads in other processes stall; return a pipe that says when one is in the midst."""
    reader, writer = pipe
    owner = os.getpid()

    def before_read(_, path):
        if os.getpid() != owner:
            Path(path).write_bytes(b"part")
            writer.send(None)
            signal.pause()

    monkeypatch.setattr(files, "before_read", before_read)
    return reader


def test_a_killed_download_blocks_nobody(directory, stalled):
    cache = ShardCache(directory)
    with running(fetch, cache, "40-a"):
        assert stalled.poll(DEADLINE_S)
        stalled.recv()
        waiter = threading.Thread(target=fetch, args=(cache, "40-a"))
        waiter.start()
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()
    assert fetch(cache, "40-a") == data_of("40-a")
    assert names(directory) == ["40-a"]
    with running(fetch, cache, "50-b"):
        assert stalled.poll(DEADLINE_S)
    part, shard = names(directory)
    assert (part.startswith(".part-"), shard) == (True, "40-a")
    assert fetch(cache, "50-b") == data_of("50-b")
    assert names(directory) == ["40-a", "50-b"]


def test_what_a_killed_download_has_left_counts_and_is_removed_in_the_end(directory, stalled):
    cache = ShardCache(directory, limit=50)
    with running(fetch, cache, "50-b"):
        assert stalled.poll(DEADLINE_S)
    (part,) = directory.glob(".part-*")
    fetch(cache, "49-c")
    assert part.exists()
    os.utime(part, (1, 1))
    fetch(cache, "20-d")
    assert names(directory) == ["20-d"]


def test_a_forked_child_keeps_no_lock_of_its_parent(directory, files, monkeypatch, pipe):
    cache, (reader, writer) = ShardCache(directory), pipe
    with contextlib.ExitStack() as stack:

        def run():
            writer.send(None)
            signal.pause()

        monkeypatch.setattr(files, "before_read", lambda *_: stack.enter_context(running(run)))
        fetch(cache, "40-a")
        assert reader.poll(DEADLINE_S)
        monkeypatch.setattr(files, "before_read", lambda *_: None)
        # Of the same name, so that the lock is the same.
        next(directory.glob("*-40-a")).unlink()
        assert fetch(cache, "40-a") == data_of("40-a")


# Prefetching --------------------------------------------------------------------------------


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_two_shards_are_fetched_ahead_at_a_time(directory, files, monkeypatch):
    cache, go, threads = ShardCache(directory), threading.Event(), set()

    def before_read(*_):
        threads.add(threading.current_thread())
        go.wait(DEADLINE_S)

    monkeypatch.setattr(files, "before_read", before_read)
    wanted = [f"{10 + number}-a" for number in range(9)]
    for name in wanted:
        cache.prefetch(f"fake://shards/{name}")
    until(lambda: len(threads) == 2)
    assert len(reads()) == 2
    go.set()
    until(lambda: names(directory) == wanted)
    until(lambda: not any(thread.is_alive() for thread in threads))
    assert all(fetch(cache, name) == data_of(name) for name in wanted)
    cache.prefetch("fake://shards/10-a")  # is there
    cache.prefetch(__file__)  # needs nothing
    assert sorted(reads()) == wanted


def test_an_error_ahead_is_raised_when_the_shard_is_opened(directory, files, monkeypatch):
    asked = threading.Event()

    def before_read(*_):
        asked.set()
        raise FileNotFoundError

    monkeypatch.setattr(files, "before_read", before_read)
    cache = ShardCache(directory)
    cache.prefetch("fake://shards/40-a")
    assert asked.wait(DEADLINE_S)
    with pytest.raises(ShardError):
        fetch(cache, "40-a")
    assert reads() == ["40-a"] * 16


def test_a_forked_child_fetches_ahead_with_threads_of_its_own(directory, files, monkeypatch):
    go, begun = threading.Event(), threading.Event()

    def before_read(*_):
        begun.set()
        go.wait(DEADLINE_S)

    monkeypatch.setattr(files, "before_read", before_read)
    cache = ShardCache(directory)
    for name in ("40-a", "41-a"):
        cache.prefetch(f"fake://shards/{name}")
    assert begun.wait(DEADLINE_S)

    def run():
        FakeFiles.before_read = lambda *_: None
        cache.prefetch("fake://shards/50-b")
        until(lambda: "50-b" in names(directory))
        os._exit(7)

    with running(run) as process:
        process.join(DEADLINE_S)
        assert process.exitcode == 7
    go.set()
    until(lambda: names(directory) == ["40-a", "41-a", "50-b"])


def test_a_cache_can_be_pickled(directory):
    cache = ShardCache(directory, limit=70, storage_options={"a": 1})
    fetch(ShardCache(directory), "40-a")
    copied = pickle.loads(pickle.dumps(cache))
    assert (copied.directory, copied.limit, copied.storage_options) == (directory, 70, {"a": 1})
    assert repr(copied) == repr(cache) == f"ShardCache('{directory}', limit=70)"
    assert Path(copied.path("fake://shards/40-a")).read_bytes() == data_of("40-a")


def test_without_a_directory_it_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ShardCache().directory == tmp_path / "shmloader" / "shards"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ShardCache().directory == Path("~/.cache/shmloader/shards").expanduser()


def test_processes_that_make_room_at_once_remove_no_more_than_one_would(directory, monkeypatch):
    cache = ShardCache(directory, limit=50)
    for name in ("20-a", "20-b"):
        fetch(cache, name)
    fetch(ShardCache(directory), "20-c")
    listed = threading.Barrier(2)

    def in_order(files):
        found = sorted(files)
        listed.wait(DEADLINE_S)  # both have listed the files before one removes any
        return found

    monkeypatch.setattr(cache_module, "sorted", in_order, raising=False)
    threads = [threading.Thread(target=cache._make_room) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert names(directory) == ["20-b", "20-c"]


# A web server ---------------------------------------------------------------------------------
# fsspec keeps a thread and connections in each process, so only forked children use it here.

needs_aiohttp = pytest.mark.skipif(find_spec("aiohttp") is None, reason="aiohttp is not installed")


def read(cache, url):
    return Path(cache.path(url)).read_bytes()


@needs_aiohttp
def test_a_server_that_fails_some_requests_gives_every_shard_once(tmp_path):
    rng = random.Random(0)
    files = {f"{number}.tar": rng.randbytes(3_000) for number in range(80)}
    cache = ShardCache(tmp_path / "cache")

    def read_all(number):
        order = sorted(files)
        random.Random(number).shuffle(order)
        for name in order[:3]:
            cache.prefetch(server.url + name)
        return sum(read(cache, server.url + name) == files[name] for name in order)

    with WebServer(files, share=0.05, seed=3).running() as server:
        assert in_children(read_all, 3) == [len(files)] * 3
    assert set(server.failed) == {"status", "closed", "cut"}
    # Where it is not told the size, fsspec asks for the file, and reads no byte of it.
    for name in files:
        assert 1 <= server.sent[name] <= 1 + server.failed_heads[name]
    assert names(tmp_path / "cache") == sorted(files)


@needs_aiohttp
def test_a_forked_child_of_a_process_that_downloads_can_download(tmp_path):
    files = {"a.tar": b"1" * 100, "b.tar": b"2" * 100}
    cache = ShardCache(tmp_path / "cache")

    def read_one(_):
        first = read(cache, server.url + "a.tar")
        pid = os.fork()
        if pid == 0:
            os._exit(read(cache, server.url + "b.tar") == files["b.tar"])
        return first, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with WebServer(files).running() as server:
        assert in_children(read_one, 1) == [(files["a.tar"], 1)]


@needs_aiohttp
@pytest.mark.parametrize("is_there", [True, False])
def test_a_server_without_the_shard_is_named_with_what_happened(tmp_path, is_there):
    cache = ShardCache(tmp_path / "cache")

    def read_one(_):
        from shmloader.streams import download

        download.time.sleep = lambda _: None
        return read(cache, server.url + "a.tar")

    with WebServer({}).running() as server:
        if is_there:
            (error,) = in_children(read_one, 1)
    if not is_there:
        (error,) = in_children(read_one, 1)
    assert isinstance(error, ShardError)
    assert f"shard {server.url}a.tar could not be downloaded in 8 tries (Client" in str(error)
    assert bool(re.search(r"\b404\b", str(error))) is is_there  # not as a part of the port
    assert names(tmp_path / "cache") == []
