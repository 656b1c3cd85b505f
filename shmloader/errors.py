"""All exceptions that shmloader defines.

::

    ShmloaderError
    ├── WorkerDiedError     (RuntimeError)  a worker process ended unexpectedly
    ├── LoaderTimeoutError  (RuntimeError)  no batch within ``timeout`` seconds; none is lost
    ├── SampleTimeoutError  (TimeoutError)  a sample took longer than ``sample_timeout`` seconds
    ├── SharedMemoryError   (MemoryError)   a batch needs more shared memory than its slot may have,
    │                                       or than is free; raised before the memory is touched
    ├── TooManyFailures     (RuntimeError)  more samples failed than ``max_failures``, or all did
    ├── ShardError          (RuntimeError)  a shard or record of a stream cannot be read
    ├── ClosedLoaderError   (RuntimeError)  used after ``close()`` or after a worker died
    └── InternalError       (RuntimeError)  a bug in shmloader

Wrong arguments raise ``ValueError`` or ``TypeError`` in the constructor, and an exception of the
user's own code keeps its type. Each class also derives from the built-in type in parentheses. So an
``except RuntimeError`` written for torch's loader also catches :class:`WorkerDiedError` and
:class:`LoaderTimeoutError`.
"""


class ShmloaderError(Exception):
    """Base of all exceptions defined by shmloader."""


class WorkerDiedError(ShmloaderError, RuntimeError):
    """A worker process ended unexpectedly: it was killed by a signal, or it exited."""


class LoaderTimeoutError(ShmloaderError, RuntimeError):
    """No batch came within ``timeout`` seconds. No batch is lost: call ``next()`` again."""


class SampleTimeoutError(ShmloaderError, TimeoutError):
    """A sample took longer than ``sample_timeout`` seconds, and its worker was replaced.

    The error's text has the sample's index, and the worker's Python stack when it was ended. A
    sample of an iterable dataset has no index, and for a call of ``__getitems__`` the text has the
    number of samples instead. The error is raised in place of the sample's batch, or handled as
    ``on_error`` says.
    """


class SharedMemoryError(ShmloaderError, MemoryError):
    """Not enough shared memory, or shared memory that is gone.

    A batch, index list or message needs more memory than its share, or than is free; or a shared
    object needs more than is free. Also raised if an object of :func:`shmloader.share` is unpickled
    after the process that pickled the object has dropped it or has ended.
    """


class TooManyFailures(ShmloaderError, RuntimeError):  # noqa: N818 - says what happened
    """More samples failed than ``max_failures``, or all did. The last failure is ``__cause__``.

    In a pipeline, calls of stages are counted instead of samples.
    """


class ShardError(ShmloaderError, RuntimeError):
    """A shard of a stream is missing or broken, or one of its records cannot be read.

    What the file system, the server or the parser raised is its ``__cause__``.

    Attributes:
        shard: Path or URL of the shard.
        record: Number of the record in the shard, from 0; None if the shard as a whole is broken.
    """

    def __init__(self, text: str, shard: str | None = None, record: int | None = None) -> None:
        super().__init__(text)
        self.shard, self.record = shard, record


class ClosedLoaderError(ShmloaderError, RuntimeError):
    """The loader was used after ``close()``, a worker's death, or too many failed samples."""


#: Texts of :class:`ClosedLoaderError` for what the user has closed.
LOADER_CLOSED = (
    "the loader is closed: close() was called, or its with block has ended. Create a new loader."
)
ITERATOR_CLOSED = (
    "the iterator is closed: close() was called on it or on its loader. Begin a new epoch with "
    "iter(loader), or create a new loader if that is closed as well."
)


class InternalError(ShmloaderError, RuntimeError):
    """An invariant of shmloader was broken: a bug in shmloader."""
