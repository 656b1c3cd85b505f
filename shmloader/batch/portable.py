"""Carries the dataset and the functions to processes that this one did not start.

An executor's processes may be on this machine or on others. Only bytes are sure to reach them:
descriptors and objects of multiprocessing may not. So a payload is pickled once into a sealed
segment, and named by the digest of its contents. The processes of this machine open the segment
through ``/proc`` and map it copy-on-write, so they share one copy. A process that cannot open it
raises :class:`MissingPayloadError`, gets the contents as bytes, and makes its own segment of them.
"""

import hashlib
import mmap
import pickle
import sys
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.batch.payload import seal, unseal
from shmloader.errors import SharedMemoryError
from shmloader.memory.pickled import OutOfBand, reduce_data
from shmloader.memory.segment import TOKEN_BYTES, Segment, reduce_memory_map

_DIGEST_BYTES = 16


class MissingPayloadError(Exception):
    """A process cannot open a payload's segment, and got no contents. Never reaches the user."""


class PayloadHandle(NamedTuple):
    """Names a payload in each task. It takes some hundred bytes.

    Attributes:
        digest: Digest of the contents.
        segment: A pickled handle of the segment, for processes of the same machine.
        spans: Where the pickle lies in the segment; see :class:`~shmloader.batch.payload.Sealed`.
        by_value: Whether cloudpickle was used; batches may need it, too.
    """

    digest: bytes
    segment: bytes
    spans: tuple[int, int, int]
    by_value: bool


def _reduce_bulk(value: Any, parts: OutOfBand) -> Any:
    """Reduce an array or tensor so that its data lie beside the pickle.

    Returns NotImplemented for any other value. Tensors in torch's shared memory are copied, since
    its descriptors cannot reach another machine.
    """
    if type(value) is np.memmap:
        return reduce_memory_map(value)
    if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
        return NotImplemented  # torch raises an error for it
    return reduce_data(value, parts)


class PortablePayload:
    """Objects pickled for any process. Its owner closes it.

    Standard pickle is tried first. cloudpickle is used if standard pickle fails, and if the pickle
    refers to the main file, since an executor's processes run another main file.

    Attributes:
        handle: The :class:`PayloadHandle` that each task carries.

    Args:
        objects: Any object, such as a tuple of the dataset and the functions.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: If neither can pickle the objects.
        SharedMemoryError: If there is not enough memory for the pickle.
        Exception: What the objects' own methods raise.
    """

    def __init__(self, objects: object) -> None:
        # Without multiprocessing's reducers, whose descriptors cannot be sent.
        self._segment, spans, by_value = seal(objects, _reduce_bulk, {}, None)
        with self._mapped() as contents:
            digest = hashlib.blake2b(
                memoryview(contents)[TOKEN_BYTES:], digest_size=_DIGEST_BYTES
            ).digest()
        self.handle = PayloadHandle(digest, pickle.dumps(self._segment), spans, by_value)

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle, and of the arrays and tensors beside it."""
        return self._segment.nbytes

    def contents(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return a copy of the segment's bytes, which can be sent to another machine."""
        with self._mapped() as mapping:
            return np.frombuffer(mapping[:], np.uint8)

    def _mapped(self) -> mmap.mmap:
        return mmap.mmap(self._segment.file.fileno(), self._segment.nbytes, prot=mmap.PROT_READ)

    def close(self) -> None:
        """Close the segment. May be called again. Processes that have mapped it keep it."""
        self._segment.close()


def load_portable(handle: PayloadHandle, contents: Any = None) -> Any:
    """Unpickle the objects of a payload.

    Args:
        handle: The payload's handle.
        contents: The segment's bytes, if they were sent; else None.

    Returns:
        The objects, as new copies.

    Raises:
        MissingPayloadError: If there are no contents, and the segment cannot be opened.
        Exception: What unpickling the user's objects raises.
    """
    segment: Segment
    if contents is not None:
        segment = Segment.of_contents(contents)
    else:
        try:
            segment = pickle.loads(handle.segment)
        except (SharedMemoryError, OSError) as error:
            raise MissingPayloadError from error
    try:
        return unseal(segment, handle.spans)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        explain_missing(error)
        raise


def explain_missing(error: FileNotFoundError | ModuleNotFoundError) -> None:
    """Add a note that files and modules have to exist where an executor's processes run."""
    if isinstance(error, FileNotFoundError):
        error.add_note(
            "The dataset opens this file where it is loaded: with executor=, it has to exist on "
            "each machine that makes batches."
        )
    else:
        error.add_note(
            f"The dataset needs this module where it is loaded ({sys.executable}): with executor=, "
            "it has to be installed there, too."
        )
