"""What /proc and the control groups say of memory and cores, and whether a slot may grow."""

import errno
import fcntl
import os
import resource
from pathlib import Path

import pytest

from shmloader.errors import SharedMemoryError
from shmloader.memory import limits
from shmloader.memory.arena import Arena
from shmloader.memory.limits import (
    RESERVE_BYTES,
    Free,
    MemoryAdmission,
    MemoryConfig,
    affinity,
    control_groups,
    core_quota,
    free_memory,
    usable_cores,
    why_unsupported,
)
from tests.made_up import MIB, System
from tests.unit.memory.support import in_a_child, names_in, resident_bytes

GROUP = "limit of the control group"
COMMIT = "CommitLimit, since vm.overcommit_memory = 2"
NO_LIMIT_OF_V1 = 9223372036854771712


@pytest.fixture
def system(tmp_path) -> System:
    return System(tmp_path)


def free(system: System) -> Free | None:
    return free_memory(system.root, control_groups(system.root))


def test_where_nothing_can_be_read_there_is_neither_limit_nor_quota(tmp_path):
    assert control_groups(tmp_path) == ()
    assert free_memory(tmp_path, ()) is None
    assert core_quota(tmp_path) is None
    assert usable_cores(tmp_path) == affinity()


def test_without_control_groups_what_is_available_counts(system):
    system.set_available(300 * MIB)
    assert free(system) == Free(300 * MIB, "MemAvailable")


@pytest.mark.parametrize("text", ["", "MemAvailable:\n", "MemAvailable: lots kB\n", "\0\xff\n"])
def test_a_meminfo_that_is_not_as_expected_sets_no_limit(system, text):
    system.write("proc/meminfo", text)
    assert free(system) is None


@pytest.mark.parametrize(
    ("mode", "expected"), [("0", "MemAvailable"), ("1", "MemAvailable"), ("2", COMMIT)]
)
def test_the_commit_limit_counts_only_where_it_is_kept(system, mode, expected):
    system.write("proc/sys/vm/overcommit_memory", f"{mode}\n")
    committed = ["CommitLimit:    204800 kB", "Committed_AS:   102400 kB"]
    system.set_available(300 * MIB, *committed)
    found = free(system)
    assert found.limit == expected
    assert found.nbytes == (100 * MIB if mode == "2" else 300 * MIB)


def test_the_least_limit_on_the_way_up_counts_v2(system):
    system.set_available(10_000 * MIB)
    system.join_v2("/user.slice/job/worker")
    system.group_v2("/user.slice/job/worker", "max", 100 * MIB)
    system.group_v2("/user.slice/job", 500 * MIB, 200 * MIB)
    system.group_v2("/user.slice", 400 * MIB, 150 * MIB)
    assert free(system) == Free(250 * MIB, f"{GROUP} /user.slice")
    system.group_v2("/user.slice/job/worker", 300 * MIB, 100 * MIB)
    assert free(system) == Free(200 * MIB, f"{GROUP} /user.slice/job/worker")
    system.set_available(150 * MIB)
    assert free(system) == Free(150 * MIB, "MemAvailable")


def test_the_least_limit_on_the_way_up_counts_v1(system):
    system.set_available(10_000 * MIB)
    system.join_v1("/job/worker")
    system.group_v1("/job/worker", NO_LIMIT_OF_V1, 100 * MIB)
    system.group_v1("/job", 500 * MIB, 200 * MIB)
    system.group_v1("", NO_LIMIT_OF_V1, 700 * MIB)
    assert free(system) == Free(300 * MIB, f"{GROUP} /job")


def test_page_cache_is_free_v2(system):
    cache = {"file": 450 * MIB, "inactive_file": 150 * MIB, "active_file": 250 * MIB}
    system.join_v2("/job")
    system.group_v2("/job", 500 * MIB, 499 * MIB, shmem=50 * MIB, **cache)
    assert free(system).nbytes == 401 * MIB
    system.group_v2("/job", 500 * MIB, 499 * MIB, slab_reclaimable=9 * MIB, **cache)
    assert free(system).nbytes == 410 * MIB


