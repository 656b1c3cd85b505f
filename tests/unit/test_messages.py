"""What crosses between processes comes out as it went in, in one datagram."""

import pickle
import socket
from typing import get_args

import pytest
import torch

from shmloader.memory.flat import Field, FlatLayout
from shmloader.memory.pickled import PickledLayout
from shmloader.messages import (
    INLINE_BYTES,
    RECEIVE_BYTES,
    BatchDone,
    BatchEmpty,
    BatchFailed,
    BeginningPart,
    CheckpointPart,
    EpochStarted,
    FromWorker,
    Leave,
    Left,
    ResumeStream,
    Spilled,
    StartEpoch,
    StreamEnded,
    Task,
    TooLong,
    ToWorker,
    pack,
    unpack,
    unpack_seq,
)

FLAT = FlatLayout(2, ("x", 1), (Field(0, torch.float32, (2, 3)), Field(64, torch.float32, (2, 3))))
PICKLED = PickledLayout(b"body", ((64, 100, -1), (0, 0, 16)), (1, 0))
MESSAGES = [
    Task(0, 0, 0, [1, 2, 3]),
    Task(10**12, 7, 5, {"any": ("key", None)}),
    Task(1, 0, 2, Spilled(0, 10**6), touched_bytes=10**6),
    StartEpoch(4),
    BatchDone(1, 2, 3, None, 0),
    BatchDone(1, 2, 3, pickle.dumps(FLAT), 640),
    BatchDone(1, 2, 3, pickle.dumps(PICKLED), 640),
    BatchDone(1, 2, 3, Spilled(128, 50_000), 640),
    BatchDone(1, 2, 3, None, 640, checksum=0xFFFFFFFF),
    BatchFailed(1, 2, 3, Spilled(64, 20_000), touched_bytes=20_064),
    BatchDone(1, 2, 3, None, 640, report=b"report"),
    BatchFailed(1, 2, 3, b"error"),
    BatchFailed(1, 2, 3, Spilled(64, 20_000)),
    BatchFailed(1, 2, 3, b"error", report=Spilled(64, 20_000)),
    BatchEmpty(1, 2, 3, report=b"report"),
    BatchEmpty(1, 2, 3, report=Spilled(0, 20_000)),
    StreamEnded(1, 2, 3),
    StreamEnded(1, 2, 3, touched_bytes=640, beginning=Spilled(0, 640)),
    EpochStarted(4),
    EpochStarted(4, b"the rest of a state"),
    BeginningPart(b"a piece of one"),
    ResumeStream(b"place"),
    Leave(),
    Left(),
    Task(1, 0, 2, b"indices and what has hung", has_hung=True),
    CheckpointPart(b"a piece of a checkpoint"),
    BatchDone(1, 2, 3, None, 640, fingerprint=0xFFFFFFFF),
    BatchFailed(1, 2, 3, b"error", snapshot=Spilled(64, 20_000)),
    BatchEmpty(1, 2, 3, report=b"report", snapshot=b"state"),
    BatchDone(1, 2, 3, None, 640, snapshot=b"state"),
    BatchDone(1, 2, 3, None, 640, snapshot=Spilled(64, 20_000)),
    BatchDone(1, 2, 3, None, 640, snapshot=TooLong(10**9)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_every_message_comes_out_as_it_went_in(message):
    arrived = unpack(pack(message))
    assert type(arrived) is type(message)
    assert arrived == message
    assert [type(value) for value in arrived] == [type(value) for value in message]


def test_every_kind_is_tried():
    assert {type(message) for message in MESSAGES} == {*get_args(ToWorker), *get_args(FromWorker)}


def test_a_message_is_sent_as_a_plain_tuple_with_the_number_of_its_kind_first():
    number, *fields = pickle.loads(pack(Task(1, 2, 3, [4], 5, 6)))
    assert fields == [1, 2, 3, [4], 5, 6, False]
    assert type(number) is int
    assert number != pickle.loads(pack(StartEpoch(1)))[0]
    assert type(pickle.loads(pack(StartEpoch(1)))[0]) is int


@pytest.mark.parametrize("task", [Task(9, 0, 2, b"short"), Task(9, 0, 2, Spilled(0, 10**6))])
def test_the_number_of_a_task_is_read_from_its_message(task):
    assert unpack_seq(pack(task)) == 9


def test_usual_messages_are_small():
    indices = list(range(10_000, 10_256))
    assert len(pack(Task(1000, 3, 17, indices))) < 1024
    assert len(pack(BatchDone(1000, 3, 5, None, 1 << 30))) < 64


def test_a_message_with_the_longest_body_is_received_whole():
    # The longest that each side may send: a task, or an answer, of INLINE_BYTES.
    padding = INLINE_BYTES - len(pack(Task(0, 0, 0, bytes(INLINE_BYTES)))) + INLINE_BYTES
    message = pack(Task(0, 0, 0, bytes(padding)))
    assert len(message) == INLINE_BYTES
    report = bytes(INLINE_BYTES // 4)
    error = bytes(INLINE_BYTES // 2)
    failed = BatchFailed(10**9, 10**9, 10**9, error, report=report)
    assert len(pack(failed)) < INLINE_BYTES
    done = BatchDone(
        10**9, 10**9, 10**9, bytes(INLINE_BYTES // 2), 1 << 37, checksum=1 << 31,
        snapshot=bytes(INLINE_BYTES // 4),
    )  # fmt: skip
    assert len(pack(done)) < INLINE_BYTES
    assert INLINE_BYTES < RECEIVE_BYTES
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        one.setblocking(False)
        for _ in range(4):
            one.send(message)
        assert [other.recv(RECEIVE_BYTES) for _ in range(4)] == [message] * 4


def test_a_key_that_cannot_be_pickled_raises_what_pickle_raises():
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pack(Task(0, 0, 0, [lambda: 0]))
