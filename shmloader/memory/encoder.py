"""Places any picklable batch in its slot: the worker's half of :mod:`shmloader.memory.codec`.

Data that lies in the slot already is only referred to. All other data is copied into it.
"""

import pickle

import numpy as np

from shmloader.memory.codec import PickledLayout, Span
from shmloader.memory.pickler import OutOfBand, Storage, batch_reducers, dump, reduce_data
from shmloader.memory.slot_writer import SlotWriter


def pickle_batch(batch: object, *, by_value: bool) -> tuple[bytes, OutOfBand]:
    """Pickle a batch. Returns the pickle, and what lies outside it.

    Args:
        batch: Any picklable value.
        by_value: Whether to fall back to cloudpickle, for classes and functions that pickle cannot
            import.

    Raises:
        Exception: What pickling the batch raises.
    """
    try:
        return dump(batch, reduce_data, batch_reducers())
    except Exception:
        if not by_value:
            raise
        return dump(batch, reduce_data, batch_reducers(), by_value=True)


def place(
    pickled: tuple[bytes, OutOfBand], writer: SlotWriter, *, spill_bytes: int
) -> PickledLayout:
    """Place a pickled batch in the slot of the current task, and return where each buffer lies.

    Runs in the worker, once per task. What collate already put into the slot is not copied again.

    Args:
        pickled: What :func:`pickle_batch` returned.
        writer: Writer of the task's slot, after collate has used it.
        spill_bytes: A body longer than this goes into the slot as well.

    Raises:
        SharedMemoryError: If the batch does not fit the slot.
    """
    body, out_of_band = pickled
    spans: dict[int, Span] = {}
    taken: list[tuple[int, int]] = []
    for storage in out_of_band.storages.values():
        spans[storage.index] = _place_storage(storage, writer, taken)
    for index, buffer in out_of_band.buffers:
        spans[index] = _place_buffer(buffer, writer, taken)
    return PickledLayout(
        body if len(body) <= spill_bytes else writer.put(body),
        tuple(spans[index] for index in range(len(spans))),
        tuple(out_of_band.order),
    )


def _place_storage(storage: Storage, writer: SlotWriter, taken: list[tuple[int, int]]) -> Span:
    start, nbytes = storage.span()
    if nbytes == 0:
        return Span(0, 0, start)
    return Span(_place(storage.keep.data_ptr() + start, nbytes, writer, taken), nbytes, start)


def _place_buffer(
    buffer: pickle.PickleBuffer, writer: SlotWriter, taken: list[tuple[int, int]]
) -> Span:
    raw = buffer.raw()
    if raw.nbytes == 0:
        return Span(0, 0, -1)
    address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
    return Span(_place(address, raw.nbytes, writer, taken), raw.nbytes, -1)


def _place(address: int, nbytes: int, writer: SlotWriter, taken: list[tuple[int, int]]) -> int:
    """Return the offset of these bytes in the slot, after copying them there if need be.

    Bytes in the slot are used for one span only; ``taken`` lists them. Another buffer that shares
    them, but not a torch storage (an array and its tensor), is copied, as with torch's loader.
    """
    offset = writer.offset_of(address, nbytes)
    if offset is None or any(offset < end and start < offset + nbytes for start, end in taken):
        return writer.put_memory(address, nbytes)
    taken.append((offset, offset + nbytes))
    return offset