def test_page_cache_is_free_v1_and_counted_with_the_groups_below(system):
    system.join_v1("/job")
    system.group_v1(
        "/job", 500 * MIB, 499 * MIB, inactive_file=1, active_file=2,
        total_inactive_file=150 * MIB, total_active_file=250 * MIB,
    )  # fmt: skip
    assert free(system).nbytes == 401 * MIB


@pytest.mark.parametrize("name", ["memory.max", "memory.current"])
def test_a_group_without_one_of_its_files_sets_no_limit(system, name):
    system.set_available(300 * MIB)
    system.join_v2("/job")
    system.group_v2("/job", 100 * MIB, 50 * MIB)
    assert free(system).nbytes == 50 * MIB
    (system.root / "sys/fs/cgroup/job" / name).unlink()
    assert free(system) == Free(300 * MIB, "MemAvailable")
    system.write(f"sys/fs/cgroup/job/{name}", "")
    assert free(system) == Free(300 * MIB, "MemAvailable")


def test_both_hierarchies_count_where_both_are_mounted(system):
    system.join_v1("/old")
    system.join_v2("/new")
    system.group_v1("/old", 200 * MIB, 0)
    assert free(system) == Free(200 * MIB, f"{GROUP} /old")


# Told from outside; in a namespace of its own; outside of that.
@pytest.mark.parametrize("path", ["/docker/0123", "/", "/../../somewhere"])
def test_in_a_container_the_mount_s_own_group_is_found(system, path):
    system.join_v2(path)
    system.group_v2("", 100 * MIB, 50 * MIB)
    assert free(system) == Free(50 * MIB, f"{GROUP} /")
    system.write("sys/fs/cgroup/cpu.max", "250000 100000\n")
    assert core_quota(system.root) == 2.5


def test_this_machine_has_something_free():
    found = free_memory(Path("/"), control_groups(Path("/")))
    assert found is not None
    assert found.nbytes > 0


@pytest.fixture
def arena():
    """One slot, which is mapped."""
    arena = Arena.create(512 * MIB, 1)
    arena.reach(arena.slots[0], 512 * MIB)
    yield arena
    arena.close()


def grow(admission: MemoryAdmission, arena: Arena, backed: int, end: int) -> int:
    """Grow the slot, of which ``backed`` bytes have pages. Returns how many are admitted."""
    (slot,) = arena.slots
    slot.touched_bytes = backed
    try:
        admission.grow(arena, slot, end)
        return slot.touched_bytes
    except SharedMemoryError:
        assert slot.touched_bytes == backed
        raise


def make_admission(system: System, free_bytes: int, worker_count: int = 2) -> MemoryAdmission:
    """An admission with this much free beyond the reserve."""
    system.set_available(free_bytes + RESERVE_BYTES)
    return MemoryAdmission(MemoryConfig(worker_count, 6, str(system.root)))


def test_what_fits_is_there_when_it_is_said_to_be(system, arena):
    admission = make_admission(system, 40 * MIB)
    assert grow(admission, arena, 0, 20 * MIB) == 20 * MIB
    assert resident_bytes(arena) == 20 * MIB
    assert grow(admission, arena, 20 * MIB, 60 * MIB) == 60 * MIB, "as much again is free"
    assert resident_bytes(arena) == 60 * MIB


def test_what_does_not_fit_is_told_with_the_arithmetic_and_not_touched(system, arena):
    admission = make_admission(system, 50 * 10**6)
    with pytest.raises(SharedMemoryError) as caught:
        grow(admission, arena, 20 * 10**6, 97 * 10**6)
    assert str(caught.value) == (
        "a batch needs at least 97.0 MB of shared memory, 77.0 MB more than its slot has, but "
        "50.0 MB is free (MemAvailable; 16.8 MB is kept in reserve). The loader uses up to 6 "
        "such slots: lower batch_size, prefetch_factor or num_workers."
    )
    assert resident_bytes(arena) == 0


def test_all_that_is_free_may_be_taken_but_for_the_reserve(system, arena):
    grow(make_admission(system, 10 * MIB, worker_count=64), arena, 0, 10 * MIB)
    with pytest.raises(SharedMemoryError, match="MemAvailable"):
        grow(make_admission(system, 10 * MIB), arena, 10 * MIB, 20 * MIB + 1)
    with pytest.raises(SharedMemoryError, match="0 B is free"):
        grow(make_admission(system, -1 * MIB), arena, 10 * MIB, 10 * MIB + 1)


