"""Carries the dataset and the functions to an executor's processes.

These may be on this machine or on others, and only bytes are sure to reach them. So a
:class:`PortablePayload` is named by the digest of its contents. The processes of this machine open
its segment through ``/proc``. A process that cannot open it raises :class:`MissingPayloadError`,
gets the contents as bytes, and makes its own segment of them.
"""

import contextlib
import hashlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shmloader.batch.payload import seal, unseal
from shmloader.errors import SharedMemoryError
from shmloader.memory.segment import TOKEN_BYTES, Segment


class MissingPayloadError(Exception):
    """A process cannot open a payload's segment, and got no contents. Never reaches the user."""


class PayloadHandle(NamedTuple):
    """Names a payload in each task. It takes some hundred bytes.

    Attributes:
        digest: Digest of the contents.
        segment: A pickled handle of the segment, for processes of the same machine.
        spans: Where the table of buffers and the pickle lie in the segment.
        by_value: Whether cloudpickle was used; batches may need it, too.
    """

    digest: bytes
    segment: bytes
    spans: tuple[int, int, int]
    by_value: bool


class PortablePayload:
    """Objects pickled for any process. Its owner closes it.

    Attributes:
        handle: The :class:`PayloadHandle` that each task carries.
        nbytes: Bytes of the pickle, and of the arrays and tensors beside it.

    Args:
        objects: Any object, such as a tuple of the dataset and the functions.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: If neither can pickle the objects.
        SharedMemoryError: If there is not enough memory for the pickle.
        Exception: What the objects' own methods raise.
    """

    def __init__(self, objects: object) -> None:
        self._segment, spans, by_value = seal(objects, None)
        self.nbytes = self._segment.nbytes
        self._path = f"/proc/self/fd/{self._segment.file.fileno()}"
        with Path(self._path).open("rb") as file:
            file.seek(TOKEN_BYTES)
            digest = hashlib.file_digest(file, "blake2b").digest()
        self.handle = PayloadHandle(digest, pickle.dumps(self._segment), spans, by_value)

    def contents(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return a copy of the segment's bytes, which can be sent to another machine."""
        return np.fromfile(self._path, np.uint8)

    def close(self) -> None:
        """Close the segment. May be called again. Processes that have mapped it keep it."""
        self._segment.close()


def load_portable(handle: PayloadHandle, contents: Any = None) -> Any:
    """Unpickle the objects of a payload, as new copies.

    Args:
        handle: The payload's handle.
        contents: The segment's bytes, if they were sent; else None.

    Raises:
        MissingPayloadError: If there are no contents, and the segment cannot be opened.
        Exception: What unpickling the user's objects raises.
    """
    try:
        segment: Segment = (
            pickle.loads(handle.segment) if contents is None else Segment.of_contents(contents)
        )
    except (SharedMemoryError, OSError) as error:
        if contents is not None:
            raise
        raise MissingPayloadError from error
    with explained_missing():
        return unseal(segment, handle.spans)


@contextlib.contextmanager
def explained_missing() -> Iterator[None]:
    """Add a note that files and modules have to exist where an executor's processes run."""
    try:
        yield
    except (FileNotFoundError, ModuleNotFoundError) as error:
        error.add_note(
            f"With executor=, this has to exist on each machine that makes batches, for "
            f"{sys.executable}."
        )
        raise
