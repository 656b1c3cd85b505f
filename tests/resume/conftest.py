"""Whether all cells of the matrix are run, or a part."""

import os

import pytest


@pytest.fixture(scope="session")
def whole() -> bool:
    """Whether ``make test-all`` runs this."""
    return os.environ.get("SHMLOADER_TEST_ALL", "") == "1"
