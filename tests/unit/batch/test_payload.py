"""Dataset and functions reach a worker by name or by value, with what they share."""

import contextlib
import functools
import multiprocessing
import os
import resource
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle
import pytest
import torch

from shmloader.batch import payload as payload_module
from shmloader.batch.payload import Payload, receive_payload
from shmloader.memory.pickled import PICKLE_ERRORS
from tests.unit.pools.sending import sent


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class Squares:
    """A dataset with a lock and a counter that are shared with the test."""

    def __init__(self, lock, counter):
        self.lock = lock
        self.counter = counter
        self.tensor = torch.arange(5)

    def __getitem__(self, index):
        return index * index


def adder(number):
    return lambda value: value + number


def double(value):
    return 2 * value


def worker(received, channel):
    """Load the payload and report on it. Runs in a process of its own."""
    dataset, function, extra = received.load()
    was_free = dataset.lock.acquire(block=False)
    with dataset.counter.get_lock():
        dataset.counter.value += 1
    found = {
        "by_value": received.by_value,
        "class": type(dataset).__qualname__,
        "sample": dataset[4],
        "tensor": dataset.tensor.tolist(),
        "lock was free": was_free,
        "function": function(21),
        "extra": extra,
    }
    channel.send(found)
    channel.close()


@pytest.fixture(autouse=True)
def main_is_a_file(monkeypatch):
    """Make ``__main__`` importable, as in most programs."""
    monkeypatch.setattr(payload_module, "main_is_importable", lambda: True)


def test_pickle_refers_to_importable_objects_by_name():
    payload = Payload((double, functools.partial(double, 3), Squares))
    assert not payload.by_value
    payload.close()


@pytest.mark.parametrize("objects", [lambda: 0, {"closure": adder(3)}, type("Local", (), {})()])
def test_cloudpickle_sends_other_objects_by_value(objects):
    payload = Payload(objects)
    assert payload.by_value
    payload.close()


def test_where_main_has_no_file_cloudpickle_comes_first(monkeypatch):
    monkeypatch.setattr(payload_module, "main_is_importable", lambda: False)
    payload = Payload(double)
    assert payload.by_value
    payload.close()


LOCK = threading.Lock()


@pytest.mark.parametrize(
    "objects",
    [LOCK, (n for n in "ab"), lambda lock=LOCK: lock],
    ids=["lock", "generator", "function with a lock"],
)
def test_objects_that_cannot_be_pickled_raise_and_leave_nothing(objects):
    before = descriptors()
    with pytest.raises(PICKLE_ERRORS):
        Payload(objects)
    assert descriptors() == before


def test_an_error_of_the_user_s_own_reduce_passes_through():
    class Broken:
        def __reduce__(self):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Payload(Broken())
    assert multiprocessing.context.get_spawning_popen() is None


def test_more_descriptors_than_one_message_takes_come_in_their_order():
    pipes = [os.pipe() for _ in range(200)]
    try:
        ends = [Connection(os.dup(read), writable=False) for read, _ in pipes]
        ends += [Connection(os.dup(write), readable=False) for _, write in pipes]
        payload = Payload((ends, ends[7]))
        found, seventh = sent(payload).load()
        payload.close()
        assert seventh is found[7]
        for number in (0, 7, 199):
            found[200 + number].send_bytes(b"%d" % number)
            assert found[number].recv_bytes() == b"%d" % number
            assert found[number].fileno() != ends[number].fileno()
        for end in (*ends, *found):
            end.close()
    finally:
        for pipe in pipes:
            for end in pipe:
                os.close(end)


@pytest.mark.parametrize("count", [0, 30, 300])
def test_a_worker_without_enough_descriptors_raises_and_can_continue(count):
    """No message or descriptor is left in its channel."""
    pipe = os.pipe()
    ends = [Connection(os.dup(pipe[0]), writable=False) for _ in range(count)]
    payload = Payload(ends)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs:
        for data, numbers in payload.messages():
            socket.send_fds(ours, [data], numbers)
        spare = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, before[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.dup(0))
            for _ in range(min(count, 20)):
                os.close(spare.pop())
            with pytest.raises(OSError, match="ulimit -n"):
                receive_payload(theirs)
            with contextlib.ExitStack() as stack:  # as many as there were
                for _ in range(min(count, 20)):
                    stack.callback(os.close, os.dup(0))
            with pytest.raises(BlockingIOError):
                theirs.recv(1, socket.MSG_DONTWAIT)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in spare:
                os.close(number)
    payload.close()
    for end in ends:
        end.close()
    for end in pipe:
        os.close(end)


def test_a_worker_whose_loader_is_closed_does_not_wait_for_a_payload():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionResetError):
            receive_payload(theirs)
    ours.close()


def test_cloudpickle_does_not_forget_multiprocessing_s_reducers():
    context = multiprocessing.get_context("spawn")
    lock = context.Lock()
    # By itself it would refuse, since nothing is being spawned.
    with pytest.raises(RuntimeError, match="should only be shared"):
        cloudpickle.dumps(lock)
    payload = Payload((lock, lambda: 0))
    assert payload.by_value
    payload.close()
