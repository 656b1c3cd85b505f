"""The messages between a rank and the process that owns the workers of its host.

Each is one pickled ``SOCK_SEQPACKET`` datagram. There are a few for each worker and epoch, and with
an automatic count ten a second from each iterator, but none for a batch. Batches go directly from a
worker to its rank (:mod:`shmloader.messages`).
"""

import pickle
from typing import NamedTuple


class Contents(NamedTuple):
    """What a rank would send to the workers, so that ranks notice a difference.

    Attributes:
        rank: The rank.
        pid: The rank's process id.
        digests: Digests of the dataset's attributes and of ``worker_init_fn``, by their names.
    """

    rank: int = 0
    pid: int = 0
    digests: tuple[tuple[str, bytes], ...] = ()

    @property
    def name(self) -> str:
        """The rank, for the texts of errors."""
        return f"rank {self.rank} (process {self.pid})"


class Welcome(NamedTuple):
    """Owner → rank, at first.

    Attributes:
        pid: The owner's process id.
        worker_count: The most workers there may be.
        wanted_count: How many workers there should be at present; None if their number is fixed.
        dataset: Describes the workers' dataset by class and length.
        contents: What the workers have got.
    """

    pid: int
    worker_count: int
    wanted_count: int | None
    dataset: str
    contents: Contents = Contents()


class Connect(NamedTuple):
    """Rank → owner, with one end of a socket pair: a further connection of this rank."""


class Attach(NamedTuple):
    """Rank → owner, with a worker's end of a socket pair: give it to this worker.

    The worker is started if it does not run.

    Attributes:
        worker_id: Number of the worker.
        attachment: Counts how often the connection has attached to a worker of this number.
    """

    worker_id: int
    attachment: int


class Attached(NamedTuple):
    """Owner → rank: the worker with this process id has got the rank's socket, or will get it."""

    worker_id: int
    pid: int


class Detach(NamedTuple):
    """Rank → owner: the rank has closed its channel to this worker, which it no longer needs."""

    worker_id: int


class EpochBegun(NamedTuple):
    """Rank → owner, with an automatic count: the reports from now on are of a new epoch."""


class Demand(NamedTuple):
    """Rank → owner, with an automatic count: batches that the rank has taken since the last report.

    Attributes:
        batches: The number of batches.
        wait_ns: How long the rank waited for these batches.
        busy_ns: How long workers were busy with these batches.
    """

    batches: int
    wait_ns: int
    busy_ns: int


class Wanted(NamedTuple):
    """Owner → rank: the first ``worker_count`` workers should be used from now on."""

    worker_count: int


class Kill(NamedTuple):
    """Rank → owner: kill this worker, which takes too long for a sample of this rank."""

    worker_id: int


def describe_owner(pid: int) -> str:
    """Name the owner, for the texts of errors."""
    return f"Process {pid}, which owns the workers of this host (worker_scope='host'),"


class Lost(NamedTuple):
    """Owner → rank: a worker to which the rank was attached is dead and reaped.

    Attributes:
        worker_id: Number of the worker.
        attachment: ``Attach.attachment`` of the message by which the rank was attached.
        pid: The worker's process id; 0 if the worker could not be started.
        exit_code: The worker's exit code, negative for a signal; None if it is not known.
        oom_kills: How many processes of this control group the kernel's out-of-memory killer has
            ended since the owner started; 0 if the worker was not ended by SIGKILL.
        was_loading: Whether the worker was making a batch, for this rank or for another one.
        because: Why the worker could not be started; "" if it was started.
    """

    worker_id: int
    attachment: int
    pid: int
    exit_code: int | None
    oom_kills: int
    was_loading: bool
    because: str = ""


class Left(NamedTuple):
    """Owner → rank: the answer when the rank has shut down its connection.

    Attributes:
        is_last: Whether no other rank is left, so that the workers and their owner end.
    """

    is_last: bool


def pack(message: tuple[object, ...]) -> bytes:
    """Return a message as it is sent."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> object:
    """Return the message that :func:`pack` has written."""
    message: object = pickle.loads(data)
    return message
