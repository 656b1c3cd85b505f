"""The part of an executor's pool that runs in the executor's processes.

:func:`make_batch` makes the batch of one task. The first task of a loader in a process loads the
dataset and calls ``worker_init_fn``; both are kept for later tasks, until the loader sends another
dataset, or until more loaders than :data:`KEPT` have used the process since.

The process is not ours: it may run other tasks of the user's. So one batch is made at a time. From
the first task on, the process is left as a worker is: with worker info, one thread for torch's
computations, and random number generators that the last batch has used. A batch is sent as a pickle
and arrays: Dask and Ray send arrays without pickling them.
"""

import ctypes
import os
import pickle
import socket
import sys
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from shmloader.batch.collator import Timer
from shmloader.batch.explain import pickle_or_explain
from shmloader.batch.failures import RemoteError
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.payload import (
    MissingPayloadError,
    PayloadHandle,
    explained_missing,
    load_portable,
)
from shmloader.batch.sample_rng import seed_worker
from shmloader.insight.measurements import pack_work, work_of
from shmloader.interruptions import Caught, attempt
from shmloader.memory.pickled import PartialStorage, load
from shmloader.memory.writer import install
from shmloader.pools.answers import Answer, make_answer
from shmloader.pools.worker_dataset import WorkerDataset, introduce
from shmloader.process_state import PROCESS

#: The most loaders whose datasets a process keeps.
KEPT = 8

# Arrays that arrive at an address that is no multiple of this many bytes are copied: the widest
# elements of tensors need it.
_WIDEST_ITEM = 16

# Parameters of mallopt, <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The most that glibc raises its threshold to by itself, on 64-bit systems.
_MMAP_BYTES = 32 << 20


def this_version() -> str:
    """Return the version of shmloader in this process."""
    return str(sys.modules["shmloader"].__version__)


def make_batch(
    version: str,
    common: "tuple[Any, ...]",
    number: int,
    dataset_epoch: int | None,
    indices: bytes,
    contents: Any = None,
) -> tuple[Any, ...]:
    """Make the batch of a task. This function is submitted to the executor.

    Args:
        version: Version of shmloader in the main process.
        common: What identifies the loader, the fields of a ``PayloadHandle``, the token of the
            process that has the loader, and the base seed of the random generators.
        number: The worker number that the process gets, if it has none for this payload.
        dataset_epoch: The number for the dataset's ``set_epoch()``; None for no call.
        indices: The pickled indices.
        contents: The payload, for a process that cannot open it by its handle; else None.

    Returns:
        Why the process cannot make batches, or "" if it can: all versions of shmloader return this.
        Then the arguments of :func:`read_answer`, or nothing if the process cannot open the
        payload. An exception of the user's code is in the answer.
    """
    if version != this_version():
        text = f"shmloader {this_version()} is installed on {socket.gethostname()}, and the loader "
        return (text + f"has {version}: install the same version there",)
    loader, payload, home, base_seed = common
    if home == PROCESS.tasks.token:
        text = "the executor runs tasks in the process that has the loader: use thread_pool=True, "
        return (text + "whose threads make batches without copies",)
    where = f"in a process of the executor (pid {os.getpid()} on {socket.gethostname()})"
    with PROCESS.tasks.lock:
        try:
            torch.set_num_threads(1)  # as in torch's own workers, on whichever thread this is
            handle = PayloadHandle(*payload)
            maker = _find_maker(loader, handle, base_seed, number, where, contents)
        except MissingPayloadError:
            return ("",)
        except Exception:  # noqa: BLE001 - it is the answer
            return "", *_pack(Answer(error=RemoteError.caught(where)))
        return "", *maker.make(indices, dataset_epoch)


def _pack(answer: Answer) -> "tuple[bytes, tuple[Any, ...] | None]":
    """Return an answer, and its packed batch beside it, as values that any executor can send."""
    content, answer.content = answer.content, None
    return pickle.dumps(answer), content


