"""Collate functions that allocate from torch's shared memory, as PyTorch Geometric's does."""

from typing import Any

import torch

from shmloader import DataLoader
from tests.process.support import Calls, mapping_at


def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, str]:
    """Concatenate in a worker as PyTorch Geometric does, and say where the result lies."""
    first = samples[0]
    count = sum(sample.numel() for sample in samples)
    storage = first.untyped_storage()._new_shared(count * first.element_size(), device=first.device)
    out = first.new(storage).resize_(len(samples) * first.shape[0], *first.shape[1:])
    return torch.cat(samples, out=out), mapping_at(storage.data_ptr())


def ramp(index: int) -> torch.Tensor:
    return torch.arange(index, index + 40_000).view(4, 10_000)


def test_shared_memory_of_torchs_is_served_from_the_slot_in_collate():
    loader = DataLoader(Calls(ramp, 12), batch_size=4, collate_fn=collate, num_workers=1)
    kept = list(loader)
    for number, (batch, where) in enumerate(kept):
        assert "memfd:shmloader" in where
        assert torch.equal(batch, torch.cat([ramp(4 * number + at) for at in range(4)]))
        assert batch.untyped_storage().nbytes() == batch.numel() * 8


def test_what_does_not_fit_in_the_slot_is_raised_as_such_or_lies_in_private_memory():
    loader = DataLoader(
        Calls(ramp, 4),
        batch_size=4,
        collate_fn=lambda x: collate(x)[1],
        num_workers=1,
        shm_size="1MiB",
    )
    (where,) = loader
    assert "/" not in where  # an intermediate result may be larger than the slot


def outside(index: int) -> tuple[Any, str]:
    storage = torch.UntypedStorage._new_shared(4096)
    return index, mapping_at(storage.data_ptr())


def test_outside_of_collate_torchs_own_function_allocates():
    loader = DataLoader(Calls(outside, 2), batch_size=2, collate_fn=list, num_workers=1)
    ((first, second),) = loader
    assert all("torch_" in where for _, where in (first, second))


def test_the_main_process_keeps_torchs_own_function():
    before = torch.UntypedStorage._new_shared
    list(DataLoader(Calls(ramp, 4), collate_fn=collate, num_workers=1))
    assert torch.UntypedStorage._new_shared == before
