"""Settings of the tests of frameworks, which `make test-frameworks` runs in their environment."""

import gc
import os
import time
from collections.abc import Iterator

import psutil
import pytest

# Elsewhere the frameworks are missing, so the tests are not collected. A framework that is missing
# in the environment of these tests is an error.
collect_ignore_glob = [] if os.environ.get("SHMLOADER_TEST_FRAMEWORKS") else ["test_*.py"]
if not collect_ignore_glob:
    import tests.frameworks.support  # noqa: F401 - lets torchvision be imported, before all others

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "1")
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def _workers() -> list[psutil.Process]:
    """The worker processes of loaders, ours and torch's."""
    found = psutil.Process().children()
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def nothing_remains() -> Iterator[None]:
    """Fail a test whose loaders leave processes; frameworks keep threads and files of their own."""
    before = {process.pid for process in _workers()}
    yield
    deadline = time.monotonic() + 10
    while remaining := [process for process in _workers() if process.pid not in before]:
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail(f"processes remain: {[process.cmdline() for process in remaining]}")
        time.sleep(0.05)