def read_answer(packed: bytes, content: Any) -> Answer:
    """Return the answer of a task that is done, in the loader's process.

    ``packed`` is the answer, and ``content`` what :func:`pack_batch` returned of its batch.
    """
    answer: Answer = pickle.loads(packed)
    if content is not None:
        batch = attempt(unpack_batch, *content)
        if isinstance(batch, Caught):  # unpickling the user's objects may raise anything
            answer.error = RemoteError.of(batch.error, "while reading a batch in the main process")
        else:
            answer.content = batch
        # The other process's clock may be another one, so only durations count. The rest of the
        # time since the task was sent is put before the work.
        assert answer.times is not None
        _, *work_ns, sample_count = work_of(answer.times)
        answer.times = pack_work(time.monotonic_ns() - sum(work_ns), *work_ns, sample_count)
    return answer


def _keep_freed_memory() -> None:
    """Make glibc's ``malloc`` keep memory that samples free, for the samples of the next batch.

    Dask starts its workers with ``MALLOC_TRIM_THRESHOLD_=65536``. With it, the memory of a decoded
    image comes from the kernel page by page. These thresholds are those that glibc reaches without
    that variable: with JPEG files 1,102 samples a second, not 660 (AMD EPYC, 2026-11-25).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_BYTES)


def _find_maker(loader: bytes, payload: PayloadHandle, *about: Any) -> "_Maker":
    """Return what makes the batches of a loader in this process. Raises as :class:`_Maker`."""
    kept = PROCESS.tasks.makers
    maker: _Maker | None = kept.get(loader)
    if maker is None or maker.digest != payload.digest:
        kept.pop(loader, None)
        _keep_freed_memory()
        # One that fails is not kept: the next task tries again.
        maker = kept[loader] = _Maker(payload, *about)
        while len(kept) > KEPT:
            kept.popitem(last=False)[1].close()
    kept.move_to_end(loader)
    return maker


class _Maker:
    """The dataset of one loader in this process, and what makes its batches.

    Raises:
        MissingPayloadError: If the payload cannot be opened here.
        Exception: What loading the user's objects raises, or ``worker_init_fn``.
    """

    def __init__(
        self, payload: PayloadHandle, base_seed: int, number: int, where: str, contents: Any
    ) -> None:
        self.digest, self._where = payload.digest, where
        install(None)  # as in a worker, but without slots
        objects = load_portable(payload, contents)
        dataset, collate_fn, init_fn, on_error, fields, worker_count = objects
        introduce(number, worker_count, seed_worker(base_seed, number), dataset, init_fn)
        self._info = torch_worker._worker_info
        self._dataset = WorkerDataset(FetchConfig(*fields), number, where, None, Timer())
        self._dataset.open(dataset, collate_fn, on_error)
        self.close = self._dataset.close

    def make(self, indices: bytes, epoch: int | None) -> "tuple[bytes, tuple[Any, ...] | None]":
        """Make a task's batch. Returns the arguments of :func:`read_answer`."""
        dataset = self._dataset
        torch_worker._worker_info = self._info  # a task of another loader may have been the last
        if dataset.error is not None:
            return _pack(Answer(error=dataset.error))

        def make() -> tuple[Any, ...]:
            with explained_missing():
                batch = dataset.load(pickle.loads(indices), epoch)
            return pack_batch(batch)

        dataset.timer.begin()
        # Ray's handler of SIGTERM raises SystemExit: then Ray runs the task elsewhere.
        return _pack(make_answer(dataset, make, self._where, (SystemExit,)))


def pack_batch(batch: object) -> tuple[Any, ...]:
    """Return a batch as a pickle and arrays: the arguments of :func:`unpack_batch`.

    The arrays are copies, because an executor may send them later than the next batch is made.

    Raises:
        TypeError: If part of the batch cannot be pickled; names that part.
    """
    body, parts = pickle_or_explain(batch)
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

    Arrays that cannot be written to are copied, such as those in Ray's store. Unpickling the user's
    objects may raise anything.

    Args:
        body: The pickle.
        order: For each buffer that the pickle lacks, in turn, the index of its array.
        arrays: The arrays, of bytes.
        starts: For the data of a tensor, which byte of its storage is the array's first; -1 for
            any other buffer.
    """
    buffers: list[object] = []
    for array, start in zip(map(_writable, arrays), starts, strict=True):
        if start < 0:
            buffers.append(array.data)
        else:
            buffers.append(PartialStorage(torch.from_numpy(array).untyped_storage(), start))
    return load(body, buffers, order)


def _writable(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    if array.flags.writeable and array.ctypes.data % _WIDEST_ITEM == 0:
        return array
    return array.copy()
