"""Dataset and functions reach a worker by name or by value; arrays lie beside the pickle."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import resource
import socket
import sys
import threading
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch

import shmloader
from shmloader.batch import payload as payload_module
from shmloader.batch.payload import Payload, receive_payload
from shmloader.memory.pickled import PICKLE_ERRORS
from shmloader.memory.segment import find_segment
from tests.parity.compare import assert_same


def sent(payload):
    """Return the payload as it arrives at a worker that is already running, not loaded yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for data, numbers in payload.messages():
            socket.send_fds(ours, [data], numbers)
        return receive_payload(theirs)


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class Squares:
    """A class that can be imported."""


def adder(number):
    return lambda value: value + number


def double(value):
    return 2 * value


@pytest.fixture(autouse=True)
def main_is_a_file(monkeypatch):
    """Make ``__main__`` importable, as in most programs."""
    monkeypatch.setattr(payload_module, "main_is_importable", lambda: True)


def test_pickle_refers_to_importable_objects_by_name():
    assert received((double, Squares)) == (double, Squares)


@pytest.mark.parametrize("function", [lambda: 3, functools.partial(adder(3), 0)])
def test_cloudpickle_sends_other_objects_by_value(function):
    assert received(function)() == 3


def test_where_main_has_no_file_cloudpickle_comes_first(monkeypatch):
    monkeypatch.setattr(payload_module, "main_is_importable", lambda: False)
    monkeypatch.setattr(double, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "double", double, raising=False)
    found = received(double)
    assert found is not double
    assert found(3) == 6


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
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(200)]
    ends = [*(reading for reading, _ in pipes), *(writing for _, writing in pipes)]
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


