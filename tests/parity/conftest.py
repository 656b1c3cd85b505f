"""What all parity tests need before the first of them runs."""

import gc
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

# A worker that the fork server starts then needs 20 ms, not the 2 s that importing torch takes.
# The server is started by the fixtures of all tests, after this line.
forkserver.set_forkserver_preload(["torch"])


@pytest.fixture(scope="module", autouse=True)
def _quick_garbage_collection() -> Iterator[None]:
    """Let the collector pass over what importing torch left: 70 ms a time, some times a test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
