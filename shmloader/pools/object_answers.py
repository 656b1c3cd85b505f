"""Makes batches as ordinary objects: on worker threads, and in the processes of an executor."""

import ctypes
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmloader.batch.collator import bytes_of
from shmloader.batch.explain import pickle_or_explain
from shmloader.batch.failures import RemoteError
from shmloader.batch.fetch import EmptyBatchError
from shmloader.batch.maker import BatchMaker
from shmloader.forked_child import end_if_forked
from shmloader.memory.pickled import PartialStorage
from shmloader.pools.answers import Answer, Batch, Empty, Failure

# Arrays that arrive at an address that is no multiple of this many bytes are copied: the widest
# elements of tensors need it.
_WIDEST_ITEM = 16


def make_answer(maker: BatchMaker, make: Callable[[], object], where: str) -> Answer:
    """Make a batch and return the answer to its ticket. An exception becomes a ``Failure``.

    Args:
        maker: Keeps the report on the samples and the times, since its timer was begun.
        make: Makes the batch by the maker.
        where: Where this runs, in words, for the texts of failures.
    """
    pid, batch, error = os.getpid(), None, None
    try:
        batch = make()
    except EmptyBatchError:
        return Empty(maker.pop_report())
    except BaseException:  # noqa: BLE001 - it is the answer
        end_if_forked(pid)
        error = RemoteError.caught(where)
    end_if_forked(pid)
    if error is not None:
        return Failure(error, report=maker.pop_report())
    return Batch(batch, maker.pop_report(), maker.timer.read(), bytes_of(batch))


def pack_batch(batch: object, *, by_value: bool) -> tuple[Any, ...]:
    """Return a batch as a pickle and arrays, which any executor can send.

    The arrays are copies, because an executor may send them later than the next batch is made.

    Args:
        batch: Any picklable value.
        by_value: Whether the batch may need cloudpickle.

    Returns:
        The arguments of :func:`unpack_batch`.

    Raises:
        TypeError: If part of the batch cannot be pickled; names that part.
    """
    body, parts = pickle_or_explain(batch, by_value=by_value)
    arrays = [np.empty(0, np.uint8)]

    def put(address: int, nbytes: int) -> int:
        memory: Any = (ctypes.c_char * nbytes).from_address(address)
        arrays.append(np.frombuffer(memory, np.uint8).copy())
        return len(arrays) - 1

    spans = parts.write(put)
    copies = [arrays[offset] for offset, _, _ in spans]
    return body, parts.order, copies, [first_byte for _, _, first_byte in spans]


def unpack_batch(
    body: bytes, order: list[int], arrays: "list[np.ndarray[Any, Any]]", starts: list[int]
) -> object:
    """Build a batch that :func:`pack_batch` has packed. Its tensors are views of the arrays.

    Arrays that cannot be written to are copied, such as those in Ray's store.

    Args:
        body: The pickle.
        order: For each buffer that the pickle lacks, in turn, the index of its array.
        arrays: The arrays, of bytes.
        starts: For the data of a tensor, which byte of its storage is the array's first; -1 for
            any other buffer.

    Raises:
        Exception: What unpickling the user's objects raises.
    """
    buffers: list[object] = []
    for array, start in zip(map(_writable, arrays), starts, strict=True):
        if start < 0:
            buffers.append(array.data)
        else:
            buffers.append(PartialStorage(torch.from_numpy(array).untyped_storage(), start))
    return pickle.loads(body, buffers=[buffers[index] for index in order])


def _writable(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    if array.flags.writeable and array.ctypes.data % _WIDEST_ITEM == 0:
        return array
    return array.copy()
