"""What most tests of the memory package begin with."""

import pytest

from tests.unit.memory.support import open_bench


@pytest.fixture
def bench():
    """A slot of 64 MiB with a task in work."""
    with open_bench() as bench:
        yield bench
