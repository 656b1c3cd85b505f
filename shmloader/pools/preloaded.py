"""What the fork server imports once, for the workers that it forks. Imported nowhere else.

Workers are started with SIGINT blocked. So is the server, and the processes that it forks inherit
this. A worker unblocks SIGINT once it ignores it. Here SIGINT is unblocked in all other processes
that the user has the server fork.
"""

import multiprocessing
import signal
from multiprocessing import util

from shmloader.pools.child import worker_main


def _unblock_sigint(_: object) -> None:
    # Only its target shows whether a process is a worker of ours.
    if getattr(multiprocessing.current_process(), "_target", None) is not worker_main:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


util.register_after_fork(_unblock_sigint, _unblock_sigint)
