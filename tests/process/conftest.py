"""Fixtures of the process tests."""

from __future__ import annotations

import pytest

from tests.process.support import Slots


@pytest.fixture
def slots() -> Slots:
    """The shared memory that a test makes."""
    return Slots()
