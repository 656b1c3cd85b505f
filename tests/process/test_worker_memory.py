"""What workers do with the memory of their samples."""

from __future__ import annotations

import platform
import resource

import numpy as np
import pytest
from torch.utils.data import Dataset

from shmloader import DataLoader
from tests.process.support import run_program

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library allocates"),
]

# Of a batch: more than glibc ever keeps by itself (64 MiB, once it has seen 32 MiB freed).
NBYTES = 128_000_000
PAGES = NBYTES // resource.getpagesize()


class Samples(Dataset[int]):
    """Memory of a batch's samples, twice; and how many pages had to be asked for, the 2nd time."""

    def __init__(self, sample_bytes: int) -> None:
        self.sample_bytes = sample_bytes

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            count = NBYTES // self.sample_bytes
            samples = [np.full(self.sample_bytes, index, np.uint8) for _ in range(count)]
            after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            del samples
        return after - before


def fault_counts(sample_bytes: int) -> list[int]:
    """Page faults in a worker."""
    with DataLoader(Samples(sample_bytes), batch_size=None, num_workers=1) as loader:
        return list(loader)


def fault_counts_in_a_program(sample_bytes: int) -> list[int]:
    """The same where little else lies on the heap."""
    run = run_program(
        "from tests.process.test_worker_memory import fault_counts\n"
        f"print(*fault_counts({sample_bytes}))"
    )
    run.assert_quiet()
    return [int(word) for word in run.out.split()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sample_bytes", [100_000, 2_000_000])
def test_memory_that_samples_leave_is_kept_for_the_next_ones(sample_bytes) -> None:
    assert max(fault_counts_in_a_program(sample_bytes)) < PAGES / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_what_the_user_has_set_is_left_as_it_is(name, value, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    assert min(fault_counts_in_a_program(100_000)) > PAGES / 2
