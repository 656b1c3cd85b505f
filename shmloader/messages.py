"""What crosses between the main process and its workers.

Every message is a tuple type below. On the wire it is one pickled plain tuple whose
first item names the kind: both ends run the same version of this file, and a plain
tuple pickles several times faster than an object of a class. One message is one
``SOCK_SEQPACKET`` datagram, so it arrives whole or not at all (I3).

Anything long (a list of many indices, the pickled body of a batch of Python objects,
a traceback) lies in the task's slot and the message says where: :class:`Spilled`.
"""

import enum
import pickle
from typing import NamedTuple

#: Longest message, in bytes, that is sent as such. A SEQPACKET socket takes about
#: 212 KB at once by default; far less than that, so that a window of them fits.
INLINE_BYTES = 16 * 1024

#: Receive buffer: INLINE_BYTES and what goes round it.
RECEIVE_BYTES = 2 * INLINE_BYTES


class Kind(enum.IntEnum):
    """First item of a message on the wire."""

    NEW_SLOT = 0
    DROP_SLOT = 1
    TASK = 2
    START_EPOCH = 3
    BATCH_DONE = 4
    BATCH_FAILED = 5
    STREAM_ENDED = 6
    EPOCH_STARTED = 7
    RESUME_STREAM = 8
    BATCH_EMPTY = 9
    STATE_PART = 10


class Spilled(NamedTuple):
    """Stands for a pickled value that lies in the slot, at ``offset``, ``nbytes`` long."""

    offset: int
    nbytes: int


class NewSlot(NamedTuple):
    """Main → worker, with one descriptor: a slot, whose file is ``nbytes`` long, for good."""

    slot_id: int
    nbytes: int


class DropSlot(NamedTuple):
    """Main → worker: unmap this slot; no task will name it again."""

    slot_id: int


class Task(NamedTuple):
    """Main → worker: load the batch of these indices into this slot.

    Attributes:
        seq: Number of the batch in its epoch, from 0.
        epoch: Number of the epoch within the iterator, from 0.
        slot_id: The slot, which is the worker's until it answers.
        indices: What the sampler gave, pickled: a list of keys, or one key where there is no
            batching; with its position in the epoch (``PositionedIndices``) if samples have random
            number generators of their own. Unpickled apart from the message, because a key of the
            user's own class may fail to unpickle. Or :class:`Spilled`.
        touched_bytes: Bytes from the slot's start that have pages.
    """

    seq: int
    epoch: int
    slot_id: int
    indices: bytes | Spilled
    touched_bytes: int = 0


class StartEpoch(NamedTuple):
    """Main → worker: make the fetcher anew (``iter(dataset)``), then answer."""

    epoch: int


class Attached(NamedTuple):
    """Stands for bytes that lie in a slot of their own, whose descriptor goes with the message."""

    nbytes: int


class ResumeStream(NamedTuple):
    """Main → worker, before its first task: its dataset goes on where another one was.

    Attributes:
        checkpoint: A pickled :class:`~shmloader.batch.iterable_state.IterableCheckpoint`.
    """

    checkpoint: bytes | Attached


class TooLong(NamedTuple):
    """Stands for a state of so many bytes that its slot had no room for."""

    nbytes: int


class BatchDone(NamedTuple):
    """Worker → main: the batch lies in its slot.

    Attributes:
        seq: As in the task.
        epoch: As in the task.
        slot_id: As in the task.
        layout: A pickled ``FlatLayout`` or ``PickledLayout`` of :mod:`shmloader.memory`, which
            may hold keys that only the worker can read, and so is not read with the message;
            or :class:`Spilled`; or None: the same as that of this worker's last batch.
        used_bytes: Bytes of the slot that were written.
        kept: The user's code in the worker still holds memory of the slot, so that
            it must never be filled again.
        checksum: Of these bytes, where SHMLOADER_DEBUG asks for it.
        report: Where failures of samples are counted, a ``SampleReport`` as it is written.
        snapshot: Of a dataset that has a state, where one was due after this batch: a pickled
            :class:`~shmloader.batch.iterable_state.Saved`.
        times: The worker's clock of this batch: fields of
            :class:`~shmloader.insight.measurements.WorkTimes`.
        fingerprint: Of a batch of an iterable dataset, where one is taken.
    """

    seq: int
    epoch: int
    slot_id: int
    layout: bytes | Spilled | None
    used_bytes: int
    kept: bool
    checksum: int | None = None
    report: bytes | Spilled | None = None
    snapshot: bytes | Spilled | TooLong | None = None
    times: tuple[int, ...] | None = None
    fingerprint: int | None = None


