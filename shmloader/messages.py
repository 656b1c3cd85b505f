"""The messages between the main process and its workers.

A task, and a batch without a new layout or anything unusual, begin with a fixed head
(:data:`TASK_HEAD`, :data:`DONE_HEAD`), whose first byte is the kind. Any other message is one of
the named tuples below, pickled. No pickle begins with one of those bytes. Both ends run the same
version of this file.

A ``SOCK_SEQPACKET`` datagram arrives whole or not at all (I3). A long list of indices lies in the
task's slot (:data:`SPILLED`), and a dataset's state in a slot as well (:class:`InSlot`). A message
that is long all the same is sent in pieces, one after the other (:func:`pieces`, :func:`join`).
"""

import pickle
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

#: Longest message that is sent whole, in bytes. A SEQPACKET socket holds about 212 KB by default.
#: This limit is far lower, so that the socket can hold the messages of a whole window.
INLINE_BYTES = 16 * 1024

#: Size of the receive buffer.
RECEIVE_BYTES = 2 * INLINE_BYTES

#: First bytes of a batch with a fixed head, and of the pieces of a long message: of its last one,
#: and of those before.
DONE, LAST, MORE = range(1, 4)
#: Bits of the first byte of a task. Only a task has the first one. With the second, the indices lie
#: at the beginning of the slot, and the number of their bytes is in their place. With the third,
#: they are a pair: the indices, and what the workers that were ended were doing, by the numbers of
#: the samples that hung, which raise instead.
TASK, SPILLED, HUNG = 8, 16, 32
#: Head of a task: bits, seq, epoch, slot_id, touched_bytes, dataset_epoch. The indices follow: a
#: pickle, or a dump of an IndexArray.
TASK_HEAD = struct.Struct("=Bqqqqq")
#: Head of a plain batch: ``DONE``, seq, epoch, slot_id, used_bytes. The worker's times follow.
DONE_HEAD = struct.Struct("=Bqqqq")
#: Stands for a ``dataset_epoch`` of None.
NO_EPOCH = -1


class InSlot(NamedTuple):
    """Stands for the pickled state of a dataset, which lies in a slot."""

    slot_id: int
    offset: int
    nbytes: int


class Unsaved(NamedTuple):
    """Stands for a state that could not be taken: the text that ``state_dict()`` raises."""

    text: str


# From the main process to a worker ---------------------------------------------------------


class Task(NamedTuple):
    """Main → worker: write the batch of these indices to this slot.

    Attributes:
        seq: Number of the batch in its epoch, from 0.
        epoch: Number of the epoch within the iterator, from 0.
        slot_id: The slot, which belongs to the worker until it answers.
        touched_bytes: How many bytes from the slot's start have pages already.
        dataset_epoch: The number for the dataset's ``set_epoch()``; None for no call.
        indices: What the sampler yielded, packed by itself, since a key of the user's own class
            may fail to unpickle. With its position in the epoch if samples have random number
            generators of their own.
        bits: The first byte of the message.
    """

    seq: int
    epoch: int
    slot_id: int
    touched_bytes: int
    dataset_epoch: int | None
    indices: bytes
    bits: int = TASK


class StartEpoch(NamedTuple):
    """Main → worker: make a new fetcher (call ``iter(dataset)``), then answer."""

    dataset_epoch: int | None = None


class ResumeStream(NamedTuple):
    """Main → worker, before its first task: resume the dataset, and receive tasks from now on.

    ``checkpoint`` is a :class:`~shmloader.batch.checkpoint.Checkpoint`.
    """

    checkpoint: Any


# From a worker to the main process ---------------------------------------------------------


class Answered(NamedTuple):
    """Worker → main: the answer to a task, unless it is a plain batch.

    Attributes:
        seq: Number of the batch in its epoch.
        epoch: Number of the epoch within the iterator.
        slot_id: The task's slot.
        touched_bytes: How many bytes of the slot were written.
        answer: An ``Answer``. The content of a batch is None, since it lies in the slot.
        layout: A pickled ``FlatLayout`` or ``PickledLayout``; None if it equals that of this
            worker's last batch. It is pickled by itself, since only the worker may be able to
            unpickle its keys.
    """

    seq: int
    epoch: int
    slot_id: int
    touched_bytes: int
    answer: Any
    layout: bytes | None = None


class StreamEnded(NamedTuple):
    """Worker → main: the worker's copy of an iterable dataset has no batch for this task.

    ``beginning`` is the checkpoint of the next epoch, if workers are persistent.
    """

    seq: int
    epoch: int
    beginning: Any = None


class EpochStarted(NamedTuple):
    """Worker → main: the answer to :class:`StartEpoch`. All earlier tasks are answered.

    ``beginning`` is the checkpoint of the epoch.
    """

    beginning: Any


ToWorker = StartEpoch | ResumeStream
FromWorker = Answered | StreamEnded | EpochStarted


def pack(message: ToWorker | FromWorker) -> bytes:
    """Return a message as bytes."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> ToWorker | FromWorker:
    """Return the message that :func:`pack` has packed."""
    message: ToWorker | FromWorker = pickle.loads(data)
    return message


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield the datagrams of a packed message: one, unless it is long."""
    if len(data) <= INLINE_BYTES:
        yield data
        return
    for start in range(0, len(data), INLINE_BYTES):
        end = start + INLINE_BYTES
        yield bytes([MORE if end < len(data) else LAST]) + data[start:end]


def join(before: bytearray, data: bytes) -> bytes | None:
    """Return the message that a datagram completes; None if further pieces follow.

    ``before`` has the pieces that have come from the same end, and is changed.
    """
    if data[0] not in (LAST, MORE):
        return data
    before += memoryview(data)[1:]
    if data[0] == MORE:
        return None
    whole = bytes(before)
    before.clear()
    return whole


def seq_of_task(data: bytes) -> int:
    """Return the ticket's number from a packed task."""
    seq: int = TASK_HEAD.unpack_from(data)[1]
    return seq
