"""Says what to do about a program whose main file starts workers when a worker imports it.

Under spawn and forkserver a worker first imports the program's main file. If that file iterates a
loader without a main guard, each worker would start further workers. Python refuses that with a
long traceback in each worker, and the main process does not learn why its workers have died. Here a
worker ends silently, with an exit code that tells the main process the reason.
"""

import multiprocessing
import os

#: Exit code of a worker that would have started workers while it imported the main file.
NO_GUARD_EXIT = 73

#: What happened, in Python's words, and what to do.
NO_GUARD_TEXT = """\
An attempt has been made to start a new process before the current process has finished its \
bootstrapping phase. A process that is started by 'spawn' or 'forkserver' imports the program's \
main file, and this file starts workers as soon as it is imported. Put that part of it under a \
main guard:

if __name__ == "__main__":
    for batch in loader:
        ...
"""

_NAME = "shmloader worker "


def name_of(worker_id: int | str) -> str:
    """Return the process name of a worker, or of another process that the pool starts."""
    return f"{_NAME}{worker_id}"


def refuse_during_import() -> None:
    """Refuse to start workers in a process that is importing the main file.

    Does not return in a process that shmloader has started: it ends with :data:`NO_GUARD_EXIT`.

    Raises:
        RuntimeError: In a process that other code has started.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(_NAME):
        os._exit(NO_GUARD_EXIT)
    raise RuntimeError(NO_GUARD_TEXT)
