"""The figures of a loader's statistics, frozen."""

import dataclasses
from typing import NamedTuple

#: The stages of a batch, in order, and what each means; the fields of
#: :class:`Stages`.
STAGES = {
    "slot": "waiting for a slot and a worker",
    "queue": "behind earlier batches of its worker",
    "fetch": "in the dataset",
    "collate": "in collate_fn",
    "encode": "describing the batch",
    "transport": "sending the answer",
    "reorder": "waiting for an earlier batch",
    "ready": "waiting for the consumer",
    "build": "making tensors of it, drawing and sending the next task",
    "pin": "pinning",
    "device": "copying to the device, device_transform",
}

#: Where the next batch was while the consumer waited for it, and what each place means; the fields
#: of :class:`WaitPlaces`.
PLACES = {
    "start": "iter(), or its worker was starting",
    "draw": "the batch sampler was drawing",
    "send": "no worker had room for it",
    "queue": "its worker was busy with earlier batches",
    "fetch": "in the dataset",
    "collate": "in collate_fn",
    "encode": "being described by its worker",
    "transport": "loaded, on its way to the main process",
    "build": "being built (or copied out of its slot) and handed over",
    "pin": "being pinned",
    "device": "being copied to the device, in device_transform",
    "end": "there was none: the epoch ended",
    "other": "not known, or an error was raised",
}


class WaitPlaces(NamedTuple):
    """Where the next batch was while the consumer waited for it, in seconds.

    The fields add up to ``WaitStats.total_s``. The verdict is based on them. Without workers, the
    consumer's own thread loads the batch meanwhile, so only ``start``, ``draw``, ``fetch``,
    ``collate``, ``build``, ``pin`` and ``device`` occur. Where torch's own iterator loads, all
    waiting is in ``start`` and ``other``.

    Attributes:
        start: ``iter()`` made the iterator, or the batch's worker had not begun its first batch of
            the epoch, because the worker was starting.
        draw: The batch sampler drew indices on the consumer's thread, most often those of a later
            batch.
        send: The indices were drawn, and no worker had room for them.
        queue: The indices were sent, and the worker was busy with earlier batches.
        fetch: The worker was loading the samples.
        collate: The worker was in ``collate_fn``.
        encode: The worker was describing the batch for the main process.
        transport: The batch was loaded, and the main process had not noticed that yet.
        build: Tensors were made of the slot or copied out of it, and the batch was handed over.
            With ``device="cpu"``, ``device_transform`` was called.
        pin: The batch was copied into page-locked memory.
        device: The batch was copied to the device, or ``device_transform`` was called.
        end: There was no next batch: the epoch ended, and so did workers that do not persist.
        other: An error was raised in place of the batch, or it is not known where the batch was.
    """

    start: float = 0.0
    draw: float = 0.0
    send: float = 0.0
    queue: float = 0.0
    fetch: float = 0.0
    collate: float = 0.0
    encode: float = 0.0
    transport: float = 0.0
    build: float = 0.0
    pin: float = 0.0
    device: float = 0.0
    end: float = 0.0
    other: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class WaitStats:
    """How long the consumer waited, in seconds.

    Attributes:
        total_s: Time in ``iter()`` and ``next()``.
        share: ``total_s`` as a share of ``elapsed_s``; 0 to 1.
        p50_s: Median time of a call of ``next()``; accurate to 7 %, like the next two.
        p90_s: 90th percentile.
        p99_s: 99th percentile.
        max_s: Longest call of ``next()``.
        startup_s: The part of ``total_s`` in ``iter()`` and the first ``next()`` of each epoch.
        places: Where the next batch was during ``total_s``.
    """

    total_s: float = 0.0
    share: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0
    startup_s: float = 0.0
    places: WaitPlaces = WaitPlaces()  # noqa: RUF009 - it cannot change


