"""The compiled module is built for all versions of Python at once, or for a free-threaded one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Builds as the interpreter says that it is, or as if it were free-threaded.
BUILD = """
import sys, sysconfig
if {free_threaded}:
    sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
sys.argv = ["setup.py", "-v", "build_ext", "--build-lib", {target!r}]
exec(compile(open("setup.py").read(), "setup.py", "exec"))
"""

USE = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("_streaming", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
source, target = ctypes.create_string_buffer(b"x" * 200), ctypes.create_string_buffer(200)
module.copy_rows(ctypes.addressof(target), [ctypes.addressof(source), ctypes.addressof(source)], 100)
assert target.raw == b"x" * 200
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("free_threaded", [False, True])
def test_free_threaded_python_gets_a_build_of_its_own(free_threaded, tmp_path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "shmloader" / "memory").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("shmloader/__init__.py", "shmloader/memory/_streaming.c"):
        shutil.copy(ROOT / name, source / name)
    script = BUILD.format(free_threaded=free_threaded, target=str(target))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.rglob("_streaming*.so")
    assert (".abi3." in built.name) is not free_threaded
    assert ("Py_LIMITED_API" in done.stdout + done.stderr) is not free_threaded
    subprocess.run([sys.executable, "-c", USE, str(built)], check=True)
