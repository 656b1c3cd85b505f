"""Memory that is not there: told before it is touched, and the kernel's kills explained."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmloader
from shmloader import DataLoader, SharedMemoryError
from shmloader.memory.limits import RESERVE_BYTES, control_groups
from tests.made_up import MIB, System
from tests.process.support import Calls, Gate, run_program, wait_until


class Limited(DataLoader):
    def __init__(self, system: System, *arguments: Any, **options: Any) -> None:
        self.system = system
        super().__init__(*arguments, **options)

    @property
    def _root(self) -> str:
        return str(self.system.root)


def make_system(root: Path, free_bytes: int) -> System:
    """So much is free beyond the reserve, for a control group."""
    system = System(root)
    system.set_available(1 << 40)
    system.join_v2("/job")
    system.group_v2("/job", 4 * free_bytes + RESERVE_BYTES, 3 * free_bytes)
    return system


def with_text(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples), "text"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["short", "general"])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_batch_that_does_not_fit_is_told_at_its_place_and_the_rest_goes_on(
    method, way, tmp_path, slots
) -> None:
    system = make_system(tmp_path, 5_000_000)
    sizes = [1000, 2000, 6_000_000, 3000, 200_000, 100]
    loader = Limited(
        system, Calls(torch.zeros, len(sizes)), batch_sampler=[[(size // 4,)] for size in sizes],
        num_workers=2, multiprocessing_context=method,
        collate_fn=with_text if way == "general" else None,
    )  # fmt: skip
    batches, told = iter(loader), []
    for size in sizes:
        try:
            batch = next(batches)
            tensor = batch if way == "short" else batch[0]
            assert tensor.nbytes == size
        except SharedMemoryError as error:
            told.append((size, str(error)))
    assert [size for size, _ in told] == [6_000_000]
    text = told[0][1]
    assert "a batch needs at least 6.0 MB of shared memory, 6.0 MB more than its slot has" in text
    assert "but 5.0 MB is free (limit of the control group /job;" in text
    assert "The loader uses up to 8 such slots: lower batch_size" in text
    assert sum(slots.files().values()) < MIB, "it was touched"


def test_a_list_of_keys_that_does_not_fit_is_told_by_the_main_process(tmp_path) -> None:
    system = make_system(tmp_path, 100_000)
    loader = Limited(system, Calls(lambda n: n % 2, 200_000), batch_size=100_000, num_workers=1)
    batches = iter(loader)
    for _ in range(2):
        with pytest.raises(SharedMemoryError, match=r"(?s)sending indices.*but 100\.0 kB is free"):
            next(batches)


def test_what_a_batch_that_failed_has_touched_is_not_asked_for_again(tmp_path) -> None:
    system = make_system(tmp_path, 50_000_000)
    told, gate = Gate(), Gate()

    def sample(index: int) -> int:
        if index == 20:
            told.open()
            gate.pass_through()
        return index

    def collate(samples: list[int]) -> torch.Tensor:
        out = shmloader.empty((10**6,), torch.uint8).fill_(1)
        if samples[0] < 20:
            raise ValueError("at the last moment")
        return out

    batches = iter(Limited(system, Calls(sample, 40), num_workers=1, collate_fn=collate))
    for _ in range(20):
        with pytest.raises(ValueError, match="at the last moment"):
            next(batches)
    told.wait_until_open()
    system.set_available(0)
    gate.open()
    next(batches)


@pytest.fixture
def control_group() -> Iterator[Callable[[int], Path]]:
    """Makes a real control group of its own within this process's, where that is permitted."""
    made: list[Path] = []

    def make(limit_bytes: int) -> Path:
        groups = [group for group in control_groups(Path("/")) if group.path.is_dir()]
        for parent in groups[:1]:
            path = parent.path / f"shmloader-test-{os.getpid()}-{len(made)}"
            try:
                path.mkdir()
                made.append(path)
                names = "memory.limit_in_bytes", "memory.oom_control"
                limit, kills = ("memory.max", "memory.events") if parent.is_v2 else names
                (path / limit).write_text(str(limit_bytes))
                if not (path / kills).exists():
                    continue
            except OSError as error:
                pytest.skip(f"no control group can be made here: {error}")
            return path
        pytest.skip("there are no control groups here that limit memory")

    yield make
    for path in made:

        def is_removed(path: Path = path) -> bool:
            with contextlib.suppress(OSError):
                path.rmdir()
            return not path.exists()

        wait_until(is_removed)


PROGRAM = """
import contextlib, multiprocessing, os, sys, time
from pathlib import Path
Path({group!r}, "cgroup.procs").write_text("0")
import torch, shmloader
from shmloader import DataLoader, SharedMemoryError, WorkerDiedError
"""


def kills_of(group: Path) -> str:
    for name in ("memory.events", "memory.oom_control"):
        if (group / name).exists():
            return (group / name).read_text()
    raise AssertionError("no count of kills")


@pytest.mark.slow
def test_in_a_real_group_a_loader_that_wants_too_much_is_told_and_nobody_killed(
    control_group,
) -> None:
    group = control_group(600 * MIB)
    done = run_program(
        PROGRAM.format(group=str(group))
        + """
made = multiprocessing.RawArray("b", 12)

class Data:
    def __getitem__(self, index):
        try:
            # Nothing is made in ordinary memory, which nobody looks after.
            return shmloader.empty((100 << 20,), torch.uint8).fill_(index)
        finally:
            made[index] = 1

# A sampler of its own: nobody knows how many batches there will be. Three are lent at once.
batches = iter(DataLoader(Data(), sampler=list(range(12)), batch_size=None, num_workers=2))
kept, told = [], []
for index in range(12):
    deadline = time.monotonic() + 60
    while not all(made[: index + 4]):  # else not all slots may come into use
        assert time.monotonic() < deadline
        time.sleep(0.005)
    try:
        batch = next(batches)
        assert int(batch[0]) == int(batch[-1]) == index
        kept = [*kept[-1:], batch]
    except SharedMemoryError as error:
        told.append(str(error))
assert told, "there was room for all"
assert "The loader uses up to 8 such slots" in told[0]
assert "shmloader-test-" in told[0], told[0]
print(12 - len(told) >= 2)
"""
    )
    done.assert_quiet()
    assert done.out.strip() == "True"
    assert "oom_kill 0" in kills_of(group)


@pytest.mark.slow
def test_in_a_real_group_a_worker_that_the_kernel_killed_is_told_so(control_group) -> None:
    group = control_group(400 * MIB)
    done = run_program(
        PROGRAM.format(group=str(group))
        + """
class Data:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index == 2:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            return bytearray(b"x") * (1 << 30)
        return index

# A killed worker leaves the group a moment before its memory does. If this process wanted a page
# just then, the kernel would kill it too.
with contextlib.suppress(PermissionError), open("/proc/self/oom_score_adj", "w") as file:
    file.write("-1000")
batches = iter(DataLoader(Data(), batch_size=None, num_workers=1))
assert [next(batches), next(batches)] == [0, 1]
try:
    next(batches)
except WorkerDiedError as error:
    print(error)
"""
    )
    done.assert_quiet()
    assert "the kernel's out-of-memory killer did: lower num_workers" in done.out
