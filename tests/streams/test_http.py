"""Shards of a web server, read by several processes.

fsspec keeps a thread and connections in each process, so only forked children use it here.
"""

import os
import random
from pathlib import Path

import pytest

from shmloader import ShardError
from shmloader.streams import ShardCache
from tests.streams.test_cache import in_children, names
from tests.streams.web_server import WebServer

pytest.importorskip("aiohttp")


def fetch(cache, url):
    return Path(cache.path(url)).read_bytes()


def test_a_server_that_fails_some_requests_gives_every_shard_once(tmp_path):
    rng = random.Random(0)
    files = {f"{number}.tar": rng.randbytes(3_000) for number in range(80)}
    cache = ShardCache(tmp_path / "cache")

    def read_all(number):
        order = sorted(files)
        random.Random(number).shuffle(order)
        for name in order[:3]:
            cache.prefetch(server.url + name)
        return sum(fetch(cache, server.url + name) == files[name] for name in order)

    with WebServer(files, share=0.05, seed=3).running() as server:
        assert in_children(read_all, 3) == [len(files)] * 3
    assert set(server.failed) == {"status", "closed", "cut"}
    # Where it is not told the size, fsspec asks for the file, and reads no byte of it.
    for name in files:
        assert 1 <= server.sent[name] <= 1 + server.failed_heads[name]
    assert names(tmp_path / "cache") == sorted(files)


def test_a_forked_child_of_a_process_that_downloads_can_download(tmp_path):
    files = {"a.tar": b"1" * 100, "b.tar": b"2" * 100}
    cache = ShardCache(tmp_path / "cache")

    def read(_):
        first = fetch(cache, server.url + "a.tar")
        pid = os.fork()
        if pid == 0:
            os._exit(fetch(cache, server.url + "b.tar") == files["b.tar"])
        return first, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with WebServer(files).running() as server:
        assert in_children(read, 1) == [(files["a.tar"], 1)]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_server_without_the_shard_is_named_with_what_happened(tmp_path, is_there):
    cache = ShardCache(tmp_path / "cache")

    def read(_):
        from shmloader.streams import download

        download.time.sleep = lambda _: None
        return fetch(cache, server.url + "a.tar")

    with WebServer({}).running() as server:
        if is_there:
            (error,) = in_children(read, 1)
    if not is_there:
        (error,) = in_children(read, 1)
    assert isinstance(error, ShardError)
    assert f"shard {server.url}a.tar could not be downloaded in 8 tries (Client" in str(error)
    assert ("404" in str(error)) is is_there
    assert names(tmp_path / "cache") == []
