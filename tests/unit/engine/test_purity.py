"""The modules that decide import nothing that acts."""

import ast
from pathlib import Path

import pytest

import shmloader

ROOT = Path(shmloader.__file__).parent.parent
ACTING = {
    *("threading", "multiprocessing", "os", "time", "torch", "numpy", "socket", "select"),
    *("mmap", "ctypes", "asyncio", "signal", "subprocess"),
}


def imported_by(module: str) -> set[str]:
    """Full names of what a module of shmloader imports, at its top or inside a function."""
    tree = ast.parse(path_of(module).read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module)
    return found


def path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


@pytest.mark.parametrize(
    "module",
    [
        "shmloader.engine.scheduler",
        "shmloader.engine.records",
        "shmloader.batch.checkpoint",
        "shmloader.pools.adapting",
        "shmloader.messages",
    ],
)
def test_a_deciding_module_imports_nothing_that_acts(module):
    seen: set[str] = set()
    ahead = [module]
    while ahead:
        name = ahead.pop()
        if name in seen:
            continue
        seen.add(name)
        if name.startswith("shmloader"):
            ahead.extend(imported_by(name))
    assert not {name.split(".")[0] for name in seen} & ACTING, seen
