"""What a worker is forked with is left alone by its garbage collector.

The collector notes what it finds in the objects themselves, so the first full collection in a
forked worker writes to the page of every container that the main process had, and the kernel copies
them all. Frozen objects are not looked at. What is garbage among them stays, in the worker.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def objects_frozen() -> Iterator[None]:
    """Fork inside of this. The child's objects stay frozen, this process's do not.

    Where the user has frozen objects himself, nothing is done: to unfreeze is to unfreeze all.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
