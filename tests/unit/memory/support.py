"""Slots and round trips for the tests of the memory package, all in one process."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from shmloader.memory import collate
from shmloader.memory.codec import PickledLayout, decode
from shmloader.memory.collate import SlotCollate
from shmloader.memory.encoder import encode
from shmloader.memory.flat import COPY_OUT_BYTES, FlatLayout, FlatReader
from shmloader.memory.lease import LeaseBook
from shmloader.memory.slot import ALIGNMENT, Slot
from shmloader.memory.slot_writer import SlotWriter
from shmloader.process_state import PROCESS

MIB = 1 << 20
SPILL_BYTES = 8 << 10
LARGE = COPY_OUT_BYTES + 1000  # bytes of a part that is lent


@dataclass
class Bench:
    """A slot, its writer, and the leases on it."""

    slot: Slot
    writer: SlotWriter
    leases: LeaseBook

    def lend(self):
        return self.leases.open(0, self.slot)

    def encode(self, batch, *, by_value=False, spill_bytes=SPILL_BYTES) -> PickledLayout:
        return encode(batch, self.writer, by_value=by_value, spill_bytes=spill_bytes)

    def decode(self, layout: PickledLayout, *, lent: bool):
        return decode(layout, self.slot, self.lend() if lent else None)

    def send(self, batch, *, lent: bool, **options):
        """A batch as it arrives on the other side."""
        return self.decode(self.encode(batch, **options), lent=lent)

    def read(self, layout: FlatLayout, *, lent: bool):
        return FlatReader(layout).read(self.slot, self.lend() if lent else None)


@contextlib.contextmanager
def open_bench(nbytes: int = 64 * MIB) -> Iterator[Bench]:
    """A slot with a task in work."""
    slot = Slot.create(nbytes)
    writer = SlotWriter()
    writer.open(slot)
    try:
        yield Bench(slot, writer, LeaseBook())
    finally:
        writer.close()
        slot.close()


@contextlib.contextmanager
def installed(writer: SlotWriter) -> Iterator[None]:
    """Make this process a worker as far as collate sees it."""
    before = dict(torch_collate.default_collate_fn_map)
    try:
        collate.install(writer)
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
        result = SlotCollate(default_collate, bench.writer)(samples)
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
            assert tensor.untyped_storage().data_ptr() % ALIGNMENT == 0
