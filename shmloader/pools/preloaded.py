"""What the fork server imports once, for the workers that it forks. Imported nowhere else.

Ctrl-C is kept from whatever starts a worker, so the server began with SIGINT blocked, and hands
that on. A worker lets it through when it ignores it; other processes that the user has the server
fork hear it as ever.
"""

import multiprocessing
import signal
from multiprocessing import util

from shmloader.pools.child import worker_main


def _let_ctrl_c_through(_: object) -> None:
    # There is no other way to know whose process this is.
    if getattr(multiprocessing.current_process(), "_target", None) is not worker_main:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


util.register_after_fork(_let_ctrl_c_through, _let_ctrl_c_through)
