"""What programs reach that do nothing but gather rows of arrays: no loader can do much better.

``deliver`` does what a loader has to do, and no more: processes gather batches, in order, into as
many shared buffers as a loader has slots in use, and the process that consumes gets a byte for each
batch and returns one when it has used it. ``gather_alone`` is what most people write by hand:
fresh arrays in one process.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

# Bytes that one read takes from a pipe at most: one for each batch that waits.
_MOST_BYTES = 64

Columns = Mapping[str, np.ndarray]


def deliver(
    columns: Columns, indices: Sequence[np.ndarray], dtype: object, workers: int, slots: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches of these indices, again and again. Close it to end the processes.

    Args:
        columns: The arrays, by key.
        indices: The rows of each batch, all of one length.
        dtype: The dtype of batches; None for those of the arrays.
        workers: Number of processes. Each makes every n-th batch.
        slots: Number of shared buffers.
    """
    size, share = len(indices[0]), slots // workers
    buffers = [_shared_arrays(columns, size, dtype) for _ in range(share * workers)]
    batches = [{key: torch.from_numpy(one) for key, one in arrays.items()} for arrays in buffers]
    done, free, pids = [], [], []
    for worker in range(workers):
        done_read, done_write = os.pipe()
        free_read, free_write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                for fd in (*done, *free, done_read, free_write):
                    os.close(fd)
                own = buffers[worker::workers]
                _gather(columns, indices[worker::workers], own, free_read, done_write)
            finally:
                os._exit(0)
        os.close(done_write)
        os.close(free_read)
        pids.append(pid)
        done.append(done_read)
        free.append(free_write)
    try:
        ready = [0] * workers
        for number in itertools.cycle(range(len(batches))):
            worker = number % workers
            if not ready[worker]:
                ready[worker] = len(os.read(done[worker], _MOST_BYTES))
            ready[worker] -= 1
            yield batches[number]
            os.write(free[worker], b".")
    finally:
        for fd in (*done, *free):
            os.close(fd)
        for pid in pids:
            os.waitpid(pid, 0)


def _shared_arrays(columns: Columns, size: int, dtype: object) -> dict[str, np.ndarray]:
    arrays = {}
    for key, column in columns.items():
        kind, shape = np.dtype(dtype or column.dtype), (size, *column.shape[1:])
        memory = mmap.mmap(-1, int(np.prod(shape)) * kind.itemsize)
        arrays[key] = np.ndarray(shape, kind, memory)
        arrays[key][...] = 0
    return arrays


def _gather(
    columns: Columns,
    indices: Sequence[np.ndarray],
    buffers: Sequence[dict[str, np.ndarray]],
    free: int,
    done: int,
) -> None:
    """Gather batches into the buffers, in turn, until the consumer has closed its pipes."""
    torch.set_num_threads(1)
    # NumPy converts faster from rows that it has just copied, and are in the cache.
    copies = {
        key: None if buffers[0][key].dtype == column.dtype else column[: len(indices[0])].copy()
        for key, column in columns.items()
    }
    left = len(buffers)
    for chosen, places in zip(itertools.cycle(indices), itertools.cycle(buffers), strict=False):
        if not left:
            left = len(os.read(free, _MOST_BYTES))
            if not left:
                return
        left -= 1
        for key, column in columns.items():
            copy, place = copies[key], places[key]
            np.take(column, chosen, axis=0, out=place if copy is None else copy, mode="clip")
            if copy is not None:
                place[...] = copy
        try:
            os.write(done, b".")
        except BrokenPipeError:
            return


def gather_alone(
    columns: Columns, indices: Sequence[np.ndarray], dtype: object
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches of these indices, again and again, in fresh arrays."""
    for chosen in itertools.cycle(indices):
        rows = {key: column.take(chosen, axis=0) for key, column in columns.items()}
        yield {
            key: torch.from_numpy(one.astype(dtype or one.dtype, copy=False))
            for key, one in rows.items()
        }
