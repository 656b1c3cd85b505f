"""Tests of this folder need a CUDA device; without one they are skipped, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items) -> None:
    reason = ""
    if not torch.backends.cuda.is_built():
        reason = "needs a GPU, and this torch was built without CUDA"
    elif not torch.cuda.is_available():
        reason = "needs a GPU, and torch finds none here"
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _context() -> None:
    """The driver's threads and descriptors are there before the first test looks (I8)."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda")
        torch.ones(1).pin_memory()
        torch.cuda.synchronize()
