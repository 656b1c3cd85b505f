"""Memory, looked at before it is touched.

A slot's pages come to exist when they are first written, and where there is no memory for them
the kernel kills somebody (or a write ends in SIGBUS). So whoever is about to write beyond what was
ever touched in a slot asks here first. That is rare: a slot keeps its pages.

Two things are asked at a growth:

* Do the bytes by which this slot grows fit what is free now? They are touched here and at once,
  in steps, with a look before each step. Others may grow at the same time, workers of this loader
  or of another: a step takes but this worker's part of what is free. So nothing is refused only
  because others might have grown, too, and what all of them take together is there.
* Do all slots that a plain loop needs fit, if they become as large? That needs to know what a
  batch usually takes, so it is asked from a worker's second batch on, of the smallest so far: a
  first batch ten times as large as the others raises no alarm. And it is asked only where it is
  known that so many batches will come. Slots for batches that are kept for longer are not counted:
  whether there is memory for one is asked when it is needed.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from shmloader.errors import SharedMemoryError
from shmloader.memory.limits import (
    ControlGroup,
    Free,
    control_groups,
    format_bytes,
    free_memory,
)
from shmloader.memory.slot import Slot

#: Never taken for slots: what others may touch between our look and our pages. Page tables, for
#: one: those of 8 GiB of slots in one process take so much. And all workers' least steps: of 64.
RESERVE_BYTES = 16 << 20

# Most and least bytes touched between two looks. To touch 8 MiB takes some 3 ms, a look 0.1 ms.
_STEP_BYTES = 8 << 20
_LEAST_STEP_BYTES = 256 << 10

# Where there is plenty, a look holds up to the next multiple of this.
_GRAIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """What one iterator may come to ask for. Crosses to the workers.

    Attributes:
        worker_count: Its workers.
        prefetch_factor: Batches in flight for each.
        loop_holds: Batches lent at once in a plain loop. More may be lent, if there is memory.
        batch_count: Batches of an epoch, where that is known for sure.
        free_at_start: What was free before it touched anything.
        root: Where ``proc`` and ``sys`` are.
        window: Batches in flight, where that is no multiple of the workers; else None.
    """

    worker_count: int
    prefetch_factor: int
    loop_holds: int
    batch_count: int | None = None
    free_at_start: Free | None = None
    root: str = "/"
    window: int | None = None

    @property
    def slot_count(self) -> int:
        """Slots that a plain loop uses at once."""
        if self.batch_count is None:
            return self._most_slots
        return min(self._most_slots, self.batch_count)

    @property
    def _most_slots(self) -> int:
        return (self.window or self.prefetch_factor * self.worker_count) + self.loop_holds

    def describe(self, slot_bytes: int) -> str:
        """The arithmetic, for slots of so many bytes."""
        if self.slot_count < self._most_slots:
            why = "one for each batch of an epoch"
        else:
            window = f"prefetch_factor {self.prefetch_factor} * num_workers {self.worker_count}"
            if self.window is not None:
                window = f"prefetch {self.window}"
            why = f"{window} + {self.loop_holds} in use"
        return (
            f"{self.slot_count} slots ({why}) × {format_bytes(slot_bytes)} = "
            f"{format_bytes(self.slot_count * slot_bytes)} of shared memory"
        )


class MemoryAdmission:
    """Says whether there is room for a slot to grow. One in each process of an iterator."""

    def __init__(self, demand: MemoryConfig) -> None:
        self._demand = demand
        self._root = Path(demand.root)
        self._groups: tuple[ControlGroup, ...] | None = None
        self._smallest_batch = math.inf
        self._most_free = _less_reserve(demand.free_at_start)
        #: Whether, as a slot grew last, less was free than all workers may come to take.
        self.is_tight = False

    def note_batch(self, used_bytes: int) -> None:
        """A batch of this process is complete."""
        self._smallest_batch = min(self._smallest_batch, used_bytes)

    def is_short(self, present_bytes: int, slot_bytes: int) -> bool:
        """Whether slots had better not keep their pages while they wait for a batch.

        Args:
            present_bytes: What all slots have now.
            slot_bytes: What each may come to need. A worker needs as much besides, for samples.
        """
        demand = self._demand
        more = (demand.slot_count + demand.worker_count) * slot_bytes - present_bytes
        if more <= RESERVE_BYTES:
            return False
        free = self._look()
        return free is not None and more > free.nbytes

    def grow(self, slot: Slot, backed: int, end: int) -> int:
        """Get a slot the pages up to ``end``, or say that there is no memory for them.

        Args:
            slot: The slot, this process's to fill.
            backed: Bytes from its start that have pages, or for which was asked already.
            end: Bytes from its start that are about to be written.

        Returns:
            Up to where need not be asked again; ``end`` or more.

        Raises:
            SharedMemoryError: With the arithmetic. The slot is as large as it was.
        """
        free = self._look()
        if free is None:
            return end
        self.is_tight = free.nbytes < self._demand.worker_count * end
        self._check_all_slots(free, end)
        position = backed
        while end - position <= free.nbytes:
            step = max(_LEAST_STEP_BYTES, free.nbytes // self._demand.worker_count)
            step_end = min(position + min(step, _STEP_BYTES), end)
            try:
                slot.populate(position, step_end)
            except MemoryError:
                break
            position = step_end
            if position == end:
                return self._round_up(free, end)
            free = self._look() or free
        if slot.give_back(backed):
            free = Free(free.nbytes + position - backed, free.limit)
        raise SharedMemoryError(self._describe_growth(free, backed, end))

    def _look(self) -> Free | None:
        """What is free now, less the reserve."""
        if self._groups is None:
            self._groups = control_groups(self._root)
        return _less_reserve(free_memory(self._root, self._groups))

    def _check_all_slots(self, now: Free, end: int) -> None:
        # The most that was ever free: siblings have touched slots since the start, and an iterator
        # before this one may have gone since.
        free = self._most_free
        if free is None or free.nbytes < now.nbytes:
            free = self._most_free = now
        demand = self._demand
        if demand.batch_count is None or self._smallest_batch == math.inf:
            return
        batch_bytes = min(int(self._smallest_batch), end)
        if demand.slot_count * batch_bytes > free.nbytes:
            raise SharedMemoryError(
                f"{demand.describe(batch_bytes)}, but {_describe_free(free)}: {_REMEDY}"
            )

    def _round_up(self, free: Free, end: int) -> int:
        """Where it does not matter, small parts of a batch need not ask one by one."""
        if free.nbytes < (2 * self._demand.slot_count) * _GRAIN_BYTES + _STEP_BYTES:
            return end
        return -(-end // _GRAIN_BYTES) * _GRAIN_BYTES

    def _describe_growth(self, free: Free, backed: int, end: int) -> str:
        return (
            f"a batch needs {format_bytes(end)} or more of shared memory, "
            f"{format_bytes(end - backed)} more than its slot has, but {_describe_free(free)}. "
            f"The loader needs {self._demand.describe(end)}: {_REMEDY}"
        )


_REMEDY = "lower prefetch_factor, num_workers or batch_size, or set shm_size."


def _less_reserve(free: Free | None) -> Free | None:
    return None if free is None else Free(max(0, free.nbytes - RESERVE_BYTES), free.limit)


def _describe_free(free: Free) -> str:
    reserve = format_bytes(RESERVE_BYTES)
    return f"{format_bytes(free.nbytes)} is free ({free.limit}; {reserve} is kept in reserve)"
