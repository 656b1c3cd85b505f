"""Imports the packages of the cluster tests, which only an environment of its own has."""

import importlib
import os
from types import ModuleType

import pytest


def needed(name: str) -> ModuleType:
    """Import a package. If it is missing, skip the test; under ``make test-cluster``, fail."""
    if os.environ.get("SHMLOADER_TEST_CLUSTER"):
        return importlib.import_module(name)
    found: ModuleType = pytest.importorskip(name)
    return found