class BatchFailed(NamedTuple):
    """Worker → main: loading raised.

    ``error`` is a pickled ``RemoteError``; ``kept``, ``report`` and ``snapshot`` as above.
    ``touched_bytes`` of the slot were written, for the batch that failed, for the error or the
    report. ``fingerprint`` as above, if it was not the reading of samples that failed.
    ``is_final``: the dataset could not be resumed, so this is not in any batch's place, and no
    batch follows.
    """

    seq: int
    epoch: int
    slot_id: int
    error: bytes | Spilled
    kept: bool
    touched_bytes: int = 0
    report: bytes | Spilled | None = None
    snapshot: bytes | Spilled | TooLong | None = None
    fingerprint: int | None = None
    is_final: bool = False


class BatchEmpty(NamedTuple):
    """Worker → main: all samples of the batch failed and are skipped. Fields as above."""

    seq: int
    epoch: int
    slot_id: int
    kept: bool
    report: bytes | Spilled | None
    snapshot: bytes | Spilled | TooLong | None = None


class StreamEnded(NamedTuple):
    """Worker → main: the worker's copy of an iterable dataset has no batch for this task.

    ``kept`` and ``touched_bytes`` as above. ``beginning``: a pickled
    :class:`~shmloader.batch.iterable_state.Beginning` of the next epoch, where workers are
    persistent.
    """

    seq: int
    epoch: int
    slot_id: int
    kept: bool
    touched_bytes: int = 0
    beginning: bytes | Spilled | TooLong | None = None


class StatePart(NamedTuple):
    """Worker → main: a piece of the beginning that :class:`EpochStarted` gives the rest of.

    Pieces, since that message has no slot.
    """

    data: bytes


class EpochStarted(NamedTuple):
    """Worker → main: the answer to :class:`StartEpoch`; all earlier tasks are answered.

    ``beginning``: a pickled :class:`~shmloader.batch.iterable_state.Beginning` of the epoch, or
    what is left of it after the pieces before.
    """

    epoch: int
    beginning: bytes | None = None


ToWorker = NewSlot | DropSlot | Task | StartEpoch | ResumeStream
FromWorker = BatchDone | BatchFailed | StreamEnded | EpochStarted | BatchEmpty | StatePart

_KINDS: dict[type, int] = {
    NewSlot: int(Kind.NEW_SLOT),
    DropSlot: int(Kind.DROP_SLOT),
    Task: int(Kind.TASK),
    StartEpoch: int(Kind.START_EPOCH),
    BatchDone: int(Kind.BATCH_DONE),
    BatchFailed: int(Kind.BATCH_FAILED),
    StreamEnded: int(Kind.STREAM_ENDED),
    EpochStarted: int(Kind.EPOCH_STARTED),
    ResumeStream: int(Kind.RESUME_STREAM),
    BatchEmpty: int(Kind.BATCH_EMPTY),
    StatePart: int(Kind.STATE_PART),
}
_TYPES = (
    NewSlot,
    DropSlot,
    Task,
    StartEpoch,
    BatchDone,
    BatchFailed,
    StreamEnded,
    EpochStarted,
    ResumeStream,
    BatchEmpty,
    StatePart,
)


def pack(message: ToWorker | FromWorker) -> bytes:
    """Write a message for the wire."""
    return pickle.dumps((_KINDS[type(message)], *message), pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> ToWorker | FromWorker:
    """Read a message off the wire."""
    kind, *fields = pickle.loads(data)
    message: ToWorker | FromWorker = _TYPES[kind]._make(fields)
    return message