@dataclasses.dataclass(frozen=True, slots=True)
class StageStats:
    """The time that delivered batches spent in one stage.

    Many batches are in flight at the same time, so the sum over all stages may exceed the time
    that passed.

    Attributes:
        total_s: Seconds, summed over all batches.
        mean_s: Seconds per batch.
    """

    total_s: float = 0.0
    mean_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStats:
    """The statistics of one worker.

    Attributes:
        worker_id: Number of the worker.
        pid: Process id of the newest process with this number; None for a thread.
        batches: Number of its batches that were delivered.
        busy_s: Seconds that it took to load these batches.
        busy_share: ``busy_s`` as a share of the time since it began its first batch; 0 to 1.
        fetch_s: The part of ``busy_s`` in the dataset.
        collate_s: The part of ``busy_s`` in ``collate_fn``.
        idle_s: Seconds between its batches, from the end of one to the beginning of the next.
        idle_awaited_s: The part of ``idle_s`` in which the consumer waited for a batch that another
            worker had not loaded yet.
        cpu_s: CPU seconds that it has used, including its start.
        stalled_s: Seconds in which it could have run but no core was free; None where the system
            does not report it.
        pss_bytes: Its memory in bytes, with its share of the shared pages: measured now while it
            lives, otherwise when it was last measured. None for a thread, or if it ended too soon.
    """

    worker_id: int
    pid: int | None = None
    batches: int = 0
    busy_s: float = 0.0
    busy_share: float = 0.0
    fetch_s: float = 0.0
    collate_s: float = 0.0
    idle_s: float = 0.0
    idle_awaited_s: float = 0.0
    cpu_s: float = 0.0
    stalled_s: float | None = None
    pss_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerStats:
    """What the process that takes the batches used, from ``iter()`` to the end of the epoch.

    Not measured without workers.

    Attributes:
        process_cpu_s: CPU seconds of all its threads, worker threads included.
        cpu_s: CPU seconds of the thread that takes the batches; None where the system does not
            report it.
        stalled_s: Seconds in which that thread could have run but no core was free; None where the
            system does not report it.
    """

    process_cpu_s: float = 0.0
    cpu_s: float | None = None
    stalled_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SlotStats:
    """The use of shared memory.

    Attributes:
        count: Maximum number of slots; 0 without worker processes.
        nbytes: Maximum memory that all slots took together, in bytes.
        lent: Number of batches whose slot was lent to the consumer.
        copied: Number of batches that were copied out, since the consumer held too many.
        grown: How often a slot took more memory than it had.
        largest_bytes: Bytes that the largest batch took.
        share_bytes: Maximum bytes that a batch may take, by ``shm_size``; 0 for no maximum.
    """

    count: int = 0
    nbytes: int = 0
    lent: int = 0
    copied: int = 0
    grown: int = 0
    largest_bytes: int = 0
    share_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What the machine offers this process.

    Attributes:
        cores: Number of cores that this process may use.
        free_bytes: Bytes of memory that may still be taken; None if not known.
        limit: What limits the memory, in words.
    """

    cores: int = 0
    free_bytes: int | None = None
    limit: str = ""


class Stages(NamedTuple):
    """The stages that a batch passes, in order. Several batches are in flight at the same time.

    Attributes:
        slot: The indices are drawn, and the batch waits for a slot and a worker.
        queue: The task is sent, and waits for earlier batches of its worker or for its start.
        fetch: The dataset loads the samples.
        collate: ``collate_fn`` makes the batch.
        encode: The worker describes the batch for the main process.
        transport: The answer is on its way, and the main process waits for it.
        reorder: The batch waits for an earlier one.
        ready: The batch waits for the consumer.
        build: Tensors are made of the slot, and the next task is drawn and sent. With
            ``device="cpu"``, ``device_transform`` is called.
        pin: The pinning thread copies the batch.
        device: The thread that copies to a device and calls ``device_transform`` has the batch,
            until the copy has begun and a further one may begin.
    """

    slot: StageStats = StageStats()
    queue: StageStats = StageStats()
    fetch: StageStats = StageStats()
    collate: StageStats = StageStats()
    encode: StageStats = StageStats()
    transport: StageStats = StageStats()
    reorder: StageStats = StageStats()
    ready: StageStats = StageStats()
    build: StageStats = StageStats()
    pin: StageStats = StageStats()
    device: StageStats = StageStats()


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """The fields of :class:`~shmloader.LoaderStats`, which documents them."""

    epoch: int | None = None
    epochs: int = 0
    is_over: bool = False
    kind: str = ""
    num_workers: int = 0
    persistent_workers: bool = False
    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    elapsed_s: float = 0.0
    samples_per_s: float = 0.0
    wait: WaitStats = WaitStats()
    stages: Stages = Stages()  # noqa: RUF009 - it cannot change
    load_p50_s: float = 0.0
    load_p99_s: float = 0.0
    workers: tuple[WorkerStats, ...] = ()
    consumer: ConsumerStats = ConsumerStats()
    slots: SlotStats = SlotStats()
    restarts: int = 0
    failures: int = 0
    machine: Machine = Machine()
