"""Checks that there is memory before it is touched.

A slot's pages come to exist when they are first written. Where there is no memory for them, the
kernel kills a process, or the write ends in SIGBUS. So before a process writes to bytes of a slot
that were never touched, it asks here. That is rare, because a slot keeps its pages.

Two things are checked when a slot grows:

* The bytes by which it grows fit what is free now. They are touched here at once, in steps, and
  free memory is read before each step. Other workers, of this loader or another, may grow their
  slots at the same time, so a step takes only this worker's share of what is free. Thus nothing is
  refused just because others might have grown too, and what all of them take together exists.
* All slots that a plain loop needs would fit, if each had the size of this worker's smallest batch.
  This is checked from a worker's second batch on. The smallest batch counts, so that a first batch
  ten times as large as the others raises no alarm. It is checked only if the number of batches is
  known. Slots for batches that the user keeps for longer are not counted: they are checked when
  they are needed.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from shmloader.errors import SharedMemoryError
from shmloader.memory.arena import Arena, Slot
from shmloader.memory.limits import Free, control_groups, format_bytes, free_memory
from shmloader.memory.memfd import populate

#: Never taken for slots, since other processes may touch memory between a check and the write.
#: The page tables of 8 GiB of slots in one process take as much, and so do the smallest steps of
#: 64 workers.
RESERVE_BYTES = 16 << 20

# The most and the least bytes that are touched between two checks. Touching 8 MiB takes some 3 ms,
# and a check takes 0.1 ms.
_STEP_BYTES = 8 << 20
_LEAST_STEP_BYTES = 256 << 10

# Where there is plenty of memory, a check admits bytes up to the next multiple of this.
_GRAIN_BYTES = 1 << 20

_REMEDY = "lower prefetch_factor, num_workers or batch_size, or set shm_size."


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How much memory one iterator may come to need. Sent to the workers.

    Attributes:
        worker_count: Number of processes that write to the slots: the workers, or the main
            process alone where an executor's processes send batches as buffers.
        prefetch_factor: Batches in flight for each of these; not used if ``window`` is given.
        loop_holds: Batches lent at once in a plain loop. More may be lent if there is memory.
        batch_count: Batches of an epoch; None unless that number is known for sure.
        free_at_start: The memory that was free before the iterator touched any.
        root: Directory that holds ``proc`` and ``sys``.
        window: Batches in flight; None for ``prefetch_factor`` for each worker.
    """

    worker_count: int
    prefetch_factor: int
    loop_holds: int
    batch_count: int | None = None
    free_at_start: Free | None = None
    root: str = "/"
    window: int | None = None

    @property
    def most_slots(self) -> int:
        """Number of slots that a plain loop of many batches uses at once."""
        return (self.window or self.prefetch_factor * self.worker_count) + self.loop_holds

    @property
    def slot_count(self) -> int:
        """Number of slots that a plain loop of ``batch_count`` batches uses at once."""
        return (
            self.most_slots if self.batch_count is None else min(self.most_slots, self.batch_count)
        )

    def describe(self, slot_bytes: int) -> str:
        """Return the arithmetic as text, for slots of ``slot_bytes``."""
        window = f"prefetch_factor {self.prefetch_factor} * num_workers {self.worker_count}"
        if self.window is not None:
            window = f"prefetch {self.window}"
        why = f"{window} + {self.loop_holds} in use"
        if self.slot_count < self.most_slots:
            why = "one for each batch of an epoch"
        return (
            f"{self.slot_count} slots ({why}) × {format_bytes(slot_bytes)} = "
            f"{format_bytes(self.slot_count * slot_bytes)} of shared memory"
        )


class MemoryAdmission:
    """Decides whether a slot may grow. Each process of an iterator has one.

    Attributes:
        smallest_batch: Bytes of the smallest batch that this process has completed.
        is_tight: Whether, when a slot last grew, less was free than all workers together may take.
    """

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._root = Path(config.root)
        self._groups = control_groups(self._root)
        self._most_free = _less_reserve(config.free_at_start)
        self.smallest_batch = math.inf
        self.is_tight = False

    def is_short(self, present_bytes: int, slot_bytes: int) -> bool:
        """Whether memory is too short for slots to keep their pages while they wait for a batch.

        Args:
            present_bytes: Bytes that all slots have now.
            slot_bytes: Bytes that each slot may come to need. A worker needs as many for samples.
        """
        config = self._config
        more = (config.slot_count + config.worker_count) * slot_bytes - present_bytes
        if more <= RESERVE_BYTES:
            return False
        free = self._read_free()
        return free is not None and more > free.nbytes

    def grow(self, arena: Arena, slot: Slot, end: int) -> None:
        """Give a slot the pages up to ``end``, or raise if there is no memory for them.

        Args:
            arena: The slots.
            slot: A slot that this process is filling, mapped up to ``end``. Its ``touched_bytes``
                are ``end`` or more afterwards.
            end: Bytes from its start that are about to be written.

        Raises:
            SharedMemoryError: If there is not enough memory. The message has the arithmetic. The
                slot is as large as it was.
        """
        free, config = self._read_free(), self._config
        if free is None:
            slot.touched_bytes = end
            return
        self.is_tight = free.nbytes < config.worker_count * end
        self._check_all_slots(free, end)
        position = backed = slot.touched_bytes
        while end - position <= free.nbytes:
            step = max(_LEAST_STEP_BYTES, free.nbytes // config.worker_count)
            step_end = min(position + min(step, _STEP_BYTES), end)
            if not populate(slot.mapping, position, step_end):
                break
            position = step_end
            if position == end:
                is_plenty = free.nbytes >= 2 * config.slot_count * _GRAIN_BYTES + _STEP_BYTES
                slot.touched_bytes = -(-end // _GRAIN_BYTES) * _GRAIN_BYTES if is_plenty else end
                return
            free = self._read_free() or free
        if arena.give_back(slot, backed):
            free = Free(free.nbytes + position - backed, free.limit)
        raise SharedMemoryError(
            f"a batch needs at least {format_bytes(end)} of shared memory, "
            f"{format_bytes(end - backed)} more than its slot has, but {_describe_free(free)}. "
            f"The loader needs {config.describe(end)}: {_REMEDY}"
        )

    def _read_free(self) -> Free | None:
        """Return what is free now, less the reserve."""
        return _less_reserve(free_memory(self._root, self._groups))

    def _check_all_slots(self, now: Free, end: int) -> None:
        # Compare with the most that was ever free: since the start, other workers have touched
        # slots, and an earlier iterator may have been closed.
        free = self._most_free = max(self._most_free or now, now)
        config = self._config
        if config.batch_count is None or self.smallest_batch == math.inf:
            return
        batch_bytes = min(int(self.smallest_batch), end)
        if config.slot_count * batch_bytes > free.nbytes:
            raise SharedMemoryError(
                f"{config.describe(batch_bytes)}, but {_describe_free(free)}: {_REMEDY}"
            )


def _less_reserve(free: Free | None) -> Free | None:
    return None if free is None else Free(max(0, free.nbytes - RESERVE_BYTES), free.limit)


def _describe_free(free: Free) -> str:
    reserve = format_bytes(RESERVE_BYTES)
    return f"{format_bytes(free.nbytes)} is free ({free.limit}; {reserve} is kept in reserve)"
