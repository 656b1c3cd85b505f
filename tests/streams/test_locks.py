"""Locks on files: that of a file which was removed meanwhile is none."""

import threading
import time
from pathlib import Path

import pytest

from shmloader.streams.locks import exclusive, exclusive_if_free, shared

DEADLINE_S = 60


def descriptors_of(path):
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += str(entry.readlink()) == str(path)
        except FileNotFoundError:  # that of the folder itself
            continue
    return found


@pytest.fixture
def waiting():
    """Start a call on a thread, and wait until it has opened a path beside one who has it open."""
    results, threads = [], []

    def start(function, path):
        thread = threading.Thread(target=lambda: results.append(function(path)))
        threads.append(thread)
        thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while descriptors_of(path) < 2:
            assert time.monotonic() < deadline
        return results

    yield start
    for thread in threads:
        thread.join(DEADLINE_S)


def result_of(results):
    deadline = time.monotonic() + DEADLINE_S
    while not results:
        assert time.monotonic() < deadline
    return results[0]


def test_who_waited_for_a_lock_of_a_removed_file_locks_a_new_one(tmp_path, waiting):
    path = tmp_path / "lock"
    with exclusive(path) as lock:
        results = waiting(exclusive, path)
        lock.remove()
    with result_of(results):
        assert path.exists()
        assert exclusive_if_free(path) is None
    with exclusive_if_free(path) as lock:
        assert lock is not None


def test_who_waited_to_read_a_removed_file_finds_none(tmp_path, waiting):
    path = tmp_path / "shard"
    path.touch()
    with exclusive(path) as lock:
        results = waiting(shared, path)
        lock.remove()
    assert result_of(results) is None


def test_several_may_read_and_one_may_write(tmp_path):
    path = tmp_path / "shard"
    assert shared(path) is None
    assert exclusive_if_free(path) is None
    path.touch()
    with shared(path) as one, shared(path) as other:
        assert one is not None
        assert other is not None
        assert exclusive_if_free(path) is None
        one.close()
        assert exclusive_if_free(path) is None
    with exclusive_if_free(path) as lock:
        assert lock is not None
        assert exclusive_if_free(path) is None
