"""Every exception that shmloader raises of its own.

::

    ShmloaderError
    ├── WorkerDiedError     (RuntimeError)  a worker process ended by itself
    ├── LoaderTimeoutError  (RuntimeError)  no batch within ``timeout`` seconds; nothing is lost
    ├── SharedMemoryError   (MemoryError)   a batch needs more shared memory than its slot may have,
    │                                       or than there is; found before it is touched
    ├── TooManyFailures     (RuntimeError)  bad samples: ``max_failures`` was passed, or all failed
    ├── ClosedLoaderError   (RuntimeError)  used after ``close()`` or after a worker died
    └── InternalError       (RuntimeError)  a bug in shmloader

Wrong arguments raise ``ValueError`` or ``TypeError`` at construction, and an
exception out of the user's own code keeps its type. Each class also derives from
the built-in type that torch's loader raises in its place, so that ``except
RuntimeError`` written for torch goes on working.
"""


class ShmloaderError(Exception):
    """Base of all exceptions defined by shmloader."""


class WorkerDiedError(ShmloaderError, RuntimeError):
    """A worker process ended by itself: killed by a signal, or by an exit of its own."""


class LoaderTimeoutError(ShmloaderError, RuntimeError):
    """No batch came within ``timeout`` seconds. None is lost: call ``next()`` again."""


class SharedMemoryError(ShmloaderError, MemoryError):
    """A batch, an index list or an answer does not fit its share of memory, or what is free."""


class TooManyFailures(ShmloaderError, RuntimeError):  # noqa: N818 - says what happened
    """More samples failed than ``max_failures`` allows, or all did; the last is ``__cause__``."""


class ClosedLoaderError(ShmloaderError, RuntimeError):
    """Used after ``close()``, after a worker died, or after too many samples failed."""


class InternalError(ShmloaderError, RuntimeError):
    """Something that the invariants rule out has happened: a bug in shmloader."""
