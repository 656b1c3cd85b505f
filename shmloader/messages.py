"""The messages between the main process and its workers.

Every message is a named tuple below. The two that a plain batch takes, a :class:`Task` and a
:class:`BatchDone` without a new layout or anything unusual, begin with a fixed head
(:data:`TASK_HEAD`, :data:`DONE_HEAD`) whose first byte is the kind. Any other message is a pickled
plain tuple whose first item is the number of the kind; no pickle begins with one of those bytes.
Both ends run the same version of this file. One message is one ``SOCK_SEQPACKET`` datagram, so it
arrives whole or not at all (I3).

Anything long (a list of many indices, the pickled body of a batch of Python objects, a traceback)
lies in the task's slot, and the message says where: :class:`Spilled`.
"""

import pickle
import struct
from typing import NamedTuple

#: Longest message, in bytes. A SEQPACKET socket holds about 212 KB by default. This limit is far
#: lower, so that the socket can hold the messages of a whole window.
INLINE_BYTES = 16 * 1024

#: Size of the receive buffer.
RECEIVE_BYTES = 2 * INLINE_BYTES

#: Length of the pieces in which long data is sent by messages that have no slot.
PART_BYTES = INLINE_BYTES // 2


class Spilled(NamedTuple):
    """Stands for a pickled value of ``nbytes`` that lies in the slot, at ``offset``."""

    offset: int
    nbytes: int


class InStateSlot(NamedTuple):
    """Stands for a pickled state of ``nbytes`` that lies in the worker's state slot."""

    nbytes: int


class TooLong(NamedTuple):
    """Stands for a state of ``nbytes`` that did not fit in its slot."""

    nbytes: int


class Unsaved(NamedTuple):
    """Stands for a state that could not be taken or pickled, or did not fit in its slot.

    Attributes:
        text: What the loader's ``state_dict()`` raises: the cause, and what to do.
    """

    text: str


#: A state of a dataset, as it travels; None if none was due.
SentState = bytes | Spilled | InStateSlot | TooLong | Unsaved | None


# From the main process to a worker ---------------------------------------------------------


class Task(NamedTuple):
    """Main → worker: write the batch of these indices to this slot.

    Attributes:
        seq: Number of the batch in its epoch, from 0.
        epoch: Number of the epoch within the iterator, from 0.
        slot_id: The slot, which belongs to the worker until it answers.
        indices: What the sampler yielded, pickled: a list of keys, or one key without batching;
            with its position in the epoch (``PositionedIndices``) if samples have random number
            generators of their own. It is pickled by itself, because a key of the user's own class
            may fail to unpickle.
        touched_bytes: How many bytes from the slot's start have pages already.
        dataset_epoch: The number for the dataset's ``set_epoch()``; None for no call.
        has_hung: Whether samples of the batch have hung, and raise instead. ``indices`` then holds
            a pair: the indices, and what the workers that were ended were doing, by the numbers of
            the samples (:class:`~shmloader.batch.sample_watch.SampleWatch`).
    """

    seq: int
    epoch: int
    slot_id: int
    indices: bytes | Spilled
    touched_bytes: int = 0
    dataset_epoch: int | None = None
    has_hung: bool = False


class StartEpoch(NamedTuple):
    """Main → worker: make a new fetcher (call ``iter(dataset)``), then answer.

    Attributes:
        epoch: Number of the epoch within the iterator.
        dataset_epoch: See :class:`Task`.
    """

    epoch: int
    dataset_epoch: int | None = None


class CheckpointPart(NamedTuple):
    """Main → worker: a piece of the ``checkpoint`` whose last piece comes in :class:`ResumeStream`.

    Long data is sent in pieces, since that message has no slot.
    """

    data: bytes


class ResumeStream(NamedTuple):
    """Main → worker, before its first task: resume the dataset, and receive tasks from now on.

    Attributes:
        checkpoint: A pickled :class:`~shmloader.batch.checkpoint.Checkpoint`, or its last piece;
            empty to begin at the dataset's beginning.
    """

    checkpoint: bytes


class Leave(NamedTuple):
    """Main → worker: receive no more tasks from the queue, and answer with :class:`Left`."""


# From a worker to the main process ---------------------------------------------------------


class BatchDone(NamedTuple):
    """Worker → main: the batch lies in its slot.

    Attributes:
        seq: Number of the batch in its epoch.
        epoch: Number of the epoch within the iterator.
        slot_id: The task's slot.
        layout: A pickled ``FlatLayout`` or ``PickledLayout`` of :mod:`shmloader.memory`; None if it
            equals that of this worker's last batch. It is pickled by itself, because it may hold
            keys that only the worker can unpickle.
        used_bytes: How many bytes of the slot were written.
        checksum: Checksum of the used bytes, with SHMLOADER_DEBUG=1.
        report: A pickled ``SampleReport``, if failed samples are counted.
        snapshot: A pickled :class:`~shmloader.batch.dataset_state.Saved` of the dataset after this
            batch, or why there is none; None if none was due.
        times: Fields of :class:`~shmloader.insight.measurements.WorkTimes`, by the worker's clock.
        fingerprint: Fingerprint of the batch, if the dataset is iterable.
    """

    seq: int
    epoch: int
    slot_id: int
    layout: bytes | Spilled | None
    used_bytes: int
    checksum: int | None = None
    report: bytes | Spilled | None = None
    snapshot: SentState = None
    times: tuple[int, ...] | None = None
    fingerprint: int | None = None


