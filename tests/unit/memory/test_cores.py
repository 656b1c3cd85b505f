"""Core quotas, read from made-up control groups."""

import pytest

from shmloader.memory.limits import affinity, core_quota, usable_cores
from tests.made_up import System


@pytest.fixture
def system(tmp_path) -> System:
    return System(tmp_path)


def test_where_nothing_can_be_read_there_is_no_quota(tmp_path) -> None:
    assert core_quota(tmp_path) is None
    assert usable_cores(tmp_path) == affinity()


def test_the_least_quota_on_the_way_up_counts_v2(system) -> None:
    system.join_v2("/a/b")
    system.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    assert core_quota(system.root) is None
    system.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n")
    assert core_quota(system.root) == 1.5
    system.write("sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert core_quota(system.root) == 0.5
    assert usable_cores(system.root) == 1


def test_the_mount_tells_the_directory_of_a_container_s_group(system) -> None:
    system.join_v2("/docker/abc")
    system.write("sys/fs/cgroup/cpu.max", "250000 100000\n")
    assert core_quota(system.root) == 2.5


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
