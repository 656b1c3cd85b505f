"""What a reader of the code found: cases that no other test of these had thought of."""

import gc
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, default_collate

import shmloader
from shmloader import DataLoader
from tests.process.support import Calls


class SeedsWhileUnpickled(Dataset):
    """As a module does that calls torch.manual_seed at its top."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.manual_seed(42)
        self.__dict__.update(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"some": 1}


@pytest.mark.slow
def test_what_unpickling_does_to_the_random_streams_comes_before_the_seeds() -> None:
    drawn = []
    for loader_class in (DataLoader, TorchLoader):
        torch.manual_seed(7)
        loader = loader_class(
            SeedsWhileUnpickled(), num_workers=2, multiprocessing_context="forkserver"
        )
        drawn.append(torch.cat(list(loader)).flatten().tolist())
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4


class KeepsAtItsEnd(IterableDataset):
    kept: Any = None

    def __iter__(self) -> Any:
        if self.kept is not None:
            yield self.kept.clone()
        for n in range(2):
            yield torch.full((20_000,), float(n))
        self.kept = shmloader.empty((20_000,)).fill_(-1)


def test_memory_taken_at_the_end_of_a_stream_is_never_written_again() -> None:
    loader = DataLoader(KeepsAtItsEnd(), batch_size=None, num_workers=1, persistent_workers=True)
    assert [batch[0] for batch in loader] == [0, 1]
    for _ in range(3):
        batches = [(batch.min().item(), batch.max().item()) for batch in loader]
        assert batches == [(-1, -1), (0, 0), (1, 1)]


def test_samples_in_the_slot_are_not_written_over_by_the_batch_made_of_them() -> None:
    def items(index: int) -> list[torch.Tensor]:
        made = [shmloader.empty((30_000,)).fill_(value) for value in (0, 1, 2)]
        return made[::-1]

    loader = DataLoader(Calls(items, 3), batch_size=None, collate_fn=default_collate, num_workers=1)
    for batch in loader:
        assert batch[:, 0].tolist() == [2, 1, 0]
        assert batch[:, -1].tolist() == [2, 1, 0]


def test_parts_that_are_copies_with_torch_do_not_share_memory() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        whole = default_collate(samples)
        array = np.arange(50_000)
        return {
            "t": whole, "n": whole.numpy(), "m": whole.numpy(),
            "a": torch.from_numpy(array), "b": torch.from_numpy(array), "same": whole,
        }  # fmt: skip

    loader = DataLoader(
        Calls(lambda n: torch.zeros(50_000), 2), batch_size=2, collate_fn=collate, num_workers=1
    )
    (batch,) = loader
    batch["n"][:] = 1
    batch["a"][:] = 0
    assert not batch["t"].any()
    assert not batch["m"].any()
    assert batch["b"][-1] == 49_999
    assert batch["same"] is batch["t"]


class Unreadable:
    def __reduce__(self) -> Any:
        return (int, ("not a number",))


def test_a_key_that_the_worker_cannot_read_fails_its_batch_and_no_other() -> None:
    keys = [0, Unreadable(), 2]
    loader = DataLoader(Calls(lambda key: key, 3), sampler=keys, batch_size=None, num_workers=1)
    batches = iter(loader)
    assert next(batches) == 0
    with pytest.raises(ValueError, match="invalid literal"):
        next(batches)
    assert next(batches) == 2


def test_code_that_keeps_every_batch_takes_no_more_shared_memory(slots: Any) -> None:
    class Generates(IterableDataset):
        def __iter__(self) -> Any:
            for n in range(60):
                batch = shmloader.empty((30_000,)).fill_(n)
                yield batch  # still in hand when the batch is answered

    loader = DataLoader(Generates(), batch_size=None, num_workers=1)
    batches = iter(loader)
    for n in range(60):
        batch = next(batches)
        assert batch.min() == batch.max() == n
    assert sum(slots.files().values()) <= 8 * (30_000 * 4 + 4096)  # no more than the slots


def test_a_sampler_that_knows_its_loader_does_not_keep_the_workers() -> None:
    class Knows:
        loader: Any = None

        def __iter__(self) -> Any:
            return iter([n for n in range(6) if self.loader is not None])

    sampler = Knows()
    loader = DataLoader(Calls(lambda n: n, 6), sampler=sampler, num_workers=1, batch_size=None)
    sampler.loader = loader
    batches = iter(loader)
    sampler.batches = batches  # type: ignore[attr-defined]
    assert next(batches) == 0
    pid = batches._workers[0].pid
    del batches, loader, sampler
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_default_device_of_the_consumers_does_not_touch_batches() -> None:
    loader = DataLoader(
        Calls(lambda n: {"x": torch.full((3,), n), "y": torch.full((3,), n)}, 4),
        batch_size=2, num_workers=1,
    )  # fmt: skip
    batches = iter(loader)
    with torch.device("meta"):
        batch = next(batches)
    assert batch["x"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert [tensor.device.type for batch in batches for tensor in batch.values()] == ["cpu"] * 2


class Tagged(torch.Tensor):
    pass


def test_tensors_of_a_subclass_leave_no_file_in_dev_shm() -> None:
    def collate(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        mapped = re.findall(r"/dev/shm/torch\S*", Path("/proc/self/maps").read_text())
        return batch, len(mapped)

    loader = DataLoader(
        Calls(lambda n: torch.full((30_000,), float(n)).as_subclass(Tagged), 4),
        batch_size=2, num_workers=1, collate_fn=collate,
    )  # fmt: skip
    for number, (batch, mapped) in enumerate(loader):
        assert mapped == 0
        assert type(batch) is Tagged
        assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]


def test_a_step_on_the_way_to_a_batch_may_be_larger_than_the_share() -> None:
    loader = DataLoader(
        Calls(lambda n: torch.full((200_000,), float(n)), 4), batch_size=2, num_workers=1,
        collate_fn=lambda samples: default_collate(samples).mean(1), shm_size="1MiB",
    )  # fmt: skip
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