@pytest.mark.parametrize("count", [0, 30, 300])
def test_a_worker_without_enough_descriptors_raises_and_can_continue(count):
    """No message or descriptor is left in its channel."""
    ends = [end for _ in range(count // 2) for end in multiprocessing.Pipe(duplex=False)]
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
            spare += [os.dup(0) for _ in range(min(count, 20))]  # as many as there were
            with pytest.raises(BlockingIOError):
                theirs.recv(1, socket.MSG_DONTWAIT)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in spare:
                os.close(number)
    payload.close()
    for end in ends:
        end.close()


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
    Payload((lock, lambda: 0)).close()


ANSWER_S = 60
BULK = 16 << 20


def received(objects):
    """Load a payload as a worker does, but in this process, which maps the memory again."""
    payload = Payload(objects)
    try:
        return sent(payload).load()
    finally:
        payload.close()


def lies_in_a_segment(array) -> bool:
    return find_segment(array.__array_interface__["data"][0], array.nbytes) is not None


whole = torch.arange(4_000.0)
KINDS = {
    "array": np.arange(1_000),
    "fortran": np.asfortranarray(np.arange(1_000.0).reshape(20, 50)),
    "every other": np.arange(2_000)[::2],
    "read-only": np.frombuffer(bytes(range(250)) * 4, np.uint8),
    "big endian": np.arange(1_000, dtype=">i4"),
    "objects": np.array(["a", None], dtype=object),
    "small": np.arange(3),
    "empty": np.empty((0, 3)),
    "tensor": torch.arange(1_000),
    "bfloat16": torch.arange(1_000).bfloat16().view(10, 100).T,
    "parameter": torch.nn.Parameter(torch.ones(5)),
    "sparse": torch.eye(4).to_sparse(),
    "small tensor": torch.tensor(5),
}


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_come_out_as_they_went_in(kind, by_value):
    objects = (KINDS[kind], (lambda: 0) if by_value else None)
    found = received(objects)[0]
    assert_same(found, pickle.loads(pickle.dumps(KINDS[kind], protocol=4)))
    if isinstance(found, np.ndarray):
        assert found.flags.writeable


def test_views_of_one_storage_still_share_it():
    head, rest = received([whole[10:30], whole[15:].view(5, 797)])
    assert torch.equal(head, whole[10:30])
    assert torch.equal(rest, whole[15:].view(5, 797))
    assert head.untyped_storage().nbytes() == 3_992 * 4  # not what lies before them
    rest[0, 0] = -1
    assert head[5] == -1
    assert whole[15] == 15


class Marked(torch.Tensor):
    pass


def test_a_tensor_keeps_its_subclass():
    for tensor in (torch.arange(1_000), shmloader.share(torch.arange(1_000))):
        found = received(tensor.as_subclass(Marked))
        assert type(found) is Marked
        assert found.tolist() == list(range(1_000))


def test_bulk_is_not_in_the_body_and_leaves_nothing_behind():
    array, tensor = np.zeros(BULK, np.uint8), torch.zeros(BULK, dtype=torch.uint8)
    payload = Payload([array, tensor, b"small"])
    found = sent(payload).load()
    assert find_segment(found[0].ctypes.data, BULK).nbytes < 2 * BULK + 4_096
    payload.close()
    assert lies_in_a_segment(found[0])
    assert lies_in_a_segment(found[1].numpy())
    found[0][:] = 1  # its own: what it was made of is as before
    assert not array.any()


@pytest.mark.slow
def test_shared_tensors_are_the_same_memory_and_others_each_worker_s_own():
    tensor = torch.zeros(1_000).share_memory_()
    twin = shmloader.share({"a": np.arange(1_000), "t": torch.arange(9_000), "l": ["x"] * 1_000})
    context = multiprocessing.get_context("spawn")
    payload = Payload([tensor, torch.ones(1_000), twin])
    assert payload._segment.nbytes < 16_384  # and so not what was shared
    ours, theirs = context.Pipe()
    with ours:
        with theirs:
            process = context.Process(target=write_to_all, args=(payload, theirs))
            process.start()
        payload.close()
        assert ours.poll(ANSWER_S), "the child says nothing"
        assert ours.recv() == [[7.0, 0.0], [7.0, 1.0], 999, 8_999, ["x", "x"]]
        process.join(ANSWER_S)
    process.close()
    assert tensor[0] == 7


def write_to_all(payload, channel) -> None:
    first, second, twin = payload.load()
    first[0] = second[0] = 7
    texts = list(twin["l"][:2])
    found = [first[:2].tolist(), second[:2].tolist(), int(twin["a"][-1]), int(twin["t"][-1]), texts]
    channel.send(found)
    channel.close()


@pytest.mark.parametrize("part", [np.s_[:], np.s_[3:50:2], np.s_[::-1, 5:], np.s_[70]])
def test_a_read_only_memory_map_crosses_by_its_file(part, tmp_path):
    path = tmp_path / "rows"
    rows = np.arange(100_000, dtype=np.float64).reshape(100, 1_000)
    rows.tofile(path)
    mapped = np.memmap(path, np.float64, "r", shape=(90, 1_000), offset=8_000 * 10)[part]
    payload = Payload(mapped)
    assert payload._segment.nbytes < 4_096
    found = sent(payload).load()
    payload.close()
    assert type(found) is np.memmap
    np.testing.assert_array_equal(found, rows[10:][part])
    found[...] = 0  # as the copy that torch's loader would have made
    np.testing.assert_array_equal(mapped, rows[10:][part])


@pytest.mark.parametrize("why", ["writable", "removed", "replaced"])
def test_a_memory_map_whose_file_may_have_been_replaced_crosses_by_its_data(why, tmp_path):
    path = tmp_path / "rows"
    np.arange(1_000).tofile(path)
    mapped = np.memmap(path, np.int64, "r+" if why == "writable" else "r")
    if why == "removed":
        path.unlink()
    elif why == "replaced":
        np.zeros(1_000, np.int64).tofile(tmp_path / "other")
        (tmp_path / "other").replace(path)
    payload = Payload(mapped)
    if why == "writable":
        mapped[1] = -1  # after the workers began
    found = sent(payload).load()
    payload.close()
    assert type(found) is np.memmap
    np.testing.assert_array_equal(found, np.arange(1_000))
    found[0] = 5
    assert mapped[0] == 0
