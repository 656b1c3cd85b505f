"""A worker's random number generators are seeded as those of torch's worker."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shmloader.batch.seeds import seed_worker


def draws() -> list[object]:
    return [
        *(random.random(), random.getrandbits(64)),
        *(np.random.rand(), int(np.random.randint(2**31))),
        *(float(torch.rand(())), int(torch.randint(2**31, ()))),
    ]


class Draws(Dataset):
    """Each sample has its worker's number and seed, and a draw from every library."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        info = get_worker_info()
        return info.id, info.seed, draws()


@pytest.fixture
def random_states():
    """Restore the test process's own generators."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.usefixtures("random_states")
def test_random_numbers_and_seeds_are_those_of_torch_s_workers():
    loader = DataLoader(
        Draws(),
        batch_size=None,
        num_workers=2,
        generator=torch.Generator().manual_seed(7),
        multiprocessing_context="fork",
    )
    samples = list(loader)
    assert {worker_id for worker_id, _, _ in samples} == {0, 1}
    for worker_id in (0, 1):
        of_worker = [sample for sample in samples if sample[0] == worker_id]
        base_seed = of_worker[0][1] - worker_id
        assert seed_worker(base_seed, worker_id) == of_worker[0][1]
        for _, _, drawn in of_worker:
            assert draws() == drawn


@pytest.mark.usefixtures("random_states")
@pytest.mark.parametrize("base_seed", [0, 2**31, 2**62])
def test_workers_and_libraries_do_not_draw_alike(base_seed):
    seen = []
    for worker_id in range(4):
        assert seed_worker(base_seed, worker_id) == base_seed + worker_id
        seen.extend([random.random(), np.random.rand(), float(torch.rand(()))])
    assert len(set(seen)) == len(seen)


@pytest.mark.usefixtures("random_states")
def test_the_same_seed_gives_the_same_random_numbers():
    seed_worker(5, 1)
    first = draws()
    seed_worker(5, 1)
    assert draws() == first
