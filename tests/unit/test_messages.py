"""What crosses between processes comes out as it went in, and a long message in pieces."""

import socket
from typing import get_args

import pytest

from shmloader.batch.failures import RemoteError, SampleReport
from shmloader.messages import (
    INLINE_BYTES,
    LAST,
    MORE,
    RECEIVE_BYTES,
    SPILLED,
    TASK,
    TASK_HEAD,
    Answered,
    EpochStarted,
    FromWorker,
    ResumeStream,
    StartEpoch,
    StreamEnded,
    ToWorker,
    Unsaved,
    join,
    pack,
    pieces,
    seq_of_task,
    unpack,
)
from shmloader.pools.answers import Answer

EMPTY = Answer(report=SampleReport(2, 2))
EMPTY.is_empty, EMPTY.snapshot = True, b"state"
FINAL = Answer(error=RemoteError.of(ValueError("no"), "here"))
FINAL.is_final, FINAL.snapshot = True, Unsaved("why")
MESSAGES = [
    StartEpoch(4),
    ResumeStream(b"checkpoint"),
    Answered(1, 2, 3, 640, EMPTY, b"layout"),
    Answered(1, 2, 3, 20_064, FINAL),
    StreamEnded(1, 2, b"beginning"),
    EpochStarted(b"beginning"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_every_message_comes_out_as_it_went_in(message):
    arrived = unpack(pack(message))
    assert type(arrived) is type(message)
    assert arrived == message


def test_every_kind_is_tried():
    assert {type(message) for message in MESSAGES} == {*get_args(ToWorker), *get_args(FromWorker)}


def test_the_number_of_a_task_is_read_from_its_message():
    assert seq_of_task(TASK_HEAD.pack(TASK | SPILLED, 9, 0, 2, 0, 0) + b"20000") == 9


@pytest.mark.parametrize("first", [b"\x80", bytes([LAST]), bytes([MORE])])
@pytest.mark.parametrize("count", [1, 2, 3, 20])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_message_of_any_length_arrives_whole(count, more, first):
    whole = (first + b"shmloader" * count * INLINE_BYTES)[: count * INLINE_BYTES + more]
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before, joined = bytearray(), []
    with one, other:
        for piece in pieces(whole if count > 1 else b"\x80" + whole[1:]):
            one.send(piece)
            joined.append(join(before, other.recv(RECEIVE_BYTES)))
    assert joined[:-1] == [None] * (len(joined) - 1)
    assert joined[-1][1:] == whole[1:]
    assert not before
    assert len(joined) == -(-len(whole) // INLINE_BYTES)
