"""The tests that need Dask and Ray, which run only in an environment that has both."""

import os

import pytest

# Ray's own, at its start: no reports to its makers, and no dashboard.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# By default, Ray moves nothing to a disk that is 95 % full. Here, it moves 240 MB.
os.environ.setdefault("RAY_local_fs_capacity_threshold", "1")

# Elsewhere they are not collected: importing Dask takes half a second in each process.
collect_ignore_glob = [] if os.environ.get("SHMLOADER_TEST_CLUSTER") else ["test_*.py"]


@pytest.fixture(autouse=True)
def nothing_remains() -> None:
    """In place of the check of every other test: the clusters keep threads and descriptors."""
