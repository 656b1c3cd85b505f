"""What multiprocessing's fork server imports once, so that the workers it forks need not.

By itself the server has nothing of torch's: each worker would import it, a second and more of a
core's time, and keep 150 MB of its own for that. Now the server does it, before it forks the first
worker, and all of them have these pages in common.

A server that runs already stays as it is. So does one that would find other modules than this
process has: it is told nothing of what a program has put on ``sys.path`` (Python 3.11 to 3.13), and
looks in the working directory first, where files may lie that are called like modules.
"""

import multiprocessing.forkserver
import os
import site
import sys
from importlib.machinery import PathFinder
from multiprocessing.context import BaseContext

# All that a worker runs: torch, numpy and what is ours.
_WORKER = "shmloader.workers.child"

_PACKAGES = ("torch", "numpy", "psutil", "cloudpickle", "shmloader")


def preload(context: BaseContext) -> None:
    """Have the fork server import what a worker needs, beside what its user has it import.

    Args:
        context: Of start method "forkserver"; its next worker is about to be started.
    """
    # There is no other way to know what the user has asked for, which stays.
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    wanted = getattr(server, "_preload_modules", ["__main__"])
    if _WORKER not in wanted and _is_like_here():
        context.set_forkserver_preload([*wanted, _WORKER])


def _is_like_here() -> bool:
    """Whether a fresh interpreter with a bare ``sys.path`` imports the same files as this one."""
    try:
        here = os.getcwd()  # noqa: PTH109 - entries of sys.path are strings
        stems = {entry.partition(".")[0] for entry in os.listdir(here)}  # noqa: PTH208 - as above
    except OSError:  # gone, or not to be read
        return False
    users = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [here, *filter(None, listed), *users, *site.getsitepackages()]
    for name in _PACKAGES:
        found = PathFinder.find_spec(name, places)
        if found is None or found.origin != getattr(sys.modules.get(name), "__file__", None):
            return False
    return not any(_is_module(name, here) for name in stems & sys.stdlib_module_names)


def _is_module(name: str, folder: str) -> bool:
    found = PathFinder.find_spec(name, [folder])
    return found is not None and found.origin is not None
