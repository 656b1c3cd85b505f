"""Random transforms with generators of their own, with `seed=` of the loader."""

from __future__ import annotations

from typing import Any

import albumentations
import monai.transforms
import numpy as np
import pytest
import torch

import shmloader
from shmloader.integrations.seeding import seeded

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


class Images:
    """Equal images, so that batches differ by what the transform draws alone."""

    def __init__(self, transform: Any, name: str) -> None:
        self.transform, self.name = transform, name

    def __len__(self) -> int:
        return 12

    def __getitem__(self, _: int) -> torch.Tensor:
        if self.name == "monai":
            return torch.as_tensor(np.asarray(self.transform(np.ones((1, 2, 2), np.float32))))
        image = np.full((8, 8, 3), 100, np.uint8)
        return torch.from_numpy(self.transform(image=image)["image"]).float()


def make(name: str, *, is_seeded: bool) -> Images:
    if name == "monai":
        noise = monai.transforms.Compose([monai.transforms.RandGaussianNoise(prob=1.0)])
        return Images(seeded(noise) if is_seeded else noise, name)
    noise = albumentations.Compose([albumentations.GaussNoise(p=1.0)])
    return Images(seeded(noise) if is_seeded else noise, name)


def epochs(dataset: Images, workers: int) -> torch.Tensor:
    loader = shmloader.DataLoader(dataset, batch_size=3, num_workers=workers, seed=4)
    return torch.stack([torch.cat(list(loader)) for _ in range(2)])


@pytest.mark.parametrize("name", ["albumentations", "monai"])
def test_a_seed_makes_them_repeatable_on_any_number_of_workers(name):
    first = epochs(make(name, is_seeded=True), 0)
    for workers in (1, 3):
        assert torch.equal(epochs(make(name, is_seeded=True), workers), first)
    assert not torch.equal(first[0], first[1])  # each epoch draws anew
    assert len(torch.unique(first[0].flatten(1), dim=0)) == 12  # and each sample


@pytest.mark.parametrize("name", ["albumentations", "monai"])
def test_without_the_hook_they_depend_on_more_than_the_seed(name):
    assert not torch.equal(
        epochs(make(name, is_seeded=False), 0), epochs(make(name, is_seeded=False), 0)
    )


@pytest.mark.parametrize("name", ["albumentations", "monai"])
def test_where_no_loader_has_a_seed_they_are_as_they_are(name):
    assert make(name, is_seeded=True)[0].shape == make(name, is_seeded=False)[0].shape
