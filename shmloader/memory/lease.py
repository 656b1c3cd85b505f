"""Leases, which show when the user has dropped the last view of a lent slot.

A lease is a ctypes array over the slot. torch and numpy keep it alive for as long as any
storage or array made from it lives: slices, ``.numpy()``, ``.detach()``, DLPack capsules and
autograd's saved tensors included. It must not be an ndarray subclass: numpy replaces the
base of a view by the base's base, so the slot would come back while it is still read.

A storage's pointer is not enough to keep the lease alive, since torch can replace that pointer
while views of the old memory are still in use; see :func:`hold`.

With ``SHMLOADER_DEBUG=1``, a batch carries a checksum of its slot's used bytes from the worker to
the main process, which detects writes to a slot after its batch was answered. That is too slow to
be on by default.
"""

import functools
import gc
import os
import threading
import weakref
import zlib
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache

from shmloader.memory.arena import Slot


def hold(storage: Any, memory: object) -> None:
    """Keep memory alive for as long as a storage that began with it lives.

    Sharing a tensor with other processes (``share_memory_()``, a queue of
    ``torch.multiprocessing``) copies its storage and replaces the storage's pointer, which drops
    the only reference to the old memory. NumPy arrays, memoryviews and DLPack capsules made before
    still point there. They keep the storage alive, so the storage has to keep the memory alive.
    torch preserves a storage's Python object and its attributes as long as the storage itself.

    Args:
        storage: The ``torch.UntypedStorage`` of a tensor that is handed to the user.
        memory: The lease, or the private memory that the batch was copied to.
    """
    prepare_holding()
    storage._shmloader_memory = memory


@functools.cache
def prepare_holding() -> None:
    """Make the garbage collector free storages that were sent elsewhere, where torch needs it.

    Called before a storage is given a ``_shmloader_memory``.

    torch's cache of storages that were sent to other processes refers to them weakly. In
    torch 2.6, for example, a storage's Python object, and so what it holds, outlives the storage
    for as long as there is such a reference. torch drops the references to dead storages only if
    there are over a hundred.
    """
    if _outlives_its_storage():
        gc.callbacks.append(_free_shared_storages)


def _outlives_its_storage() -> bool:
    """Whether a weak reference to a tensor's storage keeps the storage's Python object alive."""
    tensor = torch.empty(1)
    held = threading.Event()  # any object that can be referred to weakly
    present = weakref.ref(held)
    tensor.untyped_storage()._shmloader_memory = held  # type: ignore[attr-defined]
    reference = StorageWeakRef(tensor.untyped_storage())
    del tensor, held
    found = present() is not None
    del reference
    return found


def _free_shared_storages(phase: str, _: dict[str, int]) -> None:
    """Drop the references to dead storages. Called by the garbage collector on any thread.

    That thread may hold the lock of the cache already.
    """
    cache = shared_cache
    if phase == "stop" and cache and cache.lock.acquire(blocking=False):
        try:
            cache.free_dead_references()
        finally:
            cache.lock.release()


@functools.cache
def is_debugging() -> bool:
    """Whether the check is on. Read once, in the main process, which passes it to its workers."""
    return os.environ.get("SHMLOADER_DEBUG", "") not in ("", "0")


def checksum(slot: Slot, used_bytes: int) -> int:
    """Return a checksum of a slot's first ``used_bytes``, which are mapped."""
    return zlib.crc32(slot.memory[:used_bytes])
