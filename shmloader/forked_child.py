"""Ends a child process that the user's code has forked, when the child comes back to our code.

Such a child is a copy of the process that makes batches. Only the process itself answers for a
batch, and only it writes to the batch's slot.
"""

import os
import sys
import traceback


def end_if_forked(pid: int) -> None:
    """End this process if it is not process ``pid``; return if it is.

    The exit status is what Python's would be: that of the SystemExit that is being handled, 1 for
    any other exception, whose traceback is printed, and 0 if none is.

    Args:
        pid: Id of the process that called the user's code.
    """
    if os.getpid() == pid:
        return
    error, status = sys.exception(), 0
    try:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            status = error.code or 0
        elif error is not None:
            status = 1
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status & 0xFF)
