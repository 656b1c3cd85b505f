"""Slots and round trips for the tests of the memory package, all in one process."""

import collections
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from shmloader.batch.collator import Collator, Timer
from shmloader.memory.arena import Arena, Lease, Slot
from shmloader.memory.flat import COPY_OUT_BYTES, FlatLayout, FlatReader
from shmloader.memory.pickled import PickledLayout, PickledReader, pickle_batch, write_batch
from shmloader.memory.writer import SlotWriter, install
from shmloader.process_state import PROCESS

MIB = 1 << 20
SPILL_BYTES = 8 << 10
LARGE = COPY_OUT_BYTES + 1000  # bytes of a part that is lent


@dataclass
class Bench:
    """An arena of one slot, its writer, and the leases on it that have ended."""

    arena: Arena
    slot: Slot
    writer: SlotWriter
    ended: collections.deque[Lease]

    def mapped(self) -> Slot:
        """The slot as the main process finds it: mapped, though its worker may have parted it."""
        self.arena.reach(self.slot, max(1, self.writer.used_bytes))
        return self.slot

    def lend(self):
        return self.mapped().lend(self.ended.append)

    def encode(self, batch, *, spill_bytes=SPILL_BYTES) -> PickledLayout:
        return write_batch(pickle_batch(batch), self.writer, spill_bytes=spill_bytes)

    def decode(self, layout: PickledLayout, *, lent: bool):
        return PickledReader(layout).read(self.mapped(), self.lend() if lent else None)

    def send(self, batch, *, lent: bool, **options):
        """A batch as it arrives on the other side."""
        return self.decode(self.encode(batch, **options), lent=lent)

    def read(self, layout: FlatLayout, *, lent: bool):
        return FlatReader(layout).read(self.mapped(), self.lend() if lent else None)


@contextlib.contextmanager
def open_bench(nbytes: int = 64 * MIB) -> Iterator[Bench]:
    """A slot with a task in work."""
    arena = Arena.create(nbytes, 1)
    writer, slot = SlotWriter(arena), arena.slots[0]
    arena.reach(slot, arena.slot_bytes)
    writer.open(slot)
    try:
        yield Bench(arena, slot, writer, collections.deque())
    finally:
        writer.part()
        arena.close()


@contextlib.contextmanager
def installed(writer: SlotWriter) -> Iterator[None]:
    """Make this process a worker as far as collate sees it."""
    before = dict(torch_collate.default_collate_fn_map)
    try:
        install(writer)
        yield
    finally:
        PROCESS.slot_writer = None
        torch_collate.default_collate_fn_map.clear()
        torch_collate.default_collate_fn_map.update(before)


@contextlib.contextmanager
def in_a_worker_of_torch() -> Iterator[None]:
    """Let torch's own collate take this process for one of its workers."""
    assert torch_worker._worker_info is None
    torch_worker._worker_info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    try:
        yield
    finally:
        torch_worker._worker_info = None


def collated_by_torch(samples):
    """What torch's loader makes of these samples in a worker."""
    with in_a_worker_of_torch():
        return default_collate(samples)


def collated_by_us(samples, bench: Bench, *, lent: bool):
    """What our loader makes of these samples: the short way if it is open, else the general."""
    with installed(bench.writer):
        result = Collator(
            default_collate, Timer(), takes_list=isinstance(samples, list), writer=bench.writer
        )(samples)
    if isinstance(result, FlatLayout):
        return bench.read(result, lent=lent)
    return bench.send(result, lent=lent)


def tensors_of(batch) -> list[torch.Tensor]:
    match batch:
        case torch.Tensor():
            return [batch]
        case dict():
            return [tensor for part in batch.values() for tensor in tensors_of(part)]
        case list() | tuple():
            return [tensor for part in batch for tensor in tensors_of(part)]
    return []


def is_in(slot: Slot, tensor: torch.Tensor) -> bool:
    return slot.address <= tensor.data_ptr() < slot.address + slot.nbytes


def assert_storages_are_aligned(batch) -> None:
    for tensor in tensors_of(batch):
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes():
            assert tensor.untyped_storage().data_ptr() % 16 == 0, "the widest elements need it"


def resident_bytes(arena: Arena) -> int:
    return os.fstat(arena.fileno()).st_blocks * 512


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def exit_code_of_a_child(work: Callable[[], object]) -> int:
    """The exit code of a forked child that calls ``work``: 0 if that returns, 2 if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_a_child(work: Callable[[], str]) -> str:
    """What ``work`` returned, or the exception's name and text, in a forked child."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                text = work()
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(there, text.encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text
