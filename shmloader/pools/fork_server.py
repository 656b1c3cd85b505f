"""Makes multiprocessing's fork server import torch once, so that the workers it forks need not.

By itself the server does not import torch: each worker would, which takes a second or more of a
core's time and 150 MB of memory of its own. Here the server imports it before it forks the first
worker, and all workers share these pages.

Nothing is changed if the server runs already, or if it would import other modules than this process
has imported: it does not know what a program has put on ``sys.path`` (Python 3.11 to 3.13), and
looks first in the working directory, where files may have the names of modules.
"""

import contextlib
import multiprocessing.forkserver
import os
import re
import site
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from shmloader.probing import probe

# Imports all that a worker runs.
_WORKER = "shmloader.pools.preloaded"

_PACKAGES = ("torch", "numpy", "psutil", "cloudpickle", "shmloader")

# Optional modules that torch 2.13 and other packages look for when they are imported.
_OPTIONAL = (
    *("_winapi", "cuda", "dill", "envwrap", "monkeytype", "msvcrt", "opt_einsum", "org", "pydot"),
    *("pynvml", "torch_xla", "torchcomms", "tqdm", "triton", "winreg"),
)


def preload(context: BaseContext) -> bool:
    """Make the fork server import what a worker needs, besides what the user has it import.

    Called before a worker is started.

    Args:
        context: A context of the start method "forkserver".

    Returns:
        Whether the server has imported what a worker needs, or will import it when it starts.
    """
    # Only these private attributes show which modules the user has asked for. These are kept.
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    wanted = list(getattr(server, "_preload_modules", ["__main__"]))
    if not _is_running(getattr(server, "_forkserver_pid", None)):
        others = [name for name in wanted if name != _WORKER]
        wanted = [*others, _WORKER] if _is_like_here() else others
        context.set_forkserver_preload(wanted)
    return _WORKER in wanted


def _is_running(pid: int | None) -> bool:
    """Whether a child process runs. Does not reap it."""
    if pid is None:
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # the server of the process that forked this one, which shares it
        return True


def _is_like_here() -> bool:
    """Whether a fresh interpreter with a bare ``sys.path`` imports the same files as this one."""
    try:
        folder = os.getcwd()  # noqa: PTH109 - entries of sys.path are strings
        stems = {entry.partition(".")[0] for entry in os.listdir(folder)}  # noqa: PTH208 - as above
        stems &= {*sys.stdlib_module_names, *sys.modules, *_OPTIONAL}
    except OSError:  # the directory is gone, or cannot be read
        return False
    first = [] if getattr(sys.flags, "safe_path", False) else [folder]
    # If this process looks there first, too, it has found the same files.
    is_first_here = bool(sys.path) and Path(sys.path[0] or folder).resolve() == Path(folder)
    if first and not is_first_here and any(_is_foreign(stem, folder) for stem in stems):
        return False
    fresh = _FreshPath(first)
    return all(fresh.finds_same(name) for name in _PACKAGES) and all(
        fresh.finds_same(name, is_needed=False) for name in _loaded()
    )


class _FreshPath:
    """Where a fresh interpreter with the flags of this one looks for modules.

    Args:
        first: The directories that come first in its ``sys.path``.
    """

    def __init__(self, first: list[str]) -> None:
        flags = sys.flags
        listed = "" if flags.ignore_environment else os.environ.get("PYTHONPATH", "")
        library = sysconfig.get_path("stdlib")
        self._path = [*first, *filter(None, listed.split(os.pathsep))]
        self._path += [library, sysconfig.get_path("platstdlib")]
        self._path.append(str(Path(library, "lib-dynload")))
        self._finders: list[Any] = []
        if flags.no_site:
            return
        imports: set[str] = set()
        for folder in _site_folders():
            self._path.append(folder)
            for line in _lines_of_pth_files(folder):
                if line.startswith(("import ", "import\t")):
                    imports |= set(re.findall(r"\w+", line))
                else:
                    self._path.append(str(Path(folder, line)))
        # An editable install may add a finder instead of a directory.
        for finder in sys.meta_path:
            kind = finder if isinstance(finder, type) else type(finder)
            if kind.__module__ in imports and self.finds_same(kind.__module__):
                self._finders.append(finder)

    def finds_same(self, name: str, *, is_needed: bool = True) -> bool:
        """Whether a module that was loaded here from a file would be found in the same file.

        Args:
            name: Name of the module.
            is_needed: Whether the module must be found; otherwise it may be missing.
        """
        file = probe(sys.modules.get(name), "__file__")
        if file is None:
            return not is_needed
        spec = probe(sys.modules[name], "__spec__")
        if getattr(spec, "origin", None) in {"frozen", "built-in"}:
            return True
        found = PathFinder.find_spec(name, self._path) or self._find_by_finders(name)
        if found is None or found.origin is None:
            return not is_needed
        return _is_one_file(found.origin, file)

    def _find_by_finders(self, name: str) -> ModuleSpec | None:
        for finder in self._finders:
            with contextlib.suppress(Exception):  # a finder may do anything
                spec: ModuleSpec | None = finder.find_spec(name, None)
                if spec is not None:
                    return spec
        return None


def _site_folders() -> list[str]:
    """Return the directories whose ``.pth`` files an interpreter reads when it starts."""
    of_user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*of_user, *site.getsitepackages()]


def _lines_of_pth_files(folder: str) -> list[str]:
    """Return the lines of ``.pth`` files. Each is a directory to look in or an import statement."""
    lines: list[str] = []
    for file in sorted(Path(folder).glob("[!.]*.pth")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines += file.read_text(encoding="utf-8-sig").splitlines()
    return [line.rstrip() for line in lines if line.strip() and not line.startswith("#")]


def _loaded() -> list[str]:
    """Return the names of this process's top-level modules."""
    return [name for name in list(sys.modules) if "." not in name and name != "__main__"]


def _is_one_file(one: str, other: str) -> bool:
    return one == other or Path(one).resolve() == Path(other).resolve()


def _is_foreign(name: str, folder: str) -> bool:
    """Whether a folder has a module of this name that was not loaded here from that folder."""
    found = PathFinder.find_spec(name, [folder])
    if found is None or found.origin is None:
        return False
    file = probe(sys.modules.get(name), "__file__")
    return file is None or not _is_one_file(found.origin, file)