class BatchFailed(NamedTuple):
    """Worker → main: making the batch raised.

    Attributes:
        seq: Number of the batch in its epoch.
        epoch: Number of the epoch within the iterator.
        slot_id: The task's slot.
        error: A pickled ``RemoteError``.
        touched_bytes: How many bytes of the slot were written, for the batch, the error or the
            report.
        report: A pickled ``SampleReport``, if failed samples are counted.
        snapshot: A pickled state of the dataset, if one was due; see :class:`BatchDone`.
        fingerprint: Fingerprint of the batch; None if the dataset is not iterable, or if reading
            the samples failed.
        is_final: Whether the dataset could not be resumed. Then the error does not take the place
            of one batch: no batch follows.
    """

    seq: int
    epoch: int
    slot_id: int
    error: bytes | Spilled
    touched_bytes: int = 0
    report: bytes | Spilled | None = None
    snapshot: SentState = None
    fingerprint: int | None = None
    is_final: bool = False


class BatchEmpty(NamedTuple):
    """Worker → main: all samples of the batch failed and are skipped.

    The fields are those of :class:`BatchDone`.
    """

    seq: int
    epoch: int
    slot_id: int
    report: bytes | Spilled | None
    snapshot: SentState = None


class StreamEnded(NamedTuple):
    """Worker → main: the worker's copy of an iterable dataset has no batch for this task.

    Attributes:
        seq: Number of the batch in its epoch.
        epoch: Number of the epoch within the iterator.
        slot_id: The task's slot.
        touched_bytes: How many bytes of the slot were written.
        beginning: The pickled :class:`~shmloader.batch.checkpoint.Checkpoint` with which the next
            epoch begins, if workers are persistent.
    """

    seq: int
    epoch: int
    slot_id: int
    touched_bytes: int = 0
    beginning: bytes | Spilled | TooLong | None = None


class BeginningPart(NamedTuple):
    """Worker → main: a piece of the ``beginning`` whose last piece comes in :class:`EpochStarted`.

    See :class:`CheckpointPart`.
    """

    data: bytes


class EpochStarted(NamedTuple):
    """Worker → main: the answer to :class:`StartEpoch`. All earlier tasks are answered.

    Attributes:
        epoch: Number of the epoch, copied from :class:`StartEpoch`.
        beginning: The pickled :class:`~shmloader.batch.checkpoint.Checkpoint` with which the epoch
            begins, or its last piece; empty or None for the dataset's beginning.
    """

    epoch: int
    beginning: bytes | None = None


class Left(NamedTuple):
    """Worker → main: the answer to :class:`Leave`. All earlier tasks are answered."""


ToWorker = Task | StartEpoch | CheckpointPart | ResumeStream | Leave
FromWorker = (
    BatchDone | BatchFailed | BatchEmpty | StreamEnded | BeginningPart | EpochStarted | Left
)

# A kind's number on the wire is its index here.
_KINDS: tuple[type[ToWorker | FromWorker], ...] = (
    Task,
    StartEpoch,
    CheckpointPart,
    ResumeStream,
    Leave,
    BatchDone,
    BatchFailed,
    BatchEmpty,
    StreamEnded,
    BeginningPart,
    EpochStarted,
    Left,
)
_NUMBERS: dict[type, int] = {kind: number for number, kind in enumerate(_KINDS)}

#: First bytes of the messages that have a fixed head.
TASK, DONE = 1, 2
#: Head of a task: ``TASK``, seq, epoch, slot_id, touched_bytes, dataset_epoch. The pickled indices
#: follow.
TASK_HEAD = struct.Struct("=Bqqqqq")
#: A plain batch: ``DONE``, seq, epoch, slot_id, used_bytes, and the five times.
DONE_HEAD = struct.Struct("=B9q")
#: Stands for a ``dataset_epoch`` of None.
NO_EPOCH = -1


def pack(message: ToWorker | FromWorker) -> bytes:
    """Return a message as it is sent."""
    if type(message) is Task and isinstance(message.indices, bytes) and not message.has_hung:
        seq, epoch, slot_id, _, touched_bytes, dataset_epoch, _ = message
        told = NO_EPOCH if dataset_epoch is None else dataset_epoch
        head = TASK_HEAD.pack(TASK, seq, epoch, slot_id, touched_bytes, told)
        return head + message.indices
    if type(message) is BatchDone and message.times is not None and message[5:8] == _NOTHING:
        seq, epoch, slot_id, layout, used_bytes = message[:5]
        if layout is None and message.fingerprint is None:
            return DONE_HEAD.pack(DONE, seq, epoch, slot_id, used_bytes, *message.times)
    return pickle.dumps((_NUMBERS[type(message)], *message), pickle.HIGHEST_PROTOCOL)


# The checksum, report and snapshot of a plain batch.
_NOTHING = (None, None, None)


def unpack(data: bytes) -> ToWorker | FromWorker:
    """Return the message that :func:`pack` has written."""
    if data[0] == TASK:
        _, seq, epoch, slot_id, touched_bytes, told = TASK_HEAD.unpack_from(data)
        indices = data[TASK_HEAD.size :]
        return Task(seq, epoch, slot_id, indices, touched_bytes, None if told < 0 else told)
    if data[0] == DONE:
        _, seq, epoch, slot_id, used_bytes, *times = DONE_HEAD.unpack(data)
        return BatchDone(seq, epoch, slot_id, None, used_bytes, times=tuple(times))
    number, *fields = pickle.loads(data)
    message: ToWorker | FromWorker = _KINDS[number]._make(fields)
    return message


def unpack_seq(data: bytes) -> int:
    """Return the ticket's number from a :class:`Task`, packed."""
    seq: int = TASK_HEAD.unpack_from(data)[1] if data[0] == TASK else pickle.loads(data)[1]
    return seq
