"""Imports what these tests need, which only an environment of their own has."""

import importlib
import os
from types import ModuleType

import pytest


def needed(name: str) -> ModuleType:
    """Import a package. Where these tests are asked for, its absence is an error, else a skip."""
    if os.environ.get("SHMLOADER_TEST_CLUSTER"):
        return importlib.import_module(name)
    found: ModuleType = pytest.importorskip(name)
    return found
