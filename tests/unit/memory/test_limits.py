"""What /proc and the control groups say, on directories of made-up files."""

from pathlib import Path

import pytest

from shmloader.memory.limits import Free, OomKills, control_groups, format_bytes, free_memory
from tests.made_up import MIB, System

GROUP = "limit of the control group"
COMMIT = "CommitLimit, since vm.overcommit_memory = 2"
NO_LIMIT_OF_V1 = 9223372036854771712


@pytest.fixture
def system(tmp_path):
    return System(tmp_path)


def free(system: System) -> Free | None:
    return free_memory(system.root, control_groups(system.root))


def test_where_nothing_can_be_read_there_is_no_limit(tmp_path):
    assert control_groups(tmp_path) == ()
    assert free_memory(tmp_path, ()) is None
    assert OomKills(tmp_path).count() is None


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
    system.join_v2("/new", point="/sys/fs/cgroup/unified")
    system.group_v1("/old", 200 * MIB, 0)
    assert free(system) == Free(200 * MIB, f"{GROUP} /old")


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("/docker/0123", "/docker/0123"),  # no namespace of its own: told from outside
        ("/", "/"),  # a namespace of its own
        ("/../../somewhere", "/"),  # outside of the namespace
        ("/elsewhere", "/docker/0123"),  # outside of what is mounted
    ],
)
def test_in_a_container_the_mount_s_own_group_is_found(system, path, inside):
    system.join_v2(path, inside=inside)
    system.group_v2("", 100 * MIB, 50 * MIB)
    assert free(system) == Free(50 * MIB, f"{GROUP} /")


def test_a_group_below_that_of_a_container_is_found(system):
    system.join_v1("/docker/0123/job", inside="/docker/0123")
    system.group_v1("/job", 100 * MIB, 50 * MIB)
    system.group_v1("", 90 * MIB, 0)
    assert free(system) == Free(50 * MIB, f"{GROUP} /job")


def test_this_machine_has_something_free():
    found = free_memory(Path("/"), control_groups(Path("/")))
    assert found is not None
    assert found.nbytes > 0


def test_kills_are_those_of_the_innermost_group_that_counts(system):
    system.join_v2("/job/worker")
    assert OomKills(system.root).count() is None
    system.set_kills("", 90)
    system.set_kills("/job", 5)
    assert OomKills(system.root).count() == 5
    system.set_kills("/job/worker", 0)
    assert OomKills(system.root).count() == 0


def test_kills_are_counted_by_the_first_version_too(system):
    system.join_v1("/job")
    text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
    system.write("sys/fs/cgroup/memory/job/memory.oom_control", text)
    assert OomKills(system.root).count() == 3


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (77_070_336, "77.1 MB"),
        (999_949_999, "999.9 MB"),
        (999_950_000, "1.0 GB"),
        (1_541_406_720, "1.5 GB"),
        (10**15, "1000.0 TB"),
    ],
)
def test_sizes_are_told_in_few_digits(nbytes, text):
    assert format_bytes(nbytes) == text
