"""How many Python functions the main process enters for a plain batch: most of its cost."""

import gc
import sys

import pytest
import torch
from torch.utils.data import Dataset

from shmloader import DataLoader

pytestmark = pytest.mark.timeout(180)


class Images(Dataset):
    image = torch.zeros(3, 32, 32)

    def __len__(self) -> int:
        return 64 * 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index


CASES = {"ints": (range(60), 1, 25), "images": (Images(), 64, 27)}


@pytest.mark.parametrize(("dataset", "batch_size", "most"), CASES.values(), ids=CASES)
def test_a_plain_batch_takes_few_calls(dataset, batch_size, most) -> None:
    count, counts = 0, []

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    with DataLoader(dataset, batch_size=batch_size, num_workers=2) as loader:
        batches = iter(loader)
        for _ in range(10):
            next(batches)
        gc.disable()  # no finalizer of another test's objects counts
        sys.setprofile(note)
        try:
            for _ in range(40):
                count = 0
                next(batches)
                counts.append(count)
        finally:
            sys.setprofile(None)
            gc.enable()
    assert min(counts) <= most  # others had to wait
