"""Pickled batches: any picklable value, written to a slot by a worker, and built by the reader.

Tensors and arrays lie in the slot as out-of-band buffers of the pickle
(:mod:`shmloader.memory.pickled`). Data that lies in the slot already is only referred to.
"""

import pickle
from typing import Any, NamedTuple

import numpy as np

from shmloader.memory.arena import Slot
from shmloader.memory.layout import COPY_OUT_BYTES
from shmloader.memory.pickled import (
    OutOfBand,
    PartialStorage,
    Span,
    batch_reducers,
    dump,
    reduce_data,
    storage_over,
)
from shmloader.memory.writer import SlotWriter


class PickledLayout(NamedTuple):
    """Where a pickled batch lies.

    Attributes:
        body: The pickle, or its (offset, nbytes) if it lies in the slot as well.
        spans: The buffers.
        order: For each out-of-band buffer of the body, in turn, the index of its span.
    """

    body: "bytes | tuple[int, int]"
    spans: tuple[Span, ...]
    order: tuple[int, ...]


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


def write_batch(
    pickled: tuple[bytes, OutOfBand], writer: SlotWriter, *, spill_bytes: int
) -> PickledLayout:
    """Write a pickled batch to the slot of the current task, and return where each buffer lies.

    Runs in the worker, once per task. What collate already put into the slot is not copied again.

    Args:
        pickled: What :func:`pickle_batch` returned.
        writer: Writer of the task's slot, after collate has used it.
        spill_bytes: A body longer than this goes into the slot as well.

    Raises:
        SharedMemoryError: If the batch does not fit the slot.
    """
    body, parts = pickled
    used: list[tuple[int, int]] = []

    def put(address: int, nbytes: int) -> int:
        # Bytes in the slot are used for one span only. Another buffer that shares them, but not a
        # torch storage (an array and its tensor), is copied, as with torch's loader.
        offset = writer.offset_of(address, nbytes)
        if offset is None or any(offset < end and at < offset + nbytes for at, end in used):
            return writer.put_memory(address, nbytes)
        used.append((offset, offset + nbytes))
        return offset

    spans = parts.write(put)
    sent = body if len(body) <= spill_bytes else writer.put(body)
    return PickledLayout(sent, spans, tuple(parts.order))


class PickledReader:
    """Builds the batches of one pickled layout in the main process.

    Attributes:
        layout: The layout.
        lends: Whether the batch has a buffer that is large enough to be lent.
    """

    def __init__(self, layout: PickledLayout) -> None:
        self.layout = layout
        self.lends = any(span.nbytes > COPY_OUT_BYTES for span in layout.spans)

    def read(self, slot: Slot, lease: object | None) -> object:
        """Build the batch.

        Args:
            slot: The slot that it lies in.
            lease: Large buffers become views of it; None copies them out as well.

        Raises:
            Exception: Whatever the user's objects raise when they are unpickled.
        """
        body: Any = self.layout.body
        if not isinstance(body, bytes):
            body = slot.memory[body[0] : body[0] + body[1]]
        buffers = [_open_span(span, slot, lease) for span in self.layout.spans]
        return pickle.loads(body, buffers=[buffers[index] for index in self.layout.order])


def _open_span(span: Span, slot: Slot, lease: Any) -> object:
    """Return a span as pickle needs it: a :class:`PartialStorage` or a writable memoryview."""
    offset, nbytes, first_byte = span
    home, at = lease, offset
    if lease is None or nbytes <= COPY_OUT_BYTES:
        home, at = np.ndarray(nbytes, np.uint8, slot.memory, offset).copy(), 0
    if first_byte < 0:
        return memoryview(home).cast("B")[at : at + nbytes]
    return PartialStorage(storage_over(home, at, nbytes), first_byte)