def test_without_any_limit_everything_may_be_taken(tmp_path, arena):
    admission = MemoryAdmission(MemoryConfig(2, 6, str(tmp_path)))
    assert grow(admission, arena, 0, 500 * MIB) == 500 * MIB
    assert resident_bytes(arena) == 0, "the writer will"


def test_a_growth_that_others_come_before_is_undone_and_told(system, arena, monkeypatch):
    admission = make_admission(system, 0)
    arena.slots[0].memory[: 2 * MIB] = b"x" * (2 * MIB)
    left = [100, 90, 13]
    monkeypatch.setattr(
        limits, "free_memory", lambda *_: Free(left.pop(0) * MIB + RESERVE_BYTES, "MemAvailable")
    )
    with pytest.raises(SharedMemoryError, match=r"31\.5 MB more .* but 30\.4 MB is free"):
        grow(admission, arena, 2 * MIB, 32 * MIB)
    assert left == []
    assert resident_bytes(arena) == 2 * MIB
    assert bytes(arena.slots[0].memory[2 * MIB - 1 : 2 * MIB + 1]) == b"x\0"


@pytest.mark.parametrize(
    ("free_mib", "present_mib", "is_short"), [(80, 0, False), (79, 0, True), (60, 20, False)]
)
def test_memory_is_short_if_it_may_not_do_for_slots_and_samples(
    system, free_mib, present_mib, is_short
):
    # Six slots, and as much for the samples of two workers.
    admission = make_admission(system, free_mib * MIB)
    assert admission.is_short(present_mib * MIB, 10 * MIB) == is_short


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.fixture
def _asked_anew():
    why_unsupported.cache_clear()
    yield
    why_unsupported.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize(
    ("module", "name"),
    [(os, "memfd_create"), (fcntl, "fcntl"), (os, "pidfd_open"), (os, "eventfd")],
)
def test_what_is_refused_is_told_and_leaves_no_descriptor(module, name, monkeypatch):
    before = names_in("/proc/self/fd")
    monkeypatch.setattr(module, name, refuse)
    assert "fails ([Errno 13] Permission denied): they need " in why_unsupported()
    monkeypatch.undo()
    assert names_in("/proc/self/fd") == before


@pytest.mark.usefixtures("_asked_anew")
def test_what_this_python_lacks_is_named(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert "no attribute 'pidfd_open'" in why_unsupported()


@pytest.mark.usefixtures("_asked_anew")
def test_a_lack_of_descriptors_is_no_lack_of_support():
    def work() -> str:
        told = set()
        for count in range(3, 40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, 40))
            told.add(why_unsupported())
            why_unsupported.cache_clear()
        return str(told)

    assert in_a_child(work) == "{None}"


def test_the_least_quota_on_the_way_up_counts_v2(system) -> None:
    system.join_v2("/a/b")
    system.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    assert core_quota(system.root) is None
    system.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n")
    assert core_quota(system.root) == 1.5
    system.write("sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert core_quota(system.root) == 0.5
    assert usable_cores(system.root) == 1


def test_quotas_of_version_1(system) -> None:
    system.join_v1("/x")  # whose group of cores is /x, too
    base = "sys/fs/cgroup/cpu,cpuacct/x"
    system.write(f"{base}/cpu.cfs_quota_us", "-1\n")
    system.write(f"{base}/cpu.cfs_period_us", "100000\n")
    assert core_quota(system.root) is None
    system.write(f"{base}/cpu.cfs_quota_us", "300000\n")
    assert core_quota(system.root) == 3.0


@pytest.mark.parametrize("text", ["", "max\n", "100000 0\n", "1 2 3\n", "lots 100000\n"])
def test_an_unexpected_file_counts_as_no_quota(system, text) -> None:
    system.join_v2("/a")
    system.write("sys/fs/cgroup/a/cpu.max", text)
    assert core_quota(system.root) is None
