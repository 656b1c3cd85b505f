"""Processes of multiprocessing's "spawn" without the two seconds in which they import torch.

A process is forked, and then begins as in a new interpreter that has imported all but shmloader and
the tests: descriptors, signal handlers, standard output and the modules of both are as there. What
starts it is its parent, as with "spawn". For tests of what such processes do, not of their start.
"""

import atexit
import contextlib
import gc
import multiprocessing.util
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

_spawnv = multiprocessing.util.spawnv_passfds


def fork_as_spawned(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Stand in for ``multiprocessing.util.spawnv_passfds``. Returns the pid."""
    if "spawn_main" not in arguments[-2]:
        return _spawnv(path, arguments, descriptors)  # a service of multiprocessing's
    pid = os.fork()
    if pid == 0:
        _begin(arguments[-2:], {0, 1, 2, *descriptors})
    return pid


def _begin(arguments: Sequence[str], kept: set[int]) -> NoReturn:
    code: object = 1
    try:
        gc.freeze()
        atexit._clear()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers, not paths
            if number not in kept:
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(number)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
        ours = ("shmloader", "tests", "__mp_main__")
        names = [name for name in sys.modules if name.partition(".")[0] in ours]
        # They stay alive, since what they hold has finalizers.
        modules = [sys.modules.pop(name) for name in names]
        sys.argv = ["-c", arguments[1]]
        exec(arguments[0])
        del modules
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
